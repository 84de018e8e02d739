"""GPUs of a run and who gets which; optional packages that a run's settings need."""

import importlib.util
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared.config.environment_variables import GROUP_VARIABLE, MODEL_VARIABLE
from shared.config.rollout_section import flags_over
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError, nearest

Gpu = TypeVar("Gpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # The variable with the devices that a process may use; the launcher shares out those of its own
QUERY_SECONDS = 30.0  # The seconds that nvidia-smi may take: on a machine whose driver sleeps, some


def resolve(wanted: str) -> str:
    """Returns ``cpu`` or ``cuda``, PyTorch's name of AMD's GPUs too; ``auto`` is that where the machine shows a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if gpus() else "cpu"


AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # The driver's folders of CPUs and GPUs, where it is loaded


def gpus() -> int:
    """Returns how many GPUs this machine shows: NVIDIA's, or else AMD's."""
    return sum(entry.name.removeprefix("nvidia").isdigit() for entry in Path("/dev").glob("nvidia[0-9]*")) or len(amd_gpus())


def amd_gpus() -> list[int]:
    """Returns the memory of each of this machine's AMD GPUs, in bytes, as their driver describes them; it never ran on one."""
    found = []
    for node in sorted(AMD_NODES.glob("[0-9]*"), key=lambda path: int(path.name)):
        if _properties(node).get("simd_count", 0):  # a CPU has none
            found.append(sum(_properties(bank).get("size_in_bytes", 0) for bank in node.glob("mem_banks/*")))
    return found


def _properties(directory: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in (directory / "properties").read_text().splitlines()]
    except OSError:  # another user's
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def visible_gpus() -> list[str]:
    """Returns this machine's GPUs, as CUDA_VISIBLE_DEVICES names them (which AMD's runtime reads too): what it lists where it is set, else
    all numbers."""
    given = os.environ.get(VISIBLE)
    return [str(index) for index in range(gpus())] if given is None else [name.strip() for name in given.split(",") if name.strip()]


def gpu_bytes() -> int | None:
    """Returns the memory of this machine's smallest GPU, in bytes; None where neither nvidia-smi nor AMD's driver reports one."""
    sizes = [int(line) << 20 for line in of_each_gpu("memory.total") if line.isdigit()] or amd_gpus()
    return min(sizes, default=0) or None


def gpu_capabilities() -> list[float]:
    """Returns the compute capability of each GPU of this machine; none where nvidia-smi tells of none."""
    return [float(line) for line in of_each_gpu("compute_cap") if line.replace(".", "", 1).isdigit()]


def of_each_gpu(field: str) -> list[str]:
    """Returns what nvidia-smi says of each GPU, of those in `VISIBLE` alone where it knows them by these names; nothing where it cannot."""
    names = os.environ.get(VISIBLE, "")
    whole = all(name.startswith("GPU-") and len(name) == 40 for name in visible_gpus())  # numbers are CUDA's own, the fastest first
    which = [f"--id={names}"] if names and (whole or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID") else []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def trainer_offloads(config: RunConfig) -> bool:
    """Returns whether a trainer that shares its GPUs moves weights and optimizer to host memory while the engines generate."""
    trainer = config.trainer
    if not trainer.colocate or trainer.fsdp_cpu_offload:  # there they are in host memory already
        return False
    return resolve(trainer.train_device) == "cuda" if trainer.offload_train is None else trainer.offload_train


def engines_release(config: RunConfig) -> bool:
    """Returns whether engines that share the trainer's GPUs give their memory back while it computes. On a CPU there is none to give."""
    trainer = config.trainer
    return trainer.colocate and trainer.offload_rollout is not False and resolve(config.rollout.rollout_device) == "cuda"


def engines_back_up(config: RunConfig) -> bool:
    """Returns whether engines keep released weights in host memory: those that the next step's push does not bring, none or adapters."""
    return engines_release(config) and (config.weights.update_weights_interval > 1 or config.trainer.lora_rank is not None)


def colocated_engines(config: RunConfig, node: int) -> list[tuple[int, int]]:
    """Returns the engines on one of the trainer's nodes, where they share its GPUs: the index of each, and this node's rank in it, 0 but
    for one over several nodes. Those of node 0 come first.

    On CPUs, where an engine has one process on a node, its size counts all the same.
    """
    trainer, rollout = config.trainer, config.rollout
    if node >= trainer.nodes("actor"):
        return []
    if (spans := rollout.nodes_per_engine) > 1:
        return [divmod(node, spans)] if node // spans < rollout.rollout_replicas else []
    a_node = max(1, trainer.ranks_per_node("actor") // rollout.rollout_num_gpus_per_engine)
    every = range(rollout.rollout_replicas)
    last = None if trainer.nodes("actor") == 1 else (node + 1) * a_node
    return [(index, 0) for index in every[node * a_node : last]]


LENT_PUSH_SECONDS = 10.0  # of a push to lent engines, and of their sleep: the trainer waits for both


def lent_instances(config: RunConfig) -> list[str]:
    """Returns the rollout services of engines on GPUs that the trainer lends (`lend_gpus`); they come after the run's own."""
    trainer, own = config.trainer, config.rollout.rollout_replicas
    if not trainer.lend_gpus or config.debug.debug_rollout_only or config.debug.trains_only:
        return []
    count = trainer.ranks("actor") // config.rollout.rollout_num_gpus_per_engine
    return [f"rollout-{own + index}" for index in range(count)]


def as_lent(config: RunConfig) -> RunConfig:
    """Returns the config of lent engines, and of what the trainer does with them: colocated, but the trainer keeps its memory."""
    trainer, rollout, weights = config.trainer, config.rollout, config.weights
    share = {"mem_fraction_static": trainer.lent_mem_fraction_static} if rollout.rollout_device != "cpu" else {}
    return config.with_fields(
        trainer={"colocate": True, "offload_train": False, "offload_rollout": None},
        rollout={"sglang": flags_over(rollout.sglang, share)},
        weights={"push_timeout": min(weights.push_timeout, LENT_PUSH_SECONDS)},
    )


def shared_gpus(config: RunConfig, own: Sequence[Gpu], index: int) -> list[Gpu]:
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
        for index, _ in colocated_engines(config, 0) if "trainer-0" in assigned else ():
            assigned[f"rollout-{index}"] = shared_gpus(config, assigned["trainer-0"], index)
    for index, instance in enumerate(lent_instances(config) if "trainer-0" in assigned else ()):
        assigned[instance] = shared_gpus(config, assigned["trainer-0"], index)
    return {instance: ",".join(devices) for instance, devices in assigned.items()}


def _wanted(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yields how many GPUs of its own each instance has, but for engines that share the trainer's. Half of a run has the others' too."""
    trainer, rollout, debug = config.trainer, config.rollout, config.debug
    if resolve(trainer.train_device) == "cuda" and not debug.debug_rollout_only:
        yield "trainer-0", trainer.ranks_per_node("actor")
        if config.algorithm.has_critic:
            yield "critic-0", trainer.ranks_per_node("critic")
    for engine in engine_instances(config) if not debug.trains_only else ():
        if engine.on_gpus and (engine.model or not trainer.colocate):
            yield engine.instance, engine.gpus
    for model, group in rollout.all_groups if not debug.trains_only and resolve(rollout.rollout_device) == "cuda" else ():
        if group.worker_type == "placeholder":
            yield f"{model or rollout.policy_name}'s placeholder", group.num_gpus


class EngineInstance(NamedTuple):
    """A rollout service of a run. ``model``: the frozen one that it serves; empty: the policy. ``group``: from 0, among those of its model
    that have engines. ``gpus``: of its engine on one machine. ``on_gpus``: whether it runs there."""

    instance: str
    model: str
    group: int
    gpus: int
    on_gpus: bool


def engine_instances(config: RunConfig) -> list[EngineInstance]:
    """Returns the rollout services of all models, the policy's first, each model's in the order of its groups."""
    found = []
    for model in ("", *config.rollout.models):
        sizes = []
        for place in range(len(config.rollout.engines(model))):
            own = config.of_engines(model, place).rollout
            shape = (own.rollout_num_gpus_per_engine // own.nodes_per_engine, resolve(own.rollout_device) == "cuda")
            sizes += [(place, *shape)] * own.rollout_replicas
        name = f"model-{model}" if model else "rollout"
        found += [EngineInstance(f"{name}-{index}", model, *size) for index, size in enumerate(sizes)]
    return found


def engine_of(config: RunConfig, instance: str) -> tuple[str, RunConfig]:
    """Returns the frozen model that a rollout service serves, empty for the policy, and the config of its engine: by the environment, else
    by its instance's name. Raises ConfigError for a model or a group that the run does not have."""
    known = {engine.instance: engine for engine in engine_instances(config)}.get(instance)
    if instance in lent_instances(config):
        return "", as_lent(config.of_engines())
    model = os.environ.get(MODEL_VARIABLE) or (known.model if known is not None else "")
    if model and model not in config.rollout.models:
        raise ConfigError(MODEL_VARIABLE, model, f"a model of [rollout.models]; {nearest(model, list(config.rollout.models))}")
    group = os.environ.get(GROUP_VARIABLE) or str(known.group if known is not None and known.model == model else 0)
    if not group.isdecimal() or int(group) >= (groups := len(config.rollout.engines(model))):
        raise ConfigError(GROUP_VARIABLE, group, f"a group of {model or config.rollout.policy_name}, 0 to {groups - 1}")
    return model, config.of_engines(model, int(group))


def check(config: RunConfig) -> None:
    """Raises ConfigError naming the field and the extra that brings what it needs."""
    if config.monitoring.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("monitoring.use_wandb", True, "W&B is not installed: pip install 'myxo[wandb]', or leave it out")
    debug = config.debug
    if debug.record_memory_history and debug.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise ConfigError("debug.memory_recorder", "memray", "memray is not installed: pip install memray, or take torch, for CUDA")
