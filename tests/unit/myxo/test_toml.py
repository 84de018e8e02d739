"""The resolved config as TOML reads back as the same config."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.run import config_toml
from shared.config.config_layers import over
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from tests.support.run_config import run_config

PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)


def test_every_section_and_field_is_there(tmp_path: Path) -> None:
    text = config_toml.dump(run_config(tmp_path))
    for section in RunConfig.model_fields:
        assert f"[{section}]" in text
    assert "num_rollout = 4" in text
    assert "# eval_interval = none" in text


def test_reads_back_the_same(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        rollout={"rollout_stop": ['"', "\\", "\n", "é\x7f"], "sglang": {"mem-fraction-static": 0.5, "disable-radix-cache": True}},
        data={"apply_chat_template_kwargs": {"enable thinking": False}},
        trainer={"lr": 1e-6},
    )
    assert parse(tomllib.loads(config_toml.dump(config))) == config


def test_null_of_the_users_own_tables_reads_back(tmp_path: Path) -> None:
    own, inner = {"stages": [None, 3], "limit": None, "more": {"text": 'a: null {"b": 1}'}}, {"leg_counting": {"seed": None}}
    config = run_config(
        tmp_path,
        run={"name": "run", "custom_args": own},
        data={"prompt_data": None, "apply_chat_template_kwargs": own},
        curriculum={"reasoning_gym": ["leg_counting"], "reasoning_gym_parameters": inner},
        eval={"sets": [{"name": "own", "path": "p", "agent_options": own, "metadata_overrides": own}]},
        rollout={"agent_options": own, "models": {"other": {"hf_checkpoint": str(tmp_path), "sglang": {"dtype": None, "dp-size": 2}}}},
    )
    read = tomllib.loads(config_toml.dump(config))
    assert parse(read) == config
    above = over(read, {"rollout": {"models": {"other": {"replicas": 3, "sglang": {"max-running-requests": 8}}}}})
    other = parse(above).rollout.models["other"]
    assert other.hf_checkpoint == config.rollout.models["other"].hf_checkpoint
    assert other.sglang == {"dtype": None, "dp-size": 2, "max-running-requests": 8}


def test_json_text_over_json_text_takes_its_place() -> None:
    """SGLang has flags whose values are JSON."""
    below, above = ({"rollout": {"sglang": {"mm-process-config": text}}} for text in ('{"image": {}}', '{"video": {}}'))
    assert over(below, above) == above


@given(PLAIN)
def test_any_value_survives(value: Any) -> None:
    config = run_config(Path("/x"), rollout={"sglang": {"value": value}})
    assert tomllib.loads(config_toml.dump(config))["rollout"]["sglang"]["value"] == value


def test_what_toml_cannot_say_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.rollout.sglang["value"] = object()
    with pytest.raises(TypeError, match="object has no form in TOML"):
        config_toml.dump(config)
