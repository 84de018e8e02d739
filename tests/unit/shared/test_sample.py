"""Samples: what belongs together stays aligned, and a payload that does not fit together is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.errors import BadMessage
from shared.schema import codec, sample
from shared.schema.message import MAX_KEYS
from shared.schema.sample import Sample, SampleLimits
from tests.support.tables import table


def make(index: int = 0, length: int = 4, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "group": "g00000000",
        "index": index,
        "prompt": np.array([1, 2, 3], np.int32),
        "response": np.arange(length, dtype=np.int32),
        "log_probs": np.linspace(-1, -2, length, dtype=np.float32),
        "mask": np.ones(length, np.uint8),
        "segments": [(0, length, 5)] if length else [],
        "finish": "stop",
        "text": "text",
        "prompt_text": [{"role": "user", "content": "?"}],
        "label": "4",
        "metadata": {"level": 2},
        **changes,
    }
    return Sample(**fields)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    cuts = draw(st.lists(st.integers(1, 5), max_size=4))
    ends = np.cumsum(cuts).tolist()
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=len(cuts), max_size=len(cuts))))
    length = sum(cuts)
    return make(
        index=draw(st.integers(0, 7)),
        rollout=draw(st.integers(-1, 7)),
        length=length,
        mask=np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), np.uint8),
        segments=list(zip([0, *ends[:-1]], ends, versions, strict=False)),
        text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        label=draw(st.none() | st.just("4")),
        given_reward=draw(st.none() | st.floats(-1e9, 1e9) | st.dictionaries(st.sampled_from(["score", "acc"]), st.floats(-1, 1))),
        turn_rewards=[(start, end, draw(st.floats(-1, 1))) for start, end in zip([0, *ends[:-1]], ends, strict=False)],
        attributes=draw(st.dictionaries(st.sampled_from(["turns", "text"]), st.integers(0, 9) | st.just("four"))),
    )


def same(left: Sample, right: Sample) -> bool:
    for name in ("prompt", "response", "log_probs", "mask"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        assert getattr(left, name).dtype == getattr(right, name).dtype
    rest = ("group", "index", "rollout", "segments", "finish", "text", "prompt_text", "label", "metadata", "given_reward", "attributes")
    return all(getattr(left, name) == getattr(right, name) for name in (*rest, "turn_rewards"))


@given(st.lists(samples(), max_size=6), st.integers(1, 2000))
def test_groups_come_back_from_any_number_of_blobs(group: list[Sample], blob_bytes: int) -> None:
    back = sample.decode(sample.encode(group, blob_bytes))
    assert len(back) == len(group)
    assert all(same(left, right) for left, right in zip(back, group, strict=True))


def test_blobs_are_cut_near_the_size_that_was_asked_for() -> None:
    group = [make(index, length=1000) for index in range(10)]
    assert len(sample.encode(group, 1 << 20)) == 1
    one = len(sample.encode(group[:1], 1)[0])
    assert len(sample.encode([make(2)] * (MAX_KEYS + 1), 1)) <= MAX_KEYS, "a reference lists no more"
    blobs = sample.encode(group, 20_000)
    assert len(blobs) == 4
    assert all(20_000 <= len(blob) < 20_000 + one for blob in blobs[:-1])


def test_wider_types_travel_as_the_documented_ones() -> None:
    wide = make(
        prompt=np.array([1], np.int64),
        response=np.arange(4),
        log_probs=np.zeros(4, np.float64),
        mask=np.ones(4, bool),
        segments=[(0, 4, 0)],
    )
    [back] = sample.decode(sample.encode([wide], 1000))
    assert [getattr(back, name).dtype for name in ("prompt", "response", "log_probs", "mask")] == [np.int32, np.int32, np.float32, np.uint8]


@given(samples())
def test_meta_covers_the_trained_tokens_and_versions_tile_the_response(one: Sample) -> None:
    versions = one.versions()
    assert versions.shape == one.response.shape
    for start, end, version in one.segments:
        assert (versions[start:end] == version).all()
    meta = one.meta()
    assert meta.tokens == len(one.response)
    trained = [int(version) for version, use in zip(versions, one.mask, strict=True) if use]
    looked_at = trained or versions.tolist() or [0]
    assert (meta.oldest, meta.newest) == (min(looked_at), max(looked_at))


@table(
    ("changes", "words"),
    [
        ({"log_probs": np.zeros(3, np.float32)}, "log_probs has 3 entries for 4 response tokens"),
        ({"mask": np.ones(5, np.uint8)}, "mask has 5 entries for 4 response tokens"),
        ({"log_probs": np.array([0, np.nan, 0, 0], np.float32)}, "log_probs holds nan at 1, a trained token"),
        ({"log_probs": np.array([0, -np.inf, 0, 0], np.float32)}, "log_probs holds -inf at 1, a trained token"),
        ({"log_probs": np.array([0, 0, 0.002, 0], np.float32)}, "log_probs holds 0.002.* at 2, a trained token; .*at most 0"),
        ({"log_probs": np.array([0, 0, 0, -3e38], np.float32)}, "log_probs holds .*e.38 at 3, a trained token"),
        ({"segments": [(0, 3, 1)]}, "segments end at 3, the response at 4"),
        ({"segments": []}, "segments end at 0, the response at 4"),
        ({"segments": [(1, 4, 1)]}, "do not tile"),
        ({"segments": [(0, 2, 1), (3, 4, 1)]}, "do not tile"),
        ({"segments": [(0, 3, 1), (2, 4, 1)]}, "do not tile"),
        ({"segments": [(0, 2, 1), (2, 2, 1), (2, 4, 1)]}, "do not tile"),
        ({"segments": [(0, 4, -1)]}, "segments name version -1; versions lie between 0 and"),
        ({"segments": [(0, 2, 1), (2, 4, 2**40)]}, "segments name version 1099511627776; versions lie between 0 and 2147483647"),
        ({"segments": [(0, 5, 1)]}, "segments end at 5, the response at 4"),
        ({"response": np.zeros((2, 2), np.int32)}, "response is not a one-dimensional array of integers"),
        ({"response": np.zeros(4, np.float32)}, "response is not a one-dimensional array of integers"),
        ({"log_probs": np.zeros(4, np.int32)}, "log_probs is not a one-dimensional array of floats"),
        ({"log_probs": [0.0] * 4}, "log_probs is not a one-dimensional array of floats"),
        ({"mask": np.array([0, 1, 2, 1], np.uint8)}, "mask holds 2; expected 0 and 1"),
        ({"prompt": np.zeros(0, np.int32)}, "prompt is empty"),
        ({"mask": np.full(4, 7, np.uint8)}, "mask holds 7; expected 0 and 1"),
        ({"prompt": np.array([5, -1], np.int32)}, "prompt holds token -1 at 1, which is not in"),
        ({"response": np.array([1, 2, 3, 2**40])}, "response holds token 1099511627776 at 3"),
        ({"rollout": True}, "rollout is .True., not an integer"),
        ({"rollout": 1 << 31}, "rollout is '2147483648'"),
        ({"finish": "why"}, "finish is 'why'; expected one of stop, length, abort"),
        ({"text": None}, "group and text are text"),
        ({"label": 4}, "label is text or None"),
        ({"metadata": []}, "metadata is not a map"),
        ({"role": "the left"}, "role is 'the left'; expected 1 to 64 letters"),
        ({"role": 7}, "role is '7'"),
        ({"attributes": []}, "attributes is not a map"),
        ({"given_reward": "1"}, "given_reward is '1'; expected a number up to 1e\\+09, or 64 by name"),
        ({"given_reward": float("nan")}, "given_reward is 'nan'"),
        ({"given_reward": True}, "given_reward is 'True'"),
        ({"given_reward": {"score": "good"}}, "given_reward is .*good"),
        ({"turn_rewards": [[0, 1, 0.5]]}, r"turn_rewards holds \[0, 1, 0.5\] at 0; expected \(start, end, reward\)"),
        ({"turn_rewards": [(0, 2, 0.5), (1, 3, 0.0)]}, "turn_rewards holds .* at 1; .*, a span from 2 to 4"),
        ({"turn_rewards": [(0, 5, 0.5)]}, "turn_rewards holds .* at 0; .*, a span from 0 to 4"),
        ({"turn_rewards": [(0, 4, float("nan"))]}, "turn_rewards holds .*, a reward up to 1e"),
        ({"turn_rewards": [(0, True, 1.0)]}, "turn_rewards holds"),
        ({"turn_rewards": [(0, 0, 1.0)] * 16385}, "turn_rewards is not a list of at most 16384 turns"),
        ({"mask": "1111"}, "mask is not a one-dimensional array of integers"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadMessage, match=f"sample g00000000/2: .*{words}"):
        make(2, **changes).check()


LIMITS = SampleLimits(vocabulary=10, newest=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": np.array([1, 10], np.int32)}, r"prompt holds token 10 at 1, which is not in \[0, 10\)"),
        ({"response": np.array([0, 1, -7, 10], np.int32)}, r"response holds token -7 at 2, which is not in \[0, 10\)"),
        ({"segments": [(0, 4, 6)]}, "segments name version 6; versions lie between 0 and 5, the newest that there can be"),
    ],
)
def test_what_a_run_knows_of_all_samples_is_held_against_each(changes: dict[str, Any], words: str) -> None:
    odd = make(**changes)
    make().check(LIMITS)
    with pytest.raises(BadMessage, match=words):
        odd.check(LIMITS)
    if odd.problem() is None:
        assert len(sample.decode(sample.encode([odd], 1000))) == 1
    with pytest.raises(BadMessage, match=words):
        sample.decode(sample.encode([odd], 1000), LIMITS)


def test_the_rounding_of_an_engine_is_no_fault() -> None:
    make(log_probs=np.array([1e-6, 9e-4, 0, -900], np.float32)).check()


def test_what_is_not_trained_may_lack_a_log_prob() -> None:
    fine = make(log_probs=np.array([0, np.nan, 0, 0], np.float32), mask=np.array([1, 0, 1, 1], np.uint8))
    [back] = sample.decode(sample.encode([fine], 1000))
    assert np.isnan(back.log_probs[1])


def test_a_sample_is_a_rollout_of_its_own_unless_it_says_so() -> None:
    assert make(3).rollout == 3
    assert sample.rollouts([make(0), make(1), make(2)]) == ()
    fanned = [make(0, rollout=0), make(1, rollout=0), make(2, rollout=1)]
    assert sample.rollouts(fanned) == (0, 0, 1)
    assert sample.rollouts(sample.decode(sample.encode(fanned, 1))) == (0, 0, 1)


def test_a_payload_from_before_rollouts_is_read() -> None:
    entry = codec.unpack(sample.encode([make(2)], 1000)[0])["samples"][0]
    del entry["rollout"]
    [back] = sample.decode([codec.pack({"schema": sample.SCHEMA, "samples": [entry]})])
    assert back.rollout == 2


def blob(**changes: Any) -> bytes:
    entry = codec.unpack(sample.encode([make()], 1000)[0])["samples"][0]
    return codec.pack({"schema": sample.SCHEMA, "samples": [{**entry, **changes}]})


@table(
    "data",
    [
        b"garbage",
        codec.pack([1, 2]),
        codec.pack({"schema": 99, "samples": []}),
        codec.pack({"schema": np.zeros((0, 4), np.int32), "samples": []}),
        codec.pack({"schema": np.zeros(2, np.int32), "samples": []}),
        codec.pack({"schema": sample.SCHEMA}),
        codec.pack({"schema": sample.SCHEMA, "samples": 5}),
        codec.pack({"schema": sample.SCHEMA, "samples": [5]}),
        codec.pack({"schema": sample.SCHEMA, "samples": [{"group": "g"}]}),
        blob(surprise=1),
        blob(segments=5),
        blob(segments=[[0, 4]]),
        blob(segments=[[0, "4", 1]]),
        blob(segments=[[0, 4, None]]),
        blob(log_probs="abcd"),
        blob(response=[0, 1, 2, 3]),
        blob(mask=np.ones(3, np.uint8)),
        blob(mask=np.full(4, 255, np.uint8)),
        blob(mask=np.full(4, -1, np.int32)),
        blob(prompt=np.zeros(0, np.int32)),
        blob(log_probs=np.full(4, np.nan, np.float32)),
        blob(segments=[[0, 3, 1]]),
        blob(rollout="1"),
        blob(rollout=1.5),
        blob(rollout=None),
        blob(index=None),
        blob(group=5),
        blob(text=5),
        blob(metadata=None),
        blob(segments=[[0, 4, 1 << 40]]),
        blob(segments=[[0, 4, True]]),
        blob(response=np.array([0, 1, 2, 1 << 40])),
    ],
)
def test_a_payload_from_elsewhere_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        sample.decode([data])
