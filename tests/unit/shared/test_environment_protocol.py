"""The environment protocol's answers: what fits becomes scores, anything else is refused with the field and what was expected."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.environment.environment_url import parse
from shared.environment.http_environment import HttpEnvironment
from shared.environment.protocol import MAX_PARTS, EnvironmentAway, EnvironmentFailed, ScoreRequest, read_description, read_scores, words
from shared.schema.sample import Score
from tests.support.tables import table

WHOM = "environment judge at http://judge:8080"
GOOD = {"protocol": 1, "name": "judge", "verbs": ["score"]}


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (502, b"<html>Bad Gateway</html>", EnvironmentAway),
        (503, b"", EnvironmentAway),
        (429, b'{"message": "slow down"}', EnvironmentAway),
        (503, b'{"error": "no judge for this"}', EnvironmentFailed),
        (500, b"Internal Server Error", EnvironmentFailed),
    ],
)
async def test_what_a_proxy_says_is_no_answer_of_the_environment(status: int, answer: bytes, expected: type[Exception]) -> None:
    environment = HttpEnvironment("judge", parse("http://judge:8080"))
    with pytest.raises(expected):
        environment._read("score", status, answer)


finite = st.floats(-1e9, 1e9) | st.integers(-(10**9), 10**9)
name = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20)
entry = finite | st.dictionaries(name, finite, max_size=5).flatmap(lambda parts: finite.map(lambda reward: {**parts, "reward": reward}))
junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rewards", "reward", "error", "x", 7]), inner, max_size=3),
    max_leaves=12,
)


def refused(answer: object, count: int = 1) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        read_scores(answer, count, WHOM)
    text = str(caught.value)
    assert text.startswith(f"{WHOM}: ")
    assert len(text) < 500 and text.isprintable(), text
    return text.removeprefix(f"{WHOM}: ")


@given(st.lists(entry, max_size=6))
def test_what_fits_is_taken_as_it_is_and_survives_both_transports(rewards: list[Any]) -> None:
    answer = {"rewards": rewards, "seconds": 0.1, "x_unknown": None}
    scores = read_scores(answer, len(rewards), WHOM)
    for score, given_ in zip(scores, rewards, strict=True):
        named = given_ if isinstance(given_, dict) else {"reward": given_}
        assert score.reward == float(named["reward"])
        assert score.parts == {name: float(value) for name, value in named.items() if name != "reward"}
    assert read_scores(json.loads(json.dumps(answer)), len(rewards), WHOM) == scores
    assert read_scores(msgpack.unpackb(msgpack.packb(answer)), len(rewards), WHOM) == scores


@given(junk, st.integers(0, 3))
def test_whatever_comes_is_scores_or_a_refusal(answer: object, count: int) -> None:
    try:
        scores = read_scores(answer, count, WHOM)
    except EnvironmentFailed as error:
        assert str(error).startswith(f"{WHOM}: ")
        return
    assert len(scores) == count
    assert all(isinstance(score, Score) and math.isfinite(score.reward) for score in scores)
    assert all(math.isfinite(part) for score in scores for part in score.parts.values())


@table(
    ("answer", "words_"),
    [
        (None, "the answer is None; expected an object"),
        ([1.0], "the answer is [1.0]; expected an object"),
        ({}, "rewards is missing; expected a list with one entry a sample"),
        ({"rewards": 1.0}, "rewards is 1.0; expected a list"),
        ({"rewards": {"0": 1.0}}, "rewards is an object of 1; expected a list"),
        ({"rewards": []}, "rewards has 0 entries; expected 1, one a sample"),
        ({"rewards": [1.0, 1.0]}, "rewards has 2 entries; expected 1"),
        ({"rewards": [math.nan]}, "rewards[0] is nan; expected a finite number"),
        ({"rewards": [-math.inf]}, "rewards[0] is -inf; expected a finite number"),
        ({"rewards": [10**400]}, "rewards[0] is 1000"),
        ({"rewards": [10**5000]}, "rewards[0] is a huge integer"),
        ({"rewards": [True]}, "rewards[0] is True; expected a finite number"),
        ({"rewards": ["1.0"]}, "rewards[0] is '1.0'; expected a finite number"),
        ({"rewards": [None]}, "rewards[0] is None; expected a finite number"),
        ({"rewards": [[1.0]]}, "rewards[0] is [1.0]; expected a finite number"),
        ({"rewards": [{}]}, "rewards[0].reward is missing"),
        ({"rewards": [{"format": 1.0}]}, "rewards[0].reward is missing"),
        ({"rewards": [{"reward": True}]}, "rewards[0].reward is True"),
        ({"rewards": [{"reward": 1, "format": "yes"}]}, "rewards[0].format is 'yes'; expected a finite number"),
        ({"rewards": [{"reward": 1, "two words": math.inf}]}, "rewards[0]['two words'] is inf"),
        ({"rewards": [{"reward": 1, 7: 1.0}]}, "rewards[0] has the name 7; expected 1 to 64 printable"),
        ({"rewards": [{"reward": 1, "\ud800": 1.0}]}, "rewards[0] has the name '\\ud800'; expected 1 to 64 printable"),
        ({"rewards": [{"reward": 1, "a\x1b[31m": 1.0}]}, "rewards[0] has the name 'a\\x1b[31m'; expected 1 to 64 printable"),
        ({"rewards": [{"reward": 1e10}]}, "rewards[0].reward is 10000000000.0; expected a number from -1e+09 to 1e+09"),
        ({"rewards": [{"reward": 1, "": 1.0}]}, "rewards[0] has the name ''"),
        ({"rewards": [{"reward": 1, "n" * 65: 1.0}]}, "rewards[0] has the name 'nnn"),
        ({"rewards": [{"reward": 1, **{str(n): 1.0 for n in range(MAX_PARTS + 1)}}]}, "rewards[0] has 66 entries; expected at most 64"),
        ({"error": "no\nlabel\x1b[31m"}, "says: no label [31m"),
        ({"error": "x" * 5000}, "says: xxx"),
        ({"error": {"why": 1}, "rewards": [1.0]}, "says: {'why': 1}"),
    ],
)
def test_an_answer_that_does_not_fit_names_the_field(answer: object, words_: str) -> None:
    assert refused(answer).startswith(words_)


def test_the_sample_is_named_by_its_place() -> None:
    assert refused({"rewards": [1, 0.5, {"reward": 2}, "1"]}, 4).startswith("rewards[3] is '1'")


@table(
    ("changes", "words_"),
    [
        ({"protocol": 2}, "protocol is 2; expected 1"),
        ({"protocol": "1"}, "protocol is '1'; expected 1"),
        ({"protocol": True}, "protocol is True; expected 1"),
        ({"protocol": 1.0}, "protocol is 1.0; expected 1"),
        ({"protocol": ...}, "protocol is missing; expected 1"),
        ({"name": ...}, "name is missing"),
        ({"name": ""}, "name is ''"),
        ({"name": 7}, "name is 7"),
        ({"verbs": ...}, "verbs is missing"),
        ({"verbs": "score"}, "verbs is 'score'"),
        ({"verbs": ["score", 3]}, "verbs[1] is 3"),
        ({"verbs": ["reset", "close"]}, "verbs is ['reset', 'close']; expected a list with 'score', or with 'reset' and 'step'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "30"}, "timeout is '30'"),
        ({"timeout": math.inf}, "timeout is inf"),
        ({"error": "starting"}, "says: starting"),
    ],
)
def test_a_description_that_does_not_fit_names_the_field(changes: dict[str, Any], words_: str) -> None:
    answer = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(EnvironmentFailed) as caught:
        read_description(answer, WHOM)
    assert str(caught.value).startswith(f"{WHOM}: {words_}")


def test_a_description_may_say_more() -> None:
    description = read_description({**GOOD, "verbs": ["score", "reset", "dance"], "timeout": 30, "licence": "MIT"}, WHOM)
    assert (description.name, description.timeout) == ("judge", 30.0)
    assert read_description(GOOD, WHOM).timeout is None


@given(st.text())
def test_words_of_others_are_one_printable_line(text: str) -> None:
    line = words(text)
    assert line.isprintable() and len(line) < 250


def test_the_page_shows_what_is_sent_and_what_is_taken() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    describe, request, answer = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)[:3])
    assert read_description(describe, WHOM).name
    assert set(request) == set(ScoreRequest.model_fields)
    parsed = ScoreRequest.model_validate(request)
    assert parsed.model_dump() == request
    assert len(read_scores(answer, len(parsed.samples), WHOM)) == len(parsed.samples)
