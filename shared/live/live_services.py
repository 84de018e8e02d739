"""The services of a run as displays find them: their launcher's record of each process, and the status that counts of each kind. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.registry import ENVIRONMENT, STANDBY
from shared.config.run_config import RunConfig
from shared.live.shown_status import count
from shared.live.text import duration, number
from shared.schema.service_messages import ServiceStatus


@dataclass(frozen=True)
class InstanceStatus:
    """One service process as its launcher knows it.

    ``lived``: seconds; ``started_at``: seconds since the epoch; ``due_in``: seconds to its next start, None while it runs;
    ``last_error``: the error that the life before ended with, at ``ended_at`` (seconds since the epoch); ``foreign``: it is the
    user's, and publishes no status.
    """

    service: str
    instance: str
    pid: int
    restarts: int
    ready: bool
    lived: float
    started_at: float
    due_in: float | None
    last_code: int | None
    last_error: str = ""
    foreign: bool = False
    ended_at: float = 0.0


def present(services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus]) -> list[ServiceStatus]:
    """Returns the statuses without those that the dead left behind: a status outlives its service by its TTL."""
    started = {instance.instance: instance.started_at if instance.due_in is None else float("inf") for instance in instances}
    return [status for status in services if status.service == ENVIRONMENT or status.at > started.get(status.instance, 0.0)]


def needed(config: RunConfig) -> tuple[str, ...]:
    """Returns the kinds of services that a run cannot do without."""
    critic = config.algorithm.has_critic and not config.debug.debug_rollout_only  # then nothing is trained
    return ("buffer", "reward", "rollout", "trainer", *(("critic",) if critic else ()), *(("gateway",) if config.gateways else ()))


def newest_status(services: Sequence[ServiceStatus], service: str) -> ServiceStatus | None:
    """Returns the newest status of a kind of service of which only one is at work; one that starts up has nothing to say yet."""
    working = (status for status in services if status.service == service and status.state != STANDBY)
    return max(working, key=lambda status: (status.state != "starting", status.at), default=None)


def newest_gauges(services: Sequence[ServiceStatus], service: str) -> dict[str, Any]:
    """Returns the gauges of that status; empty where there is none."""
    status = newest_status(services, service)
    return status.gauges if status else {}


def trained_steps(services: Sequence[ServiceStatus]) -> int:
    """Returns how many steps are trained, as far as buffer and trainer tell; -1 where neither does."""
    return max(count(newest_gauges(services, "buffer"), "trained_steps", -1), count(newest_gauges(services, "trainer"), "step", -1))


def warm_start(services: Sequence[ServiceStatus]) -> str | None:
    """Returns how far the trainer's supervised warm start is, in words; None where there is none, or none any more."""
    trainer = newest_gauges(services, "trainer")
    done, total = trainer.get("sft_step", 0), trainer.get("sft_steps")
    if not total or done >= total:
        return None
    loss = f", loss {number(trainer['sft_loss'], '.3f')}" if "sft_loss" in trainer else ""
    left = f", about {duration(trainer['sft_seconds_left'])} left" if "sft_seconds_left" in trainer else ""
    return f"SFT step {number(done)}/{number(total)}{loss}{left}"
