"""What is wrong with half of a run is told before it starts; what the other half would need is not asked for."""

from pathlib import Path

import pytest

from myxo.main import main
from tests.integration.myxo.mistakes import Input


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> Input:
    made = Input.make(tmp_path, tiny_model)
    for step in range(4):
        (tmp_path / f"dump_{step}.pt").touch()
    return made


def told(given: Input, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["up", str(given.write()), "--dry-run", *flags])
    return code, capsys.readouterr().err


def test_training_on_dumps_asks_for_no_prompts_and_no_engine(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "prompts.jsonl").unlink()
    (given.directory / "heldout.jsonl").unlink()
    dumps = ("--load-debug-rollout-data", str(given.directory / "dump_{rollout_id}.pt"))
    assert told(given, capsys, *dumps, "--sglang-attention-backend", "fa3") == (0, "")
    code, error = told(given, capsys, *dumps, "--num-rollout", "6")
    assert code == 2 and "each step from 0 to 5" in error and "dump_4.pt" in error
    code, error = told(given, capsys, *dumps, "--advantage-estimator", "ppo")
    assert code == 2 and "algorithm.advantage_estimator" in error and "critic" in error
    code, error = told(given, capsys)
    assert code == 2 and "data.prompt_data" in error


def test_generating_alone_asks_nothing_of_a_trainer(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    training = ("--only-train-params-name-list", "nothing.of.this.name")
    code, error = told(given, capsys, *training)
    assert code == 2 and "only_train_params_name_list" in error
    assert told(given, capsys, *training, "--debug-rollout-only", "--colocate") == (0, "")


def test_a_warm_start_that_is_left_out_is_told(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    code, error = told(given, capsys, "--debug-rollout-only", "--sft-data", str(given.directory / "sft.jsonl"))
    assert code == 0
    assert "the warm start of [sft] is left out" in error
