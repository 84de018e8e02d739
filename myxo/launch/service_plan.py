"""The plan of the service processes of a run on its first machine, which is its only one unless trainer or engines have several."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.config import devices
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import hold_port
from shared.runtime import addresses
from shared.runtime.addresses import GATEWAY_VARIABLE, HTTP_VARIABLE, HttpAddress

_HELD: list[socket.socket] = []
"""Ports that gateways of this process's launches listen at: nobody else draws them, before a gateway runs and between its lives."""

SERVICE_MODULES = {
    "buffer": "services.buffer",
    "reward": "services.reward",
    "rollout": "services.rollout",
    "gateway": "services.gateway",
    "trainer": "services.trainer",
}
"""The module that `python -m` runs for each service."""

AGENTS = "agents"
"""The server of the user's that agents speak to (`rollout.agent_service`)."""

TRAINERS = ("trainer", "critic")
"""The services that hold the training state: they are stopped before those that they need."""

CRITIC = ("services.trainer", "critic")
"""The module and argument that it runs for the critic, the trainer's second role."""


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


def plan(config: RunConfig, nats_url: str, http: str = "") -> list[ServiceSpec]:
    """Returns one trainer, its critic where there is one, as many buffers, reward and rollout services and gateways as the config asks
    for, and the agents' server, where there is one.

    Where nothing is trained (`debug_rollout_only`), the trainer's service records what comes in; it has neither model nor GPU.

    Args:
        http: the launcher's own ``MYXO_HTTP``, ``host:port``: the first service serves its metrics there, each other one port further on.
            Empty, or port 0: any free ports.

    Raises ConfigError where it is no such address.
    """
    rewards, rollouts = config.reward.reward_replicas, config.rollout.rollout_replicas
    if config.trainer.colocate and not config.debug.debug_rollout_only:
        rollouts = len(devices.colocated_engines(config, 0))
    counts = {"buffer": config.run.buffer_replicas, "reward": rewards, "rollout": rollouts, "gateway": config.gateways, "trainer": 1}
    if config.algorithm.has_critic and not config.debug.debug_rollout_only:
        counts["critic"] = 1
    shares = devices.assign_gpus(config)
    specs: list[ServiceSpec] = []
    for service, count in counts.items():
        for index in range(count):
            instance = f"{service}-{index}"
            environment = {"NATS_URL": nats_url, "MYXO_RUN": config.run.name, "MYXO_INSTANCE": instance, "PYTHONUNBUFFERED": "1"}
            if instance in shares:
                environment["CUDA_VISIBLE_DEVICES"] = shares[instance]
            if http:
                environment[HTTP_VARIABLE] = str(addresses.parsed(http).next(len(specs)))
            if service == "gateway" and not config.gateway.gateway_port and GATEWAY_VARIABLE not in os.environ:
                # each of its lives listens there: clients that repeat a request know no other address
                _HELD.append(held := hold_port())
                environment[GATEWAY_VARIABLE] = str(HttpAddress(config.gateway.gateway_host, held.getsockname()[1]))
            module = CRITIC if service == "critic" else (SERVICE_MODULES[service],)
            specs.append(ServiceSpec(service, instance, (sys.executable, "-m", *module), environment))
    if config.rollout.agent_service:
        specs.append(ServiceSpec(AGENTS, f"{AGENTS}-0", tuple(config.rollout.agent_service), {"PYTHONUNBUFFERED": "1"}, foreign=True))
    return specs
