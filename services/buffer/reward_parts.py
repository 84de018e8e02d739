"""Sums up the named rewards of a batch's samples: how many samples have each, its mean, spread and range. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shared.schema.messages import RewardPart

MOST_NAMES = 64
"""The most names of a batch that are reported: the user chooses them, and all of them go into one message."""


def of_batch(samples: Iterable[Mapping[str, float]]) -> dict[str, RewardPart]:
    """Returns the moments of each name over the samples that have it; `MOST_NAMES` names at most, those of most samples."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for sample in samples for item in sample.items()):
        values[name].append(value)
    names = sorted(values, key=lambda name: -len(values[name]))[:MOST_NAMES]
    return {name: _moments(values[name]) for name in names}


def _moments(values: list[float]) -> RewardPart:
    mean = statistics.fmean(values)
    spread = statistics.fmean([(value - mean) ** 2 for value in values]) ** 0.5
    return RewardPart(samples=len(values), mean=mean, std=spread, min=min(values), max=max(values))
