"""A hook's sample: its fields, on its way to a process and back, against what the engine answered."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.hooks.hook_sample import HookSample, Status
from shared.hooks.sample_agreement import Answer, compared
from shared.hooks.sample_conversion import Served, from_stored, group_index, packed, to_stored, unpacked
from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema import sample as stored_sample
from shared.schema.ledger import is_evaluation
from shared.schema.sample import Sample, SampleLimits, Score
from shared.schema.sample import Sample as StoredSample
from tests.support.tables import table
from tests.support.valid_messages import example
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


# --- a hook's sample on its way to a process and back, and what of it is stored


def travelled(sample: HookSample) -> HookSample:
    return unpacked(codec.unpack(codec.pack(packed(sample))))


def full() -> HookSample:
    sample = HookSample(prompt="1+1=", tokens=[1, 2], label={"ground_truth": ["2"]}, index=7, rollout_id=7, metadata={"level": 3})
    meta = {
        "finish_reason": {"type": "stop"},
        "cached_tokens": 1,
        "prompt_tokens": 2,
        "weight_versions": [{"start": 0, "end": 2, "version": "3"}],
    }
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta, text="ab")
    sample.append_response_tokens(tokens=[9], trainable=False, text="!")
    sample.reward, sample.train_metadata, sample.non_generation_time = {"score": 1.0, "pred": "2"}, {"loss": "own"}, 2.5
    sample.tool_calls, sample.texts = 2, ["a", "b"]  # type: ignore[attr-defined]
    return sample


def test_a_sample_comes_back_as_it_was() -> None:
    assert vars(travelled(full())) == vars(full())
    assert vars(travelled(HookSample())) == vars(HookSample())


def test_arrays_come_back_as_lists_and_what_does_not_travel_stays(capfd: pytest.CaptureFixture[str]) -> None:
    sample: Any = full()
    sample.tokens, sample.loss_mask, sample.score = np.arange(5), np.array([1, 1, 0]), np.float32(0.5)
    sample.lock = threading.Lock()
    back: Any = travelled(sample)
    assert (back.tokens, back.loss_mask, back.score) == ([0, 1, 2, 3, 4], [1, 1, 0], 0.5)
    assert not hasattr(back, "lock") and "sample.lock, a lock, stays in this process" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("metadata", {"x": object()}), ("tokens", [object()]), ("response", object())])
def test_a_field_that_does_not_travel_is_refused_by_name(name: str, value: Any) -> None:
    sample = full()
    setattr(sample, name, value)
    with pytest.raises(BadMessage, match=f"{name} does not travel in a message"):
        packed(sample)


@pytest.mark.parametrize(("given", "status"), [("completed", Status.COMPLETED), (Status.TRUNCATED, Status.TRUNCATED), ("done", "done")])
def test_a_status_comes_back_by_whichever_word(given: Any, status: Any) -> None:
    sample = full()
    sample.status = given
    assert travelled(sample).status == status


def test_what_a_stored_sample_has_no_field_for_goes_along() -> None:
    [stored] = stored_sample.decode(stored_sample.encode([to_stored(full(), "g00000003", 1, 1, Served(3, 3), SampleLimits(100))], 1000))
    seen: Any = from_stored(stored)
    assert (seen.tool_calls, seen.texts, seen.train_metadata, seen.non_generation_time) == (2, ["a", "b"], {"loss": "own"}, 2.5)
    assert (seen.index, seen.rollout_id, seen.reward) == (7, 7, {"score": 1.0})
    assert seen.prefix_cache_info.prefix_cache_hit_rate == 0.5
    assert stored.given_reward == {"score": 1.0}


def test_lists_grow_in_place_and_aborted_samples_are_stored_only_to_be_gone_on_with() -> None:
    sample = HookSample(tokens=[1])
    sample.loss_mask, sample.rollout_log_probs = [], []
    held = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}})
    assert held == ([1, 2], [1], [-1.0]) and sample.status is Status.ABORTED
    with pytest.raises(BadMessage, match="status is Status.ABORTED"):
        to_stored(sample, "g00000003", 0, 0, Served(3, 3), SampleLimits(100))
    assert to_stored(sample, "g00000003", 0, 0, Served(3, 3), SampleLimits(100), unfinished=True).finish == "abort"


@table(
    ("given", "words"),
    [
        ({"tokens": [1], "log_probs": [-1.0, -2.0]}, "2 log_probs for 1 tokens"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "tokens that are not trainable have no log_probs"),
        ({"tokens": [1], "log_probs": [0.0], "meta_info": {"top_p_token_ids": [1]}}, "only one of a nucleus's"),
        ({"tokens": [1], "log_probs": [0.0], "meta_info": {"routed_experts": [1]}}, "args is needed"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HookSample(tokens=[1]).append_response_tokens(**given)


def test_nuclei_stay_in_step_with_the_tokens() -> None:
    sample = HookSample(tokens=[1])
    meta = {"top_p_token_ids": [7, 8, 9], "top_p_token_offsets": [0, 1, 3]}
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-1.0, -1.0], meta_info=meta)
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert (sample.rollout_top_p_token_ids.tolist(), sample.rollout_top_p_token_offsets.tolist()) == ([7, 8, 9], [0, 1, 3, 3])
    assert travelled(sample).rollout_top_p_token_offsets == [0, 1, 3, 3]


# --- samples of a function of the user's, against its prompt, its text and what the engine answered

PROMPT, DRAWN, TOOL = [1, 2, 3], [11, 12, 13, 14], [40, 41]
LOG_PROBS = [-0.5, -1.5, -0.25, -2.0]
SPECIAL = "<|end|>"


def decode(ids: Any, skip_special_tokens: bool) -> str:
    """A letter a token; 99 is the special one."""
    return "".join(("" if skip_special_tokens else SPECIAL) if token == 99 else chr(ord("A") + int(token)) for token in ids)


def sample(tokens: list[int], length: int, log_probs: list[float] | None, mask: list[int] | None = None, text: str | None = None) -> Sample:
    prompt, response = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    known = {"prompt": prompt, "response": response, "log_probs": log_probs, "mask": mask or 1}
    return example(Sample, group="g1", text=decode(response, False) if text is None else text, **known)


def found(one: Sample, *answers: Answer, changed: bool = False, whole: bool = True) -> SimpleNamespace:
    own, refused, doubts = compared(one, None if changed else np.array(PROMPT, np.int32), answers, decode, [SPECIAL], whole)
    return SimpleNamespace(own=own, refused=refused, doubts=doubts)


def answer(start: int, ids: list[int], log_probs: list[float] | None = None) -> Answer:
    return start, np.array(ids, np.int32), None if log_probs is None else np.array(log_probs, np.float32)


FIRST = answer(3, DRAWN, LOG_PROBS)
SECOND = answer(9, [15, 16], [-0.75, -1.0])
TWO_TURNS = [*PROMPT, *DRAWN, *TOOL, 15, 16]


@table(
    ("one", "answers"),
    [
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [FIRST]),
        (sample([*PROMPT, *DRAWN], 4, None), [FIRST]),
        (sample([*PROMPT, *DRAWN[:2]], 2, LOG_PROBS[:2]), [FIRST]),  # cut at a stop of the function's own
        (sample([*PROMPT, 8, *DRAWN], 4, LOG_PROBS), [answer(4, DRAWN, LOG_PROBS)]),  # a prompt with more to it
        (sample(TWO_TURNS, 8, [*LOG_PROBS, 0, 0, -0.75, -1.0], [1, 1, 1, 1, 0, 0, 1, 1]), [FIRST, SECOND]),
        (sample(TWO_TURNS, 2, [-0.75, -1.0]), [FIRST, SECOND]),  # of two turns the last is trained
        (sample([*PROMPT, *DRAWN], 2, LOG_PROBS[2:]), [FIRST]),  # of one answer the end is trained
        (sample([*PROMPT, *DRAWN], 4, [0.0, 0.0, 0.0, -2.0]), [answer(3, DRAWN, [0.0, 0.0, 0.0, -2.0])]),  # a model that is sure
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [answer(3, [11, 12], [-9.0, -9.0]), FIRST]),  # another rollout's answer, of older weights
        (sample([*PROMPT, *DRAWN], 5, [0.0, *LOG_PROBS], [0, 1, 1, 1, 1]), []),  # the prompt ends with the beginning of an answer
        (sample([*PROMPT, *DRAWN, 99], 5, [*LOG_PROBS, -0.1], text=f" {decode(DRAWN, True)}\n"), []),  # special tokens, white space
        (sample([*PROMPT, *DRAWN, 99], 5, [*LOG_PROBS, -0.1], text=decode(DRAWN, True) + SPECIAL), []),
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), []),
    ],
)
def test_what_agrees_is_taken_without_a_word(one: Sample, answers: list[Answer]) -> None:
    agreement = found(one, *answers)
    assert (agreement.refused, agreement.doubts) == (None, {})


@table(
    ("one", "answers", "reason"),
    [
        # two tokens of a tool behind what the engine sampled, and a length without them
        (sample([*PROMPT, *DRAWN, *TOOL], 4, LOG_PROBS, text=decode(DRAWN, True)), [], "response_length is 4, but tokens has 6 behind"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, None, text=decode(DRAWN + TOOL, True)), [], "response_length is 4, but tokens has 6 behind"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, LOG_PROBS, text="?"), [FIRST], "response_length is 4, but the engine had sampled"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, None, text="?"), [FIRST], "response_length is 4, but the engine had sampled"),
        # tokens without the last one
        (sample([*PROMPT, *DRAWN[:3]], 4, LOG_PROBS), [FIRST], "response_length is 4, and counts the last 1 tokens of the prompt"),
        # a tool without a mask
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), [FIRST], "loss_mask: 2 trained tokens, the first at 4"),
        (sample(TWO_TURNS, 8, [*LOG_PROBS, 0, 0, -0.75, -1.0]), [FIRST, SECOND], "loss_mask: 2 trained tokens, the first at 4"),
        # log-probs of other tokens, and none at all
        (sample([*PROMPT, *DRAWN], 4, [*LOG_PROBS[1:], -0.1]), [FIRST], "rollout_log_probs is -0.1 at 3"),
        (sample([*PROMPT, *DRAWN], 4, [0.0] * 4), [FIRST], "rollout_log_probs is 0 at 3"),
        # none for the second turn, short beside the first
        (
            sample([*PROMPT, *[11] * 900, 15, 16], 902, [*[-0.5] * 900, 0.0, 0.0]),
            [answer(3, [11] * 900, [-0.5] * 900), answer(903, [15, 16], [-0.75, -1.0])],
            "rollout_log_probs is 0 at 901",
        ),
    ],
)
def test_what_contradicts_the_engine_or_itself_is_refused_by_its_field(one: Sample, answers: list[Answer], reason: str) -> None:
    assert reason in (found(one, *answers).refused or "")


@table(
    ("one", "answers", "field"),
    [
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS, text="something else"), [], "response"),
        (sample([7, 7, *DRAWN], 4, LOG_PROBS), [], "tokens"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), [], "rollout_log_probs"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, None), [FIRST], "loss_mask"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, -1, -1]), [FIRST], "loss_mask"),  # perhaps another server's
        (sample([*PROMPT, *DRAWN], 4, [0.0] * 4), [answer(3, DRAWN)], "rollout_log_probs"),  # the engine was asked for none
        # other tokens than any answer's: one that began alike, the first one left out, one before it, another in place of the last
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [answer(3, [11, 12, 50], [-9.0, -9.0, -9.0])], "tokens"),
        (sample([*PROMPT, *DRAWN[1:]], 3, LOG_PROBS[1:]), [FIRST], "tokens"),
        (sample([*PROMPT, 8, *DRAWN], 5, [-0.1, *LOG_PROBS]), [FIRST], "tokens"),
        (sample([*PROMPT, *DRAWN[:2], 99], 3, [*LOG_PROBS[:2], 0.0]), [FIRST], "tokens"),
    ],
)
def test_what_may_have_a_reason_is_a_doubt_by_its_field(one: Sample, answers: list[Answer], field: str) -> None:
    agreement = found(one, *answers)
    assert (agreement.refused, [*agreement.doubts]) == (None, [field])


def test_a_prompt_that_the_function_has_changed_is_its_own() -> None:
    assert found(sample([7, 7, *DRAWN], 4, LOG_PROBS), changed=True).doubts == {}


def test_tokens_that_came_by_a_stream_are_a_doubt_alone() -> None:
    agreement = found(sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), FIRST, whole=False)
    assert (agreement.refused, {*agreement.doubts}) == (None, {"loss_mask", "tokens"})
    assert agreement.own.tolist() == [True] * 4 + [False] * 2
