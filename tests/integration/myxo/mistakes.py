"""The harness of the table of mistakes: a good run's input, and what a row changes of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.run_config import HELDOUT, values, write_jsonl

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Input:
    """A run's good input in a directory of its own: ``model`` (a copy), ``prompts.jsonl``, ``heldout.jsonl``, ``run.toml``."""

    directory: Path
    model: Path
    sections: Sections

    @classmethod
    def make(cls, directory: Path, tiny_model: Path) -> "Input":
        """Four steps of two groups; a Qwen3 with 4 heads, 2 key/value heads, 2 layers and a context of 1,024 tokens."""
        shutil.copytree(tiny_model, directory / "model")
        write_jsonl(directory / "prompts.jsonl")
        write_jsonl(directory / "heldout.jsonl", HELDOUT)
        sections = values(
            directory,
            rollout={"rollout_max_response_len": 20},
            reward={"rm_type": "exact"},
            eval={"eval_prompt_data": str(directory / "heldout.jsonl")},
        )
        return cls(directory, directory / "model", sections)

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    def model_config(self, **changes: Any) -> None:
        """Changes entries of the model's config.json; None takes one away."""
        path = self.model / "config.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def write(self) -> Path:
        """Writes ``run.toml``; returns its path."""
        path = self.directory / "run.toml"
        path.write_text("\n".join(_section(name, fields) for name, fields in self.sections.items()))
        return path


def _section(name: str, fields: dict[str, Any]) -> str:
    # JSON's texts, numbers, lists and truth values are TOML's, too
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())])


@dataclass(frozen=True)
class Mistake:
    """One row.

    Args:
        name: of the row. says: words that the errors must hold. flags: given behind the config.
        sections: section → field → value, laid over the good config. change: what else to do to the input. environment: variables.
        lines: how many errors there are; one mistake is told once.
    """

    name: str
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()
    sections: Sections = field(default_factory=dict)
    change: Callable[[Input], object] = lambda given: None
    environment: dict[str, str] = field(default_factory=dict)
    lines: int = 1

    def prepare(self, given: Input) -> list[str]:
        """Makes the mistake in the input. Returns the words of the command line."""
        for section, fields in self.sections.items():
            given.sections.setdefault(section, {}).update(fields)
        self.change(given)
        return ["up", str(given.write()), *self.flags]
