"""Notices services whose heartbeat is missing, by the reader's own clock. Pure.

A status carries the time of another machine, whose clock may differ: what counts is when a new one came in. And only time counts in which a
heartbeat could have come in and be read: a machine that was suspended, a reader that was held up, and a bus that took no writes, make
nobody silent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.schema.service_messages import ServiceStatus

LONGEST_GAP_S = 2.0
"""Two looks further apart than this witness so many seconds: whatever held the reader up may have held the services up, too."""


@dataclass
class _Heard:
    """``at``: the time on the newest status; ``came``: when it came in (seconds since the epoch); ``witnessed``: seconds without one."""

    at: float
    came: float
    witnessed: float = 0.0


class Heartbeats:
    """The services that were heard, each until it is forgotten."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._looked: float | None = None

    def look(self, statuses: Sequence[ServiceStatus], clock: float, now: float) -> None:
        """Takes what the registry holds, while the bus takes heartbeats. ``clock``: monotonic seconds; ``now``: seconds since the epoch."""
        gap = 0.0 if self._looked is None else min(max(clock - self._looked, 0.0), LONGEST_GAP_S)
        self._looked = clock
        for heard in self._heard.values():
            heard.witnessed += gap
        for status in statuses:
            known = self._heard.get(status.instance)
            if known is None or status.at != known.at:
                self._heard[status.instance] = _Heard(status.at, now)

    def look_away(self) -> None:
        """Notes that nobody can be heard at the moment: the time until the next look does not count."""
        self._looked = None

    def forget(self, instance: str) -> None:
        """Forgets a service that has ended: its next life is silent only once it was heard."""
        self._heard.pop(instance, None)

    def silent(self, patience_s: float, instances: Iterable[str] | None = None) -> dict[str, float]:
        """Returns which of these instances (None: all that were heard) are silent for longer, each with when it was last heard."""
        names = self._heard if instances is None else instances
        found = {name: self._heard[name] for name in names if name in self._heard}
        return {name: heard.came for name, heard in found.items() if heard.witnessed > patience_s}
