"""``myxo bisect RUN --sample GROUP/INDEX``: where the log-probs of a run's engine and of its trainer part, layer by layer.

An engine as the run has it and the run's trainer compute the same tokens by the same version's weights, one after the other; what they have
computed is compared in `myxo.run.layer_comparison`.
"""

import argparse
import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run, positive
from myxo.commands.evaluate import chosen_version, materialized, versions_on_disk
from myxo.commands.export_run import config_of
from myxo.commands.samples import stored_sample
from myxo.commands.up import with_flags
from myxo.display import SafeConsole
from myxo.run import layer_comparison as comparison
from myxo.run.layer_comparison import Captures, OperationDifference
from shared.config import devices, flags
from shared.config.run_config import RunConfig
from shared.hub.hub_resolve import local_tokenizer
from shared.model.architecture import OPERATIONS, ROUNDINGS, Architecture
from shared.model.engine_checkpoint import quantized
from shared.model.families import architecture_of, read_architecture
from shared.model.hf_checkpoint import weight_files
from shared.model.quantization import parts_of, quantization_of
from shared.process.child_process import ChildProcess
from shared.runtime import exit_codes
from shared.runtime.errors import BadInput, BadMessage, ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.safe_files import replace_file
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.sample import Sample
from shared.transfer.tensor_file import TensorFiles

ENGINE, TRAINER = "services.rollout.engine.layer_scoring", "services.trainer.trainer_layers"
DIRECTORY = "bisect"  # of a run's, for what the last bisection has written
FEWEST, DEFAULT_TOKENS = 2, 512
SHOWN = 16  # layers whose causes are looked for
OLDER = 3  # versions on disk that are compared with the engine's weights at most
_ABOUT = """Find where an engine and the trainer of a run part: the first operation that differs beyond what its precision explains.

RUN is a run's name or its directory, or a config's TOML file. An engine and a trainer of the run's config, with flags laid over it, start
on this machine one after the other; a run at work needs its GPUs for itself. Exits 1 where they differ. docs/mismatch.md explains the
report."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _ABOUT, "RUN|CONFIG (--sample GROUP/INDEX | --prompt TEXT | --dump FILE) [--version N]", bisect)
    add_run(command, "RUN|CONFIG", ", or a config's TOML file")
    command.add_argument("--sample", metavar="GROUP/INDEX", help="the tokens of this sample, as `myxo samples` names it")
    command.add_argument("--prompt", metavar="TEXT", help="the tokens of this text")
    command.add_argument("--dump", metavar="FILE", type=Path, help="--sample, or the first one, of a file of --save-debug-rollout-data")
    command.add_argument("--version", type=int, metavar="N", help="the weight version (default: the sample's, else the newest on disk)")
    command.add_argument("--engine-checkpoint", metavar="DIR", type=Path, help="what the engine loads instead, such as a quantised one")
    command.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"the first N alone (default {DEFAULT_TOKENS})")
    command.add_argument("--deadline", type=positive, default=900.0, metavar="S", help="seconds for each of the two (default 900)")
    add_json(command)


def bisect(parsed: argparse.Namespace, console: Console) -> int:
    """Compares and reports. Returns the exit code. Raises ConfigError for bad input, MyxoError where one of the two does not compute."""
    config = config_of(parsed.run, parsed.dir, flags.read(parsed.flags))
    check(config, parsed)
    sample = _sample(parsed, config)
    tokens = _tokens(parsed, config, sample)
    version = parsed.version if parsed.version is not None or sample is None else int(sample.versions().max(initial=0))
    item = chosen_version(config, version, plain=True)
    say = SafeConsole(stderr=True) if parsed.json else console
    say.print(f"Version {item.version} of {config.run.name} is {item.what}; {len(tokens)} tokens.", soft_wrap=True)
    directory = config.run.root / DIRECTORY
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model, precision = materialized(item, directory / "model").absolute(), config.rollout.rollout_precision
    engine_model = (parsed.engine_checkpoint or quantized(model, directory / "engine-model", precision)).absolute()
    architecture = same_model(config, engine_model)
    widest = max(architecture.hidden_size, architecture.ffn_hidden_size, architecture.num_attention_heads * architecture.head_dim)
    r = comparison.rounding(precisions(config, engine_model), widest)
    request = {
        "config": config.with_fields(model={"hf_checkpoint": model}).model_dump(mode="json"),
        "tokens": tokens,
        "engine_model": str(engine_model),
        "trainer_model": str(model),
        "deadline": parsed.deadline,
        "rounding": r,
        "temperature": config.rollout.rollout_temperature or 1.0,
    }
    replace_file(directory / "request.json", json.dumps(request).encode(), mode=0o600)
    for what, module in (("engine", ENGINE), ("trainer", TRAINER)):
        say.print(f"The {what} computes; {directory / what}.log has what it says.", soft_wrap=True)
        run(what, module, directory, parsed.deadline + 60)
    checkpoints = Checkpoints(config, engine_model, model, item.version)
    found, report = judged(captured(directory, len(tokens), r), architecture.num_layers, checkpoints)
    report["recorded"] = _recorded(directory, sample, tokens, found)
    report |= {"run": config.run.name, "version": item.version, "tokens": len(tokens), "rounding": r}
    if parsed.json:
        console.file.write(json.dumps(report, indent=2) + "\n")
    else:
        show(found, report, console)
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
    for name in ("actor_num_nodes", "context_parallel_size"):
        if (value := getattr(config.trainer, name)) > 1:
            raise ConfigError(f"trainer.{name}", value, f"1: lay --{name.replace('_', '-')} 1 over it")
    if config.rollout.nodes_per_engine > 1:
        raise ConfigError("rollout.sglang.nnodes", config.rollout.nodes_per_engine, "1: an engine of one machine")


def _sample(parsed: argparse.Namespace, config: RunConfig) -> Sample | None:
    """Returns the sample whose tokens are asked for: of a dump by its name, or its first one, or the run's. Raises ConfigError."""
    path, name = parsed.dump, parsed.sample
    if path is None:
        return None if parsed.prompt is not None else asyncio.run(stored_sample(str(config.run.root), config.run.dir, name))
    try:
        samples = [one for blob in codec.unpack(path.read_bytes())["blobs"].values() for one in sample_codec.decode([blob])]
    except (OSError, BadMessage, LookupError, TypeError, AttributeError) as error:
        expected = "a file that --save-debug-rollout-data has written in Myxo's own format (a path that does not end in .pt)"
        raise ConfigError("--dump", str(path), f"{expected}; {getattr(error, 'strerror', None) or error}") from None
    found = next((one for one in samples if name in (None, one.name, f"{one.group}/{one.index}")), None)
    if found is None:
        there = ", ".join(f"{one.group}/{one.index}" for one in samples[:8])
        raise ConfigError("--sample", name, f"one of the {len(samples)} in {path}: {there}{' …' if len(samples) > 8 else ''}")
    return found


def _tokens(parsed: argparse.Namespace, config: RunConfig, sample: Sample | None) -> list[int]:
    if sample is not None:
        found = np.concatenate([sample.prompt, sample.response])
    elif (tokenizer := local_tokenizer(config)) is not None:
        found = tokenizer.encode(parsed.prompt, begin=True)
    else:
        raise ConfigError("--prompt", parsed.prompt, "--sample or --dump: the tokenizer of model.hf_checkpoint is not here")
    if len(found) < FEWEST:
        raise ConfigError("--prompt" if sample is None else "--sample", parsed.prompt or parsed.sample, f"at least {FEWEST} tokens")
    return [int(token) for token in found[: parsed.tokens]]


def same_model(config: RunConfig, engine_model: Path) -> Architecture:
    """Returns the architecture of the trainer. Raises ConfigError where the engine's checkpoint is not one of the same sizes."""
    own, other = architecture_of(config), read_architecture(engine_model, quantized=True, backend=config.trainer.trainer_backend)
    for name in ("num_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        if (wanted := getattr(own, name)) != (given := getattr(other, name)):
            raise ConfigError("--engine-checkpoint", str(engine_model), f"the run's model, whose {name} is {wanted}; this one has {given}")
    return own


def precisions(config: RunConfig, engine_model: Path) -> list[str]:
    """Returns the formats that engine and trainer compute with, by the names of `layer_comparison.ROUNDOFFS`."""
    given, entries = config.rollout.engine_flags, json.loads((engine_model / "config.json").read_text())
    on_cpu = devices.resolve(config.rollout.rollout_device) == "cpu"
    dtype = str(given.get("dtype") or ("float32" if on_cpu else "auto"))
    dtype = str(entries.get("torch_dtype") or entries.get("dtype") or "bfloat16") if dtype == "auto" else dtype
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    methods = f"{given.get('quantization') or ''}{entries.get('quantization_config') or ''}"
    fewer = next((name for name in ("fp8", "int8") if name in methods), "int4") if methods else None
    alike = fewer == "int4" and config.trainer.rounded_by  # the trainer computes with the same integers
    return [config.trainer.train_dtype, dtype, *([fewer] if fewer and not alike else [])]


def run(what: str, module: str, directory: Path, deadline: float) -> None:
    """Runs one of the two to its end. Raises MyxoError, with its last line, where it fails or is late."""
    process = ChildProcess(what, [sys.executable, "-m", module, str(directory)], log := directory / f"{what}.log")
    try:
        code = process.wait(deadline)
    except DeadlineExceeded:
        raise MyxoError(f"the {what} did not compute within {deadline:g} s (--deadline); {log} has what it says") from None
    finally:
        process.stop(10.0)
    if code:
        raise MyxoError(f"the {what} did not compute: {(process.last_lines(1) or ['it said nothing'])[0][:400]} ({log})")


def captured(directory: Path, tokens: int, r: float) -> Captures:
    """Returns what both have written."""
    engine = comparison.merged(directory / "engine", tokens, sums=True)
    engine["log_probs"] = np.array(json.loads((directory / "engine" / "log_probs.json").read_text()), np.float32)[:, None]
    passes = ("plain", "substituted", *(f"rounded-{seed}" for seed in range(1, ROUNDINGS + 1)))
    plain, substituted, *rounded = (comparison.merged(directory / name, tokens) for name in passes)
    return Captures(engine, plain, substituted, rounded, r)


@dataclass(frozen=True)
class Checkpoints:
    """What engine and trainer have loaded. ``version``: the trainer's."""

    config: RunConfig
    engine: Path
    trainer: Path
    version: int

    def causes(self, one: OperationDifference, captures: Captures) -> list[dict[str, str]]:
        """Returns the causes of a difference, those that outputs, tensors or config.json speak for first."""
        evidence = comparison.activation_evidence(captures, one)
        if self.engine != self.trainer:
            evidence = self._tensors(one) or evidence
            evidence = {kind: "; ".join(filter(None, (words, *self._entries(kind)))) for kind, words in evidence.items()}
        return comparison.causes(one.operation, evidence)

    def _entries(self, kind: str) -> list[str]:
        words = {"norm epsilon": ("eps",), "rope": ("rope", "rotary")}.get(kind, ())
        engine, trainer = (json.loads((path / "config.json").read_text()) for path in (self.engine, self.trainer))
        differing = [name for name in engine | trainer if any(w in name for w in words) and engine.get(name) != trainer.get(name)]
        return [f"config.json: {name} is {engine.get(name)} for the engine, {trainer.get(name)} for the trainer" for name in differing]

    def _tensors(self, one: OperationDifference) -> dict[str, str]:
        engine, trainer = (layer_tensors(path, one.layer) for path in (self.engine, self.trainer))
        roundoff = comparison.ROUNDOFFS["fp8"] if quantization_of(self.engine) != quantization_of(self.trainer) else 0.0

        def older() -> int | None:
            there, target = versions_on_disk(self.config), self.config.run.root / DIRECTORY / "older"
            for number in sorted(there.keys() - {self.version}, reverse=True)[:OLDER]:
                tensors = layer_tensors(materialized(there[number], target), one.layer)
                if not any(comparison.weights_differ(engine[name], tensors[name], roundoff).any() for name in engine if name in tensors):
                    return number
            return None

        return comparison.weight_evidence(one.operation, engine, trainer, older, roundoff)


def layer_tensors(directory: Path, layer: int | None) -> dict[str, Any]:
    """Returns a layer's tensors of a checkpoint as float32 by Hugging Face's names; those beside the layers where it is None.
    Matrices of 8-bit floats are multiplied by their factors; those of 4-bit integers are left out."""
    files, quantization = TensorFiles(weight_files(directory)[0], links=True), quantization_of(directory)
    wanted = [name for name in files.tensors if (f".layers.{layer}." in name if layer is not None else ".layers." not in name)]
    found = {name: comparison.as_float32(files[name], *files.tensors[name]) for name in wanted}
    for name in quantization.names if quantization else ():
        assert quantization is not None
        form, parts = quantization.format, [found.pop(part) for part in parts_of(name, quantization.format) if part in found]
        if parts and form.bits == 8:
            factors = parts[1].repeat(form.rows, 0).repeat(form.columns, 1) if form.rows else parts[1]
            found[name] = parts[0] * (factors[tuple(map(slice, parts[0].shape))] if form.rows else factors)
    return found


def judged(captures: Captures, layers: int, checkpoints: Checkpoints) -> tuple[list[OperationDifference], dict[str, Any]]:
    """Returns all differences, and the report: the first of each layer with its causes, and the log-probs' difference."""
    found, missing = comparison.differences(captures, layers)
    origins = comparison.origins(found)
    causes = [checkpoints.causes(one, captures) for one in origins[:SHOWN]]
    total = np.abs(captures.engine["log_probs"] - captures.plain["log_probs"])
    return found, {
        "differences": [asdict(one) | {"differs": one.differs} for one in found],
        "not_compared": missing,
        "origins": [asdict(one) | {"shown": str(one)} for one in origins],
        "causes": causes[0] if causes else [],
        "others": [one[0]["kind"] for one in causes[1:]],
        "log_probs": {"mean": float(total.mean()), "max": float(total.max())},
    }


def _recorded(directory: Path, sample: Sample | None, tokens: Sequence[int], found: Sequence[OperationDifference]) -> dict[str, Any] | None:
    """Returns how the log-probs that the sample came with differ from the trainer's, where they do."""
    if sample is None or sample.log_probs is None or len(tokens) <= len(sample.prompt):
        return None
    first, count = len(sample.prompt) - 1, len(tokens) - len(sample.prompt)
    tempered = TensorFiles([directory / "tempered.safetensors"])["log_probs"].view(np.float32)[first : first + count]
    trained, layers = sample.mask[:count] != 0, sum(one.operation == "output" for one in found)
    bound = max(layers, 1) * next(one.bound for one in found if one.name == "log_probs")
    problem = comparison.recorded_problem(sample.log_probs[:count][trained], tempered[trained], bound)
    return None if problem is None else {"problem": problem, "causes": comparison.causes("recorded")}


def show(found: Sequence[OperationDifference], report: dict[str, Any], console: Console) -> None:
    """Prints the report."""
    operations = [name for name in OPERATIONS if any(one.operation == name for one in found)]
    table = Table("layer", *(name.replace("_", " ") for name in operations), title="Differences as shares of what rounding explains")
    rows: dict[int, dict[str, Text]] = {}
    for one in found:
        if one.layer is not None:
            rows.setdefault(one.layer, {})[one.operation] = _cell(one)
    for layer, row in rows.items():
        table.add_row(str(layer), *(row.get(name, "") for name in operations))
    console.print(table)
    console.print(*(Text.assemble(f"{one}: ", _cell(one)) for one in found if one.layer is None), sep=", ")
    mean, largest = report["log_probs"]["mean"], report["log_probs"]["max"]
    console.print(f"Log-probs of these tokens, engine against trainer: mean {mean:.3g}, max {largest:.3g} nats.")
    if report["not_compared"]:
        console.print(f"Not compared, since one of the two does not have it so: {', '.join(report['not_compared'][:6])}", soft_wrap=True)
    if not report["origins"]:
        console.print("No operation differs beyond what its precision explains.")
    _print_origins(report, console)
    if report["recorded"]:
        words = f"The log-probs that the sample was recorded with differ from the trainer's: {report['recorded']['problem']}."
        _print_causes(words, report["recorded"]["causes"], console)


def _print_origins(report: dict[str, Any], console: Console) -> None:
    for index, one in enumerate(report["origins"][:SHOWN]):
        by = f"{one['error']:.3g}, where rounding explains {one['bound']:.2g} (token {one['token']})"
        if not index:
            _print_causes(f"First difference: {one['shown']}: {by}.", report["causes"], console)
        else:
            console.print(f"By itself differs, too: {one['shown']}: {by} ({report['others'][index - 1]})", soft_wrap=True)


def _cell(one: OperationDifference) -> Text:
    share = one.error / one.bound if one.bound else (float("inf") if one.error else 0.0)
    return Text(f"{share:.2g}", style="bold red" if one.differs else "green" if share < 0.5 else "yellow")


def _print_causes(words: str, causes: Sequence[dict[str, str]], console: Console) -> None:
    console.print(words, style="bold red", soft_wrap=True)
    for cause in causes:
        found = f": {cause['evidence']}" if cause["evidence"] else ""
        console.print(Text.assemble(("likely " if found else "possible ", "dim"), (cause["kind"], "bold"), found), soft_wrap=True)
        console.print(Text(f"    → {cause['switch']}"), soft_wrap=True)
