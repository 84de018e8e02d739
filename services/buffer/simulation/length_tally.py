"""The fate of the generated samples and tokens by length: longer responses grow older, so every policy treats them differently."""

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy

from services.buffer.simulation.workload_model import DECILES, WorkloadModel


@dataclass(frozen=True)
class LengthShare:
    """A part of the samples or tokens, from 0 to 1: overall, and by decile of length, shortest first (0 where there is nothing)."""

    overall: float
    by_decile: list[float]


class LengthTally:
    """Counts from the batch of step ``first`` on, by decile of length.

    Discarded is what dropped groups hold, and what was generated anew; masked, what is in a batch but too old to be trained.

    Args:
        model: whose `WorkloadModel.edges` divide the lengths.
    """

    def __init__(self, model: WorkloadModel, first: int) -> None:
        self._edges, self._first = model.edges.tolist(), first
        self._formed_at: list[float] = []
        self._counts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * DECILES)
        self.ages: Counter[int] = Counter()  # of trained samples, in versions

    def formed(self, now: float) -> None:
        """Counts a batch as formed; its samples follow."""
        self._formed_at.append(now)

    def trained(self, length: float, masked: float, age: int | None) -> None:
        """Counts a sample of ``length`` tokens in a batch, ``masked`` of them not trained. age: of its oldest trained token, if any."""
        if self._count(length, trained=1, batched_tokens=length, masked_tokens=masked) and age is not None:
            self.ages[age] += 1

    def discarded(self, length: float, drawn: float) -> None:
        """Counts a sample that would have had ``length`` tokens as thrown away with the ``drawn`` ones that it has."""
        self._count(length, discarded=1, discarded_tokens=drawn)

    def _count(self, length: float, **amounts: float) -> bool:
        """Adds amounts to those of the length's decile; returns whether the warm-up is over, and they count."""
        if len(self._formed_at) <= self._first:
            return False
        decile = bisect_left(self._edges, length)
        for name, amount in amounts.items():
            self._counts[name][decile] += amount
        return True

    @property
    def step_seconds(self) -> float:
        """Returns the mean seconds between two batches."""
        times = self._formed_at[self._first :]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def tokens_per_step(self) -> float:
        """Returns the tokens that a step trains, the masked ones left out, as the mean over steps."""
        return (sum(self._counts["batched_tokens"]) - sum(self._counts["masked_tokens"])) / (len(self._formed_at) - self._first)

    def share(self, name: str, *of: str) -> LengthShare:
        """Returns what was counted as ``name`` as a part of all that was counted as one of ``of``."""
        part, whole = numpy.array(self._counts[name]), numpy.sum([self._counts[other] for other in of], axis=0)
        deciles = numpy.divide(part, whole, out=numpy.zeros(DECILES), where=whole > 0)
        return LengthShare(float(part.sum() / whole.sum()), deciles.tolist())
