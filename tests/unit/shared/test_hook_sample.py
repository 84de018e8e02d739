"""Samples between store and hooks: nothing is lost on the way, and what does not fit together is refused by field."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.hooks.hook_sample import HookSample, Status
from shared.hooks.sample_conversion import Served, from_stored, group_index, to_stored
from shared.runtime.errors import BadMessage
from shared.schema import sample as stored_sample
from shared.schema.ledger import is_evaluation
from shared.schema.sample import Sample as StoredSample
from shared.schema.sample import SampleLimits, Score
from tests.support.tables import table
from tests.unit.shared.test_sample import samples

SERVED = Served(begun=3, newest=5)
VOCABULARY = 100


def hook_sample(**changes: Any) -> HookSample:
    """Prompt of two tokens, response of four: two of the model, one of a tool, one of the model."""
    fields: dict[str, Any] = {
        "prompt": "1+1=",
        "tokens": [1, 2, 10, 11, 12, 13],
        "response": "text",
        "response_length": 4,
        "label": "2",
        "loss_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-1.0, -2.0, 0.0, -3.0],
        "status": Status.COMPLETED,
        "metadata": {"turns": 2},
    }
    return HookSample(**{**fields, **changes})


LIMITS = SampleLimits(VOCABULARY, log_probs_reader="algorithm.use_tis = true reads them")


def stored(given: HookSample, group: str = "g00000007", served: Served = SERVED, limits: SampleLimits = LIMITS) -> StoredSample:
    return to_stored(given, group, 3, 1, served, limits)


def test_what_a_hook_generated_is_stored() -> None:
    one = stored(hook_sample())
    assert (one.group, one.index, one.rollout, one.finish) == ("g00000007", 3, 1, "stop")
    assert (one.prompt.tolist(), one.response.tolist()) == ([1, 2], [10, 11, 12, 13])
    assert (one.mask.tolist(), one.log_probs.tolist()) == ([1, 1, 0, 1], [-1.0, -2.0, 0.0, -3.0])
    assert (one.text, one.prompt_text, one.label, one.metadata) == ("text", "1+1=", "2", {"turns": 2})
    assert [one.prompt.dtype, one.response.dtype, one.mask.dtype, one.log_probs.dtype] == [np.int32, np.int32, np.uint8, np.float32]
    assert one.segments == [(0, 4, 3)]
    assert stored(hook_sample(status=Status.TRUNCATED)).finish == "length"
    [back] = stored_sample.decode(stored_sample.encode([one], 1000))
    assert (back.rollout, back.segments) == (1, one.segments)


def test_what_may_be_left_out() -> None:
    one = stored(hook_sample(loss_mask=None, rollout_log_probs=[-1, -2, -3, -4]))
    assert one.mask.tolist() == [1, 1, 1, 1]
    one = stored(hook_sample(loss_mask=[0] * 4, rollout_log_probs=None))
    assert one.log_probs is None
    one = stored(hook_sample(remove_sample=True, rollout_log_probs=None))
    assert one.mask.tolist() == [0] * 4
    one = stored(hook_sample(loss_mask=None, rollout_log_probs=None), "eval.heldout.0.1")
    assert one.mask.tolist() == [0] * 4, "held-out samples are not trained"
    one = stored(hook_sample(rollout_log_probs=[-1.0, -2.0, float("nan"), -3.0]))
    assert one.log_probs.tolist() == [-1.0, -2.0, 0.0, -3.0]
    one = stored(hook_sample(tokens=[1], response="", response_length=0, loss_mask=[], rollout_log_probs=[]))
    assert (len(one.response), one.segments) == (0, [])
    arrays = hook_sample(tokens=np.arange(6), loss_mask=np.array([True, False, True, True]), rollout_log_probs=np.zeros(4))
    assert stored(arrays).mask.tolist() == [1, 0, 1, 1]


@table(
    ("changes", "words"),
    [
        ({"response_length": -1}, "response_length is -1"),
        ({"response_length": None}, "response_length is None"),
        ({"response_length": 6}, "6 tokens with a response_length of 6; expected a prompt's tokens, then the response's"),
        ({"tokens": []}, "0 tokens with a response_length of 4"),
        ({"tokens": "abcdef"}, "tokens is not a list of token ids"),
        ({"tokens": None}, "tokens is not a list of token ids"),
        ({"tokens": [1.5] * 6}, "tokens is not a list of token ids"),
        ({"tokens": [[1], [2, 3]]}, "tokens is not a list of token ids"),
        ({"tokens": [1, 2, 3, 4, 5, 100]}, r"token 100 at 5 is not in \[0, 100\)"),
        ({"tokens": [1, -2, 3, 4, 5, 6]}, r"token -2 at 1 is not in \[0, 100\)"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 entries for 4 response tokens"),
        ({"loss_mask": [1, 1, 2, 1]}, "loss_mask holds 2; expected 0 and 1"),
        ({"loss_mask": [1.0] * 4}, "loss_mask is not a list of 0 and 1"),
        ({"rollout_log_probs": None}, r"rollout_log_probs is missing, .* as the engine sampled them; algorithm\.use_tis = true reads them"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs has 1 entries for 4 response tokens"),
        ({"rollout_log_probs": [-1.0, float("nan"), 0.0, 0.0]}, "rollout_log_probs is nan at 1, a trained token"),
        ({"rollout_log_probs": [None] * 4}, "rollout_log_probs is not a list of numbers"),
        ({"status": Status.FAILED}, "status is Status.FAILED; expected COMPLETED or TRUNCATED"),
        ({"status": "done"}, "status is done; expected COMPLETED or TRUNCATED"),
        ({"reward": "good"}, "reward: a reward is 'good'; expected a finite number"),
        ({"reward": {"score": float("nan")}}, "reward: score is nan; expected a finite number"),
        ({"response": b"text"}, "response is text"),
        ({"metadata": {"when": object()}}, "metadata does not travel in a message: object"),
        ({"metadata": {1: "one"}}, "metadata does not travel in a message"),
        ({"weight_versions": [3, 3, 6, 3]}, "weight_versions names 6; the newest that this replica served is 5"),
        ({"weight_versions": [3, 3, -2, 3]}, "weight_versions names -2; versions count from 0"),
        ({"weight_versions": ["default"]}, "weight_versions is .*default.*: ValueError"),
        ({"weight_versions": [(0, 5, 3)]}, "weight_versions has a span 0 to 5 of 4 response tokens"),
        ({"weight_versions": [(0, 5)]}, "weight_versions is .*ValueError"),
        ({"weight_versions": [{"start": 0}]}, "weight_versions is .*KeyError"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadMessage, match=f"sample g00000007/3: .*{words}"):
        stored(hook_sample(**changes))


VERSIONS = {
    "nothing said": ([], [(0, 4, 3)]),
    "one a token": ([3, 4, 4, 5], [(0, 1, 3), (1, 3, 4), (3, 4, 5)]),
    "one a token, some not known": ([None, 4, None, None], [(0, 1, 3), (1, 3, 4), (3, 4, 3)]),
    "that of a tool's token means nothing": ([4, 4, 5, 4], [(0, 4, 4)]),
    "spans": ([(0, 2, 4), (2, 4, 5)], [(0, 3, 4), (3, 4, 5)]),
    "the engine's own spans": ([{"start": 0, "end": 2, "version": "4"}], [(0, 3, 4), (3, 4, 3)]),
    "slime's, one a call": (["4", "5"], [(0, 4, 3)]),
    "slime's, as many as tokens": (["4", "4", "4", "5"], [(0, 4, 3)]),
    "slime's, an old one": (["2", "5"], [(0, 4, 2)]),
}


@table("case", VERSIONS)
def test_versions_are_never_taken_for_newer_than_they_may_be(case: str) -> None:
    given, segments = VERSIONS[case]
    assert stored(hook_sample(weight_versions=given)).segments == segments


@table(
    ("late", "given", "expected"),
    [
        ({4}, [3, 4, 4, 4], [3, 3, 3, 4]),
        ({4}, [4, 4, 4, 4], [3, 4, 4, 4]),
        ({3}, [3, 3, 3, 3], [3, 3, 3, 3]),
        ({4, 5}, [4, 5, 5, 5], [3, 4, 4, 5]),
        ({5}, [3, 3, 3, 5], [3, 3, 3, 3]),
    ],
)
def test_a_versions_late_first_token_counts_for_the_one_before(late: set[int], given: list[int], expected: list[int]) -> None:
    served = Served(begun=3, newest=5, late=frozenset(late))
    assert stored(hook_sample(weight_versions=given), served=served).versions().tolist() == expected


@given(samples(), st.booleans())
def test_a_stored_sample_comes_back_from_a_hook_as_it_was(one: StoredSample, removed: bool) -> None:
    seen = from_stored(one)
    assert seen.tokens == [*one.prompt.tolist(), *one.response.tolist()]
    assert (seen.response, seen.response_length, seen.index, seen.rollout_id) == (one.text, len(one.response), one.index, one.rollout)
    back = to_stored(seen, one.group, one.index, one.rollout, Served(begun=0, newest=9), SampleLimits(VOCABULARY))
    assert (back.prompt.tolist(), back.response.tolist(), back.mask.tolist()) == (
        one.prompt.tolist(),
        one.response.tolist(),
        one.mask.tolist(),
    )
    trained = one.mask.astype(bool)
    assert back.log_probs[trained].tolist() == one.log_probs[trained].tolist()
    assert back.versions()[trained].tolist() == one.versions()[trained].tolist()
    assert (back.finish, back.label, back.prompt_text, back.metadata) == (one.finish, one.label, one.prompt_text, one.metadata)


def test_the_reward_of_a_stored_sample() -> None:
    one = stored(hook_sample())
    assert from_stored(one).reward is None
    assert from_stored(one, Score(reward=0.5)).reward == 0.5
    assert getattr(from_stored(replace(one, role="solver")), "role", None) == "solver", "rewards are compared within it"
    assert from_stored(one, Score(reward=0.5, parts={"format": 1.0})).reward == {"reward": 0.5, "format": 1.0}
    named = Score(reward=1.0, parts={"format": 1.0, "match": 0.0}, removed=True)
    seen = from_stored(one, named, "format")
    assert (seen.reward, seen.remove_sample) == ({"format": 1.0, "match": 0.0}, True)


def test_ids_of_groups() -> None:
    assert (group_index("g00000012"), group_index("eval.heldout.3.7"), group_index("x")) == (12, 7, 0)
    assert (is_evaluation("g00000012"), is_evaluation("eval.heldout.3.7")) == (False, True)


def meta(finish: str, *spans: tuple[int, int, int]) -> dict[str, Any]:
    versions = [{"start": start, "end": end, "version": str(version)} for start, end, version in spans]
    return {"finish_reason": {"type": finish}, "weight_version": "9", **({"weight_versions": versions} if spans else {})}


def test_appending_keeps_all_in_step() -> None:
    one = HookSample(tokens=[1, 2])
    one.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta("stop", (0, 1, 3), (1, 5, 4)), text="ab")
    one.append_response_tokens(tokens=[7], trainable=False, text="[tool]")
    one.append_response_tokens(tokens=[8], log_probs=[-3.0], meta_info=meta("length"), text="c")
    assert (one.tokens, one.response, one.response_length) == ([1, 2, 5, 6, 7, 8], "ab[tool]c", 4)
    assert (one.loss_mask, one.rollout_log_probs) == ([1, 1, 0, 1], [-1.0, -2.0, 0.0, -3.0])
    assert one.weight_versions == [3, 4, None, None], "what an engine is called at the end says nothing of a token"
    assert (one.status, one.effective_response_length) == (Status.TRUNCATED, 3)
    one.append_response_tokens(tokens=[], meta_info=meta("abort"))
    assert (one.status, one.response_length) == (Status.ABORTED, 4)
    assert stored(hook_sample(**{**vars(one), "status": Status.COMPLETED})).segments == [(0, 1, 3), (1, 3, 4), (3, 4, 3)]


def test_verified_drafts_are_counted_whichever_flag_has_engines_verify_them() -> None:
    one, drafted = HookSample(tokens=[1]), {"completion_tokens": 1, "spec_verify_ct": 1}
    one.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta("stop") | drafted)
    one.append_response_tokens(tokens=[6], log_probs=[-1.0], meta_info=meta("stop") | {"completion_tokens": 1})
    assert (one.spec_info.spec_verify_ct, one.spec_info.completion_token_num) == (1, 1)


def test_log_probs_that_nobody_kept_stay_unknown_and_are_no_zeros() -> None:
    one = stored(hook_sample(rollout_log_probs=None), limits=SampleLimits(VOCABULARY))
    assert one.log_probs is None and one.mask.tolist() == [1, 1, 0, 1]
    [back] = stored_sample.decode(stored_sample.encode([one], 1000), SampleLimits(VOCABULARY))
    assert back.log_probs is None and from_stored(back).rollout_log_probs is None
    with pytest.raises(stored_sample.InvalidSample, match=r"log_probs are missing: algorithm\.use_tis = true reads them"):
        stored_sample.decode(stored_sample.encode([one], 1000), LIMITS)
    held_out = stored(hook_sample(rollout_log_probs=None), "eval.heldout.0.1")
    assert held_out.log_probs is None and not held_out.mask.any()


def test_appending_tokens_without_log_probs_leaves_the_whole_sample_without() -> None:
    one = HookSample(tokens=[1])
    one.append_response_tokens(tokens=[9], trainable=False, text="[")
    one.append_response_tokens(tokens=[5, 6], text="ab")
    one.append_response_tokens(tokens=[7], trainable=False, text="]")
    one.append_response_tokens(tokens=[], log_probs=[])
    one.append_response_tokens(tokens=[8], text="c")
    assert (one.rollout_log_probs, one.loss_mask, one.response) == (None, [0, 1, 1, 0, 1], "[ab]c")
    with pytest.raises(ValueError, match="the 5 response tokens before these have no rollout_log_probs"):
        one.append_response_tokens(tokens=[8], log_probs=[-1.0])
    other = HookSample(tokens=[1])
    other.append_response_tokens(tokens=[5], log_probs=[-1.0])
    with pytest.raises(ValueError, match="1 trainable tokens without log_probs, after 1 response tokens with them"):
        other.append_response_tokens(tokens=[6])


def test_appending_refuses_log_probs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="1 log_probs for 2 tokens"):
        HookSample().append_response_tokens(tokens=[5, 6], log_probs=[-1.0])
    with pytest.raises(ValueError, match="the 2 response tokens before these have no rollout_log_probs"):
        HookSample(tokens=[1, 5, 6], response_length=2).append_response_tokens(tokens=[7], log_probs=[-1.0])
