"""The services of a run that are present, from their statuses in the registry. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.registry import ENVIRONMENT, MODEL, STANDBY
from shared.config.run_config import RunConfig
from shared.runtime.safe_text import duration, number, printable_line
from shared.schema.service_messages import Doing, ServiceStatus

LONGEST_NAME = 64  # Characters of a name: of an instance, a state, or that of a user's in a gauge's
LONGEST_TEXT = 1000  # Characters of any other text
MOST_GAUGES = 512  # Gauges that are looked at
MOST_DOING = 16  # Things that a service does at once, and instances that one of them waits for, that are looked at
_TEXTS = {"detail", "held_back", "last_error", "http"}


def shown(status: ServiceStatus) -> ServiceStatus:
    """Returns the status with every text fit for a line of a display."""
    texts = {
        name: printable_line(value, LONGEST_TEXT if name in _TEXTS else LONGEST_NAME) for name, value in status if isinstance(value, str)
    }
    gauges = {printable_line(name, 2 * LONGEST_NAME): value for name, value in list(status.gauges.items())[:MOST_GAUGES]}
    return status.model_copy(update={**texts, "gauges": gauges, "doing": [_shown_doing(item) for item in status.doing[:MOST_DOING]]})


def _shown_doing(item: Doing) -> Doing:
    names = [printable_line(name, LONGEST_NAME) for name in item.awaited_from[:MOST_DOING]]
    since = item.since if math.isfinite(item.since) else 0.0
    what, follows = printable_line(item.what, LONGEST_TEXT), printable_line(item.next_action, LONGEST_TEXT)
    return item.model_copy(update={"what": what, "next_action": follows, "awaited_from": names, "since": since})


def count(gauges: Mapping[str, float], name: str, otherwise: int = 0) -> int:
    """Returns a gauge that other figures are derived from as a whole number; ``otherwise`` where it is absent or not finite."""
    value = gauges.get(name, float(otherwise))
    return int(value) if math.isfinite(value) else otherwise


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
    if config.tinker.tinker_endpoint:
        return ("rollout", "trainer", "gateway")
    critic = config.algorithm.has_critic and not config.debug.debug_rollout_only  # then nothing is trained
    models = (MODEL,) if config.rollout.models else ()
    return ("buffer", "reward", "rollout", *models, "trainer", *(("critic",) if critic else ()), *(("gateway",) if config.gateways else ()))


def newest_status(services: Sequence[ServiceStatus], service: str) -> ServiceStatus | None:
    """Returns the newest status of a kind of service of which only one is at work; one that starts up reports nothing yet."""
    working = (status for status in services if status.service == service and status.state != STANDBY)
    return max(working, key=lambda status: (status.state != "starting", status.at), default=None)


def newest_gauges(services: Sequence[ServiceStatus], service: str) -> dict[str, Any]:
    """Returns the gauges of that status; empty where there is none."""
    status = newest_status(services, service)
    return status.gauges if status else {}


def trained_steps(services: Sequence[ServiceStatus]) -> int:
    """Returns how many steps are trained, as far as buffer and trainer report; -1 if neither does."""
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


# Two looks further apart than this witness so many seconds: whatever held the reader up may have held the services up, too
LONGEST_GAP_S = 2.0
SILENCE_SHARE = 0.5  # A status that was not renewed for this share of its TTL is a silent service's: it is renewed five times within


@dataclass
class HeardService:
    """``at``: the time on the newest status; ``came``: when it came in (seconds since the epoch); ``witnessed``: seconds without one."""

    at: float
    came: float
    witnessed: float = 0.0


class Heartbeats:
    """The services that were ``heard``, by instance, each until it is forgotten."""

    def __init__(self) -> None:
        self.heard: dict[str, HeardService] = {}
        self._looked: float | None = None

    def observe(self, statuses: Sequence[ServiceStatus], clock: float, now: float) -> None:
        """Takes what the registry holds, while the bus takes heartbeats. ``clock``: monotonic seconds; ``now``: seconds since the epoch."""
        gap = 0.0 if self._looked is None else min(max(clock - self._looked, 0.0), LONGEST_GAP_S)
        self._looked = clock
        for heard in self.heard.values():
            heard.witnessed += gap
        for status in statuses:
            known = self.heard.get(status.instance)
            if known is None or status.at != known.at:
                self.heard[status.instance] = HeardService(status.at, now)

    def pause(self) -> None:
        """Stops the clock while no service can be heard, until the next observation; from there on each has its whole patience again."""
        self._looked = None
        self.heard = {instance: HeardService(heard.at, heard.came) for instance, heard in self.heard.items()}

    def forget(self, instance: str) -> None:
        """Forgets a service that has ended: its next life is silent only once it was heard."""
        self.heard.pop(instance, None)

    def silent(self, patience_s: float, instances: Iterable[str] | None = None) -> dict[str, float]:
        """Returns which of these instances (None: all that were heard) are silent for longer, each with when it was last heard."""
        names = self.heard if instances is None else instances
        found = {name: self.heard[name] for name in names if name in self.heard}
        return {name: heard.came for name, heard in found.items() if heard.witnessed > patience_s}
