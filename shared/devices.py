"""Where a service computes: resolved without torch, and shared out when several services of a run are on one machine."""

from __future__ import annotations

from pathlib import Path

from shared.config import RunConfig
from shared.errors import ConfigError


def resolve(wanted: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where the machine has an NVIDIA device."""
    if wanted != "auto":
        return wanted
    return "cuda" if gpus() else "cpu"


def gpus() -> int:
    """How many NVIDIA devices this machine shows."""
    return len([entry for entry in Path("/dev").glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit()])


def share_out(config: RunConfig) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by instance for a run that is all on this machine: the trainer's ranks first, its critic's, each engine's.

    Instances on a CPU have no entry. Raises ConfigError where there are too few GPUs.
    """
    trainer, rollout = config.trainer, config.rollout
    wanted: list[tuple[str, int]] = []
    if resolve(trainer.train_device) == "cuda":
        wanted.append(("trainer-0", trainer.ranks("actor")))
        if config.algorithm.has_critic:
            wanted.append(("critic-0", trainer.ranks("critic")))
    if resolve(rollout.rollout_device) == "cuda":
        wanted += [(f"rollout-{number}", rollout.rollout_num_gpus_per_engine) for number in range(rollout.rollout_replicas)]
    needed, there = sum(count for _, count in wanted), gpus()
    if needed > there:
        parts = ", ".join(f"{instance} {count}" for instance, count in wanted)
        raise ConfigError(
            "rollout.rollout_replicas", rollout.rollout_replicas, f"the run needs {needed} GPUs ({parts}), this machine has {there}"
        )
    shares, first = {}, 0
    for instance, count in wanted:
        shares[instance] = ",".join(str(number) for number in range(first, first + count))
        first += count
    return shares
