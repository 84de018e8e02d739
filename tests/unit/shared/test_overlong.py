"""Samples that are longer than a micro-batch."""

import re

import numpy as np
import pytest

from shared.config.run_config import field_sections
from shared.runtime.errors import BadMessage
from shared.schema.sample import Sample, fitted, too_long
from tests.support.train_samples import train_sample

TURNS = [(0, 2, 0.5), (3, 4, 1.0)]
FITS = train_sample([1, 2], [3, 4], index=0)
LONG = train_sample(
    [1, 2], [3, 4, 5, 6], [0, 0, 1, 1], index=1, text="all of it", mask=np.array([1, 1, 0, 1], np.uint8), finish="stop", turn_rewards=TURNS
)


def test_what_is_too_long_is_told_with_fields_that_there_are() -> None:
    named = [word for word in re.findall(r"[a-z_]+", too_long(9, 8)) if "_" in word]
    assert named == ["max_tokens_per_gpu", "context_parallel_size", "rollout_max_response_len"]
    assert set(named) <= set(field_sections())


def test_what_fits_is_left_as_it_is() -> None:
    [found] = fitted([LONG], 6, "drop")
    assert found is LONG


@pytest.mark.parametrize("longest", [3, 4, 5])
def test_a_longer_one_is_truncated(longest: int) -> None:
    [fits, cut] = fitted([FITS, LONG], max(4, longest), "truncate") if longest > 3 else fitted([LONG, LONG], longest, "truncate")
    room = longest - 2
    assert longest == 3 or fits is FITS
    assert (cut.prompt.tolist(), cut.response.tolist()) == ([1, 2], [3, 4, 5, 6][:room])
    assert (len(cut.log_probs), cut.mask.tolist()) == (room, [1, 1, 0, 1][:room])
    assert (cut.finish, cut.text, cut.problem()) == ("length", "all of it", None)
    assert cut.versions().tolist() == [0, 0, 1, 1][:room]
    assert cut.turn_rewards == [(0, min(2, room), 0.5), (min(3, room), room, 1.0)], "the rewards of what was cut off count for what is left"


def test_masked_nothing_of_it_is_trained_and_the_others_are() -> None:
    [fits, cut] = fitted([FITS, LONG], 5, "mask")
    assert fits is FITS and cut.length == 5 and not cut.mask.any() and cut.problem() is None


def test_its_group_is_given_up() -> None:
    with pytest.raises(BadMessage, match="sample g/1 has 6 tokens, a micro-batch holds at most 5: raise max_tokens_per_gpu or context_par"):
        fitted([FITS, LONG], 5, "drop")


@pytest.mark.parametrize("policy", ["truncate", "mask"])
def test_a_prompt_that_leaves_no_room_ends_its_group(policy: str) -> None:
    with pytest.raises(BadMessage, match="sample g/1 has 6 tokens, a micro-batch holds at most 2"):
        fitted([LONG], 2, policy)  # type: ignore[arg-type]


def test_a_group_of_which_nothing_is_left_to_train_is_given_up() -> None:
    with pytest.raises(BadMessage, match="no sample of group g that could be trained fits: sample g/1 has 6 tokens"):
        fitted([LONG, LONG], 5, "mask")


def test_a_group_that_trained_nothing_before_is_no_matter_of_length() -> None:
    masked: Sample = train_sample([1], [2], mask=np.zeros(1, np.uint8))
    assert fitted([masked], 2, "mask") == [masked]
