"""One run of the benchmark: which, by which command, and what its files tell while it continues and afterwards."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.command_line import first_gpus
from shared.config.devices import VISIBLE
from shared.data.metric_files import MetricDirectory

HERE = Path(__file__).parent

UNCORRECTED = ("--off-policy", "none")
OBJECTIVES = {
    "decoupled": ("--off-policy", "decoupled"),
    "torch": ("--off-policy", "decoupled", "--trainer-backend", "torch"),
    "naive": UNCORRECTED,
    "rollout": ("--off-policy", "rollout"),
    "fp8": (*UNCORRECTED, "--hf-checkpoint", "{data}/model-fp8"),
    "fp8-tis": ("--use-tis", "--hf-checkpoint", "{data}/model-fp8"),
    "int4": (*UNCORRECTED, "--rollout-precision", "int4"),
    "int4-aware": (*UNCORRECTED, "--rollout-precision", "int4", "--quantization-aware"),
}
"""Objective → its flags: decoupled PPO, whose importance weights are of the policy at batch start over the one that drew the tokens; the
same, trained by the torch backend; no correction, as if the samples were the policy's own; PPO's ratio to the policy that drew them; and no
correction with engines of fewer bits, 8-bit floats with truncated importance weights in its place, 4-bit integers with a trainer that
computes with them as well."""

STEP_TAGS = {
    "rollout/raw_reward": "reward",
    "rollout/staleness_mean": "staleness",
    "train/train_rollout_logprob_abs_diff": "logprob_diff",
    "train/tis_clipfrac": "clipped",
    "perf/wait_time_ratio": "waiting",
}
"""Metrics of a step that are kept, by the names of docs/metrics.md, and their names here."""

WARMED_UP = ("smollm2",)
"""Examples whose runs begin with a warm start of their own."""

ON_GPUS = [
    *("--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none"),
    *("--sglang-mem-fraction-static", "0.6", "--sglang-max-total-tokens", "65536", "--sglang-max-running-requests", "256"),
    *("--sglang-chunked-prefill-size", "2048", "--sglang-cuda-graph-bs-decode", "8", "32", "64", "128", "256"),
    *("--sglang-cuda-graph-backend-prefill", "disabled", "--sglang-sleep-on-idle"),
]
"""Many engines share a GPU: each takes a cache of so many tokens, whatever is free. Its share of memory has to be large, since what others
take while it starts counts as its own."""

GPUS_OF_A_RUN = 2
"""The trainer's and the engine's: NCCL takes no two of its ranks on one."""


@dataclass(frozen=True)
class LearningRun:
    """One run. ``bound``: its `max_staleness`. ``objective``: one of `OBJECTIVES`."""

    example: str
    device: str
    bound: int
    seed: int
    objective: str
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.example}-{self.objective}-b{self.bound}-s{self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """Returns what it is known by in the figures."""
        return asdict(self)

    def command(self, data: Path, directory: Path, flags: Sequence[str]) -> list[str]:
        """Returns the command line. ``data``: the example's (`learning_data`). ``directory``: the run's own is made in it. ``flags``: the
        last word on everything."""
        return [
            *(sys.executable, "-m", "myxo.main", "up", str(HERE / f"{self.example}.toml"), "--fresh"),
            *("--name", self.name, "--dir", str(directory), "--hf-checkpoint", str(data / "model")),
            *("--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", f"{data / 'heldout.jsonl'}"),
            *("--rollout-device", self.device, "--train-device", self.device),
            *("--num-rollout", str(self.num_steps), "--max-staleness", str(self.bound)),
            *(flag.format(data=data) for flag in OBJECTIVES[self.objective]),
            *("--rollout-seed", str(1000 + self.seed), "--seed", str(2000 + self.seed)),
            *(["--sft-data", str(data / "sft.jsonl")] if self.example in WARMED_UP else []),
            *(ON_GPUS if self.device == "cuda" else []),
            *flags,
        ]


def planned(example: str, device: str, bounds: Sequence[int], seeds: int, objectives: Sequence[str], steps: int) -> Iterator[LearningRun]:
    """Yields all runs, seed after seed: what is cut off lacks seeds, not bounds or objectives."""
    for seed in range(seeds):
        for objective in objectives:
            for bound in bounds:
                yield LearningRun(example, device, bound, seed, objective, steps)


def environment(slot: int, device: str, gpus: int) -> dict[str, str]:
    """Returns the environment of the run in a slot. On GPUs the trainer of each slot lies on the next one, the engine on the one after
    it: so they share all GPUs alike. These are the first that `VISIBLE` names, where it is set."""
    if device != "cuda":
        return dict(os.environ)
    shared = first_gpus(gpus)
    order = [shared[(slot + index) % len(shared)] for index in range(GPUS_OF_A_RUN)]
    return os.environ | {VISIBLE: ",".join(order)}


def curve(root: Path) -> dict[str, Any]:
    """Returns what a run has done so far, by the files in its directory.

    ``steps``: of each trained step, from 0, the seconds at which it was over and `STEP_TAGS`. ``evaluations``: ``version`` that was
    evaluated, ``newest`` that drew a token of it, ``seconds`` at which the version was live, mean ``reward`` of ``samples``. Seconds count
    from the moment at which version 0 was live; nothing is told before.
    """
    live = {event["version"]: _at(event) for event in _events(root / "logs" / "trainer-0.log", "weights_pushed")}
    if 0 not in live:
        return {"steps": [], "evaluations": []}
    began = live[0]
    steps: dict[int, dict[str, Any]] = {}
    for scalar in MetricDirectory(root / "tensorboard").read():
        if scalar.tag in STEP_TAGS:
            step = steps.setdefault(scalar.step, {"step": scalar.step, "seconds": round(scalar.at - began, 2)})
            step[STEP_TAGS[scalar.tag]] = round(scalar.value, 5)
    evaluations = [
        {
            **{"version": event["version"], "newest": event["newest"], "seconds": round(live[event["version"]] - began, 2)},
            **{"reward": round(event["mean_reward"], 5), "samples": event["samples"]},
        }
        for event in _events(root / "logs" / "buffer-0.log", "evaluated")
        if event["version"] in live
    ]
    return {"steps": [steps[step] for step in sorted(steps)], "evaluations": sorted(evaluations, key=lambda one: one["version"])}


def _events(log: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of a service's log that tell of one kind of event; a last line that is not whole yet is left out."""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if line.startswith("{") and f'"event": "{name}"' in line:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()
