"""GPUs of a run and who gets which; optional packages that a run's settings need."""

import importlib.util
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"  # The variable with the devices that a process may use; the launcher shares out those of its own
QUERY_SECONDS = 30.0  # The seconds that nvidia-smi may take: on a machine whose driver sleeps, some


def resolve(wanted: str) -> str:
    """Returns ``cpu`` or ``cuda``; ``auto`` is CUDA where the machine has an NVIDIA device."""
    if wanted != "auto":
        return wanted
    return "cuda" if gpus() else "cpu"


def gpus() -> int:
    """Returns how many NVIDIA devices this machine shows."""
    return sum(entry.name.removeprefix("nvidia").isdigit() for entry in Path("/dev").glob("nvidia[0-9]*"))


def visible_gpus() -> list[str]:
    """Returns this machine's NVIDIA devices, as CUDA_VISIBLE_DEVICES names them: what it lists, where it is set; else all numbers."""
    given = os.environ.get(VISIBLE)
    return [str(index) for index in range(gpus())] if given is None else [name.strip() for name in given.split(",") if name.strip()]


def gpu_bytes() -> int | None:
    """Returns the memory of this machine's smallest GPU, in bytes; None where nvidia-smi tells of none."""
    sizes = [int(line) for line in _told_of_each("memory.total") if line.isdigit()]
    return min(sizes) << 20 if sizes else None


def gpu_names() -> list[str]:
    """Returns the product name of each GPU of this machine; none where nvidia-smi tells of none."""
    return _told_of_each("name")


def _told_of_each(field: str) -> list[str]:
    """Returns what nvidia-smi says of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def trainer_offloads(config: RunConfig) -> bool:
    """Returns whether a trainer that shares its GPUs moves weights and optimizer to host memory while the engines generate."""
    trainer = config.trainer
    if not trainer.colocate:
        return False
    return resolve(trainer.train_device) == "cuda" if trainer.offload_train is None else trainer.offload_train


def engines_release(config: RunConfig) -> bool:
    """Returns whether engines that share the trainer's GPUs give their memory back while it computes. On a CPU there is none to give."""
    trainer = config.trainer
    return trainer.colocate and trainer.offload_rollout is not False and resolve(config.rollout.rollout_device) == "cuda"


def engines_back_up(config: RunConfig) -> bool:
    """Returns whether engines keep released weights in host memory: where not every step ends in a push, they keep the old ones."""
    return engines_release(config) and config.weights.update_weights_interval > 1


def colocated_engines(config: RunConfig, node: int) -> range:
    """Returns the indexes of the engines on one of the trainer's nodes, where they share its GPUs: those of node 0 come first.

    On CPUs, where an engine has one process, its size counts all the same.
    """
    trainer, rollout = config.trainer, config.rollout
    if node >= trainer.nodes("actor"):
        return range(0)
    a_node = max(1, trainer.ranks_per_node("actor") // rollout.rollout_num_gpus_per_engine)
    every = range(rollout.rollout_replicas)
    last = None if trainer.nodes("actor") == 1 else (node + 1) * a_node
    return every[node * a_node : last]


def shared_gpus(config: RunConfig, own: Sequence[str], index: int) -> list[str]:
    """Returns the GPUs of a colocated engine: all of the trainer's on its node, each those first that it computes on.

    The buffers of a memory channel lie on the GPU of the trainer's rank that fills them, and are read from there.

    Args:
        own: the trainer's on that node. index: of the engine, among those of the node.
    """
    first = index * config.rollout.rollout_num_gpus_per_engine
    return [*own[first:], *own[:first]]


def assign_gpus(config: RunConfig) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by instance of a run's services on its first machine: trainer's ranks first, critic's, then engines.

    Colocated engines have the trainer's GPUs (`shared_gpus`). Instances on a CPU have no entry.

    Raises ConfigError where there are too few GPUs.
    """
    trainer, rollout, wanted = config.trainer, config.rollout, list(_wanted(config))
    needed, present = sum(count for _, count in wanted), visible_gpus()
    if needed > len(present):
        parts = ", ".join(f"{instance} {count}" for instance, count in wanted)
        expected = f"the run needs {needed} GPUs ({parts}), this machine has {len(present)}"
        expected += f" of which {VISIBLE} tells" if VISIBLE in os.environ else ""
        raise ConfigError("rollout.rollout_replicas", rollout.rollout_replicas, expected)
    free = iter(present)
    assigned = {instance: list(itertools.islice(free, count)) for instance, count in wanted}
    if trainer.colocate:
        if (train := resolve(trainer.train_device)) != (generate := resolve(rollout.rollout_device)):
            raise ConfigError("rollout.rollout_device", generate, f"{train}, where the trainer it is colocated with computes")
        for index in colocated_engines(config, 0) if "trainer-0" in assigned else ():
            assigned[f"rollout-{index}"] = shared_gpus(config, assigned["trainer-0"], index)
    return {instance: ",".join(devices) for instance, devices in assigned.items()}


def _wanted(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yields how many GPUs of its own each instance has, but for engines that share the trainer's. Half of a run has the others' too."""
    trainer, rollout, debug = config.trainer, config.rollout, config.debug
    if resolve(trainer.train_device) == "cuda" and not debug.debug_rollout_only:
        yield "trainer-0", trainer.ranks_per_node("actor")
        if config.algorithm.has_critic:
            yield "critic-0", trainer.ranks_per_node("critic")
    if resolve(rollout.rollout_device) == "cuda" and not trainer.colocate and not debug.trains_only:
        for index in range(rollout.rollout_replicas):
            yield f"rollout-{index}", rollout.rollout_num_gpus_per_engine // rollout.nodes_per_engine


def check(config: RunConfig) -> None:
    """Raises ConfigError naming the field and the extra that brings what it needs."""
    if config.monitoring.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("monitoring.use_wandb", True, "W&B is not installed: pip install 'myxo[wandb]', or leave it out")
    debug = config.debug
    if debug.record_memory_history and debug.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise ConfigError("debug.memory_recorder", "memray", "memray is not installed: pip install memray, or take torch, for CUDA")
