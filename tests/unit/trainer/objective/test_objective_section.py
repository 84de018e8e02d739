"""The section [algorithm]: slime's names mean what they mean there, and what contradicts itself is refused by field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from services.trainer.objective import ObjectiveConfig
from services.trainer.trainer_settings import objective_config
from shared.config import flags
from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import parse
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values


@pytest.mark.parametrize(
    ("given", "correction"),
    [
        ({}, "decoupled"),
        ({"use_tis": True}, "decoupled"),
        ({"use_tis": False}, "none"),
        ({"use_rollout_logprobs": True}, "rollout"),
        ({"use_rollout_logprobs": True, "use_tis": False}, "rollout"),
        ({"off_policy": "rollout", "use_rollout_logprobs": True}, "rollout"),
        ({"off_policy": "none", "use_tis": False}, "none"),
    ],
)
def test_slimes_switches_choose_the_correction(tmp_path: Path, given: dict[str, Any], correction: str) -> None:
    config = run_config(tmp_path, algorithm=given)
    assert objective_config(config).off_policy == correction


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"use_rollout_logprobs": True, "use_tis": True}, "use_rollout_logprobs"),
        ({"use_rollout_logprobs": True, "off_policy": "decoupled"}, "use_rollout_logprobs"),
        ({"use_tis": True, "off_policy": "none"}, "use_tis"),
        ({"use_tis": False, "off_policy": "decoupled"}, "use_tis"),
        ({"use_rs": True, "off_policy": "none"}, "use_rs"),
        ({"tis_batch_normalize": True, "use_tis": False}, "tis_batch_normalize"),
        ({"rs_veto_threshold": 1e-4, "use_rollout_logprobs": True}, "rs_veto_threshold"),
        ({"custom_tis_function_path": "m:f", "off_policy": "rollout"}, "custom_tis_function_path"),
        ({"custom_tis_function_path": "m:f", "use_rs": True}, "use_rs"),
        ({"rs_level": "sequence"}, "rs_level"),
        ({"rs_upper_bound": 2.0}, "rs_upper_bound"),
        ({"use_rs": True, "rs_lower_bound": 3.0}, "rs_upper_bound"),
        ({"tis_clip": 0.5, "tis_clip_low": 0.5}, "tis_clip"),
        ({"tis_mode": "truncate", "tis_clip_low": 0.5}, "tis_clip_low"),
        ({"use_opsm": True, "use_tis": False}, "use_opsm"),
        ({"use_m2po": True, "off_policy": "none"}, "use_m2po"),
        ({"use_m2po": True, "advantage_estimator": "cispo"}, "use_m2po"),
        ({"use_m2po": True, "eps_clip_c": 3.0}, "eps_clip_c"),
        ({"kl_coef": 0.1}, "kl_coef"),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1, "advantage_estimator": "ppo"}, "kl_coef"),
        ({"use_unbiased_kl": True}, "use_unbiased_kl"),
        ({"ref_update_interval": 10}, "ref_update_interval"),
        ({"num_critic_only_steps": 1}, "num_critic_only_steps"),
        ({"use_opd": True}, "opd_type"),
        ({"use_opd": True, "opd_type": "megatron"}, "opd_teacher_load"),
        ({"use_opd": True, "opd_type": "sglang", "opd_teacher_load": "teacher"}, "opd_teacher_load"),
        ({"opd_type": "sglang"}, "opd_type"),
        ({"custom_advantage_function_path": "m:f", "advantage_estimator": "ppo"}, "custom_advantage_function_path"),
        ({"loss_type": "custom_loss"}, "custom_loss_function_path"),
        ({"custom_loss_function_path": "m:f"}, "custom_loss_function_path"),
        ({"custom_loss_function_path": "m.f", "loss_type": "custom_loss"}, "custom_loss_function_path"),
        ({"calculate_per_token_loss": True, "loss_divisor": 100}, "loss_divisor"),
        ({"loss_type": "dpo"}, "loss_type"),
        ({"gamma": 1.1}, "gamma"),
        ({"lambd": -0.1}, "lambd"),
        ({"m2_threshold": -1}, "m2_threshold"),
    ],
)
def test_a_contradiction_is_refused_by_field(tmp_path: Path, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(tmp_path, algorithm=given)
    assert error.value.field == f"algorithm.{field}"
    assert error.value.expected


def test_every_field_of_the_objective_comes_from_the_section(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "advantage_estimator": "ppo", "disable_rewards_normalization": True, "disable_grpo_std_normalization": True,
        "normalize_advantages": True, "gamma": 0.9, "lambd": 0.95, "use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5,
        "eps_clip": 0.1, "eps_clip_high": 0.28, "eps_clip_c": 3.0, "value_clip": 0.3, "m2_threshold": 0.1, "use_kl_loss": True,
        "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.01, "use_unbiased_kl": True, "entropy_coef": 0.001, "tis_mode": "mask",
        "tis_level": "sequence", "tis_clip": 3.0, "tis_clip_low": 0.5, "tis_batch_normalize": True, "use_rs": True,
        "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1, "rs_veto_threshold": 1e-4, "use_opsm": True,
        "opsm_delta": 0.1, "loss_divisor": 100, "rejection_threshold": 0.5,
    }  # fmt: skip
    found = objective_config(run_config(tmp_path, algorithm=given))
    wanted = {"normalize_rewards": False, "normalize_std": False, "reducer": "fixed_length", "fixed_length": 100}
    same = {name for name in given if name in {field.name for field in fields(ObjectiveConfig)}}
    assert {name: getattr(found, name) for name in same} == {name: given[name] for name in same}
    assert {name: getattr(found, name) for name in wanted} == wanted
    left = {field.name for field in fields(ObjectiveConfig)} - same - set(wanted)
    assert left == {"loss_type", "kl_coef", "use_m2po", "off_policy"}  # which would contradict these, and are tried above
    assert objective_config(run_config(tmp_path, algorithm={"calculate_per_token_loss": True})).reducer == "token_mean"


def test_the_sections_defaults_are_the_objectives(tmp_path: Path) -> None:
    assert objective_config(run_config(tmp_path)) == ObjectiveConfig()
    assert not AlgorithmSection().has_critic
    assert AlgorithmSection(advantage_estimator="ppo").has_critic


PAGE = (Path(__file__).parents[4] / "docs" / "algorithms.md").read_text()
ROWS = [line for line in PAGE.partition("## Which flags give what")[2].partition("\n## ")[0].splitlines() if "`--" in line]


@pytest.mark.parametrize("row", ROWS, ids=[re.split(r"[|(]", row)[1].strip() for row in ROWS])
def test_the_flags_of_the_documentation_are_a_valid_objective(tmp_path: Path, row: str) -> None:
    first, *others = re.findall(r"`(--[^`]*)`", row)
    for words in (first, *(f"{first} {other}" for other in others if other.split()[0] not in first)):
        if "custom_loss" in words:
            words += " --custom-loss-function-path my.losses:f"
        given = flags.parse(words.replace("DIR", "teacher").replace(" N", " 1024").split())
        assert isinstance(objective_config(parse(values(tmp_path, **given))), ObjectiveConfig)


def test_the_documentation_has_every_algorithm() -> None:
    assert len(ROWS) >= 18
    for estimator in ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert f"--advantage-estimator {estimator}" in PAGE
