"""The fate of the generated samples and tokens by length: longer responses grow older, so every policy treats them differently."""

from bisect import bisect_left
from collections import Counter
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
        self._trained, self._discarded = [0.0] * DECILES, [0.0] * DECILES
        self._batched_tokens, self._masked_tokens, self._discarded_tokens = [0.0] * DECILES, [0.0] * DECILES, [0.0] * DECILES
        self.ages: Counter[int] = Counter()  # of trained samples, in versions

    def formed(self, step: int, now: float) -> None:
        """Counts the batch of a step as formed; its samples follow."""
        assert step == len(self._formed_at)
        self._formed_at.append(now)

    def trained(self, length: float, masked: float, age: int | None) -> None:
        """Counts a sample of ``length`` tokens in a batch, ``masked`` of them not trained. age: of its oldest trained token, if any."""
        if len(self._formed_at) <= self._first:
            return
        decile = bisect_left(self._edges, length)
        self._trained[decile] += 1
        self._batched_tokens[decile] += length
        self._masked_tokens[decile] += masked
        if age is not None:
            self.ages[age] += 1

    def discarded(self, length: float, drawn: float) -> None:
        """Counts a sample that would have had ``length`` tokens as thrown away with the ``drawn`` ones that it has."""
        if len(self._formed_at) <= self._first:
            return
        decile = bisect_left(self._edges, length)
        self._discarded[decile] += 1
        self._discarded_tokens[decile] += drawn

    @property
    def step_seconds(self) -> float:
        """Returns the mean seconds between two batches."""
        times = self._formed_at[self._first :]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def tokens_per_step(self) -> float:
        """Returns the tokens that a step trains, the masked ones left out, as the mean over steps."""
        return (sum(self._batched_tokens) - sum(self._masked_tokens)) / (len(self._formed_at) - self._first)

    def discarded_samples(self) -> LengthShare:
        """Returns the discarded samples as a part of all."""
        return _share(self._discarded, self._trained, self._discarded)

    def discarded_tokens(self) -> LengthShare:
        """Returns the discarded tokens as a part of all that were generated."""
        return _share(self._discarded_tokens, self._batched_tokens, self._discarded_tokens)

    def masked_tokens(self) -> LengthShare:
        """Returns the masked tokens as a part of those in batches."""
        return _share(self._masked_tokens, self._batched_tokens)


def _share(counts: list[float], *of: list[float]) -> LengthShare:
    part, whole = numpy.array(counts), numpy.sum(of, axis=0)
    deciles = numpy.divide(part, whole, out=numpy.zeros(DECILES), where=whole > 0)
    return LengthShare(float(part.sum() / whole.sum()), deciles.tolist())
