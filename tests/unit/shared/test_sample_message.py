"""A hook's sample on its way to a process and back, and what of it is stored."""

import threading
from typing import Any

import numpy as np
import pytest

from shared.hooks import HookSample, Status
from shared.hooks.sample_conversion import Served, from_stored, packed, to_stored, unpacked
from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema import sample as stored_sample
from shared.schema.sample import SampleLimits
from tests.support.tables import table


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
