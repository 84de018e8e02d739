"""What training its draft layers gives a model that becomes predictable: accept length over training, and speed beside plain decoding.

``python -m benchmarks.draft_training [--device cuda] [--model DIR] [--json FILE]`` trains one model three times by ``myxo up``: without
speculation (``plain``), with the checkpoint's draft layers as they are (``fixed``), and with draft layers that are trained and pushed with
the policy (``trained``). By default the model is a tiny DeepSeek-V3 with random weights and one draft layer, on the arithmetic example's
sums, which it learns in a warm start and then by GRPO; ``--model`` names a checkpoint with draft layers, which the example's sums then
train. FILE is written again after each run.

Figures, of each case: ``accept_length`` and ``accept_rate`` of each step's samples, ``tokens_per_s`` at which a sample was decoded beside
others (the median over steps), ``times``: that over plain's, ``reward`` of the first and the last step, ``mtp_loss`` by step, ``exit``.
Exit code 1 with ``problems``: a run that did not end well, or trained draft layers whose accept length has not risen above the fixed ones'.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.command_line import conditions
from benchmarks.example_run import ROOT, SMALL_ENGINE_FLAGS, launch, prepare_example, stopped
from shared.data.metric_files import MetricDirectory

CASES: Mapping[str, tuple[str, ...]] = {
    "plain": ("--speculation", "off"),
    "fixed": ("--speculation", "mtp"),
    "trained": ("--speculation", "mtp", "--enable-mtp-training"),
}
LAST = 3  # the newest steps over which accept lengths are compared


def write_tiny(directory: Path) -> None:
    """Writes the tiny model, with a tokenizer of characters."""
    from tests.support.tiny_model import PRINTABLE, character_tokenizer
    from tests.unit.trainer.megatron.draft_steps import make_drafted
    from tests.unit.trainer.megatron.tiny import VOCAB

    directory.mkdir(parents=True)
    make_drafted("deepseek_v3", directory)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(directory)


def figures(path: Path) -> dict[str, Any]:
    """Returns a run's figures by its directory of metrics."""
    found: dict[str, list[float]] = {}
    for scalar in MetricDirectory(path).read():
        found.setdefault(scalar.tag, []).append(round(scalar.value, 4))

    def of(name: str) -> list[float]:
        return found.get(name, [])

    speeds, rewards = of("perf/decode/throughput/mean"), of("rollout/raw_reward")
    return {
        "steps": len(rewards),
        "accept_length": of("rollout/spec_accept_length"),
        "accept_rate": of("rollout/spec_accept_rate"),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "reward": [rewards[0], rewards[-1]] if rewards else [],
        "mtp_loss": of("train/mtp_loss"),
    }


def problems(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns what is wrong with the cases so far."""
    found = [f"{name}: exit code {case['exit']}" for name, case in cases.items() if case["exit"] != 0]
    lengths = {name: cases[name]["accept_length"][-LAST:] for name in ("fixed", "trained") if name in cases}
    found += [f"{name}: no accept length" for name, length in lengths.items() if not length]
    if len(lengths) == 2 and all(lengths.values()) and statistics.fmean(lengths["trained"]) <= statistics.fmean(lengths["fixed"]):
        found.append("trained draft layers are accepted no more often than those that are not trained")
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of engine and trainer")
    parser.add_argument("--model", type=Path, help="a checkpoint with draft layers; default: a tiny random one")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--sft-steps", type=int, default=300, help="of the warm start")
    parser.add_argument("--seconds", type=float, default=170, help="for each run")
    parser.add_argument("--directory", type=Path, help="for the runs; default: a temporary one")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of each run")
    options = parser.parse_args()
    report: dict[str, Any] = {**conditions(), "device": options.device, "model": str(options.model or "tiny DeepSeek-V3")}
    report |= {"steps": options.steps, "sft_steps": options.sft_steps, "flags": options.flags, "cases": {}, "problems": []}
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).absolute()
        data, model = directory / "data", options.model or directory / "model"
        config = prepare_example(data)
        if options.model is None and not model.exists():
            write_tiny(model)
        for case in options.cases:
            words = [
                *(*config, "--fresh", "--name", case, "--dir", str(directory), *CASES[case]),
                *("--hf-checkpoint", str(model), "--prompt-data", str(data / "train.jsonl"), "--eval-interval", str(options.steps)),
                *("--num-rollout", str(options.steps), "--sft-steps", str(options.sft_steps)),
                *("--rollout-device", options.device, "--train-device", options.device),
                *(SMALL_ENGINE_FLAGS if options.device == "cuda" else ()),
                *options.flags,
            ]
            process = subprocess.Popen(launch(words), cwd=ROOT, stdin=subprocess.DEVNULL)
            try:
                code = process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                code = stopped(process)
            found = {"exit": code, **figures(directory / case / "tensorboard")}
            report["cases"][case] = found
            plain = report["cases"].get("plain", {}).get("tokens_per_s")
            found["times"] = round(found["tokens_per_s"] / plain, 3) if plain and found["tokens_per_s"] else None
            report["problems"] = problems(report["cases"])
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(bool(report["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
