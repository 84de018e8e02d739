"""Where a service computes: resolved without torch, and shared out when several services of a run are on one machine."""

from __future__ import annotations

from pathlib import Path

from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError


def resolve(wanted: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where the machine has an NVIDIA device."""
    if wanted != "auto":
        return wanted
    return "cuda" if gpus() else "cpu"


def gpus() -> int:
    """How many NVIDIA devices this machine shows."""
    return len([entry for entry in Path("/dev").glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit()])


def trainer_offloads(config: RunConfig) -> bool:
    """Whether a trainer that shares its GPUs moves weights and optimizer to host memory while the engines generate."""
    trainer = config.trainer
    if not trainer.colocate:
        return False
    return resolve(trainer.train_device) == "cuda" if trainer.offload_train is None else trainer.offload_train


def engines_release(config: RunConfig) -> bool:
    """Whether engines that share the trainer's GPUs give their memory back while it computes. On a CPU there is none to give."""
    trainer = config.trainer
    return trainer.colocate and trainer.offload_rollout is not False and resolve(config.rollout.rollout_device) == "cuda"


def engines_back_up(config: RunConfig) -> bool:
    """Whether engines keep released weights in host memory: where not every step is followed by a push, they go on with what they had."""
    return engines_release(config) and config.weights.update_weights_interval > 1


def share_out(config: RunConfig) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by instance for a run that is all on this machine: the trainer's ranks first, its critic's, each engine's.

    Colocated engines have the trainer's own, all of them, each those first that it computes on: a memory lane's buffers lie on the GPU of
    the trainer's rank that fills them, and are read from there.

    Instances on a CPU have no entry. Raises ConfigError where there are too few GPUs.
    """
    trainer, rollout = config.trainer, config.rollout
    wanted: list[tuple[str, int]] = []
    if resolve(trainer.train_device) == "cuda":
        wanted.append(("trainer-0", trainer.ranks("actor")))
        if config.algorithm.has_critic:
            wanted.append(("critic-0", trainer.ranks("critic")))
    if resolve(rollout.rollout_device) == "cuda" and not trainer.colocate:
        wanted += [(f"rollout-{number}", rollout.rollout_num_gpus_per_engine) for number in range(rollout.rollout_replicas)]
    needed, there = sum(count for _, count in wanted), gpus()
    if needed > there:
        parts = ", ".join(f"{instance} {count}" for instance, count in wanted)
        raise ConfigError(
            "rollout.rollout_replicas", rollout.rollout_replicas, f"the run needs {needed} GPUs ({parts}), this machine has {there}"
        )
    shares: dict[str, list[int]] = {}
    first = 0
    for instance, count in wanted:
        shares[instance] = list(range(first, first + count))
        first += count
    if trainer.colocate:
        train, generate = resolve(trainer.train_device), resolve(rollout.rollout_device)
        if train != generate:
            raise ConfigError("rollout.rollout_device", generate, f"{train}, where the trainer it is colocated with computes")
        for number in range(rollout.rollout_replicas if "trainer-0" in shares else 0):
            own, size = shares["trainer-0"], rollout.rollout_num_gpus_per_engine
            shares[f"rollout-{number}"] = own[number * size :] + own[: number * size]
    return {instance: ",".join(map(str, numbers)) for instance, numbers in shares.items()}
