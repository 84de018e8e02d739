"""Decides how many requests a replica has in its engine at once, by what the engine tells of its load. Pure.

More requests at once are more tokens a second, until the engine's memory is full: then it makes requests wait, or takes running ones back
and computes them anew. So the limit grows while all slots are used and the engine has room, and falls where it has not: additive increase
and multiplicative decrease, as in congestion control (Chiu and Jain 1989).
"""

from dataclasses import dataclass

START = 256
"""The slots that an engine begins with."""

MOST = 4096
"""The most slots: beyond them an engine gains nothing, and its answers take the service's time."""

GROWTH, BACK_OFF = 0.25, 0.9
"""The share of the slots that is added at a reading, and the share of the running requests that is kept after a retraction."""

FULL = 0.9
"""The share of the engine's memory for keys and values from which on the limit does not grow: running requests need more."""

SPARE = 8
"""One request waits in the engine for so many that run, so that it has the next one at hand when one ends."""

QUEUED_READINGS = 3
"""Readings in a row with requests that wait: a burst of new ones has been begun by then."""

CALM_READINGS = 10
"""Readings after a retraction in which the limit does not grow."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load. ``running``, ``queued``: requests; ``kv_usage``: share of its memory for keys and values that is in use;
    ``retracted``: requests that it has taken back for want of memory since it started."""

    running: int
    queued: int
    kv_usage: float
    retracted: int = 0


class SlotLimit:
    """The slots of one replica, one reading of the engine's load after another.

    Args:
        fixed: slots that do not follow the load (`rollout.rollout_concurrency`); None: they do. least: the fewest slots: a group's samples.
    """

    def __init__(self, fixed: int | None, least: int) -> None:
        self._fixed, self._least = fixed, least
        self.slots = fixed or max(START, least)
        self._queued = self._calm = 0
        self._retracted: int | None = None

    def note(self, load: EngineLoad, held: int) -> int:
        """Returns the slots after a reading, about one a second, while ``held`` of them were held."""
        if self._fixed is not None:
            return self.slots
        retracted = max(0, load.retracted - (load.retracted if self._retracted is None else self._retracted))
        self._retracted = load.retracted
        self._queued = self._queued + 1 if load.queued * SPARE > load.running else 0
        self._calm = max(0, self._calm - 1)
        if retracted:
            self.slots, self._calm = self._bounded(min(self.slots, int(BACK_OFF * load.running))), CALM_READINGS
        elif self._queued >= QUEUED_READINGS and load.running:
            self.slots = self._bounded(min(self.slots, load.running + load.running // SPARE + 1))
        elif held >= self.slots and not load.queued and not self._calm and load.kv_usage < FULL:
            self.slots = self._bounded(int(self.slots * (1 + GROWTH)) + 1)
        return self.slots

    def renew(self) -> None:
        """Forgets what an earlier engine told: a new one counts from zero."""
        self._retracted, self._queued = None, 0

    def _bounded(self, slots: int) -> int:
        return max(self._least, min(MOST, slots))
