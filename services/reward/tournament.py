"""The forms of a tournament among the samples of a group: who meets whom, and what the results are worth. Pure.

A form is a generator: it yields a round, the pairs of samples to be compared, is sent the points of the first of each pair (1 won, 0 lost,
0.5 a tie; anything between where two answers differ), and returns one reward a sample, in [0, 1]: the share of the others that it is placed
before, a tie counting half. The forms are those of ArenaRL (https://github.com/Alibaba-NLP/qqr), which normalises the rewards afterwards;
here that is the advantage estimator's part. Draws are seeded, so that a group that is judged again meets in the same pairs.
"""

import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

Round = list[tuple[int, int]]
Form = Generator[Round, list[float], list[float]]


def round_robin(count: int, draw: random.Random) -> Form:
    """Each against each: count × (count - 1) / 2 comparisons."""
    pairs = list(itertools.combinations(range(count), 2))
    points = [0.0] * count
    for (first, second), won in zip(pairs, (yield pairs), strict=True):
        points[first] += won
        points[second] += 1 - won
    return placed(points)


def anchor(count: int, draw: random.Random) -> Form:
    """All against the first: count - 1 comparisons. The first one's points are the mean of what it won."""
    return placed((yield from _seeding(count)))


def single_elimination(count: int, draw: random.Random) -> Form:
    """Seeded by `anchor`, then a bracket in which who loses is out: 2 × (count - 1) comparisons.

    Those that go out in one round are placed by their mean points.
    """
    record = _Record(count)
    for index, points in enumerate((yield from _seeding(count))):
        record.add(index, points)
    going, lost = yield from record.knock_out(_bracket(sorted(range(count), key=record.mean, reverse=True)))
    gone = [lost]
    while len(going) > 1:
        going, lost = yield from record.knock_out(going)
        gone.append(lost)
    return placed_in_order([*going, *_last_out_first(gone, record)])


def double_elimination(count: int, draw: random.Random) -> Form:
    """Who has lost twice is out: up to 2 × count - 2 comparisons. Pairs are drawn anew for each round.

    Those that go out in one round are placed by their mean points.
    """
    record, going, fallen = _Record(count), list(range(count)), list[list[int]]()
    while len(going) > 1:
        draw.shuffle(going)
        going, lost = yield from record.knock_out(going)
        fallen.append(lost)
    second, gone = list[int](), list[list[int]]()
    while fallen or len(second) > 1:
        second += fallen.pop(0) if fallen else []
        if len(second) > 1:
            draw.shuffle(second)
            second, lost = yield from record.knock_out(second)
            gone.append(lost)
    final, lost = yield from record.knock_out([*going, *second])
    return placed_in_order([*final, *lost, *_last_out_first(gone, record)])


def swiss(count: int, draw: random.Random) -> Form:
    """⌈log2 count⌉ rounds among neighbours in the table who have not met; ties are broken by the points of those whom one met.

    Who is left over in a round wins it, and nobody twice as long as others have not.
    """
    points, met, rested = [0.0] * count, [set[int]() for _ in range(count)], set[int]()
    for _ in range(min(math.ceil(math.log2(count)), count - 1)):
        table = draw.sample(range(count), count)
        table.sort(key=lambda one: points[one], reverse=True)
        if count % 2:
            rests = next((one for one in reversed(table) if one not in rested), table[-1])
            rested.add(rests)
            table.remove(rests)
            points[rests] += 1
        pairs = _neighbours(table, met)
        for (first, second), won in zip(pairs, (yield pairs), strict=True):
            points[first] += won
            points[second] += 1 - won
            met[first].add(second)
            met[second].add(first)
    return placed([(points[one], sum(points[other] for other in met[one])) for one in range(count)])


FORMS: dict[str, Callable[[int, random.Random], Form]] = {
    form.__name__: form for form in (round_robin, anchor, single_elimination, double_elimination, swiss)
}
"""By their names in the config."""


def placed(keys: Sequence[Any]) -> list[float]:
    """Returns the rewards of samples that are ordered by ``keys``, the greatest first; equal ones share their places."""
    others = len(keys) - 1
    return [(sum(key > other for other in keys) + (sum(key == other for other in keys) - 1) / 2) / others for key in keys]


def placed_in_order(order: Sequence[int]) -> list[float]:
    """Returns the rewards, by index, of samples that stand in the order of their places."""
    rewards = [0.0] * len(order)
    for place, index in enumerate(order):
        rewards[index] = 1 - place / (len(order) - 1)
    return rewards


class _Record:
    """The points of each sample in all its comparisons."""

    def __init__(self, count: int) -> None:
        self._points: list[list[float]] = [[] for _ in range(count)]

    def add(self, index: int, points: float) -> None:
        self._points[index].append(points)

    def mean(self, index: int) -> float:
        return sum(self._points[index]) / len(self._points[index]) if self._points[index] else 0.0

    def knock_out(self, going: Sequence[int | None]) -> Generator[Round, list[float], tuple[list[int], list[int]]]:
        """Compares neighbours. Returns who goes on, the first of a tie and who has no neighbour among them, and who has lost."""
        couples = [[one for one in going[at : at + 2] if one is not None] for at in range(0, len(going), 2)]
        pairs = [(couple[0], couple[1]) for couple in couples if len(couple) == 2]
        lost = list[int]()
        for (first, second), points in zip(pairs, (yield pairs), strict=True):
            self.add(first, points)
            self.add(second, 1 - points)
            lost.append(second if points >= 0.5 else first)
        return [one for couple in couples for one in couple if one not in lost], lost


def _seeding(count: int) -> Generator[Round, list[float], list[float]]:
    """Returns the points of all against the first."""
    won = yield [(other, 0) for other in range(1, count)]
    return [sum(1 - points for points in won) / len(won), *won]


def _bracket(seeds: list[int]) -> list[int | None]:
    """Returns the samples, best first, in an order in which neighbours meet and the best meet last; None: a place that is free."""
    order = [0]
    while len(order) < len(seeds):
        order = [place for one in order for place in (one, 2 * len(order) - 1 - one)]
    return [seeds[place] if place < len(seeds) else None for place in order]


def _last_out_first(gone: list[list[int]], record: _Record) -> list[int]:
    return [one for lost in reversed(gone) for one in sorted(lost, key=record.mean, reverse=True)]


def _neighbours(table: list[int], met: Sequence[set[int]]) -> Round:
    """Returns pairs of the table, each the highest that is left and the next that it has not met, or the next where it has met all."""
    pairs, left = Round(), list(table)
    while left:
        first = left.pop(0)
        second = next((one for one in left if one not in met[first]), left[0])
        left.remove(second)
        pairs.append((first, second))
    return pairs
