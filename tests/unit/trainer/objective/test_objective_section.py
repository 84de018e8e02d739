"""The section [algorithm]: slime's names mean what they mean there, and what contradicts itself is refused by field."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from shared.config import presets
from shared.config.algorithm import AlgorithmSection
from shared.runtime.errors import ConfigError, Problems
from tests.support.run_config import run_config


def test_slimes_switches_choose_the_correction(tmp_path: Path) -> None:
    for given, correction in (
        ({}, "decoupled"),
        ({"use_tis": True}, "decoupled"),
        ({"use_tis": False}, "none"),
        ({"use_rollout_logprobs": True}, "rollout"),
        ({"use_rollout_logprobs": True, "use_tis": False}, "rollout"),
        ({"off_policy": "rollout", "use_rollout_logprobs": True}, "rollout"),
        ({"off_policy": "none", "use_tis": False}, "none"),
    ):
        assert run_config(tmp_path, algorithm=given).algorithm.correction == correction, given


TAUGHT = {"use_opd": True, "opd_type": "sglang", "opd_teachers": {"a": "http://a:1"}}


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"use_rollout_logprobs": True, "use_tis": True}, "use_rollout_logprobs"),
    ({"use_rollout_logprobs": True, "off_policy": "decoupled"}, "use_rollout_logprobs"),
    ({"use_tis": True, "off_policy": "none"}, "use_tis"),
    ({"use_tis": False, "off_policy": "decoupled"}, "use_tis"),
    ({"use_rs": True, "off_policy": "none"}, "use_rs"),
    ({"tis_batch_normalize": True, "use_tis": False}, "tis_batch_normalize"),
    ({"rs_veto_threshold": 1e-4, "use_rollout_logprobs": True}, "rs_veto_threshold"),
    ({"custom_tis_function_path": "m:f", "off_policy": "rollout"}, "custom_tis_function_path"),
    ({"rs_level": "sequence"}, "rs_level"),
    ({"rs_upper_bound": 2.0}, "rs_upper_bound"),
    ({"use_rs": True, "rs_lower_bound": 3.0}, "rs_upper_bound"),
    ({"tis_clip": 0.5, "tis_clip_low": 0.5}, "tis_clip"),
    ({"tis_mode": "truncate", "tis_clip_low": 0.5}, "tis_clip_low"),
    ({"use_m2po": True, "off_policy": "none"}, "use_m2po"),
    ({"use_m2po": True, "advantage_estimator": "cispo"}, "use_m2po"),
    ({"use_m2po": True, "eps_clip_c": 3.0}, "eps_clip_c"),
    ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "eps_clip_c"),
    ({"gamma": 0.9}, "gamma"),
    ({"advantage_estimator": "reinforce_plus_plus_baseline", "gamma": 0.9}, "gamma"),
    ({"advantage_estimator": "reinforce_plus_plus", "lambd": 0.9}, "lambd"),
    ({"rs_veto_threshold": 1e-9}, "rs_veto_threshold"),
    ({"kl_coef": 0.1}, "kl_coef"),
    ({"kl_coef": 0.1, "kl_loss_coef": 0.1, "advantage_estimator": "ppo"}, "kl_coef"),
    ({"use_unbiased_kl": True}, "use_unbiased_kl"),
    ({"ref_update_interval": 10}, "ref_update_interval"),
    ({"num_critic_only_steps": 1}, "num_critic_only_steps"),
    ({"use_opd": True}, "opd_type"),
    ({"use_opd": True, "opd_type": "megatron"}, "opd_teacher_load"),
    ({"use_opd": True, "opd_type": "sglang", "opd_teacher_load": "teacher"}, "opd_teacher_load"),
    ({"opd_type": "sglang"}, "opd_type"),
    ({"opd_teachers": {"a": "http://a:1"}}, "opd_teachers"),
    ({"use_opd": True, "opd_type": "sglang", "opd_teachers": {"a": "nats:a"}}, "opd_teachers"),
    ({"use_opd": True, "opd_type": "sglang", "opd_teachers": {"a": "a:1"}}, "opd_teachers"),
    ({"use_opd": True, "opd_type": "sglang", "opd_top_k": 8}, "opd_top_k"),
    ({**TAUGHT, "opd_top_k_coef": 2.0}, "opd_top_k_coef"),
    ({**TAUGHT, "opd_teacher_weights": {"b": 1.0}}, "opd_teacher_weights"),
    ({**TAUGHT, "opd_teacher_weights": {"a": 0.0}}, "opd_teacher_weights"),
    ({**TAUGHT, "opd_teacher_key_variable": "sk-hush"}, "opd_teacher_key_variable"),
    ({**TAUGHT, "opd_top_k": 8, "loss_type": "custom_loss", "custom_loss_function_path": "m:f"}, "opd_top_k"),
    ({"custom_advantage_function_path": "m:f", "advantage_estimator": "ppo"}, "custom_advantage_function_path"),
    ({"loss_type": "custom_loss"}, "custom_loss_function_path"),
    ({"custom_loss_function_path": "m:f"}, "custom_loss_function_path"),
    ({"custom_loss_function_path": "m f", "loss_type": "custom_loss"}, "custom_loss_function_path"),
    ({"calculate_per_token_loss": True, "loss_divisor": 100}, "loss_divisor"),
    ({"loss_type": "dpo"}, "loss_type"),
    ({"gamma": 1.1}, "gamma"),
    ({"lambd": -0.1}, "lambd"),
    ({"m2_threshold": -1}, "m2_threshold"),
    ({"advantage_estimator": "grop"}, "advantage_estimator"),
    ({"kl_loss_type": "k4"}, "kl_loss_type"),
    ({"off_policy": "async"}, "off_policy"),
    ({"tis_mode": "mis"}, "tis_mode"),
    ({"tis_level": "group"}, "tis_level"),
    ({"use_rs": True, "rs_level": "group"}, "rs_level"),
    ({"eps_clip": -0.1}, "eps_clip"),
    ({"eps_clip": math.nan}, "eps_clip"),
    ({"eps_clip_high": -0.1}, "eps_clip_high"),
    ({"eps_clip_c": 1.0}, "eps_clip_c"),
    ({"kl_loss_coef": -1.0}, "kl_loss_coef"),
    ({"entropy_coef": math.inf}, "entropy_coef"),
    ({"m2_threshold": math.inf}, "m2_threshold"),
    ({"value_clip": -0.1}, "value_clip"),
    ({"opsm_delta": -1.0}, "opsm_delta"),
    ({"loss_divisor": 0}, "loss_divisor"),
]


def test_a_contradiction_is_refused_by_field(tmp_path: Path) -> None:
    found = []
    for given, field in CONTRADICTIONS:
        try:
            run_config(tmp_path, algorithm=given)
            found.append(f"{given}: accepted")
        except ConfigError as error:
            if error.field != f"algorithm.{field}" or not error.expected:
                found.append(f"{given}: {error}")
    assert not found


BASELINE = {"advantage_estimator": "reinforce_plus_plus_baseline"}


def test_one_sample_a_prompt_cannot_be_compared_with_others(tmp_path: Path) -> None:
    for given in ({}, {"advantage_estimator": "gspo"}, BASELINE, {"advantage_estimator": "rloo"}, {"disable_grpo_std_normalization": True}):
        with pytest.raises(ConfigError) as error:
            run_config(tmp_path, algorithm=given, rollout={"n_samples_per_prompt": 1})
        assert error.value.field == "rollout.n_samples_per_prompt"


def test_one_sample_a_prompt_is_fine_where_samples_are_not_compared(tmp_path: Path) -> None:
    for given in (
        {"loss_type": "sft_loss"},
        {"loss_type": "custom_loss", "custom_loss_function_path": "m:f"},
        {"use_opd": True, "opd_type": "sglang"},
        {"disable_rewards_normalization": True},
        {"custom_advantage_function_path": "m:f"},
        {"custom_reward_post_process_path": "m:f"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "ppo"},
        {**BASELINE, "disable_rewards_normalization": True},
    ):
        assert run_config(tmp_path, algorithm=given, rollout={"n_samples_per_prompt": 1}).rollout.n_samples_per_prompt == 1


@pytest.mark.parametrize("sections", [{"rollout": {"num_rollout": 0}, "sft": {"sft_data": ["x"]}}, {"debug": {"debug_rollout_only": True}}])
def test_one_sample_a_prompt_is_fine_where_nothing_is_compared(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    given = {**sections, "rollout": {**sections.get("rollout", {}), "n_samples_per_prompt": 1}}
    assert run_config(tmp_path, **given).rollout.n_samples_per_prompt == 1


def test_what_follows_from_several_fields() -> None:
    assert AlgorithmSection(calculate_per_token_loss=True).reducer == "token_mean"
    assert AlgorithmSection(loss_divisor=100).reducer == "fixed_length"
    assert AlgorithmSection().reducer == "rollout_mean"
    assert AlgorithmSection(eps_clip=0.25).clip_range == (0.75, 1.25)
    assert AlgorithmSection(eps_clip=0.25, eps_clip_high=0.5).clip_range == (0.75, 1.5)
    assert AlgorithmSection(use_rs=True, tis_clip_low=0.5, rs_upper_bound=3.0).rejection_bounds == (0.5, 3.0)
    assert AlgorithmSection().compares_rewards
    assert not AlgorithmSection(disable_rewards_normalization=True).compares_rewards
    assert not AlgorithmSection(custom_reward_post_process_path="m:f").compares_rewards
    assert not AlgorithmSection(advantage_estimator="ppo").compares_rewards
    assert AlgorithmSection(use_kl_loss=True).measures_kl and not AlgorithmSection().measures_kl
    assert AlgorithmSection(advantage_estimator="ppo").has_critic and not AlgorithmSection().has_critic


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(Problems) as error:
        run_config(
            tmp_path,
            algorithm={"kl_coef": 0.1, "tis_clip": 0.5, "tis_clip_low": 0.5, "use_m2po": True, "off_policy": "none"},
            trainer={"num_steps_per_rollout": 3},
        )
    for field in ("algorithm.kl_coef", "algorithm.tis_clip", "algorithm.use_m2po", "trainer.num_steps_per_rollout"):
        assert field in str(error.value)


PAGE = (Path(__file__).parents[4] / "docs" / "algorithms.md").read_text()
ROWS = [line for line in PAGE.partition("## Which flags give what")[2].partition("\n## ")[0].splitlines() if "`--" in line]


def test_the_documentation_tells_every_preset_as_it_is() -> None:
    told = dict(re.findall(r"\| `(\w+)` \| `(--[^`]*)` \|", "\n".join(ROWS)))
    assert told == {name: presets.flags_of(name) for name in presets.PRESETS}


def test_the_documentation_has_every_algorithm() -> None:
    assert len(ROWS) >= 18
    for estimator in ("grpo", "gspo", "cispo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert f"--advantage-estimator {estimator}" in PAGE
