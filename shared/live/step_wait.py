"""What the next training step of a run waits for, in words: the first cause that applies. Pure."""

from collections.abc import Sequence

from shared.bus.registry import ENVIRONMENT, NODE, STANDBY, WAITING
from shared.config.run_config import RunConfig
from shared.live.live_services import InstanceStatus, newest_gauges, present, warm_start
from shared.live.text import number
from shared.runtime.child_process import cause
from shared.schema.service_messages import ServiceStatus


def waiting_for(config: RunConfig, services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus]) -> str:
    """Returns what the next training step waits for, in words: the first cause that applies."""
    alive = [status for status in present(services, instances) if status.service != ENVIRONMENT]
    buffer = newest_gauges(alive, "buffer")
    causes = (
        _restart(instances),
        _nodes(alive),
        _start(instances, alive),
        _kind_of_service(config, alive),
        _getting_ready(alive),
        _weights(alive, buffer),
        _environments(services),
        _batch(buffer, config.rollout.rollout_batch_size) if config.rollout.num_rollout else None,
        _evaluation(buffer),
    )
    return next(filter(None, causes), "a training step")


def _restart(instances: Sequence[InstanceStatus]) -> str | None:
    for instance in instances:
        if instance.due_in is not None:
            return f"{instance.instance}, which ended with {cause(instance.last_code)} and starts again in {instance.due_in:.0f} s"
    return None


def _nodes(alive: Sequence[ServiceStatus]) -> str:
    """Returns the nodes of a trainer that wait for others; of those that all wait for a first one, one."""
    waiting = [status for status in alive if status.service == NODE and status.state == WAITING and status.detail]
    first = [status for status in waiting if status.instance.endswith("-node-0")] or waiting[:1]
    return "; ".join(f"{status.instance}, {status.state} {status.detail}" for status in first)


def _start(instances: Sequence[InstanceStatus], alive: Sequence[ServiceStatus]) -> str | None:
    names = {status.instance for status in alive}
    absent = [instance for instance in instances if instance.instance not in names and not instance.foreign]
    if not absent:
        return None
    return f"{', '.join(instance.instance for instance in absent)} to start ({max(instance.lived for instance in absent):.0f} s so far)"


def _kind_of_service(config: RunConfig, alive: Sequence[ServiceStatus]) -> str | None:
    kinds = {status.service for status in alive if status.state != STANDBY}
    critic = config.algorithm.has_critic and not config.debug.debug_rollout_only  # then nothing is trained
    needed = ("buffer", "reward", "rollout", "trainer", *(("critic",) if critic else ()))
    return next((f"a {service} service" for service in needed if service not in kinds), None)


def _getting_ready(alive: Sequence[ServiceStatus]) -> str:
    starting = [status for status in alive if status.service == "rollout" and status.state == "starting"]
    engines = [f"{status.instance} ({status.detail})" if status.detail else status.instance for status in starting]
    trainers = [status for status in alive if status.service in ("trainer", "critic") and status.state != "ready"]
    parts = [f"engine of {', '.join(engines)} starting"] if engines else []
    if warm_up := warm_start(alive):
        return "; ".join([*parts, warm_up])
    return "; ".join([*parts, *(f"{status.instance} {status.state}" for status in trainers)])


def _weights(alive: Sequence[ServiceStatus], buffer: dict[str, float]) -> str | None:
    served = any(status.service == "rollout" and status.version >= 0 for status in alive)
    if served and buffer.get("live_version", -1) >= 0:
        return None
    states = [f"{status.instance} {status.state}" for status in alive if status.service in ("trainer", "rollout")]
    return f"weights to be served ({', '.join(states)})"


def _environments(services: Sequence[ServiceStatus]) -> str:
    away = [status for status in services if status.service == ENVIRONMENT and status.state in ("away", "refused")]
    return "; ".join(f"environment {status.instance} ({status.state}: {status.detail})" for status in away)


def _evaluation(buffer: dict[str, float]) -> str | None:
    pending = buffer.get("eval_pending", 0)
    return f"evaluations ({number(pending)} prompts outstanding)" if pending else None


def _batch(buffer: dict[str, float], size: int) -> str | None:
    ready = buffer.get("ready", size)
    return f"a batch ({number(ready)} of {size} groups ready)" if ready < size else None
