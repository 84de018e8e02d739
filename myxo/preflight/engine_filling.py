"""How many engines a run has where its config does not say: as many as the GPUs hold that trainer and critic leave. Pure.

Colocated engines share the trainer's GPUs and fill these. ``rollout_replicas`` and ``rollout_num_gpus`` are the user's word and win.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.config.run_config import RunConfig


@dataclass(frozen=True)
class EngineFilling:
    """The engines that fill GPUs.

    Args:
        engines: how many, at least one: too few GPUs for it are what other checks refuse. idle: GPUs that nobody computes on.
        gpus: those that there are for engines.
    """

    engines: int
    idle: int
    gpus: int

    def told(self, size: int) -> str:
        """Returns the line that tells a user, for engines of ``size`` GPUs."""
        line = (
            f"rollout_replicas = {self.engines}, of {size} GPU{'s' * (size > 1)} each: they fill the {self.gpus} that there are for engines"
        )
        return f"{line}, but for {self.idle}, which {'is' if self.idle == 1 else 'are'} idle" if self.idle else line


def is_open(config: RunConfig) -> bool:
    """Returns whether the config leaves the number of engines to the machine."""
    rollout = config.rollout
    return "rollout_replicas" not in rollout.model_fields_set and rollout.rollout_num_gpus is None and not config.debug.trains_only


def shares_trainer(config: RunConfig) -> bool:
    """Returns whether the engines are on the trainer's GPUs."""
    return config.trainer.colocate and not config.debug.debug_rollout_only


def left_gpus(config: RunConfig, nodes: int, gpus_per_node: int, *, on_gpus: bool) -> list[int]:
    """Returns how many GPUs trainer and critic leave on each node, 0 where they need more than there are.

    ``on_gpus``: whether they compute on GPUs.
    """
    left, trainer = [gpus_per_node] * nodes, config.trainer
    roles = () if config.debug.debug_rollout_only or not on_gpus else ("actor", "critic") if config.algorithm.has_critic else ("actor",)
    for role in roles:
        for node in range(min(trainer.nodes(role), nodes)):
            left[node] = max(0, left[node] - trainer.ranks_per_node(role))
    return left


def next_nodes(left: Sequence[int], spans: int, share: int) -> tuple[int, ...] | None:
    """Returns the nodes of the next engine: the first that has room; of one over several nodes, those with the most. None: no room is left.

    Args:
        left: GPUs that are left on each node. spans: nodes of an engine. share: its GPUs on each.
    """
    order = sorted(range(len(left)), key=lambda node: -left[node]) if spans > 1 else range(len(left))
    found = [node for node in order if left[node] >= share][:spans]
    return tuple(sorted(found)) if len(found) == spans else None


def filling(config: RunConfig, left: Sequence[int]) -> EngineFilling:
    """Returns the engines that fill what is left of each node's GPUs; of colocated ones, all GPUs of the trainer, whatever is left."""
    rollout, trainer = config.rollout, config.trainer
    size, spans = rollout.rollout_num_gpus_per_engine, rollout.nodes_per_engine
    if shares_trainer(config):
        left = [trainer.ranks_per_node("actor")] * trainer.nodes("actor")
    free, engines = list(left), 0
    while (nodes := next_nodes(free, spans, max(1, size // spans))) is not None:
        engines += 1
        for node in nodes:
            free[node] -= max(1, size // spans)
    return EngineFilling(max(1, engines), sum(free) if engines else 0, sum(left))


def filled(config: RunConfig, nodes: int, gpus_per_node: int, *, trains: bool) -> tuple[RunConfig, str]:
    """Returns the config with the engines that fill GPUs, and the line that tells so; as it is, and nothing, where it says how many.

    Args:
        nodes, gpus_per_node: what there is for trainer and engines; no nodes: that is not known, and colocated engines alone are counted.
        trains: whether trainer and critic compute on GPUs.
    """
    rollout = config.rollout
    if not is_open(config) or not (nodes or shares_trainer(config)):
        return config, ""
    found = filling(config, left_gpus(config, nodes, gpus_per_node, on_gpus=trains))
    update = {"rollout": rollout.model_copy(update={"rollout_replicas": found.engines})}
    size = rollout.rollout_num_gpus_per_engine
    return config.model_copy(update=update), found.told(size) if found.engines > 1 or found.idle else ""
