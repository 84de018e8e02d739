"""What the checks of a run look at: its config, and what several of them read from disk, each loaded once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from myxo.preflight.parameter_checks import ModelSize, model_size
from shared.config.run_config import RunConfig
from shared.data import data_files
from shared.data.prompts import PromptFile, TrainingPrompts, eval_prompts
from shared.data.tokenizer import Tokenizer
from shared.model.architecture import Architecture
from shared.model.families import read_architecture
from shared.runtime.errors import ConfigError

Opened = TypeVar("Opened")

LONGEST_NOTE = 1000
"""Characters of a note that are shown: one may hold a whole prompt."""


@dataclass
class Inspection:
    """A config under inspection."""

    config: RunConfig
    starts: bool = False
    """Whether all services of the run are about to start on this machine."""
    fresh: bool = False
    """Whether what the run has done so far is to be removed."""
    notes: list[str] = field(default_factory=list)
    """What there is to say of a config that can run, a line each."""
    frozen: RunConfig | None = None
    """The config as the run keeps it, where that is not ``config``: with names on the hub in the place of paths."""
    longest_prompts: dict[str, int] = field(default_factory=dict)
    """``data.prompt_data``, ``eval.eval_prompt_data`` → tokens of the longest prompt of those that were read."""

    def note(self, text: str) -> None:
        """Takes a line to be told where nothing is refused."""
        line = " ".join(text.split())
        self.notes.append(line if len(line) <= LONGEST_NOTE else f"{line[:LONGEST_NOTE]} …")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it cannot be loaded (see ``tokenizer_problem``)."""
        return self._tokenizer if isinstance(self._tokenizer, Tokenizer) else None

    @property
    def tokenizer_problem(self) -> ConfigError | None:
        """Why there is no tokenizer."""
        return self._tokenizer if isinstance(self._tokenizer, ConfigError) else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | ConfigError:
        try:
            return Tokenizer(self.config.model.hf_checkpoint)
        except ConfigError as error:
            return error

    @cached_property
    def model_size(self) -> ModelSize | None:
        """How large the model is; None where its files cannot be read, which the check of the weight files reports."""
        return model_size(self.config.model.hf_checkpoint)

    @cached_property
    def training(self) -> TrainingPrompts | ConfigError | None:
        """The training prompts, or what is wrong with their files; None where the run draws from a source, or another check tells why."""
        there = self.config.data.data_source is None and self.there(self.config.data.prompt_data)
        return self._opened(TrainingPrompts) if there else None

    @cached_property
    def heldout(self) -> PromptFile | ConfigError | None:
        """The held-out prompts, or what is wrong with their files; None where the run has none, or another check tells why."""
        return self._opened(eval_prompts) if self.there(self.config.eval.eval_prompt_data) else None

    def _opened(self, opener: Callable[[RunConfig, Tokenizer], Opened | None]) -> Opened | ConfigError | None:
        if self.tokenizer is None or (self.config.data.apply_chat_template and not self.tokenizer.has_chat_template):
            return None
        try:
            return opener(self.config, self.tokenizer)
        except ConfigError as error:
            return error

    @cached_property
    def model_config(self) -> dict[str, Any] | None:
        """The checkpoint's ``config.json``; None where it holds no JSON object, which the check of the model's files reports."""
        try:
            values = json.loads((self.config.model.hf_checkpoint / "config.json").read_text())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    @cached_property
    def architecture(self) -> Architecture | ConfigError | None:
        """What the actor is, or why its ``config.json`` describes no model that can be trained; None without one."""
        directory = self.config.model.hf_checkpoint
        return architecture_of(directory) if (directory / "config.json").is_file() else None

    @staticmethod
    def there(files: object) -> bool:
        """Whether all files of a config's field exist; the check of the files reports those that do not."""
        return all(path.is_file() for path in data_files.paths(files))


def architecture_of(directory: Path) -> Architecture | ConfigError:
    """What the model in a directory is, or why it is none that can be trained."""
    try:
        return read_architecture(directory)
    except ConfigError as error:
        return error
