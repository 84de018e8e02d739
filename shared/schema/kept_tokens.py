"""The tokens that a sampler kept at each place of a response, by top-p, top-k or min-p: it renormalises over them, and so does training
that replays them (`trainer.support_replay`)."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Kept(NamedTuple):
    """The kept tokens of R places. A place without any is one that no engine sampled: it has the whole vocabulary.

    Args:
        ids: int32 [N], those of all places end to end. offsets: int32 [R + 1], place r has ``ids[offsets[r]:offsets[r + 1]]``.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Kept":
        """Returns those of a list of ids for each place. Raises TypeError, ValueError or OverflowError where these are no token ids."""
        return cls.counted([len(row) for row in rows], np.fromiter(chain.from_iterable(rows), np.int32))

    @classmethod
    def counted(cls, counts: Sequence[int] | NDArray[np.integer], ids: NDArray[np.int32]) -> "Kept":
        """Returns those of all places end to end, of which each has so many."""
        return cls(ids, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))

    @property
    def counts(self) -> NDArray[np.int32]:
        """Returns how many are kept at each place, [R]; 0: no engine sampled it."""
        return np.diff(self.offsets)

    def at(self, places: NDArray[np.integer]) -> "Kept":
        """Returns those of some places, in the given order; -1: a place that no engine sampled."""
        counts = np.append(self.counts, 0)[places]
        before = np.cumsum(counts) - counts
        return Kept.counted(counts, self.ids[np.repeat(self.offsets[places] - before, counts) + np.arange(counts.sum())])

    def part(self, start: int, end: int) -> "Kept":
        """Returns those of the places from ``start`` to ``end`` (exclusive), as views of the ids."""
        offsets = self.offsets[start : end + 1]
        return Kept(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def followed_by(self, more: "Kept") -> "Kept":
        """Returns these and those of further places."""
        return Kept(np.concatenate([self.ids, more.ids]), np.concatenate([self.offsets, more.offsets[1:] + self.offsets[-1]]))

    def marked(self) -> NDArray[np.int32]:
        """Returns those of places that all have some as one array, int32 [N]: twice each id, and 1 more at a place's end."""
        found = self.ids * np.int32(2)
        found[self.offsets[1:] - 1] += 1
        return found

    @classmethod
    def unmarked(cls, marked: NDArray[np.int32]) -> "Kept":
        """Returns what `marked` was made of."""
        return cls(marked >> 1, np.append(0, np.flatnonzero(marked & 1) + 1).astype(np.int32))

    def keys(self) -> NDArray[np.int64]:
        """Returns numbers that are equal where two places keep the same tokens, [R]; 0 where none are known."""
        table = np.random.default_rng(0).integers(1, 1 << 62, int(self.ids.max(initial=0)) + 1, np.int64)
        sums = np.concatenate([[0], np.cumsum(table[self.ids])])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]

    def problem(self, response: NDArray[np.integer], vocabulary: int) -> str | None:
        """Returns why these are not the kept tokens of a response, [R], of ids below ``vocabulary``; None where they are."""
        for values in (self.ids, self.offsets):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != np.int32:
                return "kept is not two arrays of int32, ids [N] and offsets [R + 1]"
        if len(self.offsets) != len(response) + 1:
            return f"kept has {len(self.offsets)} offsets for {len(response)} response tokens; expected one more than these"
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or (counts := self.counts).min(initial=0) < 0:
            return f"kept has offsets from {self.offsets[0]} to {self.offsets[-1]} for {len(self.ids)} ids; expected ascending ones from 0"
        if len(self.ids) and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocabulary:
            return f"kept holds tokens {self.ids.min()} to {self.ids.max()}, which are not in [0, {vocabulary})"
        rows = np.repeat(np.arange(len(response)), counts)
        found = counts == 0
        found[rows[self.ids == response[rows]]] = True
        if found.all():
            return None
        place = int(np.argmin(found))
        return f"kept has {counts[place]} tokens at {place}, and the sampled token {response[place]} is not among them"
