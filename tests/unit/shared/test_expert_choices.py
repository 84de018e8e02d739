"""Experts that travel with samples: through the store, to and from hooks, and refused where they do not fit."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.packing import pack
from shared.hooks.sample_conversion import Served, from_stored, to_stored
from shared.runtime.errors import BadMessage
from shared.schema import sample as samples
from shared.schema.sample import ExpertChoices, InvalidSample, Sample, SampleLimits, fitted
from tests.support.run_config import run_config

CHOICES = ExpertChoices(layers=(1, 2), total=3, per_token=2, count=4)
LIMITS = SampleLimits(choices=CHOICES)
ROUTED = (np.arange(5 * 4) % 4).astype(np.int16).reshape(5, 2, 2)


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt": np.array([1, 2, 3], np.int32),
        "response": np.array([4, 5, 6], np.int32),
        "log_probs": np.full(3, -1.0, np.float32),
        "mask": np.ones(3, np.uint8),
        "segments": [(0, 3, 0)],
        "routed_experts": ROUTED,
    }
    return Sample("g00000001", 0, **{**fields, **changes}, finish="stop", text="abc")


def test_they_come_back_from_the_store_as_they_went() -> None:
    (found,) = samples.decode(samples.encode([sample()], 1 << 20), LIMITS)
    assert found.routed_experts is not None and found.routed_experts.dtype == np.int16
    assert np.array_equal(found.routed_experts, ROUTED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routed_experts": None}, "routed_experts are missing"),
        ({"routed_experts": ROUTED[:4]}, r"shape \[4, 2, 2\]; expected \[5, 2, 2\]"),
        ({"routed_experts": ROUTED[..., :1]}, r"shape \[5, 2, 1\]"),
        ({"routed_experts": ROUTED + np.int16(1)}, "1 to 4; the model's experts are 0 to 3"),
        ({"routed_experts": ROUTED.astype(np.int32)}, "not an array of int16"),
    ],
)
def test_what_does_not_fit_the_tokens_costs_its_sample(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSample, match=reason):
        samples.decode(samples.encode([sample(**changes)], 1 << 20), LIMITS)


def test_a_sample_that_is_not_trained_needs_none() -> None:
    bare = sample(mask=np.zeros(3, np.uint8), routed_experts=None)
    assert bare.problem(LIMITS) is None and sample(routed_experts=None).problem() is None


def test_one_that_is_cut_keeps_those_of_what_is_left_and_one_that_is_not_trained_is_packed_without() -> None:
    [shorter] = fitted([sample()], 5, "truncate")
    assert np.array_equal(shorter.routed_experts, ROUTED[:4]) and shorter.problem(LIMITS) is None
    unreadable = sample(mask=np.zeros(3, np.uint8), routed_experts=ROUTED[:2])
    experts = pack([sample(), unreadable], [1.0, 1.0], CHOICES).experts
    assert experts is not None and np.array_equal(experts[:5], ROUTED) and (experts[5:] == -1).all()


def test_an_engine_tells_all_layers_and_those_with_experts_are_kept() -> None:
    told = (np.arange(5 * 6) % 4).astype("<i4")
    found = CHOICES.read(base64.b64encode(told.tobytes()).decode(), 5)
    assert np.array_equal(found, told.reshape(5, 3, 2)[:, 1:])
    with pytest.raises(ValueError, match="30 experts for 4 tokens"):
        CHOICES.read(base64.b64encode(told.tobytes()).decode(), 4)


def test_hooks_see_and_give_them() -> None:
    seen = from_stored(sample())
    assert np.array_equal(seen.rollout_routed_experts, ROUTED)
    again = to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS)
    assert np.array_equal(again.routed_experts, ROUTED) and "rollout_routed_experts" not in again.attributes
    seen.rollout_routed_experts = (np.arange(5 * 6) % 4).reshape(5, 3, 2)  # of all layers, as slime's functions keep them
    assert to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS).routed_experts.shape == (5, 2, 2)
    seen.rollout_routed_experts = ROUTED[:3]
    with pytest.raises(BadMessage, match=r"shape \[3, 2, 2\]; expected \[5, 2, 2\]"):
        to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"ingest": {"ingest_groups": "beside"}}, "groups from outside"),
        ({"rollout": {"agent": "package.module:play"}}, "the sessions of agents"),
        ({"rollout": {"sglang": {"enable-hierarchical-cache": True}}}, "have lost their experts"),
    ],
)
def test_what_tells_no_experts_is_refused(sections: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=reason):
        run_config(tmp_path, **sections, trainer={"use_rollout_routing_replay": True})
