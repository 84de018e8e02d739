"""What the control and payload planes carry at a size, against what they were measured to carry on two cores.

From ``sample_path_no_ray.json`` (the whole path: buffer, NATS and Valkey) and ``standby.json`` (a ledger's replay).
"""

import json
import math
from dataclasses import dataclass

from benchmarks.scale.push_model import ROOT

_PATH = json.loads((ROOT / "benchmarks/results/sample_path_no_ray.json").read_text())
_STANDBY = json.loads((ROOT / "benchmarks/results/standby.json").read_text())
REPLAYED = _STANDBY["records"] / _STANDBY["replay_seconds"]
"""Records of the ledger that a buffer replays in a second when it starts."""
DAY = 86_400.0
PER_STEP = 4
"""Records of a step beside those of its groups: the version, the batch, its training, the checkpoint."""


@dataclass(frozen=True)
class Workload:
    """What is run at a size.

    Args:
        gpus: all. generating: share of them that generates. token_rate: tokens a second that each of those draws.
        length: mean tokens of a sample. per_group: samples of a group. batch: samples of a step. max_staleness: in versions.
        slowest: tokens a second of one response, and longest: tokens of the longest one.
    """

    gpus: int
    generating: float = 0.5
    token_rate: float = 2_000.0
    length: float = 8_448.0
    per_group: int = 8
    batch: int = 2_048
    max_staleness: int = 2
    slowest: float = 50.0
    longest: float = 32_768.0

    @property
    def samples_per_s(self) -> float:
        """Returns how many samples all engines finish in a second."""
        return self.gpus * self.generating * self.token_rate / self.length

    @property
    def step_seconds(self) -> float:
        """Returns how long the engines take for a batch, which the trainer is to keep up with."""
        return self.batch / self.samples_per_s


def capacity(length: float) -> float:
    """Returns the samples a second that the path was measured to carry, between its two lengths by the bytes of a sample."""
    (short, fast), (long, slow) = sorted((int(length), rate) for length, rate in _PATH["samples_per_s"].items())
    share = min(1.0, max(0.0, (length - short) / (long - short)))
    return 1 / ((1 - share) / fast + share / slow)


def rates(work: Workload) -> dict[str, float]:
    """Returns the workload's rates, and of what was measured the share that they take.

    ``samples_per_s``, ``of_path`` (share), ``redis_mb_per_s``, ``redis_gb`` (payloads in flight), ``records_per_day``,
    ``replay_seconds`` (of a day's ledger), ``step_seconds``, ``versions`` (that pass while the longest response is drawn).
    """
    bytes_a_token = _PATH["bytes_per_sample"]["8448"] / 8_448
    pace, size = work.samples_per_s, work.length * bytes_a_token
    records = DAY * (pace / work.per_group + PER_STEP / work.step_seconds)
    return {
        "samples_per_s": pace,
        "of_path": pace / capacity(work.length),
        "redis_mb_per_s": 2 * pace * size / 1e6,
        "redis_gb": (work.max_staleness + 2) * work.batch * size / 1e9,
        "records_per_day": records,
        "replay_seconds": records / REPLAYED,
        "step_seconds": work.step_seconds,
        "versions": math.ceil(work.longest / work.slowest / work.step_seconds),
    }


def gpus_until(work: Workload, name: str, most: float) -> int:
    """Returns the GPUs at which the rate of that name, which grows with them, reaches ``most``."""
    return int(work.gpus * most / rates(work)[name])
