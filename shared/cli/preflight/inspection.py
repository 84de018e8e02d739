"""What the checks of a run look at: its config, and what several of them read from disk, each loaded once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared import data_files
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer


@dataclass
class Inspection:
    """A config under inspection."""

    config: RunConfig

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

    @staticmethod
    def there(files: object) -> bool:
        """Whether all files of a config's field exist; the check of the files reports those that do not."""
        return all(path.is_file() for path in data_files.paths(files))
