"""What the command line's tests share: a run's input on disk, and the command."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.myxo.command import ROOT, Myxo
from tests.integration.myxo.mistakes import Input
from tests.support.run_config import HELDOUT, values, write_jsonl


@pytest.fixture
def config_file(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """Writes a run's TOML file beside valid input: four steps, held-out prompts. Keywords are sections with fields to change."""

    def write(**sections: dict[str, object]) -> Path:
        write_jsonl(tmp_path / "prompts.jsonl")
        write_jsonl(tmp_path / "heldout.jsonl", HELDOUT)
        content = values(
            tmp_path,
            **{
                "model": {"hf_checkpoint": str(tiny_model)},
                "rollout": {"rollout_max_response_len": 20},
                "reward": {"rm_type": "exact"},
                "eval": {"eval_prompt_data": str(tmp_path / "heldout.jsonl")},
                "trainer": {"save_interval": 5},
                "console": {"console": False},  # it takes a second of CPU at each start; test_console has one
            },
        )
        for section, fields in sections.items():
            content.setdefault(section, {}).update(fields)
        path = tmp_path / "run.toml"
        path.write_text("\n".join(_section(name, fields) for name, fields in content.items()))
        return path

    return write


def _section(name: str, fields: dict[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str | Path) else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> Input:
    return Input.make(tmp_path, tiny_model)


@pytest.fixture
def myxo() -> Iterator[Myxo]:
    """Runs commands, without servers from this process's environment."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NATS_URL", "REDIS_URL", "MYXO_RUN", "MYXO_INSTANCE")}
    command = Myxo({**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    yield command
    for process in command.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
