"""The learning-rate schedule."""

import pytest

from shared.config.trainer_section import LearningRateSchedule
from shared.runtime.errors import ConfigError


def rates(count, **fields):
    schedule = LearningRateSchedule(**fields)
    return [schedule.at(update) for update in range(count)]


def test_constant_after_a_warm_up_that_wastes_no_update():
    assert rates(5, lr=1.0, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates(2, lr=1.0) == [1.0, 1.0]


def test_linear_decay_ends_at_min_lr_and_stays():
    assert rates(7, lr=1.0, min_lr=0.2, warmup_steps=1, decay_steps=5, decay_style="linear") == pytest.approx(
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_decay_is_half_way_in_the_middle():
    values = rates(6, lr=1.0, min_lr=0.0, decay_steps=4, decay_style="cosine")
    assert values == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lr": 1.0, "decay_style": "linear"}, "lr_warmup_iters"),
        ({"lr": 1.0, "decay_style": "cosine", "decay_steps": 3, "warmup_steps": 3}, "lr_warmup_iters"),
        ({"lr": 1.0, "min_lr": 2.0, "decay_style": "linear", "decay_steps": 3}, "min_lr"),
    ],
)
def test_contradictions_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        LearningRateSchedule(**fields)
