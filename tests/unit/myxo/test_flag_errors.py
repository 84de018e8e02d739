"""What is wrong on a command line is told under the flag that was typed, with the field beside it."""

import json
from pathlib import Path

import pytest

from myxo.commands import evaluate, up
from myxo.preflight import Source, checked_config
from shared.config import flags
from shared.runtime.errors import BadInput, problems_of
from tests.support.tables import table

LEAST = "--hf-checkpoint /no/model --prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rm-type math"
SFT = "--hf-checkpoint /no/model --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss"


def told(source: Source) -> list[str]:
    with pytest.raises(BadInput) as caught:
        checked_config(source)
    return [str(problem) for problem in problems_of(caught.value)]


@table(
    ("words", "begins"),
    [
        (f"{LEAST} --lr -1", "--lr (trainer.lr) = '-1': "),
        (f"{LEAST} --lr=-1", "--lr (trainer.lr) = '-1': "),
        ("--prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4", "--hf-checkpoint (model.hf_checkpoint) = None: required"),
        (f"{LEAST} --tensor-model-parallel-size 3", "--tensor-model-parallel-size (trainer.tensor_model_parallel_size) = "),
        (f"{LEAST} --tensor-model-parallel-size 3 --context-parallel-size 2", "--tensor-model-parallel-size (trainer.tensor_model_"),
        (f"{LEAST} --eval-prompt-data a /no/a.jsonl b /no/b.jsonl", "--eval-prompt-data (eval.eval_prompt_data.a) = '/no/a.jsonl': "),
        (f"{LEAST} --distributed-timeout-minutes 0", "--distributed-timeout-minutes (trainer.collective_timeout) = 0.0: "),
        (f"{LEAST} --no-use-tis --off-policy decoupled", "--no-use-tis (algorithm.use_tis) = "),
        (f"{LEAST} --sglang-page-size", "--sglang-page-size (rollout.sglang.page-size) = True: "),
        (
            f"{SFT} --prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4",
            "--prompt-data (sft.sft_data) = '/no/p.jsonl': no such file",
        ),
        (f"{LEAST} --lrr 1", "--lrr = '': unknown flag; did you mean --lr?"),
    ],
)
def test_an_error_names_the_flag_that_was_typed(words: str, begins: str) -> None:
    found = told(up.train_source(None, words.split()))
    assert any(problem.startswith(begins) for problem in found), found


def test_what_a_file_sets_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[trainer]\nlr = -1.0\n")
    found = told(Source(path, flags.read(["--rollout-top-p", "7", "--hf-checkpoint", "/no/model", "--rollout-batch-size", "4"])))
    assert any(problem.startswith("trainer.lr = -1.0: ") for problem in found), found
    assert any(problem.startswith("--rollout-top-p (rollout.rollout_top_p) = '7': ") for problem in found), found


RUN = "[run]\nname = 'r'\n[model]\nhf_checkpoint = '/no/model'\n[data]\nprompt_data = '/no/p.jsonl'\n"
STEPS = "[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 2\nnum_rollout = 1\n"


@pytest.mark.parametrize(
    ("temperature", "begins"),
    [
        (-1, "--eval-config (eval.sets.bad.temperature) = -1: "),
        (1, "--eval-config (eval.sets.bad) = '/no/bad.jsonl': "),  # refused by a check of files, long after the sets were read
    ],
)
def test_a_set_of_a_file_is_named_with_the_file(tmp_path: Path, temperature: int, begins: str) -> None:
    file = tmp_path / "tasks.yaml"
    sets = [{"name": "ok", "path": "/no/ok.jsonl"}, {"name": "bad", "path": "/no/bad.jsonl", "temperature": temperature}]
    file.write_text(json.dumps({"eval": {"datasets": sets}}))
    found = told(up.train_source(None, f"{LEAST} --eval-config {file}".split()))
    assert any(problem.startswith(begins) and problem.endswith(f"(in {file})") for problem in found), found


def test_a_file_below_the_config_is_named_where_its_value_is_refused_late(tmp_path: Path) -> None:
    base = tmp_path / "model.toml"
    base.write_text(RUN)
    path = tmp_path / "run.toml"
    path.write_text(f"base = 'model.toml'\n{STEPS}")
    found = told(Source.of(path, []))
    assert any(problem.startswith("model.hf_checkpoint = ") and problem.endswith(f"(in {base})") for problem in found), found


def test_a_run_to_evaluate_that_is_not_there_is_told_with_what_could_be_given(tmp_path: Path) -> None:
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "lock").touch()
    for given, words in (("arithmetik", "did you mean arithmetic?"), (str(tmp_path / "none.toml"), "nor is there a file ")):
        with pytest.raises(BadInput, match=f"RUN = '{given}': .*{words}".replace("?", r"\?")):
            evaluate.config_of(given, tmp_path, flags.read([]))


def test_flags_over_a_run_to_evaluate_are_named_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + STEPS)
    with pytest.raises(BadInput, match=r"^--eval-top-p \(eval.eval_top_p\) = '7': "):
        evaluate.config_of(str(path), tmp_path, flags.read(["--eval-top-p", "7"]))


def test_a_files_demonstrations_are_not_the_prompts_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[sft]\nsft_data = "/no/sft.jsonl"\n')
    typed = ["--prompt-data", "/no/p.jsonl", "--lr", "1e-3", "--hf-checkpoint", "/no/model", "--rollout-batch-size", "4"]
    found = told(Source(path, flags.read(typed)))
    assert any(problem.startswith("sft.sft_data = '/no/sft.jsonl': no such file") for problem in found), found
