"""slime's own functions of the objective, where a command line names them."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import flags, slime_script
from shared.config.config_reading import parse
from shared.hooks import load
from shared.runtime.errors import ConfigError
from tests.support.run_config import values
from tests.support.tables import table

OPD = (
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
    "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards "
    "--rm-url http://10.0.0.7:13141/generate --use-opd --opd-type sglang --opd-kl-coef 1.0 --use-kl-loss --kl-loss-coef 0.00"
)


def settled(tmp_path: Path, words: str) -> tuple[Any, list[str]]:
    given = values(tmp_path, **flags.parse(words.split()))
    lines = slime_script.settle_functions(given)
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
    assert slime_script.settle_functions(given) == []
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
    assert slime_script.defaults(given).get("algorithm", {}).get("kl_loss_type") == kind
