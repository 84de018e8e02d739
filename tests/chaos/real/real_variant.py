"""The real variant: SGLang and Megatron on CPUs, every process started as ever, and known by its command line."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.fast.fast_config import FastShape, sections, write_toml
from tests.chaos.ledger_check import LedgerFindings
from tests.chaos.schedule import Schedule
from tests.chaos.variant import Limits, Processes, Start, Variant, alive, children

WORDS = {
    "buffer-0": "services.buffer",
    "reward-0": "services.reward\0",
    "reward-0/worker": "services.reward.worker",
    "rollout-0": "services.rollout\0",
    "rollout-0/engine": "cpu_launcher.py",
    "rollout-0/engine/scheduler": "sglang::scheduler",
    "rollout-0/engine/detokenizer": "sglang::detokenizer",
    "trainer-0": "services.trainer\0",
    "trainer-0/rank": "services.trainer.rank",
}
"""Words of the command lines of the processes that faults hit. A watchdog's holds those of its command: the innermost process counts."""


def write_model(path: Path) -> Path:
    """Writes a random checkpoint of 0.1 M parameters; returns its path."""
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(path)
    return path


class RealVariant(Variant):
    limits = Limits(hang=400.0, recovery=180.0, whole=1500.0)

    def prepare(self, directory: Path, schedule: Schedule) -> Start:
        config = write_toml(directory, real_sections(directory, self.model, schedule.shape))
        return Start([sys.executable, "-m", "myxo.main", "up", str(config)])

    def processes(self, directory: Path, launcher: int) -> Processes:
        return RunningProcesses(launcher)

    def problems(self, root: Path, schedule: Schedule, found: LedgerFindings) -> list[str]:
        if found.finished and not sorted((root / "hf").glob("*.safetensors")):
            return [f"there are no final weights in {root / 'hf'}"]
        return []


def real_sections(directory: Path, model: Path, shape: FastShape) -> dict[str, dict[str, Any]]:
    """Returns the values of a run with two ranks of the trainer, and deadlines that real engines need."""
    values = sections(directory, model, replace(shape, replicas=1))
    values["rollout"] |= {"engine_start_timeout": 600.0, "generate_timeout": 120.0}
    values["trainer"] |= {"lr": 1e-4, "actor_num_gpus_per_node": 2}
    values["weights"] |= {"push_timeout": 120.0, "update_weight_buffer_size": 1 << 20}
    values["bus"] = {"ack_wait": 10.0}
    values["eval"]["eval_timeout"] = 120.0
    return values


class RunningProcesses(Processes):
    """Those below the launcher, and those that once were."""

    def __init__(self, launcher: int) -> None:
        super().__init__(launcher)
        self._seen: dict[int, str] = {}

    def named(self, target: str) -> list[int]:
        lines = self._lines()
        found = [pid for pid, line in lines.items() if WORDS[target] in line + "\0"]
        return sorted(pid for pid in found if not any(below in found for below in children(pid)))

    def left(self) -> dict[int, str]:
        return {pid: line.replace("\0", " ")[:80] for pid, line in self._seen.items() if alive(pid) and _command_line(pid) == line}

    def _lines(self) -> dict[int, str]:
        found, below = dict[int, str](), [self._launcher]
        while below:
            further = children(below.pop())
            below += further
            found |= {pid: _command_line(pid) for pid in further}
        self._seen |= found
        return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
