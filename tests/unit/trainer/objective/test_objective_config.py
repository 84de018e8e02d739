import math

import pytest

from services.trainer.objective import ObjectiveConfig
from shared.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("advantage_estimator", {"advantage_estimator": "grop"}),
        ("kl_loss_type", {"kl_loss_type": "k4"}),
        ("off_policy", {"off_policy": "async"}),
        ("tis_mode", {"tis_mode": "mis"}),
        ("tis_level", {"tis_level": "group"}),
        ("reducer", {"reducer": "mean"}),
        ("eps_clip", {"eps_clip": -0.1}),
        ("eps_clip", {"eps_clip": math.nan}),
        ("eps_clip_high", {"eps_clip_high": -0.1}),
        ("eps_clip_c", {"eps_clip_c": 1.0}),
        ("kl_loss_coef", {"kl_loss_coef": -1.0}),
        ("entropy_coef", {"entropy_coef": math.inf}),
        ("tis_clip", {"tis_clip": 0.5, "tis_clip_low": 0.5}),
        ("tis_clip_low", {"tis_clip_low": -1.0}),
        ("tis_clip_low", {"tis_mode": "truncate", "tis_clip_low": 0.5}),
        ("tis_batch_normalize", {"tis_batch_normalize": True, "off_policy": "rollout"}),
        ("use_rs", {"use_rs": True, "off_policy": "none"}),
        ("rs_veto_threshold", {"rs_veto_threshold": 1e-4, "off_policy": "none"}),
        ("rs_level", {"use_rs": True, "rs_level": "group"}),
        ("rs_upper_bound", {"use_rs": True, "rs_lower_bound": 2.0}),
        ("use_m2po", {"use_m2po": True, "off_policy": "none"}),
        ("use_m2po", {"use_m2po": True, "advantage_estimator": "gspo"}),
        ("eps_clip_c", {"use_m2po": True, "eps_clip_c": 3.0}),
        ("m2_threshold", {"m2_threshold": math.inf}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("kl_coef", {"kl_coef": 0.1, "kl_loss_coef": 0.1, "advantage_estimator": "ppo"}),
        ("use_unbiased_kl", {"use_unbiased_kl": True}),
        ("gamma", {"gamma": 1.5}),
        ("lambd", {"lambd": -0.1}),
        ("value_clip", {"value_clip": -0.1}),
        ("loss_type", {"loss_type": "dpo"}),
        ("opsm_delta", {"opsm_delta": -1.0}),
        ("use_opsm", {"use_opsm": True, "off_policy": "none"}),
        ("fixed_length", {"reducer": "fixed_length"}),
        ("fixed_length", {"fixed_length": 128}),
        ("fixed_length", {"reducer": "fixed_length", "fixed_length": 0}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, values):
    with pytest.raises(ConfigError) as error:
        ObjectiveConfig(**values)
    assert error.value.field == f"objective.{field}"


def test_the_upper_bound_follows_the_lower_unless_given():
    assert (ObjectiveConfig(eps_clip=0.25).clip_low, ObjectiveConfig(eps_clip=0.25).clip_high) == (0.75, 1.25)
    assert ObjectiveConfig(eps_clip=0.25, eps_clip_high=0.5).clip_high == 1.5
    assert ObjectiveConfig(eps_clip=0.25, eps_clip_high=0.0).clip_high == 1.0
