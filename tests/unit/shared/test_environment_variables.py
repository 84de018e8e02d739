"""Environment variables of the trainer's ranks: applied as given; no credentials, and none that the launcher sets."""

import json
import os
from pathlib import Path

import pytest

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.objective_checks import check_variables
from services.trainer.__main__ import prepare_environment
from shared.config import flags
from shared.config.config_reading import parse
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import table

GIVEN = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "3"}


def test_ranks_get_the_variables_and_they_win_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_environment(run_config(tmp_path, trainer={"train_env_vars": GIVEN, "train_device": "cpu"}))
    assert {name: os.environ[name] for name in GIVEN} == GIVEN


def test_the_flag_takes_slimes_json() -> None:
    overrides = flags.parse(["--train-env-vars", json.dumps(GIVEN)])
    assert overrides == {"trainer": {"train_env_vars": GIVEN}}


@table(
    ("name", "value", "says"),
    [
        ("WANDB_API_KEY", "s3cr3t", "credential"),
        ("HF_TOKEN", "x", "credential"),
        ("AWS_SECRET_ACCESS_KEY", "x", "credential"),
        ("REDIS_URL", "redis://host", "credential"),
        ("MY_PROXY", "http://user:s3cr3t@host", "credential"),
        ("MYXO_RUN", "other", "launcher"),
        ("RANK", "1", "launcher"),
        ("CUDA_VISIBLE_DEVICES", "0", "launcher"),
        ("NOT-A-NAME", "1", "no name"),
    ],
)
def test_a_variable_that_does_not_belong_there_is_refused_by_name(tmp_path: Path, name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(values(tmp_path, trainer={"train_env_vars": {name: value}}))
    assert caught.value.field == "trainer.train_env_vars"
    assert name in caught.value.expected
    assert "s3cr3t" not in str(caught.value)


def test_what_slime_would_train_by_and_is_not_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("MEGATRON_USE_SGLANG_ROPE", "0")
    given = {"OPEN_TRAINING_INT4_GROUP_SIZE": "128", **GIVEN}  # read there
    notes = [
        note.text for note in check_variables(Inspection(run_config(tmp_path, trainer={"train_env_vars": given}))) if isinstance(note, Note)
    ]
    assert [note.partition(" is not read: slime's training forward rounds weights to INT4")[0] for note in notes] == [
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG = 1"
    ]
