"""Presets, slime's functions of the objective, and runs without log-probs."""

from pathlib import Path
from typing import Any

import pytest

from myxo.commands.flag_list import lines_of
from shared.config import flags, presets, slime_defaults
from shared.config.config_reading import parse
from shared.config.presets import PRESETS, ValueOf
from shared.config.run_config import RunConfig
from shared.hooks import load
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import table


def read(tmp_path: Path, words: str, **sections: Any) -> RunConfig:
    given = flags.parse(words.split())
    return parse(values(tmp_path, **{name: {**sections.get(name, {}), **given.get(name, {})} for name in {*sections, *given}}))


def fields(config: RunConfig) -> dict[str, Any]:
    return {field: value for section in type(config).model_fields for field, value in getattr(config, section)}


@table("name", PRESETS)
def test_a_preset_sets_its_fields_and_nothing_else(tmp_path: Path, name: str) -> None:
    plain, found = fields(read(tmp_path, "")), fields(read(tmp_path, f"--preset {name}"))
    wanted = {field: found[value.field] if isinstance(value, ValueOf) else value for field, value in PRESETS[name].items()}
    assert found == {**plain, **wanted, "preset": [name]}


@table("name", PRESETS)
def test_a_preset_is_the_flags_that_it_is_said_to_be(tmp_path: Path, name: str) -> None:
    by_flags = fields(read(tmp_path, presets.flags_of(name).replace("ROLLOUT_MAX_RESPONSE_LEN", "1024")))
    assert by_flags == {**fields(read(tmp_path, f"--preset {name}")), "preset": []}
    assert any(name in line.split() and presets.flags_of(name) in line for line in lines_of("preset"))


def test_what_is_given_stays(tmp_path: Path) -> None:
    given = read(
        tmp_path, "--preset dapo --eps-clip-high 0.3", algorithm={"eps_clip": 0.1}, rollout={"dynamic_sampling_filter_path": "m:f"}
    )
    assert (given.algorithm.eps_clip, given.algorithm.eps_clip_high) == (0.1, 0.3)
    assert given.algorithm.calculate_per_token_loss
    assert given.rollout.dynamic_sampling_filter_path == "m:f"


@table(
    ("words", "field", "value"),
    [
        ("--preset dapo --use-tis", "off_policy", None),
        ("--preset grpo --use-rollout-logprobs", "off_policy", None),
        ("--preset icepop --no-use-tis", "off_policy", "decoupled"),  # what follows is refused: it has no weight to mask
        ("--preset dr_grpo --calculate-per-token-loss", "loss_divisor", None),
        ("--preset cispo --loss-divisor 10", "calculate_per_token_loss", False),
        ("--preset ppo --kl-loss-coef 0.1", "kl_coef", 0.0),
        ("--preset ppo --kl-loss-coef 0.00", "kl_coef", 0.05),  # nothing was given by that
        ("--preset dr_grpo --rollout-max-response-len 77", "loss_divisor", 77),
        ("--preset gspo icepop", "off_policy", "decoupled"),
        ("--preset gspo icepop", "eps_clip", 3e-4),
    ],
)
def test_a_field_that_says_the_same_thing_otherwise_wins(tmp_path: Path, words: str, field: str, value: object) -> None:
    try:
        assert fields(read(tmp_path, words))[field] == value
    except ConfigError as error:
        assert "off_policy" in str(error)
        assert "icepop" in words


def test_what_is_said(tmp_path: Path) -> None:
    config = read(tmp_path, "--preset dapo --eps-clip 0.1")
    (line,) = presets.notes(config.algorithm.preset, fields(config))
    said, _, otherwise = line.partition("; given otherwise: ")
    assert said.startswith("preset dapo: ")
    assert "eps_clip_high = 0.28" in said
    assert "dynamic_sampling_filter_path = nonzero_std" in said
    assert otherwise == "eps_clip = 0.1 (the preset: 0.2)"


def test_what_a_later_preset_sets_is_said_to_be_its(tmp_path: Path) -> None:
    config = read(tmp_path, "--preset gspo icepop --eps-clip 0.1")
    first, second = presets.notes(config.algorithm.preset, fields(config))
    assert "; instead: off_policy = decoupled (of icepop, which comes later; gspo: none); given otherwise: eps_clip = 0.1" in first
    assert "otherwise" not in second and "instead" not in second


def test_an_error_names_the_preset_that_set_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use_m2po = True: .*\(set by preset m2po\)"):
        read(tmp_path, "--preset m2po --off-policy none")


def test_a_preset_of_which_nothing_is_left_says_so(tmp_path: Path) -> None:
    config = read(tmp_path, "--preset tis icepop --tis-mode clip --tis-clip 9 --tis-clip-low 0.1 --off-policy decoupled")
    first, _ = presets.notes(config.algorithm.preset, fields(config))
    assert "preset tis: off_policy = decoupled; given otherwise: " in first
    (line,) = presets.notes(["gspo"], fields(config))
    assert line.startswith("preset gspo: sets nothing; given otherwise: advantage_estimator = ")


def test_a_preset_may_stand_alone_in_toml_and_survives_what_is_frozen(tmp_path: Path) -> None:
    config = parse(values(tmp_path, algorithm={"preset": "ppo", "kl_coef": 0.0}))
    assert config.algorithm.preset == ["ppo"]
    frozen = RunConfig.model_validate_json(config.model_dump_json())
    assert frozen == config
    assert parse(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preset": "dapoo"}, "did you mean dapo"),
        ({"preset": ["gspo", 3]}, "valid are"),
        ({"preset": "ppo", "advantage_estimator": "grpo", "kl_coef": 0}, "set by preset ppo"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse(values(tmp_path, algorithm=given))
    assert error.value.field.startswith("algorithm.")


# --- slime's own functions of the objective, where a command line names them

OPD = (
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
    "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards "
    "--rm-url http://10.0.0.7:13141/generate --use-opd --opd-type sglang --opd-kl-coef 1.0 --use-kl-loss --kl-loss-coef 0.00"
)


def settled(tmp_path: Path, words: str) -> tuple[Any, list[str]]:
    given = values(tmp_path, **flags.parse(words.split()))
    lines = slime_defaults.settle_functions(given)
    return parse(given), lines


def test_the_teacher_of_slimes_example_is_a_teacher(tmp_path: Path) -> None:
    config, (line,) = settled(tmp_path, OPD)
    assert config.algorithm.opd_teachers == {"teacher": "http://10.0.0.7:13141/generate"}
    assert "opd_teachers" in line
    post_process = load("algorithm.custom_reward_post_process_path", config.algorithm.custom_reward_post_process_path)
    assert post_process(None, [object(), object()]) == ([0.0, 0.0], [0.0, 0.0])


async def test_its_reward_is_none(tmp_path: Path) -> None:
    config, _ = settled(tmp_path, OPD)
    assert await load("reward.custom_rm_path", config.reward.custom_rm_path)(None, object(), evaluation=False) == 0.0


def test_teachers_that_are_given_stay(tmp_path: Path) -> None:
    given = values(tmp_path, **flags.parse(OPD.split()))
    given["algorithm"]["opd_teachers"] = {"mine": "http://mine:1"}
    assert slime_defaults.settle_functions(given) == []
    assert given["reward"]["rm_url"] == "http://10.0.0.7:13141/generate"


@pytest.mark.parametrize(("name", "mode"), [("vanilla_tis_function", "clip"), ("icepop_function", "mask")])
def test_slimes_importance_weights_are_modes(tmp_path: Path, name: str, mode: str) -> None:
    words = f"--use-tis --tis-clip 2.0 --tis-clip-low 0.5 --custom-tis-function-path slime.backends.megatron_utils.loss.{name}"
    config, (line,) = settled(tmp_path, words)
    assert (config.algorithm.tis_mode, config.algorithm.custom_tis_function_path) == (mode, None)
    assert line.endswith(f"is --tis-mode {mode}")


def test_functions_of_ones_own_stay(tmp_path: Path) -> None:
    config, lines = settled(tmp_path, "--custom-tis-function-path mine.weights:icepop_function")
    assert config.algorithm.custom_tis_function_path == "mine.weights:icepop_function"
    assert lines == []


def test_a_weight_without_its_correction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_mode"):
        settled(tmp_path, "--no-use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function")


@table(("words", "kind"), [("", "k1"), ("--preset dapo", "k1"), ("--preset gspo grpo", None), ("--preset grpo --kl-loss-type k2", None)])
def test_a_preset_comes_before_slimes_defaults(words: str, kind: str | None) -> None:
    given = flags.parse(f"--use-kl-loss {words}".split())
    assert slime_defaults.defaults(given).get("algorithm", {}).get("kl_loss_type") == kind


# --- which runs can do without the log-probs that the rollout drew tokens with

SYNCHRONOUS, AHEAD = {"max_staleness": 0}, {"max_staleness": 1}
OWN_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "a:b", "advantage_estimator": "reinforce_plus_plus"}


@table(
    ("algorithm", "rollout", "reader"),
    [
        ({}, SYNCHRONOUS, None),
        ({}, AHEAD, "algorithm.off_policy = decoupled (the default) with rollout.max_staleness = 1 reads them"),
        ({"use_tis": False}, SYNCHRONOUS, None),
        ({"use_tis": False}, AHEAD, None),
        ({"off_policy": "none"}, AHEAD, None),
        ({"off_policy": "decoupled"}, SYNCHRONOUS, "algorithm.off_policy = decoupled reads them"),
        ({"off_policy": "rollout"}, SYNCHRONOUS, "algorithm.off_policy = rollout reads them"),
        ({"use_tis": True}, SYNCHRONOUS, "algorithm.use_tis = true reads them"),
        ({"use_rollout_logprobs": True}, SYNCHRONOUS, "algorithm.use_rollout_logprobs = true reads them"),
        ({"use_rs": True}, SYNCHRONOUS, "algorithm.use_rs = True reads them"),
        ({"rs_veto_threshold": 0.1}, SYNCHRONOUS, "algorithm.rs_veto_threshold = 0.1 reads them"),
        ({"tis_batch_normalize": True}, SYNCHRONOUS, "algorithm.tis_batch_normalize = True reads them"),
        ({"use_opsm": True, "use_tis": False}, AHEAD, None),
        ({"use_m2po": True}, SYNCHRONOUS, "algorithm.use_m2po = True reads them"),
        ({"custom_tis_function_path": "a:b"}, SYNCHRONOUS, "algorithm.custom_tis_function_path = a:b reads them"),
        ({"loss_type": "sft_loss"}, AHEAD, None),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "a:b"}, AHEAD, None),
        ({**OWN_LOSS, "off_policy": "rollout"}, SYNCHRONOUS, None),
        ({**OWN_LOSS, "off_policy": "rollout", "kl_coef": 0.1}, SYNCHRONOUS, "algorithm.off_policy = rollout reads them"),
        ({**OWN_LOSS, "kl_coef": 0.1}, SYNCHRONOUS, None),
        ({}, {**SYNCHRONOUS, "missing_log_probs": "refuse"}, "rollout.missing_log_probs = refuse"),
        ({}, {**SYNCHRONOUS, "missing_log_probs": "recompute"}, None),
    ],
)
def test_who_reads_them(tmp_path: Path, algorithm: dict[str, Any], rollout: dict[str, Any], reader: str | None) -> None:
    batch = {"n_samples_per_prompt": 2, **rollout}
    assert run_config(tmp_path, algorithm=algorithm, rollout=batch).log_probs_reader == reader
    if reader is not None and "missing_log_probs" not in rollout:
        with pytest.raises(ConfigError, match="recompute, but algorithm.* reads them"):
            run_config(tmp_path, algorithm=algorithm, rollout={**batch, "missing_log_probs": "recompute"})


def test_weights_between_two_versions_are_not_those_that_sampled(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout=SYNCHRONOUS, weights={"update_weights_interval": 2})
    assert config.log_probs_reader == "algorithm.off_policy = decoupled (the default) with weights.update_weights_interval = 2 reads them"
