"""The input of a run's checks: its config, and the files that several of them read from disk, each loaded once."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shared.config.run_config import RunConfig
from shared.data import data_files
from shared.data.prompts import PromptFile, TrainingPrompts, eval_prompts
from shared.data.tokenizer import Tokenizer
from shared.model import hf_checkpoint
from shared.model.architecture import Architecture
from shared.model.families import read_architecture
from shared.runtime.errors import BadInput, ConfigError
from shared.transfer.manifest import ITEM_BYTES

Result = TypeVar("Result")

Headers = Mapping[str, tuple[str, hf_checkpoint.Shape]]
"""Each tensor of a checkpoint → its dtype and shape."""


@dataclass(frozen=True)
class Note:
    """A line about a config that can run, told where nothing is refused."""

    text: str


Findings = Iterator[BadInput | Note]
"""The findings that a check yields: refusals and notes."""


@dataclass(frozen=True)
class ModelSize:
    """The number of a model's parameters, and the bytes that they take in its files."""

    parameters: int
    bytes: int


@dataclass
class Inspection:
    """A config under inspection."""

    config: RunConfig
    starts: bool = False
    """True if all services of the run are about to start on this machine."""
    fresh: bool = False
    """True if the run's present state is to be removed."""
    frozen: RunConfig | None = None
    """The config as the run keeps it, where that is not ``config``: with names on the hub in the place of paths."""
    longest_prompts: dict[str, int] = field(default_factory=dict)
    """``data.prompt_data``, ``eval.eval_prompt_data`` → tokens of the longest prompt that was read."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer; None where it cannot be loaded, which `tokenizer_problem` explains."""
        return self._tokenizer if isinstance(self._tokenizer, Tokenizer) else None

    @property
    def tokenizer_problem(self) -> ConfigError | None:
        return self._tokenizer if isinstance(self._tokenizer, ConfigError) else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | ConfigError:
        return attempted(lambda: Tokenizer(self.config.model.hf_checkpoint))

    @cached_property
    def training(self) -> TrainingPrompts | ConfigError | None:
        """Returns the training prompts, or their files' error; None where the run draws from a source, or another check reports it."""
        there = self.config.data.data_source is None and self.there(self.config.data.prompt_data)
        return self._opened(TrainingPrompts) if there else None

    @cached_property
    def heldout(self) -> PromptFile | ConfigError | None:
        """Returns the held-out prompts, or their files' error; None where the run has none, or another check reports it."""
        return self._opened(eval_prompts) if self.there(self.config.eval.eval_prompt_data) else None

    def _opened(self, opener: Callable[[RunConfig, Tokenizer], Result | None]) -> Result | ConfigError | None:
        tokenizer = self.tokenizer
        if tokenizer is None or (self.config.data.apply_chat_template and not tokenizer.has_chat_template):
            return None
        return attempted(lambda: opener(self.config, tokenizer))

    @cached_property
    def model_config(self) -> dict[str, Any] | None:
        """Returns the checkpoint's ``config.json``; None where it holds no JSON object, which the check of the model's files reports."""
        try:
            values = json.loads((self.config.model.hf_checkpoint / "config.json").read_text())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    @cached_property
    def architecture(self) -> Architecture | ConfigError | None:
        """Returns the actor's architecture, or why its ``config.json`` describes no model that can be trained; None without one."""
        directory = self.config.model.hf_checkpoint
        return architecture_of(directory) if (directory / "config.json").is_file() else None

    @cached_property
    def weight_headers(self) -> tuple[Headers, list[ConfigError]]:
        """Returns the headers of the actor's files, and the errors of the files."""
        try:
            return hf_checkpoint.read_headers(self.config.model.hf_checkpoint)
        except ConfigError as error:
            return {}, [error]

    @cached_property
    def model_size(self) -> ModelSize | None:
        """Returns the model's size; None where its files cannot be read, which the check of the weight files reports."""
        headers, problems = self.weight_headers
        if problems or not headers:
            return None
        sizes = [(math.prod(shape), ITEM_BYTES[dtype]) for dtype, shape in headers.values()]
        return ModelSize(sum(count for count, _ in sizes), sum(count * width for count, width in sizes))

    @staticmethod
    def there(files: object) -> bool:
        """Returns whether all files of a config's field exist; the check of the files reports those that do not."""
        return all(path.is_file() for path in data_files.paths(files))


def attempted(load: Callable[[], Result]) -> Result | ConfigError:
    """Returns what ``load`` returns, or the ConfigError that it raises."""
    try:
        return load()
    except ConfigError as error:
        return error


def architecture_of(directory: Path) -> Architecture | ConfigError:
    """Returns the architecture of the model in a directory, or why it cannot be trained."""
    return attempted(lambda: read_architecture(directory))
