"""The steps of a run that is told its epochs, as `myxo up --print-config` settles them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from myxo.main import main
from shared.config.config_reading import parse
from shared.schema.versions import is_periodic
from tests.integration.myxo.mistakes import Input
from tests.support.run_config import PROMPTS, write_jsonl


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> Input:
    made = Input.make(tmp_path, tiny_model)
    del made.sections["rollout"]["num_rollout"]
    write_jsonl(tmp_path / "prompts.jsonl", [PROMPTS[index % len(PROMPTS)] for index in range(7)])
    return made


def settled(given: Input, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """The resolved [rollout]."""
    assert main(["up", str(given.write()), "--print-config", *flags]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    parse(tomllib.loads(printed))  # what is printed is a config again
    rollout: dict[str, Any] = tomllib.loads(printed)["rollout"]
    return rollout


def test_epochs_are_whole_batches_of_the_prompts(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = settled(given, capsys, "--num-epoch", "3")  # 7 prompts in batches of 2: 3 steps, and a prompt is left over
    assert (rollout["num_rollout"], rollout["num_rollout_per_epoch"], rollout["num_epoch"]) == (9, 3, 3)


def test_prompts_that_are_left_out_do_not_count(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "7+7=" * 100, "label": "14"}
    write_jsonl(given.directory / "prompts.jsonl", [*PROMPTS[:4], long, long, long, long])
    flags = ("--num-epoch", "2", "--rollout-max-prompt-len", "40", "--overlong-prompts", "filter")
    assert settled(given, capsys, *flags)["num_rollout"] == 4
    assert settled(given, capsys, "--num-epoch", "2")["num_rollout"] == 8


def test_an_epoch_has_each_files_prompts_as_often_as_its_weight_says(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"{given.directory / 'prompts.jsonl'}@[:4]*2", f"{given.directory / 'prompts.jsonl'}@[4:]*1"]  # 4 twice, 3 once
    rollout = settled(given, capsys, "--num-epoch", "2", "--prompt-data", *files)
    assert (rollout["num_rollout"], rollout["num_rollout_per_epoch"]) == (10, 5)


def test_a_number_of_steps_wins(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = settled(given, capsys, "--num-epoch", "3", "--num-rollout", "5")
    assert rollout["num_rollout"] == 5
    assert "num_rollout_per_epoch" not in rollout


def test_epochs_that_do_not_count_are_told(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    told = "rollout.num_epoch: without effect, as this needs num_rollout left out"
    assert main(["up", str(given.write()), "--print-config", "--num-epoch", "3", "--num-rollout", "5"]) == 0
    assert told in capsys.readouterr().err
    assert main(["up", str(given.write()), "--print-config", "--num-epoch", "3"]) == 0
    printed = capsys.readouterr()
    assert "without effect" not in printed.err
    (given.directory / "again.toml").write_text(printed.out)  # both are in it, and agree
    assert main(["up", str(given.directory / "again.toml"), "--print-config"]) == 0
    assert "without effect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), ("rollout.num_rollout", "or num_epoch")),
        (("--num-epoch", "2", "--rollout-batch-size", "8"), ("rollout.num_epoch", "7 are fewer than rollout_batch_size = 8")),
        (("--num-epoch", "0"), ("rollout.num_epoch", "greater than 0")),
        (("--num-epoch", "2", "--data-source", "tests.support.prompt_source:Sums"), ("rollout.num_epoch", "data_source")),
    ],
)
def test_what_gives_no_steps_is_refused(
    given: Input, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: tuple[str, ...]
) -> None:
    assert main(["up", str(given.write()), "--print-config", *flags]) == 2
    error = capsys.readouterr().err
    assert [word for word in says if word not in error] == [], error


def test_intervals_that_do_not_fit_are_said(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-rollout", "12", "--eval-interval", "4", "--save-interval", "4", "--save-hf", "out/{rollout_id}", "--save-hf-interval"]
    assert main(["up", str(given.write()), "--print-config", *flags, "6", "--update-weights-interval", "3"]) == 0
    error = capsys.readouterr().err
    for line in (
        "eval_interval = 4 is no multiple of update_weights_interval = 3: what is due in between waits for the next version",
        "save_hf_interval = 6 is no multiple of save_interval = 4: what is due in between waits for the next checkpoint",
    ):
        assert line in error
    assert main(["up", str(given.write()), "--print-config", *flags, "8", "--update-weights-interval", "2"]) == 0
    assert "no multiple" not in capsys.readouterr().err


def test_an_epoch_is_saved_and_evaluated_at_its_end() -> None:
    assert [steps for steps in range(1, 13) if is_periodic(steps, 4)] == [4, 8, 12]
    assert [steps for steps in range(1, 13) if is_periodic(steps, 4, 5)] == [4, 5, 8, 10, 12]
