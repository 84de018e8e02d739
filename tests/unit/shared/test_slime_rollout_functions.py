"""slime's own rollout functions as values of the flag: what Myxo does anyway, what stands for other fields, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import flags
from shared.config.learning_rate import LearningRateSchedule
from shared.config.run_config import RunConfig, read
from shared.config.slime_rollout_functions import NATIVE, REFUSED, SUPERVISED
from shared.runtime.errors import ConfigError
from tests.support.run_config import values


def settled(tmp_path: Path, words: list[str]) -> tuple[RunConfig, str]:
    """The config of the smallest run with these flags, and its notes."""
    given = flags.read(words)
    assert given.problems == []
    laid: dict[str, dict[str, Any]] = {section: dict(fields) for section, fields in values(tmp_path).items()}
    for section, fields in given.overrides.items():
        laid.setdefault(section, {}).update(fields)
    found = read(None, laid)
    assert found.config is not None, found.problems
    return found.config, " | ".join(found.notes)


@pytest.mark.parametrize("path", [*NATIVE, *(path[::-1].replace(".", ":", 1)[::-1] for path in NATIVE)])
def test_what_myxo_does_anyway_has_no_effect_and_is_told(tmp_path: Path, path: str) -> None:
    config, notes = settled(tmp_path, ["--rollout-function-path", path])
    assert config.rollout.rollout_function_path is None
    assert f"--rollout-function-path {path} changes nothing" in notes


def test_a_function_of_ones_own_stays(tmp_path: Path) -> None:
    config, notes = settled(tmp_path, ["--rollout-function-path", "my.rollouts.generate_rollout"])
    assert (config.rollout.rollout_function_path, notes) == ("my.rollouts.generate_rollout", "")


@pytest.mark.parametrize("path", REFUSED)
def test_what_there_is_nothing_for_is_refused(tmp_path: Path, path: str) -> None:
    laid = values(tmp_path)
    laid["rollout"]["rollout_function_path"] = path
    [problem] = read(None, laid).problems
    assert isinstance(problem, ConfigError) and problem.field == "rollout.rollout_function_path"
    assert REFUSED[path] in str(problem)


def test_supervised_training_is_the_warm_start_alone(tmp_path: Path) -> None:
    words = f"--rollout-function-path {SUPERVISED} --prompt-data chats.jsonl --input-key chat --rollout-batch-size 128 --debug-train-only "
    words += "--num-epoch 3 --lr 2e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.1 --loss-type sft_loss"
    given = flags.read(words.split())
    assert given.problems == []
    laid: dict[str, dict[str, Any]] = {section: dict(fields) for section, fields in values(tmp_path).items()}
    del laid["rollout"]["num_rollout"]
    for section, fields in given.overrides.items():
        laid.setdefault(section, {}).update(fields)
    found = read(None, laid)
    config = found.config
    assert config is not None, found.problems
    assert (config.rollout.num_rollout, config.rollout.rollout_function_path, config.debug.debug_train_only) == (0, None, False)
    sft = config.sft
    assert [path.name for path in (file.path for file in sft.sft_data or [])] == ["chats.jsonl"]
    assert (sft.sft_messages_key, sft.sft_batch_size, sft.sft_epochs) == ("chat", 128, 3)
    assert sft.steps(1000) == 3 * (1000 // 128) == 21
    schedule = sft.schedule(sft.steps(1000))
    assert schedule == LearningRateSchedule(2e-5, 1e-6, 2, 21, "cosine")
    assert "supervised training alone" in " | ".join(found.notes)


def test_steps_that_are_given_win(tmp_path: Path) -> None:
    config, _ = settled(tmp_path, ["--sft-steps", "7", "--sft-epochs", "2"])
    assert config.sft.steps(10_000) == 7
    assert settled(tmp_path, ["--sft-epochs", "2"])[0].sft.steps(10) == 1, "one step at least"
