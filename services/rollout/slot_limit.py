"""Decides how many requests a replica has in its engine at once, by what the engine tells of its load. Pure.

More requests at once are more tokens a second, until the engine computes as fast as it can, or its memory is full: then it makes requests
wait, or takes running ones back and computes them anew. But each of them is slower, and its tokens are older when they are trained. So the
limit is raised, while all slots are used, as long as that makes the engine faster by a fair part of what it adds, and lowered where memory
lacks: hill climbing on the throughput, and the multiplicative decrease of congestion control (Chiu and Jain 1989).
"""

from dataclasses import dataclass

from services.rollout.slot_queue import lot

START = 256
"""The slots that an engine begins with, at least."""

MOST = 4096
"""The most slots: beyond them an engine gains nothing, and its answers take the service's time."""

GROWTH, WORTH = 0.25, 0.25
"""The share of the slots that is added at a time, and the share of it by which the engine has to be faster for them to stay."""

BACK_OFF = 0.9
"""The share of the running requests that is kept after a retraction."""

FULL = 0.9
"""The share of the engine's memory for keys and values from which on the limit does not grow: running requests need more."""

SPARE = 8
"""One request waits in the engine for so many that run, so that it has the next one at hand when one ends."""

QUEUED_READINGS = 3
"""Readings in a row with requests that wait: a burst of new ones has been begun by then."""

SETTLING, MEASURED = 2, 4
"""Readings after a change that are passed over, and those after them over which the engine's speed is taken."""

CALM_READINGS, REST_READINGS = 10, 60
"""Readings after a retraction, and after slots that were not worth it, in which the limit does not grow."""


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
        batch: its share of a batch's samples: with as many slots it begins, since a step may wait for all of them. most: slots.
    """

    def __init__(self, fixed: int | None, least: int, batch: int = 0, most: int = MOST) -> None:
        self._fixed, self._least, self._most = fixed, least, min(MOST, most)
        self.slots = fixed or self._bounded(max(START, batch))
        self._queued = self._calm = self._readings = 0
        self._retracted: int | None = None
        self._from = (0, 0.0)  # tokens and time of the first reading that counts
        self._before: tuple[int, float] | None = None  # fewer slots, and the engine's speed with them

    def note(self, load: EngineLoad, held: int, tokens: int, now: float) -> int:
        """Returns the slots after a reading, about one a second.

        Args:
            held: slots that are held. tokens: that the engine has drawn by ``now``, monotonic seconds.
        """
        if self._fixed is not None:
            return self.slots
        retracted = max(0, load.retracted - (load.retracted if self._retracted is None else self._retracted))
        self._retracted = load.retracted
        self._queued = self._queued + 1 if load.queued * SPARE > load.running else 0
        self._calm = max(0, self._calm - 1)
        if retracted:
            self._lower(int(BACK_OFF * load.running), CALM_READINGS)
        elif self._queued >= QUEUED_READINGS and load.running:
            self._lower(load.running + load.running // SPARE + 1, 0)
        elif held > self.slots - lot(self.slots) and not load.queued and not self._calm and load.kv_usage < FULL:
            self._climb(tokens, now)
        else:
            self._readings = 0
        return self.slots

    def renew(self) -> None:
        """Forgets what an earlier engine told: a new one counts from zero."""
        self._retracted, self._queued, self._readings, self._before = None, 0, 0, None

    def _lower(self, slots: int, calm: int) -> None:
        self.slots, self._calm = self._bounded(min(self.slots, slots)), calm
        self._readings, self._before = 0, None

    def _climb(self, tokens: int, now: float) -> None:
        """Takes the engine's speed with the present slots; gives it more, or those back that were not worth it."""
        self._readings += 1
        if self._readings <= SETTLING:
            self._from = (tokens, now)
        if self._readings < SETTLING + MEASURED:
            return
        speed, self._readings = (tokens - self._from[0]) / max(now - self._from[1], 1e-9), 0
        if self._before is not None:
            fewer, slower = self._before
            if speed < slower * (1 + WORTH * (self.slots / fewer - 1)):
                self._lower(fewer, REST_READINGS)
                return
        self._before = (self.slots, speed)
        self.slots = self._bounded(int(self.slots * (1 + GROWTH)) + 1)

    def _bounded(self, slots: int) -> int:
        return max(self._least, min(self._most, slots))
