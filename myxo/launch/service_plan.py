"""The service processes of a run on its first machine, and how many engines fill its GPUs where the config does not say.

The first machine is the only one unless trainer or engines have several. Engines take as many GPUs as trainer and critic leave; colocated
ones share the trainer's GPUs and fill these. ``rollout_replicas`` and ``rollout_num_gpus`` are the user's word and win.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.bus.registry import MODEL
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import hold_port
from shared.runtime.addresses import GATEWAY_VARIABLE, HTTP_VARIABLE, HttpAddress, parsed

# Ports that gateways of this process's launches listen at: no other process gets them, before a gateway runs and between its lives.
_HELD: list[socket.socket] = []

# The module that `python -m` runs for each service.
SERVICE_MODULES = {
    "buffer": "services.buffer",
    "reward": "services.reward",
    "rollout": "services.rollout",
    "gateway": "services.gateway",
    "trainer": "services.trainer",
}
AGENTS = "agents"  # server of the user's that agents speak to (`rollout.agent_service`)
TRAINERS = ("trainer", "critic")  # services that hold the training state: they are stopped before those that they need
CRITIC = ("services.trainer", "critic")  # module and argument that it runs for the critic, the trainer's second role


@dataclass(frozen=True)
class ServiceSpec:
    """A service to start: ``service`` is the kind, ``instance`` the id, ``environment`` goes on top of this process's own.

    ``foreign``: it is the user's, so that it has no status in the registry, and may start processes of its own.
    """

    service: str
    instance: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False


def run_service(
    config: RunConfig, nats_url: str, role: str, instance: str, more: Mapping[str, str], service: str = "", name: str = ""
) -> ServiceSpec:
    """Returns what starts an instance of a role: a service, or the critic.

    ``more``: of its environment. ``service``, ``name``: its kind and its id to the supervisor, where these are others.
    """
    module = CRITIC if role == "critic" else (SERVICE_MODULES[role],)
    environment = {"NATS_URL": nats_url, "MYXO_RUN": config.run.name, "MYXO_INSTANCE": instance, "PYTHONUNBUFFERED": "1", **more}
    return ServiceSpec(service or role, name or instance, (sys.executable, "-m", *module), environment)


def plan(config: RunConfig, nats_url: str) -> list[ServiceSpec]:
    """Returns one trainer, its critic where there is one, as many buffers, reward and rollout services and gateways as the config asks for,
    those of frozen models among them, and the agents' server, where there is one.

    Where nothing is trained (`debug_rollout_only`), the trainer's service records what comes in; it has neither model nor GPU. Raises
    ConfigError.
    """
    shares, instances, specs = devices.assign_gpus(config), _instances(config), list[ServiceSpec]()
    for kind, instance in instances:
        environment = {devices.VISIBLE: shares[instance]} if instance in shares else {}
        if kind == "gateway" and (given := os.environ.get(GATEWAY_VARIABLE)):  # of the first; each further one is a port further on
            further = int(instance.rpartition("-")[2])
            environment[GATEWAY_VARIABLE] = str(parsed(given, GATEWAY_VARIABLE).next(further, GATEWAY_VARIABLE))
        elif kind == "gateway" and not config.gateway.gateway_port:
            # each of its lives listens there: clients that repeat a request know no other address
            _HELD.append(held := hold_port())
            environment[GATEWAY_VARIABLE] = str(HttpAddress(config.gateway.gateway_host, held.getsockname()[1]))
        specs.append(run_service(config, nats_url, "rollout" if kind == MODEL else kind, instance, environment, service=kind))
    if config.rollout.agent_service:
        specs.append(ServiceSpec(AGENTS, f"{AGENTS}-0", tuple(config.rollout.agent_service), {"PYTHONUNBUFFERED": "1"}, foreign=True))
    return at_ports(specs)


def at_ports(specs: list[ServiceSpec]) -> list[ServiceSpec]:
    """Returns a launcher's services with addresses for their metrics: the first has the launcher's ``MYXO_HTTP``, ``host:port``, each other
    one port further on. Without it, or with port 0: any free ports. Raises ConfigError where it is no such address."""
    if not (http := os.environ.get(HTTP_VARIABLE)):
        return specs
    first = parsed(http)
    return [replace(spec, environment={**spec.environment, HTTP_VARIABLE: str(first.next(index))}) for index, spec in enumerate(specs)]


def _instances(config: RunConfig) -> list[tuple[str, str]]:
    """Returns the kind and the instance of each of Myxo's own services."""
    rollouts = config.rollout.rollout_replicas
    if config.tinker.tinker_endpoint:
        kinds = [("rollout", rollouts), ("gateway", 1), ("trainer", 1)]
        return [(kind, f"{kind}-{index}") for kind, count in kinds for index in range(count)]
    if shares_trainer(config):
        rollouts = len(devices.colocated_engines(config, 0))
    counts = {"buffer": config.run.buffer_replicas, "reward": config.reward.reward_replicas, "rollout": rollouts}
    found = [(kind, f"{kind}-{index}") for kind, count in counts.items() for index in range(count)]
    found += [("rollout", instance) for instance in devices.lent_instances(config)]
    found += [(MODEL, engine.instance) for engine in devices.engine_instances(config) if engine.model]
    trainers = TRAINERS if config.algorithm.has_critic and not config.debug.debug_rollout_only else TRAINERS[:1]
    return [*found, *(("gateway", f"gateway-{index}") for index in range(config.gateways)), *((kind, f"{kind}-0") for kind in trainers)]


@dataclass(frozen=True)
class EngineFilling:
    """The engines that fill GPUs.

    ``engines``: how many, at least one: too few GPUs for it are what other checks refuse. ``idle``: GPUs without a process. ``gpus``:
    those that there are for engines.
    """

    engines: int
    idle: int
    gpus: int

    def note(self, size: int) -> str:
        """Returns the line for the user, for engines of ``size`` GPUs."""
        each = f"of {size} GPU{'s' * (size > 1)} each"
        line = f"rollout_replicas = {self.engines}, {each}: they fill the {self.gpus} that there are for engines"
        return f"{line}, but for {self.idle}, which {'is' if self.idle == 1 else 'are'} idle" if self.idle else line


def shares_trainer(config: RunConfig) -> bool:
    """Returns whether the engines are on the trainer's GPUs."""
    return config.trainer.colocate and not config.debug.debug_rollout_only


def left_gpus(config: RunConfig, nodes: int, gpus_per_node: int, *, on_gpus: bool) -> list[int]:
    """Returns how many GPUs trainer, critic and frozen models leave on each node, 0 where they need more than there are.

    ``on_gpus``: whether they compute on GPUs.
    """
    left, trainer = [gpus_per_node] * nodes, config.trainer
    roles = () if config.debug.debug_rollout_only or not on_gpus else ("actor", "critic") if config.algorithm.has_critic else ("actor",)
    for role in roles:
        for node in range(min(trainer.nodes(role), nodes)):
            left[node] = max(0, left[node] - trainer.ranks_per_node(role))
    for engine in devices.engine_instances(config):
        if engine.model and engine.on_gpus and (found := next_nodes(left, 1, engine.gpus)) is not None:
            left[found[0]] -= engine.gpus
    return left


def next_nodes(left: Sequence[int], spans: int, share: int) -> tuple[int, ...] | None:
    """Returns the nodes of the next engine: the first that has room; of one over several nodes, those with the most. None: no room is left.

    ``left``: GPUs that are left on each node. ``spans``: nodes of an engine. ``share``: its GPUs on each.
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
    """Returns the config with the engines that fill GPUs, and the line that reports it; as it is, and nothing, where it says how many.

    ``nodes``, ``gpus_per_node``: what there is for trainer and engines; no nodes: that is not known, and colocated engines alone are
    counted. ``trains``: whether trainer and critic compute on GPUs.
    """
    rollout = config.rollout
    given = "rollout_replicas" in rollout.model_fields_set or rollout.rollout_num_gpus is not None
    if given or config.debug.trains_only or not (nodes or shares_trainer(config)):
        return config, ""
    found = filling(config, left_gpus(config, nodes, gpus_per_node, on_gpus=trains))
    size = rollout.rollout_num_gpus_per_engine
    return config.with_fields(rollout={"rollout_replicas": found.engines}), found.note(size) if found.engines > 1 or found.idle else ""
