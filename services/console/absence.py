"""Which services of a running run are away, by what the registry shows of them over time. Pure.

A service that was killed leaves its status in the registry until its TTL: it is away as soon as its status is no longer renewed. Times are
compared with this process's own clock alone; other machines' clocks may differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.bus.registry import ENVIRONMENT
from shared.config.run_config import RunConfig
from shared.live.live_services import needed
from shared.live.stall import Away
from shared.schema.service_messages import ServiceStatus

STALE_SHARE = 0.5
"""A status that was not renewed for this share of its TTL is a silent service's: it is renewed five times within."""

NOT_STARTED = "not started yet"
"""Why a kind of service is away that was never seen."""

SILENT = "silent: its status is no longer renewed"
"""Why an instance is away that is in the registry all the same."""

NOT_AT_WORK = ("starting", "stopping", "failed")


@dataclass
class _Seen:
    """What was seen of an instance: the time on its newest status, when that came in, whether it was ever at work."""

    at: float
    seen: float
    worked: bool = False


@dataclass
class AbsentServices:
    """The services seen so far."""

    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    def look(self, config: RunConfig | None, statuses: Sequence[ServiceStatus], now: float) -> dict[str, Away]:
        """Returns what is away: an instance that is silent or starts again, or a kind of service of which there is none.

        Args:
            config: None while no services are expected. statuses: what the registry holds. now: seconds since the epoch.
        """
        services = [status for status in statuses if status.service != ENVIRONMENT]
        for status in services:
            known = self._seen.setdefault((status.service, status.instance), _Seen(status.at, now))
            if known.at != status.at:
                known.at, known.seen = status.at, now
        return {} if config is None else self._troubled(config, services, now) | self._missing(config, services, now)

    def _troubled(self, config: RunConfig, services: Sequence[ServiceStatus], now: float) -> dict[str, Away]:
        """Returns the instances in the registry that are silent or not at work any more."""
        absent = {}
        for status in services:
            known = self._seen[status.service, status.instance]
            if why := _problem(status, known, now, config.bus.registry_ttl * STALE_SHARE):
                absent[status.instance] = Away(known.seen, why)
            elif status.state not in NOT_AT_WORK:
                known.worked = True
        return absent

    def _missing(self, config: RunConfig, services: Sequence[ServiceStatus], now: float) -> dict[str, Away]:
        """Returns the kinds of services of which the registry has none."""
        absent = {}
        for kind in set(needed(config)) - {status.service for status in services}:
            seen = [known.seen for (service, _), known in self._seen.items() if service == kind]
            absent[kind] = Away(max(seen, default=now), "its status is gone from the registry" if seen else "not started yet")
        return absent


def _problem(status: ServiceStatus, known: _Seen, now: float, patience: float) -> str:
    if now - known.seen > patience:
        return SILENT
    if known.worked and status.state in NOT_AT_WORK:
        return f"{status.state} again" if status.state == "starting" else status.state
    return ""
