"""What becomes of groups, for a source of prompts that is told (``observe``): in the order of the ledger, by its position in it.

Which results a source hears before it draws the prompt of group k follows from the ledger alone: those of all groups that had ended when
group k was admitted. So a buffer that replays the ledger has the same results for the same prompts.
"""

import bisect
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The end of a training group. number: how many were admitted before it. rewards: of its samples, empty where it was never scored.

    fate: ``trained``, ``dropped`` or ``dead``; reason: why, of the latter two.
    """

    number: int
    fate: str
    rewards: tuple[float, ...] = ()
    reason: str = ""

    def told(self, group: str, entry: Mapping[str, Any], metadata_key: str, threshold: float) -> dict[str, Any]:
        """Returns the result as a source gets it. ``entry``: the group's prompt as it was drawn; ``threshold``: the reward that passes."""
        passed = sum(reward >= threshold for reward in self.rewards)
        return {
            "group": group,
            "number": self.number,
            "metadata": entry.get(metadata_key) or {},
            "rewards": list(self.rewards),
            "pass_rate": passed / len(self.rewards) if self.rewards else None,
            "fate": self.fate,
            "reason": self.reason,
        }


class ResultLog:
    """The results of a run in order, and how many there were when each group was admitted. Written by one thread, read by any.

    Results that were forgotten stay counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: list[GroupResult] = []
        self._forgotten = 0
        self._count = 0
        self._firsts, self._before = array("q"), array("q")

    def __len__(self) -> int:
        return self._count

    def add(self, results: Sequence[GroupResult]) -> None:
        """Appends results, in the order of the ledger."""
        with self._lock:
            self._results += results[max(0, self._forgotten - self._count) :]
            self._count += len(results)

    def admit(self, first: int) -> None:
        """Takes note that the groups from number ``first`` on are admitted after the results so far."""
        with self._lock:
            self._firsts.append(first)
            self._before.append(self._count)

    def before(self, number: int) -> int:
        """Returns how many results there were when group ``number`` was admitted."""
        with self._lock:
            position = bisect.bisect_right(self._firsts, number)
            return self._before[position - 1] if position else 0

    def between(self, start: int, end: int) -> list[GroupResult]:
        """Returns the results from position ``start`` up to ``end``. Raises ValueError where they were forgotten."""
        with self._lock:
            if start < self._forgotten:
                raise ValueError(f"results from {start} on are asked for; those before {self._forgotten} are forgotten")
            return self._results[start - self._forgotten : end - self._forgotten]

    def forget(self, count: int) -> None:
        """Lets go of the first ``count`` results of the run, also of those that are yet to be added."""
        with self._lock:
            del self._results[: max(0, count - self._forgotten)]
            self._forgotten = max(self._forgotten, count)
