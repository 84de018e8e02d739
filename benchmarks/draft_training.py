"""What training its draft layers gives a model that becomes predictable: accept length over training, and speed beside plain decoding.

``python -m benchmarks.draft_training [PHASE ...] [--device cuda] [--directory DIR] [--json FILE]`` makes a MiMo with random weights and one
draft layer, and a task whose answers are predictable once learned: counting on to the next multiple of a number. Its phases, one after
another, or singly with the same ``--directory`` and ``--json``, where what is done already is kept:

- ``warm``: a warm start on demonstrations. The draft layer stays random, but with ``--warm-drafts``.
- ``trained``, ``fixed``: from there, with speculation, training on the policy's own right answers (rejection sampling), with the draft
  layer trained and pushed with the policy, and with it as it was.
- ``compare``: engines beside each other on one device, of the policy that ``trained`` ended with: ``plain``, with the draft layer that was
  trained with it, and with the ``fixed`` one. They are measured one after another, on the task's prompts.

``--write`` puts the tables of `RESULTS` into the page.

Figures. ``warm``: ``loss`` of demonstrations over the warm start, nats a token. ``trained`` and ``fixed``: by step ``accept_length``,
``accept_rate``, ``reward``, ``mtp_loss``; ``tokens_per_s`` at which a sample was decoded beside others, the median over the last steps;
``exit``, the code, and whether it was ``cut`` at its time, which loses only the steps to come. ``compare``: of each kind and number of
requests at once ``tokens_per_s`` of all together, ``accept_length`` and ``times``, its speed over plain's. Exit code 1 with ``problems``:
what did not end well, or trained draft layers that are accepted no more often than they were at first, or than fixed ones.
"""

import argparse
import asyncio
import fcntl
import json
import random
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import conditions
from benchmarks.example_run import ROOT, launch, stopped
from benchmarks.page_table import markdown_table, put_table
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess, FlagValue, engine_command
from services.rollout.engine.generation import GenerationRequest
from shared.config.speculation import DRAFT, speculation_flags, without_speculation
from shared.data.metric_files import MetricDirectory
from shared.process.child_process import with_parent
from shared.process.embedded_servers import free_port
from shared.schema.messages import Sampling

PHASES = ("warm", "trained", "fixed", "compare")
RUNS = PHASES[:3]
PAGE, RESULTS = ROOT / "docs" / "speculation.md", ROOT / "benchmarks" / "results" / "draft_training.json"
LAST = 3  # the steps at either end over which accept lengths are compared
HELD_OUT = 64
CONFIGURATION = 'from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = "mimo"\n'


@dataclass(frozen=True)
class Scale:
    """Sizes of a device's runs.

    Args:
        multiple: counted to. warm: steps and batch of the warm start, its learning rate, and that of the steps behind it.
        samples: of a step, of as many prompts, so many ``at_once``, in so many ``updates``. batches: requests at once that are compared.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    dtype: str
    multiple: int
    warm: tuple[int, int, float, float]
    samples: int
    at_once: int
    steps: int
    updates: int
    batches: tuple[int, ...]
    engine: Mapping[str, FlagValue] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest answer, four a number, and as many again."""
        return 8 * self.multiple


_ENGINE: Mapping[str, FlagValue] = {
    **{"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "disable-prefill-cuda-graph": True},
    **{"mem-fraction-static": 0.25, "max-total-tokens": 32768, "max-running-requests": 32, "cuda-graph-max-bs-decode": 32},
    **{"speculative-num-steps": 5},
}
# On GPUs as deep as large published models: a token costs more then, and what a verification costs beside the layers does not
SCALES = {
    "cuda": Scale(1024, 64, 16, 3072, "bfloat16", 50, (220, 64, 4e-4, 2e-4), 128, 32, 40, 4, (1, 4, 16, 32), _ENGINE),
    "cpu": Scale(128, 2, 4, 256, "float32", 10, (150, 64, 3e-3, 1e-3), 64, 64, 40, 4, (1, 8)),
}


def counted(start: int, multiple: int) -> str:
    """Returns the answer to ``start``: the numbers behind it, to the next multiple."""
    return " ".join(str(number) for number in range(start + 1, (start // multiple + 1) * multiple + 1))


def write_task(directory: Path, scale: Scale) -> None:
    """Writes the model with its tokenizer, the prompts and the demonstrations; what a finished call has written stays."""
    if (done := directory / "prepared").exists():
        return
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.support.tiny_model import PRINTABLE, character_tokenizer

    torch.manual_seed(0)
    dtype = getattr(torch, scale.dtype)
    sizes = {"hidden_size": scale.hidden, "intermediate_size": scale.intermediate, "num_hidden_layers": scale.layers + 1}
    sizes |= {"num_attention_heads": scale.heads, "num_key_value_heads": scale.heads // 2, "max_position_embeddings": 1024}
    deviation = 0.02 if scale.hidden > 256 else 0.05
    config = Qwen2Config(vocab_size=128, **sizes, initializer_range=deviation, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1)
    tensors = Qwen2ForCausalLM(config).to(dtype).state_dict()
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:  # what so many layers add has to stay small
            tensors[name].mul_((2 * scale.layers) ** -0.5)
    last, draft = f"model.layers.{scale.layers}.", "model.mtp_layers.0."
    tensors = {name.replace(last, draft): tensor for name, tensor in tensors.items()}
    tensors |= {f"{draft}{name}_layernorm.weight": torch.ones(scale.hidden, dtype=dtype) for name in ("token", "hidden", "final")}
    tensors[f"{draft}input_proj.weight"] = torch.randn(scale.hidden, 2 * scale.hidden).mul_(deviation).to(dtype)
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    written |= {"num_nextn_predict_layers": 1, "num_hidden_layers": scale.layers, "layer_types": ["full_attention"] * scale.layers}
    written |= {"torch_dtype": scale.dtype, "dtype": scale.dtype, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (model / "config.json").write_text(json.dumps(written))
    (model / "configuration_mimo.py").write_text(CONFIGURATION)  # as published: transformers does not know the family
    character_tokenizer(PRINTABLE).save_pretrained(model)
    starts = [number for number in range(100, 900) if number % scale.multiple]
    random.Random(0).shuffle(starts)
    rows = {number: {"prompt": f"{number}:", "label": counted(number, scale.multiple)} for number in starts}
    (directory / "train.jsonl").write_text("".join(json.dumps(rows[number]) + "\n" for number in starts[HELD_OUT:]))
    (directory / "heldout.jsonl").write_text("".join(json.dumps(rows[number]) + "\n" for number in starts[:HELD_OUT]))
    shown = [{"prompt": f"{number}:", "response": counted(number, scale.multiple)} for number in starts[HELD_OUT:]]
    (directory / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown * 8))
    done.touch()


def run_file(directory: Path, phase: str, options: argparse.Namespace) -> Path:
    """Writes the file of a phase's run, and returns it."""
    scale = SCALES[options.device]
    steps, batch, sft_lr, lr = scale.warm
    warm = phase == "warm"
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": phase},
        "model": {"hf_checkpoint": str(directory / ("model" if warm else "warm/hf")), "trust_remote_code": True},
        "data": {"prompt_data": str(directory / "train.jsonl"), "rollout_shuffle": True},
        "rollout": {"num_rollout": 0 if warm else options.steps or scale.steps, "rollout_batch_size": scale.samples,
                    "n_samples_per_prompt": 1, "max_staleness": 1, "rollout_max_response_len": scale.longest,
                    "rollout_concurrency": scale.at_once, "rollout_device": options.device, "in_flight_on_push": "retract",
                    **({} if warm else {"speculation": "mtp"})},
        "rollout.sglang": without_speculation(scale.engine) if warm else dict(scale.engine),
        "reward": {"rm_type": "exact"},  # of the last number alone, an answer without the others would be the shortest that is right
        # ε: a policy that makes no errors has gradients of noise alone, which Adam would make as large as any
        "trainer": {"train_dtype": scale.dtype, "train_device": options.device, "lr": lr, "adam_beta2": 0.95, "lr_warmup_iters": 10,
                    "adam_eps": 1e-8 if warm else 1e-5, "mtp_loss_scaling_factor": 1.0,
                    "num_steps_per_rollout": scale.updates, "save_interval": 20, "keep_checkpoints": 1, "seed": 1, "torch_threads": 1,
                    "save_hf": str(directory / phase / "hf-{rollout_id}"), "save_at_start": False,
                    "enable_mtp_training": options.warm_drafts if warm else phase == "trained"},
        "algorithm": {"loss_type": "sft_loss", "rejection_threshold": 0.5},
    }  # fmt: skip
    if warm:
        tables["sft"] = {"sft_data": str(directory / "sft.jsonl"), "sft_steps": options.sft_steps or steps, "sft_batch_size": batch,
                         "sft_lr": sft_lr, "sft_lr_decay_style": "cosine", "sft_warmup_fraction": 0.05}  # fmt: skip
    text = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items()]
    (file := directory / f"{phase}.toml").write_text("".join(text))
    return file


def run_figures(directory: Path, phase: str) -> dict[str, Any]:
    """Returns a run's figures by its metrics."""
    found: dict[str, list[float]] = {}
    for scalar in MetricDirectory(directory / phase / "tensorboard").read():
        found.setdefault(scalar.tag, []).append(round(scalar.value, 4))

    def of(name: str) -> list[float]:
        return found.get(name, [])

    if phase == "warm":
        return {"loss": of("sft/loss")[::25] + of("sft/loss")[-1:], "mtp_loss": of("sft/mtp_loss")[::25]}
    rewards, speeds = of("rollout/raw_reward"), of("perf/decode/throughput/mean")[-10:]
    return {
        "steps": len(rewards),
        "accept_length": of("rollout/spec_accept_length"),
        "accept_rate": of("rollout/spec_accept_rate"),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "reward": rewards,
        "mtp_loss": of("train/mtp_loss"),
    }


def newest_policy(directory: Path, phase: str) -> Path:
    """Returns a run's newest export. Raises FileNotFoundError: it has none yet."""
    made = sorted(directory.glob(f"{phase}/hf-*"), key=lambda path: int(path.name.removeprefix("hf-")))
    found = [path for path in (directory / phase / "hf", *reversed(made)) if (path / "config.json").exists()]
    if not found:
        raise FileNotFoundError(f"{directory / phase}: no export; run the phase {phase} first")
    return found[0]


class Compared:
    """One engine among those that are compared. ``prompts``: of the task, as tokens."""

    def __init__(self, client: EngineClient, prompts: Sequence[np.ndarray], longest: int) -> None:
        self._client, self._prompts, self._longest = client, prompts, longest

    async def speed(self, batch: int, rounds: int) -> dict[str, float]:
        """Returns tokens/s of ``batch`` requests at once, the accept length, and the tokens of all, over so many rounds."""
        tokens = verified = verifications = 0
        began = time.monotonic()

        async def requests(first: int) -> None:
            nonlocal tokens, verified, verifications
            for index in range(first, first + rounds):
                request = GenerationRequest(self._prompts[index % len(self._prompts)], self._longest)
                (one,) = await self._client.generate_group([request], Sampling(temperature=1.0, max_new_tokens=self._longest))
                tokens += len(one.tokens)
                verifications += one.verifications
                verified += len(one.tokens) if one.verifications else 0

        await asyncio.gather(*(requests(worker * rounds) for worker in range(batch)))
        seconds = time.monotonic() - began
        found = {"tokens_per_s": round(tokens / seconds, 1), "accept_length": round(verified / verifications, 3) if verifications else 1.0}
        return found | {"tokens": tokens, "seconds": round(seconds, 2)}


async def compare(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of the phase ``compare``."""
    from transformers import AutoTokenizer

    scale, policy = SCALES[options.device], newest_policy(directory, "trained")
    flags: dict[str, FlagValue] = {**without_speculation(scale.engine), "trust-remote-code": True}
    drafts: dict[str, dict[str, FlagValue]] = {"plain": {}}
    for kind, of in (("trained", policy), ("fixed", newest_policy(directory, "warm"))):
        drafts[kind] = {**speculation_flags("mtp", scale.engine, {}), **scale.engine, DRAFT: str(of)}
    tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=True)
    rows = [json.loads(line) for line in (directory / "heldout.jsonl").read_text().splitlines()]
    prompts = [np.array(tokenizer.encode(row["prompt"]), np.int32) for row in rows]
    figures: dict[str, Any] = {"policy": policy.name, **{kind: {} for kind in drafts}}
    async with AsyncExitStack() as stack:
        processes = {}
        for kind, own in drafts.items():
            command = engine_command(policy, free_port(), device=options.device, random_seed=1, flags={**flags, **own})
            processes[kind] = EngineProcess(command, directory / f"compare.{kind}.log")
            stack.callback(processes[kind].stop, 0)
        engines = {}
        for kind, process in processes.items():
            await process.ready(options.seconds)
            client = await stack.enter_async_context(await EngineClient.connect(process.receiver))
            engines[kind] = Compared(client, prompts, scale.longest)
            await engines[kind].speed(max(scale.batches), 1)
        for batch in scale.batches:
            for kind, engine in engines.items():
                found = await engine.speed(batch, max(4, HELD_OUT // 2 // batch))
                times = found["tokens_per_s"] / figures["plain"].get(str(batch), found)["tokens_per_s"]
                figures[kind][str(batch)] = found | {"times": round(times, 3)}
    return figures


def run_phase(directory: Path, phase: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one phase, and returns its figures."""
    if phase == "compare":
        return asyncio.run(compare(directory, options))
    if phase != "warm":
        newest_policy(directory, "warm")
    began = time.monotonic()
    words = [str(run_file(directory, phase, options)), "--fresh", "--dir", str(directory), *options.flags]
    process = subprocess.Popen(with_parent(launch(words)), cwd=ROOT, stdin=subprocess.DEVNULL)
    cut = False
    try:
        code = process.wait(options.seconds)
    except subprocess.TimeoutExpired:
        code, cut = stopped(process), True
    return {"exit": code, "cut": cut, "seconds": round(time.monotonic() - began, 1), **run_figures(directory, phase)}


def problems(phases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns what is wrong with the phases so far."""
    ended = {name: phases[name] for name in RUNS if name in phases and not phases[name]["cut"]}
    found = [f"{name}: exit code {phase['exit']}" for name, phase in ended.items() if phase["exit"] != 0]
    lengths = {name: phases[name]["accept_length"] for name in ("trained", "fixed") if name in phases}
    found += [f"{name}: {len(length)} accept lengths, too few" for name, length in lengths.items() if len(length) < 2 * LAST]
    if any(len(length) < 2 * LAST for length in lengths.values()):
        return found
    last = {name: statistics.fmean(length[-LAST:]) for name, length in lengths.items()}
    if "trained" in lengths and last["trained"] <= statistics.fmean(lengths["trained"][:LAST]):
        found.append("trained draft layers are accepted no more often than they were at first")
    if len(last) == 2 and last["trained"] <= last["fixed"]:
        found.append("trained draft layers are accepted no more often than those that are not trained")
    return found


def merged(path: Path, base: dict[str, Any], phase: str, figures: dict[str, Any] | None) -> dict[str, Any]:
    """Adds a phase's figures to a file that others may be writing, and returns all of it; None: only reads."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = json.loads(path.read_text()) if path.exists() else {**base, "phases": {}, "problems": []}
        if figures is not None:
            report["phases"][phase] = {**conditions(), **figures}
            report["problems"] = problems(report["phases"])
            path.write_text(json.dumps(report, indent=1) + "\n")
        return dict(report)


def table(report: Mapping[str, Any]) -> str:
    """Returns the page's tables of a report."""
    phases = report["phases"]

    def ends(values: Sequence[float]) -> list[str]:
        return [f"{statistics.fmean(part):.2f}" for part in (values[:LAST], values[-LAST:])]

    runs = {name: phases[name] for name in ("trained", "fixed")}
    rows = [(name, str(run["steps"]), *ends(run["accept_length"]), *ends(run["reward"])) for name, run in runs.items()]
    head = ("draft layer", "steps", "accept length at first", "at the end", "reward at first", "at the end")
    of, kinds = phases["compare"], ("plain", "trained", "fixed")
    compared = markdown_table(
        ("requests at once", *(f"{kind}, tokens/s" for kind in kinds), "trained, times", "accept length", "fixed, times", "accept length"),
        ([batch, *(f"{of[kind][batch]['tokens_per_s']:,.0f}" for kind in kinds),
          *(f"{of[kind][batch][name]:.2f}" for kind in kinds[1:] for name in ("times", "accept_length"))] for batch in of["plain"]),
    )  # fmt: skip
    where = f"{report['model']}; {of.get('gpu') or str(of['cores']) + ' CPU cores'}, {of['at'][:10]}."
    return f"{markdown_table(head, rows)}\n\n{compared}\n\n{where}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"of {', '.join(PHASES)}; default: all that are not done")
    parser.add_argument("--device", choices=tuple(SCALES), default="cuda", help="of engine and trainer")
    parser.add_argument("--steps", type=int, help="behind the warm start")
    parser.add_argument("--sft-steps", type=int, help="of the warm start")
    parser.add_argument("--warm-drafts", action="store_true", help="the warm start trains the draft layer, too")
    parser.add_argument("--seconds", type=float, default=200, help="for each phase")
    parser.add_argument("--directory", type=Path, default=Path("runs/draft_training"), help="for the runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, of all phases; default: in the directory")
    parser.add_argument("--write", action="store_true", help="put the results into the documentation, and run nothing")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of each run")
    options = parser.parse_args()
    if wrong := [phase for phase in options.phases if phase not in PHASES]:
        parser.error(f"{wrong[0]}: expected one of {', '.join(PHASES)}")
    if options.write:
        put_table(PAGE, "draft_training", table(json.loads(RESULTS.read_text())))
        return 0
    scale, directory = SCALES[options.device], options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    path = (options.json or directory / "draft_training.json").absolute()
    model = f"MiMo with random weights, {scale.layers} layers of {scale.hidden}, {scale.dtype}"
    base = {"device": options.device, "model": model, "warm_drafts": options.warm_drafts, "flags": options.flags}
    write_task(directory, scale)
    report = merged(path, base, "", None)
    for phase in options.phases or [phase for phase in PHASES if phase not in report["phases"]]:
        report = merged(path, base, phase, run_phase(directory, phase, options))
    print(json.dumps(report, indent=1))
    return int(bool(report["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
