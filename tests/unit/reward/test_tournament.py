"""The forms of a tournament: whoever is better is placed before whoever is worse, with as many comparisons as the docs say."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.remote_rewards import FORMS
from tests.support.tables import table

Points = Callable[[int, int], float]


def played(name: str, count: int, points: Points, seed: int = 0) -> tuple[list[float], list[tuple[int, int]]]:
    """The rewards, and all pairs in their order."""
    form, met = FORMS[name](count, random.Random(seed)), list[tuple[int, int]]()
    pairs = next(form)
    while True:
        met += pairs
        try:
            pairs = form.send([points(*pair) for pair in pairs])
        except StopIteration as end:
            return end.value, met


def by(strength: list[float]) -> Points:
    """What a judge says who sees how much better one is."""
    return lambda first, second: 0.5 + (strength[first] - strength[second]) / 2


@given(name=st.sampled_from(list(FORMS)), strength=st.lists(st.floats(0, 1), min_size=2, max_size=20), seed=st.integers(0, 99))
def test_rewards_are_shares_of_the_others(name: str, strength: list[float], seed: int) -> None:
    rewards, met = played(name, len(strength), by(strength), seed)
    assert len(rewards) == len(strength) and all(0 <= reward <= 1 for reward in rewards)
    assert sum(rewards) == pytest.approx(len(strength) / 2), "each place is given once"
    assert all(first != second for first, second in met)
    assert played(name, len(strength), by(strength), seed) == (rewards, met)


@table("count", [2, 3, 4, 5, 8, 9, 13, 16])
def test_the_best_is_first_and_what_is_known_exactly_is_in_order(count: int) -> None:
    strength = random.Random(count).sample([index / count for index in range(count)], count)
    right = [sum(one > other for other in strength) / (count - 1) for one in strength]
    best = strength.index(max(strength))
    for name in FORMS:
        rewards, met = played(name, count, by(strength))
        assert rewards[best] == max(rewards) == 1 or name == "anchor" or (name == "swiss" and count % 2), name
        if name == "round_robin":
            assert rewards == pytest.approx(right)
        if name == "anchor":
            assert sorted(range(1, count), key=rewards.__getitem__) == sorted(range(1, count), key=strength.__getitem__)
        if name == "double_elimination" and count > 2:
            assert sorted(rewards)[-2] == rewards[strength.index(sorted(strength)[-2])], "the second best loses to the best alone"
        most = {
            "round_robin": count * (count - 1) // 2,
            "anchor": count - 1,
            "single_elimination": 2 * (count - 1),
            "double_elimination": max(2, 2 * (count - 1)),
        }
        assert len(met) == most.get(name, len(met)), name
        assert len({frozenset(pair) for pair in met}) == len(met) or name not in ("round_robin", "anchor")


def test_the_best_two_meet_last() -> None:
    rewards, met = played("single_elimination", 8, by([index / 8 for index in range(8)]))
    assert rewards == pytest.approx([0, 1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 1])
    assert met[-1] == (7, 6) and met[7] == (7, 0)


def test_ties_share_their_places() -> None:
    assert played("round_robin", 4, lambda first, second: 0.5)[0] == [0.5] * 4
    assert played("anchor", 4, lambda first, second: 1.0 if first == 1 else 0.5)[0] == pytest.approx([0, 1, 0.5, 0.5])


def test_who_rests_in_a_round_is_another_each_time() -> None:
    assert sorted(played("swiss", 3, by([0.1, 0.5, 0.9]))[0]) == [0, 0.5, 1]
    _, met = played("swiss", 5, by([0.1, 0.3, 0.5, 0.7, 0.9]))
    times = [sum(one in pair for pair in met) for one in range(5)]
    assert sorted(times) == [2, 2, 2, 3, 3]
