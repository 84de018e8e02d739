"""Which node of a cluster runs which service of a run, and on which GPUs.

The trainer's ranks come first: node N has the Nth share of the actor's, then of the critic's. Engines take the GPUs that are left, node
by node. Everything else runs on node 0.

``python -m myxo.launch.node_placement CONFIG --nodes N --gpus-per-node N [flags]`` checks a config and prints ``run NAME ENGINES ROOT``,
then a line for each service, ``NODE RANK ROLE INSTANCE GPUS MODULE…``, with ``-`` for no GPUs. ENGINES: how many there are; they fill the
GPUs where the config does not say. RANK: of the node in the service's own job, as MYXO_NODE_RANK has it: a trainer's, or that of an engine
over several nodes, whose parts share INSTANCE. ROLE is the account that it takes (docs/accounts.md). `deploy/slurm` starts what it prints.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from myxo.launch.service_plan import CRITIC, SERVICE_MODULES, next_nodes
from myxo.preflight import Source, checked_config
from shared.config import devices
from shared.config.devices import EngineInstance
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import ended

NO_GPUS = "-"


@dataclass(frozen=True)
class PlacedService:
    """A service on a node. ``gpus``: their indexes there; empty for a service that has none, or computes on a CPU. ``rank``: of the node
    among those of its trainer or engine."""

    node: int
    role: str
    instance: str
    module: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        gpus = ",".join(map(str, self.gpus)) or NO_GPUS
        return " ".join((str(self.node), str(self.rank), self.role, self.instance, gpus, *self.module))


def place(config: RunConfig, nodes: int, gpus_per_node: int) -> list[PlacedService]:
    """Returns a run's services, those of node 0 first. Raises ConfigError where nodes or GPUs are too few."""
    trainer = config.trainer
    free = [list(range(gpus_per_node)) for _ in range(nodes)]
    placed = [PlacedService(0, role, instance, (module,)) for role, instance, module in _first_node(config)]
    trains = not config.debug.debug_rollout_only  # else the trainer's service records what comes in, without model and GPU
    for role in ("actor", "critic") if config.algorithm.has_critic and trains else ("actor",):
        on_gpus = trains and devices.resolve(trainer.train_device) == "cuda"
        placed += _trainer_nodes(config, role, free, trainer.ranks_per_node(role) if on_gpus else 0)
    placed += _engines(config, [engine for engine in devices.engine_instances(config) if engine.model], free)
    return sorted([*placed, *_policy(config, placed, free)], key=lambda service: service.node)


def _policy(config: RunConfig, placed: Sequence[PlacedService], free: list[list[int]]) -> Iterator[PlacedService]:
    """Yields the engines of the policy, last those on GPUs that the trainer lends."""
    trainers = [service for service in placed if service.instance.startswith("trainer-")]
    if config.trainer.colocate:
        for trainer in trainers:
            for place, (index, part) in enumerate(devices.colocated_engines(config, trainer.rank)):
                yield _engine(trainer.node, f"rollout-{index}", devices.shared_gpus(config, trainer.gpus, place), part)
    elif devices.resolve(config.rollout.rollout_device) == "cuda":
        yield from _engines(config, [engine for engine in devices.engine_instances(config) if not engine.model], free)
    else:
        nodes = len(free)
        rollout = config.rollout
        if (spans := rollout.nodes_per_engine) > nodes:
            raise ConfigError("rollout.sglang.nnodes", spans, f"at most {nodes}, the nodes of this job")
        turns = itertools.cycle(range(min(config.trainer.nodes("actor"), nodes - spans), nodes))
        for index in range(rollout.rollout_replicas):
            for rank, node in enumerate(sorted(itertools.islice(turns, spans))):
                yield _engine(node, f"rollout-{index}", rank=rank)
    for place, instance in enumerate(devices.lent_instances(config)):
        yield _engine(trainers[0].node, instance, devices.shared_gpus(config, trainers[0].gpus, place))


def _trainer_nodes(config: RunConfig, role: str, free: list[list[int]], share: int) -> Iterator[PlacedService]:
    name, module = ("trainer", (SERVICE_MODULES["trainer"],)) if role == "actor" else ("critic", CRITIC)
    nodes = config.trainer.nodes(role)
    if nodes > len(free):
        raise ConfigError(f"trainer.{role}_num_nodes", nodes, f"at most {len(free)}, the nodes of this job")
    for node in range(nodes):
        if share > len(free[node]):
            left = f"{len(free[node])} GPUs are left on node {node}"
            raise ConfigError(f"trainer.{role}_num_gpus_per_node", share, left)
        own, free[node] = tuple(free[node][:share]), free[node][share:]
        yield PlacedService(node, "trainer", f"{name}-node-{node}" if node else f"{name}-0", module, own, node)


def _first_node(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    counts = {"buffer": config.run.buffer_replicas, "reward": config.reward.reward_replicas, "gateway": config.gateways}
    for service, count in counts.items():
        for index in range(count):
            yield service, f"{service}-{index}", SERVICE_MODULES[service]
    if config.console.console:
        yield "console", "console-0", "services.console"


def _engine(node: int, instance: str, gpus: Sequence[int] = (), rank: int = 0) -> PlacedService:
    return PlacedService(node, "rollout", instance, (SERVICE_MODULES["rollout"],), tuple(gpus), rank)


def _engines(config: RunConfig, engines: Sequence[EngineInstance], free: list[list[int]]) -> Iterator[PlacedService]:
    """Yields a model's engines where GPUs are left; of a frozen model that computes on a CPU on the first node."""
    for index, engine in enumerate(engines):
        spans, share = (1 if engine.model else config.rollout.nodes_per_engine), engine.gpus if engine.on_gpus else 0
        nodes = next_nodes([len(gpus) for gpus in free], spans, share)
        if nodes is None:
            left = f"{index} engines of {share * spans} GPUs fit on what the trainer leaves of {len(free)} nodes"
            field = f"rollout.models.{engine.model}.replicas" if engine.model else "rollout.rollout_replicas"
            raise ConfigError(field, len(engines), f"at most {index}: {left}")
        for rank, node in enumerate(nodes):
            own, free[node] = free[node][:share], free[node][share:]
            yield _engine(node, engine.instance, own, rank)


def main(arguments: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m myxo.launch.node_placement", allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parsed, flags = parser.parse_known_args(arguments)
    config = checked_config(Source.of(parsed.config, flags), cluster=(parsed.nodes, parsed.gpus_per_node))
    print("run", config.run.name, config.rollout.rollout_replicas, config.run.root)
    for service in place(config, parsed.nodes, parsed.gpus_per_node):
        print(service)
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(ended("placement", lambda: main(sys.argv[1:])))
