"""Which service processes a run on this machine consists of."""

from __future__ import annotations

import sys

from shared import devices
from shared.cli.child import ServiceSpec
from shared.config import RunConfig

SERVICE_MODULES = {service: f"services.{service}" for service in ("buffer", "reward", "rollout", "trainer")}
"""The module that `python -m` runs for each service."""

TRAINERS = ("trainer", "critic")
"""The services that hold what training has made: asked to stop before those that they need."""

CRITIC = ("services.trainer", "critic")
"""What it runs for the critic, the trainer's second role."""


def plan(config: RunConfig, nats_url: str) -> list[ServiceSpec]:
    """One trainer, its critic where the objective has one, and as many buffers, reward and rollout services as the config asks for."""
    rewards, rollouts = config.reward.reward_replicas, config.rollout.rollout_replicas
    counts = {"buffer": config.run.buffer_replicas, "reward": rewards, "rollout": rollouts, "trainer": 1}
    if config.algorithm.has_critic:
        counts["critic"] = 1
    shares = devices.share_out(config)
    specs = []
    for service, count in counts.items():
        for number in range(count):
            instance = f"{service}-{number}"
            environment = {"NATS_URL": nats_url, "MYXO_RUN": config.run.name, "MYXO_INSTANCE": instance, "PYTHONUNBUFFERED": "1"}
            if instance in shares:
                environment["CUDA_VISIBLE_DEVICES"] = shares[instance]
            module = CRITIC if service == "critic" else (SERVICE_MODULES[service],)
            specs.append(ServiceSpec(service, instance, (sys.executable, "-m", *module), environment))
    return specs
