"""When a process that died starts again, and when nobody tries any more. Pure: told what happened, it answers in seconds."""

from __future__ import annotations

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0

HEALTHY_SECONDS = 60.0
"""A life of this length forgives the deaths before it: the next wait starts at the beginning again."""

MOST_DEATHS = 10
"""Deaths in a row, none of these lives ready, after which starting again is pointless."""


class BackOff:
    """The waits of one process between its lives: ``first`` seconds, doubling up to ``longest``.

    Args:
        at_once: the first death of a row is followed by no wait at all (servers, which everybody else waits for).
    """

    def __init__(
        self,
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
        healthy: float = HEALTHY_SECONDS,
        most: int = MOST_DEATHS,
        at_once: bool = False,
    ) -> None:
        self._first, self._longest, self._healthy, self._most, self._at_once = first, longest, healthy, most, at_once
        self._short_lives = 0
        self.deaths_unready = 0
        """Deaths in a row without having been ready."""

    def died(self, lived: float, ready: bool) -> float | None:
        """Takes note of a death after ``lived`` seconds; ``ready``: whether it had got to work in that life.

        Returns the seconds to wait before the next start; None when it should not be started any more.
        """
        self.deaths_unready = 0 if ready else self.deaths_unready + 1
        if self.deaths_unready >= self._most:
            return None
        self._short_lives = 1 if lived >= self._healthy else self._short_lives + 1
        doublings = self._short_lives - 1
        if self._at_once:
            if doublings == 0:
                return 0.0
            doublings -= 1
        return min(self._longest, self._first * 2.0 ** min(doublings, 64))
