"""``myxo bisect RUN --sample GROUP/INDEX``: where the log-probs of a run's engine and of its trainer part, layer by layer.

An engine as the run has it and the run's trainer compute the same tokens by the same version's weights, one after the other; what they have
computed is compared in `myxo.run.layer_comparison`.
"""

import argparse
import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxo.commands.command_arguments import add_json, seconds
from myxo.commands.evaluate import chosen_version, materialized, versions_on_disk
from myxo.commands.export_run import config_of
from myxo.commands.samples import stored_sample
from myxo.commands.up import take_flags
from myxo.display.safe_console import SafeConsole
from myxo.run import layer_comparison as comparison
from myxo.run.layer_comparison import Captures, MismatchCause, OperationDifference
from shared.config import devices, flags
from shared.config.run_config import RunConfig
from shared.data.tokenizer_files import local_tokenizer
from shared.model.architecture import Architecture
from shared.model.families import architecture_of, read_architecture
from shared.model.hf_checkpoint import weight_files
from shared.model.layer_operations import OPERATIONS, ROUNDINGS
from shared.runtime import exit_codes
from shared.runtime.errors import BadInput, BadMessage, ConfigError, MyxoError
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.sample import Sample
from shared.transfer.tensor_file import TensorFiles

ENGINE, TRAINER = "services.rollout.engine.layer_scoring", "services.trainer.trainer_layers"
DIRECTORY = "bisect"  # of a run's, for what the last bisection has written
FEWEST, DEFAULT_TOKENS = 2, 512
OLDER = 3  # versions on disk that are compared with the engine's weights at most
_ABOUT = """Find where an engine and the trainer of a run part: the first operation that differs beyond what its precision explains.

RUN is a run's name or its directory, or a config's TOML file. An engine and a trainer of the run's config, with flags laid over it, start
on this machine one after the other; a run at work needs its GPUs for itself. Exits 1 where they differ. docs/mismatch.md explains the
report."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description = _ABOUT
    command.usage = f"{command.prog} RUN|CONFIG (--sample GROUP/INDEX | --prompt TEXT | --dump FILE) [--version N] [flags]"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("run", metavar="RUN|CONFIG", help="a run's name or its directory, or a config's TOML file")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where the run named RUN lies (default runs)")
    command.add_argument("--sample", metavar="GROUP/INDEX", help="the tokens of this sample, as `myxo samples` names it")
    command.add_argument("--prompt", metavar="TEXT", help="the tokens of this text")
    command.add_argument("--dump", metavar="FILE", type=Path, help="--sample, or the first one, of a file of --save-debug-rollout-data")
    command.add_argument("--version", type=int, metavar="N", help="the weight version (default: the sample's, else the newest on disk)")
    command.add_argument("--engine-checkpoint", metavar="DIR", type=Path, help="what the engine loads instead, such as a quantised one")
    command.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"the first N alone (default {DEFAULT_TOKENS})")
    command.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="seconds for each of the two to answer (default 900)")
    add_json(command)
    command.set_defaults(run_command=bisect, flags=[], take_rest=take_flags)


def bisect(parsed: argparse.Namespace, console: Console) -> int:
    """Compares and reports. Returns the exit code. Raises ConfigError for bad input, MyxoError where one of the two does not compute."""
    config = config_of(parsed.run, parsed.dir, flags.read(parsed.flags))
    check(config, parsed)
    sample = _sample(parsed, config)
    tokens = _tokens(parsed, config, sample)
    version = parsed.version if parsed.version is not None or sample is None else int(sample.versions().max(initial=0))
    item = chosen_version(config, version)
    say = SafeConsole(stderr=True) if parsed.json else console
    say.print(f"Version {item.version} of {config.run.name} is {item.what}; {len(tokens)} tokens.", soft_wrap=True)
    directory = config.run.root / DIRECTORY
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = materialized(item, directory / "model").absolute()
    engine_model = (parsed.engine_checkpoint or model).absolute()
    architecture = same_model(config, engine_model)
    r = comparison.rounding(precisions(config, engine_model), width(architecture))
    request = {
        "config": config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": model})}).model_dump(mode="json"),
        "tokens": tokens,
        "engine_model": str(engine_model),
        "trainer_model": str(model),
        "engine_flags": {},
        "deadline": parsed.deadline,
        "rounding": r,
        "temperature": config.rollout.rollout_temperature or 1.0,
    }
    (directory / "request.json").write_text(json.dumps(request))
    for what, module in (("engine", ENGINE), ("trainer", TRAINER)):
        say.print(f"The {what} computes; {directory / what}.log has what it says.", soft_wrap=True)
        run(what, module, directory, parsed.deadline + 60)
    captures = captured(directory, len(tokens), r)
    report = judged(captures, architecture, config, engine_model, model, item.version)
    report["recorded"] = _recorded(directory, sample, tokens, report)
    report |= {"run": config.run.name, "version": item.version, "tokens": len(tokens), "rounding": r}
    if parsed.json:
        console.file.write(json.dumps(report, indent=2) + "\n")
    else:
        show(report, console)
    return exit_codes.FAILED if report["origins"] or report["recorded"] else exit_codes.DONE


def check(config: RunConfig, parsed: argparse.Namespace) -> None:
    """Raises ConfigError, or BadInput, for what cannot be compared here."""
    for package, extra in (("services.rollout", "rollout"), ("sglang", "rollout"), ("services.trainer", "trainer"), ("torch", "trainer")):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"{package} is not installed here: `myxo bisect` starts an engine and a trainer; pip install 'myxo[{extra}]'")
    given = [name for name in ("sample", "prompt", "dump") if getattr(parsed, name) is not None]
    if given not in (["sample"], ["prompt"], ["dump"], ["sample", "dump"]):
        raise ConfigError("--sample, --prompt, --dump", ", ".join(given) or None, "one of them; --dump also with --sample")
    if parsed.tokens < FEWEST:
        raise ConfigError("--tokens", parsed.tokens, f"at least {FEWEST}")
    trainer = config.trainer
    if trainer.actor_num_nodes > 1:
        raise ConfigError("trainer.actor_num_nodes", trainer.actor_num_nodes, "1: lay --actor-num-nodes 1 over it")
    if trainer.context_parallel_size > 1:
        raise ConfigError("trainer.context_parallel_size", trainer.context_parallel_size, "1: lay --context-parallel-size 1 over it")
    if config.rollout.nodes_per_engine > 1:
        raise ConfigError("rollout.sglang.nnodes", config.rollout.nodes_per_engine, "1: an engine of one machine")


def _sample(parsed: argparse.Namespace, config: RunConfig) -> Sample | None:
    if parsed.prompt is not None:
        return None
    if parsed.dump is not None:
        return dumped_sample(parsed.dump, parsed.sample)
    return asyncio.run(stored_sample(str(config.run.root), config.run.dir, parsed.sample))


def dumped_sample(path: Path, name: str | None) -> Sample:
    """Returns a sample of a dump by its name, or the first one. Raises ConfigError."""
    expected = "a file that --save-debug-rollout-data has written in Myxo's own format (a path that does not end in .pt)"
    try:
        content = codec.unpack(path.read_bytes())
        samples = [one for key, blob in content["blobs"].items() for one in sample_codec.decode([blob])]
    except (OSError, BadMessage, LookupError, TypeError, AttributeError) as error:
        raise ConfigError("--dump", str(path), f"{expected}; {getattr(error, 'strerror', None) or error}") from None
    found = next((one for one in samples if name in (None, one.name, f"{one.group}/{one.index}")), None)
    if found is None:
        there = ", ".join(f"{one.group}/{one.index}" for one in samples[:8])
        raise ConfigError("--sample", name, f"one of the {len(samples)} in {path}: {there}{' …' if len(samples) > 8 else ''}")
    return found


def _tokens(parsed: argparse.Namespace, config: RunConfig, sample: Sample | None) -> list[int]:
    if sample is not None:
        found = np.concatenate([sample.prompt, sample.response]).tolist()
    else:
        tokenizer = local_tokenizer(config)
        if tokenizer is None:
            raise ConfigError("--prompt", parsed.prompt, "--sample or --dump: the tokenizer of model.hf_checkpoint is not here")
        found = tokenizer.encode(parsed.prompt, begin=True).tolist()
    if len(found) < FEWEST:
        raise ConfigError("--prompt" if sample is None else "--sample", parsed.prompt or parsed.sample, f"at least {FEWEST} tokens")
    return [int(token) for token in found[: parsed.tokens]]


def same_model(config: RunConfig, engine_model: Path) -> Architecture:
    """Returns the architecture of the trainer. Raises ConfigError where the engine's checkpoint is not one of the same sizes."""
    own, other = architecture_of(config), read_architecture(engine_model, quantized=True, backend=config.trainer.trainer_backend)
    for name in ("num_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        if getattr(own, name) != getattr(other, name):
            expected = f"a checkpoint of the run's model, whose {name} is {getattr(own, name)}; this one has {getattr(other, name)}"
            raise ConfigError("--engine-checkpoint", str(engine_model), expected)
    return own


def precisions(config: RunConfig, engine_model: Path) -> list[str]:
    """Returns the formats that engine and trainer compute with, by the names of `layer_comparison.ROUNDOFFS`."""
    given, entries = config.rollout.engine_flags, json.loads((engine_model / "config.json").read_text())
    on_cpu = devices.resolve(config.rollout.rollout_device) == "cpu"
    dtype = str(given.get("dtype") or ("float32" if on_cpu else "auto"))
    dtype = str(entries.get("torch_dtype") or entries.get("dtype") or "bfloat16") if dtype == "auto" else dtype
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    method = str(given.get("quantization") or (entries.get("quantization_config") or {}).get("quant_method") or "")
    bits = str(entries.get("quantization_config") or "")
    fewer = next((name for name in ("fp8", "int8") if name in method or name in bits), "int4") if method else None
    return [config.trainer.train_dtype, dtype, *([fewer] if fewer else [])]


def width(architecture: Architecture) -> int:
    """Returns the terms of the widest product of a layer."""
    return max(architecture.hidden_size, architecture.ffn_hidden_size, architecture.num_attention_heads * architecture.head_dim)


def run(what: str, module: str, directory: Path, deadline: float) -> None:
    """Runs one of the two to its end. Raises MyxoError, with its last line, where it fails or is late."""
    log = directory / f"{what}.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", module, str(directory)], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise MyxoError(f"the {what} did not compute: {last[:400]} ({log})")
    if code is None:
        raise MyxoError(f"the {what} did not compute within {deadline:g} s (--deadline); {log} has what it says")


def captured(directory: Path, tokens: int, r: float) -> Captures:
    """Returns what both have written."""
    engine = comparison.merged(directory / "engine", tokens, sums=True)
    log_probs = json.loads((directory / "engine" / "log_probs.json").read_text())
    engine["log_probs"] = np.array(log_probs, np.float32)[:, None]
    passes = [comparison.merged(directory / name, tokens) for name in ("plain", "substituted", *_rounded())]
    return Captures(engine, passes[0], passes[1], passes[2:], r)


def _rounded() -> list[str]:
    return [f"rounded-{seed}" for seed in range(1, ROUNDINGS + 1)]


def judged(
    captures: Captures, architecture: Architecture, config: RunConfig, engine_model: Path, model: Path, version: int
) -> dict[str, Any]:
    """Returns the report: all differences, the first of each layer with its causes, and the log-probs' difference."""
    found, missing = comparison.differences(captures, architecture.num_layers)
    origins = comparison.origins(found)
    causes = [_causes(one, captures, config, engine_model, model, version) for one in origins[:1]]
    kinds = [_causes(one, captures, config, engine_model, model, version)[0].kind for one in origins[1:16]]
    total = np.abs(captures.engine["log_probs"] - captures.plain["log_probs"])
    return {
        "differences": [asdict(one) | {"differs": one.differs} for one in found],
        "not_compared": missing,
        "origins": [asdict(one) | {"shown": str(one)} for one in origins],
        "causes": [asdict(cause) for one in causes for cause in one],
        "others": kinds,
        "log_probs": {"mean": float(total.mean()), "max": float(total.max())},
    }


def _causes(
    one: OperationDifference, captures: Captures, config: RunConfig, engine_model: Path, model: Path, version: int
) -> list[MismatchCause]:
    evidence = comparison.by_activations(captures, one)
    if engine_model != model:
        evidence = _of_weights(one, config, engine_model, model, version) or evidence
        evidence = [MismatchCause(one.kind, "; ".join(filter(None, (one.evidence, *_entries(one.kind, engine_model, model)))), one.switch)
                    for one in evidence]  # fmt: skip
    return comparison.likely(one.operation, evidence)


def _entries(kind: str, engine_model: Path, model: Path) -> list[str]:
    """Returns the entries of both ``config.json`` that a cause is about and that differ, in words."""
    words = {"norm epsilon": ("eps",), "rope": ("rope", "rotary")}.get(kind, ())
    engine, trainer = (json.loads((path / "config.json").read_text()) for path in (engine_model, model))
    differing = [name for name in engine | trainer if any(w in name for w in words) and engine.get(name) != trainer.get(name)]
    return [f"config.json: {name} is {engine.get(name)} for the engine, {trainer.get(name)} for the trainer" for name in differing]


def _of_weights(one: OperationDifference, config: RunConfig, engine_model: Path, model: Path, version: int) -> list[MismatchCause]:
    engine, trainer = (layer_tensors(path, one.layer) for path in (engine_model, model))
    changes = comparison.weight_comparison(one, engine, trainer)
    older = None
    for number in sorted((v for v in versions_on_disk(config) if v != version), reverse=True)[:OLDER] if changes.whole else ():
        there = layer_tensors(materialized(versions_on_disk(config)[number], config.run.root / DIRECTORY / "older"), one.layer)
        if all(np.array_equal(there[name], engine[name]) for name in engine if name in there):
            older = number
            break
    return changes.causes(older)


def layer_tensors(directory: Path, layer: int | None) -> dict[str, Any]:
    """Returns a layer's tensors of a checkpoint as float32 by Hugging Face's names; those beside the layers where it is None."""
    files = TensorFiles(weight_files(directory)[0], links=True)
    wanted = [name for name in files.tensors if (f".layers.{layer}." in name if layer is not None else ".layers." not in name)]
    return {name: comparison.as_float32(files[name], *files.tensors[name]) for name in wanted}


def _recorded(directory: Path, sample: Sample | None, tokens: Sequence[int], report: dict[str, Any]) -> dict[str, Any] | None:
    """Returns how the log-probs that the sample came with differ from the trainer's, where they do."""
    if sample is None or sample.log_probs is None or len(tokens) <= len(sample.prompt):
        return None
    first, count = len(sample.prompt) - 1, len(tokens) - len(sample.prompt)
    file = TensorFiles([directory / "tempered.safetensors"])
    tempered = file["log_probs"].view(np.float32)[first : first + count]
    trained = sample.mask[:count] != 0
    layers = [one for one in report["differences"] if one["name"].endswith(".output")]
    bound = max(len(layers), 1) * next(one["bound"] for one in report["differences"] if one["name"] == "log_probs")
    problem = comparison.recorded_problem(sample.log_probs[:count][trained], tempered[trained], bound)
    return problem and {"problem": problem, "causes": [asdict(cause) for cause in comparison.likely("recorded")]}  # type: ignore[return-value]


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report."""
    found = [OperationDifference(*(one[name] for name in ("name", "error", "bound", "token", "tied"))) for one in report["differences"]]
    operations = [name for name in OPERATIONS if any(one.operation == name for one in found)]
    table = Table("layer", *(name.replace("_", " ") for name in operations), title="Differences as shares of what rounding explains")
    beside = []
    for layer, row in comparison.by_operation(found):
        if layer:
            table.add_row(layer, *(_cell(row.get(name)) for name in operations))
        else:
            beside = list(row.values())
    console.print(table)
    console.print(*(Text.assemble(f"{one}: ", _cell(one)) for one in beside), sep=", ")
    mean, largest = report["log_probs"]["mean"], report["log_probs"]["max"]
    console.print(f"Log-probs of these tokens, engine against trainer: mean {mean:.3g}, max {largest:.3g} nats.")
    if report["not_compared"]:
        console.print(f"Not compared, since one of the two does not have it so: {', '.join(report['not_compared'][:6])}", soft_wrap=True)
    if not report["origins"]:
        console.print("No operation differs beyond what its precision explains.")
    else:
        first = report["origins"][0]
        by = f"{first['error']:.3g}, where rounding explains {first['bound']:.2g} (token {first['token']})"
        words = f"First difference: {first['shown']}: {by}."
        console.print(words, style="bold red", soft_wrap=True)
        _print_causes(report["causes"], console)
        for one, kind in zip(report["origins"][1:], report["others"], strict=False):
            console.print(f"By itself differs, too: {one['shown']}: {one['error']:.3g} of {one['bound']:.2g} ({kind})", soft_wrap=True)
    if report["recorded"]:
        words = f"The log-probs that the sample was recorded with differ from the trainer's: {report['recorded']['problem']}."
        console.print(words, style="bold red", soft_wrap=True)
        _print_causes(report["recorded"]["causes"], console)


def _cell(one: OperationDifference | None) -> Text:
    if one is None:
        return Text("")
    share = one.error / one.bound if one.bound else (float("inf") if one.error else 0.0)
    return Text(f"{share:.2g}", style="bold red" if one.differs else "green" if share < 0.5 else "yellow")


def _print_causes(causes: Sequence[dict[str, str]], console: Console) -> None:
    for cause in causes:
        found = f": {cause['evidence']}" if cause["evidence"] else ""
        console.print(Text.assemble(("likely " if found else "possible ", "dim"), (cause["kind"], "bold"), found), soft_wrap=True)
        console.print(Text(f"    → {cause['switch']}"), soft_wrap=True)
