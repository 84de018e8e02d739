"""No field is accepted and ignored: of each objective every field that may be changed changes the loss, a metric or a gradient."""

import itertools
from functools import cache

import numpy as np
import pytest
from pydantic import ValidationError

from shared.config.algorithm import AlgorithmSection

from .objective_run import Outcome, drawn, outcome

OTHERS = {
    "loss_type": ["sft_loss"],
    "advantage_estimator": ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"],
    "gamma": [0.5],
    "lambd": [0.5],
    "rejection_threshold": [-0.75],
    "eps_clip": [0.02],
    "eps_clip_high": [0.03],
    "eps_clip_c": [1.01],
    "value_clip": [0.01],
    "m2_threshold": [0.001],
    "kl_loss_coef": [0.1],
    "kl_coef": [0.1],
    "entropy_coef": [0.1],
    "off_policy": ["rollout", "none", "decoupled"],
    "use_tis": [True, False],
    "tis_mode": ["truncate", "mask"],
    "tis_level": ["sequence", "geometric"],
    "tis_clip": [1.05],
    "tis_clip_low": [0.95],
    "rs_level": ["sequence", "geometric"],
    "rs_lower_bound": [0.9],
    "rs_upper_bound": [1.1],
    "rs_veto_threshold": [0.8],
    "opsm_delta": [0.5],
    "opd_kl_coef": [0.25],
    "loss_divisor": [7],
    "kl_loss_type": ["k1", "k2"],
}
"""Other values than the default; of switches, the other one."""

ELSEWHERE = {
    "turn_advantage_coef": "services.trainer.loss_inputs adds turns' advantages",
    "turn_gamma": "services.trainer.loss_inputs adds turns' advantages",
    "preset": "sets other fields before there is a section",
    "num_critic_only_steps": "services.trainer.loop counts steps",
    "ref_update_interval": "services.trainer.reference_policy counts steps",
    "opd_type": "where the teacher's log-probs come from",
    "opd_teacher_load": "where the teacher's log-probs come from",
    "opd_teachers": "where the teacher's log-probs come from",
    "opd_top_k": "services.trainer.loss_inputs adds the distillation's loss",
    "opd_top_k_coef": "services.trainer.loss_inputs adds the distillation's loss",
    "opd_teacher_weights": "which teachers a prompt has",
    "opd_teacher_key_variable": "where the teachers' key is",
    "opd_teacher_key": "which teachers a prompt has",
    "opd_teacher_timeout": "how long a teacher is waited for",
    "opd_teacher_concurrency": "how many samples a teacher has in hand",
}
"""Fields whose effect is not one of a single step's loss. Paths to functions of the user's own have tests of their own."""

UNREAD = {"kl_loss_type"}
"""Accepted without a KL, as the rules say."""

BASES = [
    {"loss_type": "policy_loss", "advantage_estimator": estimator, **correction}
    for estimator, correction in itertools.product(OTHERS["advantage_estimator"], ({}, {"off_policy": "rollout"}, {"off_policy": "none"}))
]
FEATURES = [
    {},
    {"use_kl_loss": True, "kl_loss_coef": 0.1},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.5, "rs_upper_bound": 3.0},
    {"use_opsm": True},
    {"use_m2po": True},
    {"use_opd": True, "opd_type": "sglang"},
    {"tis_mode": "mask", "tis_clip_low": 0.7, "tis_clip": 1.3, "tis_batch_normalize": True},
    {"kl_coef": 0.1},
]


def section(**fields) -> AlgorithmSection | None:
    try:
        return AlgorithmSection(**fields)
    except ValidationError:
        return None


def changes(base: dict):
    for field, info in AlgorithmSection.model_fields.items():
        if field in ELSEWHERE or field.endswith("_path") or field in base:
            continue
        for value in OTHERS.get(field, [not info.default] if isinstance(info.default, bool) else []):
            if value != info.default:
                yield field, value


def same(one: Outcome, other: Outcome) -> bool:
    numbers = [[found.loss, *found.metrics.values(), *np.concatenate(found.gradients)] for found in (one, other)]
    numbers = [[*row, *np.concatenate(found.advantages)] for row, found in zip(numbers, (one, other), strict=True)]
    if one.critic is not None and other.critic is not None:
        numbers = [[*row, *np.concatenate(found.critic[1])] for row, found in zip(numbers, (one, other), strict=True)]
    return numbers[0] == numbers[1]


def test_every_field_has_another_value_or_a_reason_why_not():
    switches = {name for name, info in AlgorithmSection.model_fields.items() if isinstance(info.default, bool)}
    paths = {name for name in AlgorithmSection.model_fields if name.endswith("_path")}
    assert switches | paths | {*OTHERS} | {*ELSEWHERE} == {*AlgorithmSection.model_fields}


@pytest.mark.parametrize("base", [*BASES, {"loss_type": "sft_loss"}], ids=lambda base: "-".join(map(str, base.values())))
def test_what_is_accepted_has_an_effect(base):
    batches = [drawn(seed, nats=0.6, fan_out=True) for seed in range(5)]
    tried = 0
    for feature in FEATURES:
        fields = {**base, **feature}
        config = section(**fields)
        if config is None:
            continue
        before = cache(lambda seed, config=config: outcome(config, batches[seed]))
        for field, value in changes(fields):
            changed = section(**fields, **{field: value})
            if changed is None or (field in UNREAD and not (changed.measures_kl or changed.kl_coef)):
                continue
            if field in ("use_tis", "use_rollout_logprobs", "off_policy") and changed.correction == config.correction:
                continue  # it says what is so
            if field == "use_kl_loss" and config.kl_coef:
                continue  # there is a reference, and the KL to it is measured
            if (field, value) == ("tis_mode", "truncate") and not config.tis_clip_low:
                continue  # clipped to at least 0, which every weight is
            tried += 1
            alike = all(same(before(seed), outcome(changed, batches[seed])) for seed in range(len(batches)))  # most differ in the first
            assert not alike, f"{field} = {value} changes nothing in {fields}"
    assert tried > (1 if base["loss_type"] == "sft_loss" else 20)
