"""What the checks of a run look at: its config, and what several of them read from disk, each loaded once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shared import data_files
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.model.architecture import Architecture
from shared.model.families import read_architecture
from shared.tokenizer import Tokenizer


@dataclass
class Inspection:
    """A config under inspection."""

    config: RunConfig
    starts: bool = False
    """Whether all services of the run are about to start on this machine."""
    longest_prompts: dict[str, int] = field(default_factory=dict)
    """``data.prompt_data``, ``eval.eval_prompt_data`` → tokens of the longest prompt, where all were read."""

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
