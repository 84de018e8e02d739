"""Named rewards of samples as number, mean, spread and range: a few numbers a group, which those of a batch are merged from. Pure."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shared.messages import RewardPart

MOST_NAMES = 64
"""Names that a group keeps and a batch tells: they are the user's, and those of a whole batch go into one message."""


class PartMoments(NamedTuple):
    """deviation: sum of squared deviations from the mean."""

    samples: int
    mean: float
    deviation: float
    low: float
    high: float

    def merged(self, other: PartMoments) -> PartMoments:
        """Those of both sets together (Chan, Golub, LeVeque 1983)."""
        samples, distance = self.samples + other.samples, other.mean - self.mean
        deviation = self.deviation + other.deviation + distance * distance * self.samples * other.samples / samples
        mean = self.mean + distance * other.samples / samples
        return PartMoments(samples, mean, deviation, min(self.low, other.low), max(self.high, other.high))


def of_group(parts: Sequence[Mapping[str, float]]) -> dict[str, PartMoments]:
    """By name, over the samples that have it; `MOST_NAMES` names at most, those that come first."""
    found: dict[str, PartMoments] = {}
    for name, value in (item for sample in parts for item in sample.items()):
        one = PartMoments(1, value, 0.0, value, value)
        if name in found:
            found[name] = found[name].merged(one)
        elif len(found) < MOST_NAMES:
            found[sys.intern(name)] = one  # every group has the same names: they are kept once
    return found


def of_batch(groups: Iterable[Mapping[str, PartMoments]]) -> dict[str, RewardPart]:
    """By name, over all samples of a batch that have it; `MOST_NAMES` names at most, those of most samples."""
    found: dict[str, PartMoments] = {}
    for name, moments in (item for group in groups for item in group.items()):
        found[name] = found[name].merged(moments) if name in found else moments
    counts = Counter({name: moments.samples for name, moments in found.items()})
    return {name: _told(found[name]) for name, _ in counts.most_common(MOST_NAMES)}


def _told(moments: PartMoments) -> RewardPart:
    std = math.sqrt(moments.deviation / moments.samples)
    return RewardPart(samples=moments.samples, mean=moments.mean, std=std, min=moments.low, max=moments.high)
