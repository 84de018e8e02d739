"""Presets: what they set, what stays as given, and what is said of both."""

from pathlib import Path
from typing import Any

import pytest

from myxo.commands.flag_list import lines_of
from shared.config import flags, presets
from shared.config.config_reading import parse
from shared.config.presets import PRESETS, ValueOf
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError
from tests.support.run_config import values
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
