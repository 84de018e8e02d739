"""The harness of the table of mistakes: a good run's input, and what a row changes of it."""

import json
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config.run_config import field_sections
from tests.support.run_config import HELDOUT, values, write_jsonl

Sections = dict[str, dict[str, Any]]

LIMIT_S = 10.0
"""Processor time that a refusal may take, children included: what a wait in a busy machine's queue adds is no fault of the command."""


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


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


NAMED = re.compile(r"(--[\w-]+|[A-Za-z]\w*(?:\.\w+)?)(?::\w+)?(?: \([\w.]+\))?(?: = |: )")
AT_LINE = re.compile(r"([\w./-]+\.(?:toml|jsonl|py))(?:': not .*\(at line |:)(\d+)")
REMEDY = re.compile(
    r"did you mean \S+\?|should be |expected |(?:at most|fewer than) \d|belongs into the section \[|a run calls \w|`myxo try CONFIG` calls|"
    r"[;,:] (?:or )?(?:give|write|add|set|put|leave|use|unset|start|check|fetch|correct|a directory with)\b",
    re.IGNORECASE,
)
"""What a message names, with its value behind it; a line of a file; and what is to be done, or what would be right."""


SECONDS = 60.0
"""Within these of its start a run has to say what is wrong, on a machine that is busy with other things."""


def grade(told: str, given: Input, words: Iterable[str], told_after: float | None = None) -> str:
    """Returns the grade of what a user is told of a mistake: A before anything starts, B some seconds after a run did; or what it lacks.

    The place has to be there: a field of the config, a key in the file, a flag or variable among ``words``; lines, in the files named.
    """
    fields = {f"{section}.{name}" for name, section in field_sections().items()}
    written = set(re.findall(r"^\[?(\w+)", (given.directory / "run.toml").read_text(), re.MULTILINE)) | {*words}
    lines = [(given.directory / path, int(line)) for path, line in AT_LINE.findall(told)]
    wrong = [path for path, line in lines if not path.is_file() or line > len(path.read_text().splitlines())]
    named = [name for name in NAMED.findall(told) if {name, name.rpartition(".")[2]} & written or name in fields]
    if wrong or not (named or lines):
        return f"no place, {wrong}"
    if not REMEDY.search(told) or (told_after or 0.0) > SECONDS:
        return "no remedy in time"
    return "A" if told_after is None else "B"


@dataclass(frozen=True)
class Mistake:
    """One row.

    Args:
        name: of the row. says: words that the errors must hold. flags: given behind the config.
        sections: section → field → value, laid over the good config. change: what else to do to the input. environment: variables.
        lines: how many errors there are; one mistake is told once. text: takes the text of the config and returns that which is written.
        runs: whether it is told and runs all the same.
    """

    name: str
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()
    sections: Sections = field(default_factory=dict)
    change: Callable[[Input], object] = lambda given: None
    environment: dict[str, str] = field(default_factory=dict)
    lines: int = 1
    text: Callable[[str], str] = str
    runs: bool = False

    def prepare(self, given: Input) -> list[str]:
        """Makes the mistake in the input. Returns the words of the command line."""
        for section, fields in self.sections.items():
            given.sections.setdefault(section, {}).update(fields)
        self.change(given)
        path = given.write()
        path.write_text(self.text(path.read_text()))
        return ["up", str(path), *self.flags, *["--dry-run"] * self.runs]
