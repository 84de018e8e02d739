"""Which of the numbers that were given counts."""

import math
from typing import Any

import numpy as np
import pytest

from shared.hooks import reward_values
from shared.schema.sample import Score
from tests.support.tables import table


@table(
    ("value", "key", "score"),
    [
        (1, None, Score(reward=1.0)),
        (True, None, Score(reward=1.0)),
        (np.float32(0.5), None, Score(reward=0.5)),
        (np.array(2), None, Score(reward=2.0)),
        (0.5, "match", Score(reward=0.5)),
        ({"reward": 1.0}, None, Score(reward=1.0)),
        ({"reward": 1.0, "format": 0.5}, None, Score(reward=1.0, parts={"format": 0.5})),
        ({"score": -1, "acc": False, "pred": "41"}, "score", Score(reward=-1.0, parts={"score": -1.0, "acc": 0.0})),
        ({"reward": 1.0, "format": 0.5}, "format", Score(reward=0.5, parts={"reward": 1.0, "format": 0.5})),
    ],
)
def test_what_counts(value: Any, key: str | None, score: Score) -> None:
    assert reward_values.read(value, key) == score


@table(
    ("value", "key", "words"),
    [
        (None, None, "a reward is None; expected a finite number"),
        ("1.0", None, "a reward is '1.0'"),
        (math.nan, None, "a reward is nan"),
        (10**400, None, "a reward is"),
        (np.zeros(2), None, "a reward is"),
        ([1.0], None, r"a reward is \[1.0\]"),
        ({}, None, "no reward is named reward; there are none"),
        ({"acc": 1.0, "pred": "x"}, None, "no reward is named reward; there are acc"),
        ({"acc": 1.0}, "score", r"no reward is named score; there are acc \(reward.reward_key says which counts\)"),
        ({"score": "much"}, "score", "no reward is named score; there are none"),
        ({"score": 1.0, "acc": math.inf}, "score", "acc is inf; expected a finite number"),
        ({f"part-{number}": 1.0 for number in range(65)}, None, "65 named rewards; expected at most 64"),
        ({"acc": 1e10, "reward": 1.0}, None, "acc is 10000000000.0; expected a number from -1e\\+09 to 1e\\+09"),
        ({"\ud800": 1.0, "reward": 1.0}, None, "with names of 1 to 64 printable characters"),
        ({"x" * 65: 1.0, "reward": 1.0}, None, "with names of 1 to 64 printable characters"),
    ],
)
def test_what_cannot_count(value: Any, key: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reward_values.read(value, key)


def test_an_environments_named_rewards() -> None:
    score = Score(reward=1.0, parts={"format": 0.5})
    assert reward_values.counted(score, None) is score
    assert reward_values.counted(Score(reward=1.0), "format") == Score(reward=1.0), "a single reward counts"
    assert reward_values.counted(score, "format") == Score(reward=0.5, parts={"reward": 1.0, "format": 0.5})
    many = {f"p{number}": float(number) for number in range(64)}
    assert reward_values.counted(Score(reward=9.0, parts=many), "p1").reward == 1.0
    with pytest.raises(ValueError, match="no reward is named length; there are reward, format"):
        reward_values.counted(score, "length")
