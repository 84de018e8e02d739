"""Whether two ways of sampling have one distribution, where a distance that one way has from itself is known.

An engine in bfloat16 is no perfect source: its probabilities change a little with the requests beside a request, so counts scatter more
than independent samples' do. The floor is therefore measured: several runs of the one way give the distances that it has from itself.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

Responses = Sequence[Sequence[int]]
"""Token ids of responses of at least so many tokens as are compared."""

LEAST, SPREAD, FEWEST = 2.0, 4.0, 10
"""A distance is a difference above ``LEAST``, and above the mean of the way's own by ``SPREAD`` standard errors, of as many as there are
runs; cells of fewer counts are one."""


def deviations(one: Responses, other: Responses, places: int) -> float:
    """Returns by how many standard deviations the counts of (place, token) differ more than those of independent samples would."""
    counts = [Counter((place, token) for row in rows for place, token in enumerate(row[:places])) for rows in (one, other)]
    scale, squares, freedom = (len(other) / len(one)) ** 0.5, 0.0, 0
    for place in range(places):
        cells = {key for count in counts for key in count if key[0] == place}
        common = {key for key in cells if sum(count[key] for count in counts) >= FEWEST}
        pairs = [(counts[0][key], counts[1][key]) for key in common]
        rare = [sum(count[key] for key in cells - common) for count in counts]
        pairs += [(rare[0], rare[1])] if sum(rare) else []
        squares += sum((a * scale - b / scale) ** 2 / (a + b) for a, b in pairs)
        freedom += max(len(pairs) - 1, 0)
    return (squares - freedom) / (2 * max(freedom, 1)) ** 0.5


class Comparison(NamedTuple):
    """``distance``: the mean of those between runs of both ways; ``floor``: the largest that is none; ``own``: the mean within one."""

    distance: float
    floor: float
    own: float

    @property
    def differs(self) -> bool:
        return self.distance > self.floor


def compared(plain: Sequence[Responses], other: Sequence[Responses], places: int) -> Comparison:
    """Compares runs of another way with at least three runs of the one whose distances from itself are the floor, all about as long."""
    own = [deviations(one, two, places) for one, two in combinations(plain, 2)]
    mean = statistics.fmean(own)
    distance = statistics.fmean(deviations(one, two, places) for one, two in product(plain, other))
    return Comparison(distance, max(LEAST, mean + SPREAD * statistics.stdev(own) / len(plain) ** 0.5), mean)
