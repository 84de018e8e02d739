"""What became of the generated samples and tokens, by length: longer responses grow older, so every policy treats them differently."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import numpy

from services.buffer.simulation.workload_model import DECILES, Floats, WorkloadModel

_KINDS = ("trained", "discarded", "batched_tokens", "discarded_tokens", "masked_tokens")


class LengthTally:
    """Counts from the batch of step ``first`` on, by decile of length.

    Discarded is what dropped groups hold, and what was generated anew; masked, what is in a batch but too old to be trained.

    Args:
        model: whose `WorkloadModel.edges` divide the lengths.
    """

    def __init__(self, model: WorkloadModel, first: int) -> None:
        self._edges, self._first = model.edges.tolist(), first
        self._formed_at: list[float] = []
        self._counts = {kind: [0.0] * DECILES for kind in _KINDS}
        self.ages: Counter[int] = Counter()  # of trained samples, in versions

    def formed(self, step: int, now: float) -> None:
        """The batch of a step was formed; its samples follow."""
        assert step == len(self._formed_at)
        self._formed_at.append(now)

    def trained(self, length: float, masked: float, age: int | None) -> None:
        """A sample of ``length`` tokens is in a batch, ``masked`` of them not trained. age: of its oldest trained token, if it has one."""
        if self._counts_now:
            self._add(length, trained=1, batched_tokens=length, masked_tokens=masked)
            if age is not None:
                self.ages[age] += 1

    def discarded(self, length: float, drawn: float) -> None:
        """A sample that would have had ``length`` tokens is thrown away with the ``drawn`` ones that it has."""
        if self._counts_now:
            self._add(length, discarded=1, discarded_tokens=drawn)

    @property
    def _counts_now(self) -> bool:
        return len(self._formed_at) > self._first

    def _add(self, length: float, **amounts: float) -> None:
        decile = bisect_left(self._edges, length)
        for kind, amount in amounts.items():
            self._counts[kind][decile] += amount

    # --- what it comes to; parts are float64 [10] and 0 where there is nothing

    @property
    def step_seconds(self) -> float:
        """Mean time between two batches."""
        times = self._formed_at[self._first :]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step trains, the masked ones left out. Mean over steps."""
        return (sum(self._counts["batched_tokens"]) - sum(self._counts["masked_tokens"])) / (len(self._formed_at) - self._first)

    def discarded_samples(self) -> tuple[float, Floats]:
        """Discarded samples as a part of all: overall and by decile."""
        return self._part("discarded", "trained", "discarded")

    def discarded_tokens(self) -> tuple[float, Floats]:
        """Discarded tokens as a part of all that were generated: overall and by decile."""
        return self._part("discarded_tokens", "batched_tokens", "discarded_tokens")

    def masked_tokens(self) -> tuple[float, Floats]:
        """Masked tokens as a part of those in batches: overall and by decile."""
        return self._part("masked_tokens", "batched_tokens")

    def _part(self, what: str, *of: str) -> tuple[float, Floats]:
        part, whole = numpy.array(self._counts[what]), numpy.sum([self._counts[kind] for kind in of], axis=0)
        deciles = numpy.divide(part, whole, out=numpy.zeros(DECILES), where=whole > 0)
        return float(part.sum() / whole.sum()), deciles
