"""The input of a run's checks: its config, and the files that several of them read from disk, each loaded once."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from shared.config import devices
from shared.config.data_sections import DataSection
from shared.config.engine_limits import model_config_of
from shared.config.eval_views import EvalView, eval_views
from shared.config.run_config import RunConfig
from shared.data import data_files
from shared.data.demonstrations import DemonstrationFile
from shared.data.prompts import PromptFile, TrainingPrompts, eval_prompts
from shared.data.tokenizer import Tokenizer
from shared.model import hf_checkpoint
from shared.model.architecture import Architecture
from shared.model.families import TOWERS, architecture_of, planned_architecture, read_architecture, tower_of
from shared.model.quantization import quantization_of
from shared.runtime.errors import BadInput, ConfigError
from shared.transfer.manifest import ITEM_BYTES

Result = TypeVar("Result")

Headers = Mapping[str, tuple[str, hf_checkpoint.Shape]]  # each tensor of a checkpoint → its dtype and shape


@dataclass(frozen=True)
class Note:
    """A line about a config that can run, reported where nothing is refused."""

    text: str


Findings = Iterator[BadInput | Note]  # findings that a check yields: refusals and notes


@dataclass(frozen=True)
class ModelSize:
    """The number of a model's parameters, and the bytes that they take in its files."""

    parameters: int
    bytes: int


class NoTokenizer(Tokenizer):
    """Stands in for a tokenizer or a chat template that cannot be had, so that rows are checked all the same: each text is one token."""

    def __init__(self) -> None:
        self.template, self.templates, self.has_chat_template = None, {}, False

    def lengths(self, texts: Sequence[str], begin: Sequence[bool] = ()) -> list[int]:
        return [min(len(text), 1) for text in texts]

    def render(self, messages: object, variables: object = None) -> str:
        return "chat"


@dataclass
class Inspection:
    """A config under inspection. What cannot be loaded is None, and stands once among ``problems``, whichever checks ask for it."""

    config: RunConfig
    starts: bool = False  # true if all services of the run are about to start on this machine
    whole: bool = True  # false if the config is without fields that were refused: a check ends where it reads one
    fresh: bool = False  # true if the run's present state is to be removed
    frozen: RunConfig | None = None  # config as the run keeps it, where that is not ``config``: with names on the hub in the place of paths
    # ``data.prompt_data`` and the field of each evaluation set → tokens of the longest prompt that was read.
    longest_prompts: dict[str, int] = field(default_factory=dict)
    longest_places: dict[str, str] = field(default_factory=dict)  # the file and line of each
    problems: list[ConfigError] = field(default_factory=list)  # what was wrong with what could not be loaded
    guesses: list[str] = field(default_factory=list)  # what was settled for fields that are not given, as sentences
    notes: list[str] = field(default_factory=list)  # notes of all checks

    @cached_property
    def gpu_bytes(self) -> int | None:
        """Returns the memory of this machine's smallest GPU, in bytes; None where none is reported."""
        return devices.gpu_bytes()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer; None where it cannot be loaded."""
        directory = getattr(self.config.model, "hf_checkpoint", None)  # the config may be left without it
        return self._loaded(lambda: Tokenizer(directory)) if directory and (directory / "tokenizer.json").is_file() else None

    @cached_property
    def training(self) -> TrainingPrompts | None:
        """Returns the training prompts; None where they cannot be opened, or the run draws from a source."""
        data = self.config.data
        if not self.config.has_steps:
            return None
        return self._opened(partial(TrainingPrompts, self.config), data.prompt_data, data) if data.data_source is None else None

    @cached_property
    def heldout(self) -> list[tuple[EvalView, PromptFile]]:
        """Returns the run's sets of held-out prompts, those that can be opened."""
        views = eval_views(self.config)
        opened = ((view, self._opened(partial(eval_prompts, view), view.files, view.config.data)) for view in views)
        return [(view, prompts) for view, prompts in opened if prompts is not None]

    @cached_property
    def demonstrations(self) -> DemonstrationFile | None:
        """Returns the demonstrations of the warm start; None where there is none, or they cannot be opened."""
        config, tokenizer = self.config, self.tokenizer
        if tokenizer is None or config.debug.debug_rollout_only or not self.there(config.sft.sft_data):
            return None
        return self._loaded(lambda: DemonstrationFile(config, tokenizer))

    def _opened(self, opener: Callable[[Tokenizer], Result], files: object, data: DataSection) -> Result | None:
        if not self.there(files):
            return None
        tokenizer = self.tokenizer
        usable = tokenizer is not None and (tokenizer.has_chat_template or not data.apply_chat_template)
        return self._loaded(lambda: opener(tokenizer if tokenizer is not None and usable else NoTokenizer()))

    @cached_property
    def model_config(self) -> dict[str, Any] | None:
        """Returns the checkpoint's ``config.json``; None where it holds no JSON object, which the check of the model's files reports."""
        return model_config_of(self.config.model.hf_checkpoint)

    @cached_property
    def architecture(self) -> Architecture | None:
        """Returns the actor's architecture; None where its ``config.json`` describes no model that can be trained."""
        directory = self.config.model.hf_checkpoint
        return self._loaded(lambda: architecture_of(self.config)) if (directory / "config.json").is_file() else None

    @cached_property
    def planned(self) -> Architecture | None:
        """Returns what the actor's memory is planned by; None as `architecture`."""
        return None if self.architecture is None else self.as_planned(self.architecture)

    def as_planned(self, outline: Architecture) -> Architecture:
        """Returns what the memory of the actor, which has this outline, is planned by."""
        backend, held = self.config.trainer.trainer_backend, self.weight_headers
        found = planned_architecture(self.config.model.hf_checkpoint, outline, backend)
        ends = [name for name, (_, shape) in held.items() if tuple(shape) == (found.vocab_size, found.hidden_size)]
        if backend == "torch" and len(ends) == 1:  # where config.json says nothing, each family has its own default
            found = replace(found, tied_embeddings=True)
        if self.config.data.multimodal_keys is None:
            return found
        seen = [math.prod(shape) for name, (_, shape) in held.items() if any(part in name for part in TOWERS)]
        return replace(found, tower=tower_of(self.model_config or {}, sum(seen)))

    @cached_property
    def critic(self) -> Architecture | None:
        """Returns the architecture of the critic's own checkpoint; None where it has none, or one that cannot be trained."""
        directory = self.config.trainer.critic_load if self.config.algorithm.has_critic else None
        backend = self.config.trainer.trainer_backend
        return self._loaded(lambda: read_architecture(directory, backend=backend), "trainer.critic_load") if directory is not None else None

    @cached_property
    def frozen_models(self) -> dict[str, Architecture]:
        """Returns the architectures of frozen models by their names, without those of families that only engines know."""
        found = {}
        for name in self.config.rollout.models:
            with contextlib.suppress(ConfigError, OSError):
                found[name] = read_architecture(self.config.of_engines(name).model.hf_checkpoint, quantized=True)
        return found

    @cached_property
    def weight_headers(self) -> Headers:
        """Returns the headers of the actor's files; none where one of them cannot be read."""
        headers, problems = self._loaded(lambda: hf_checkpoint.read_headers(self.config.model.hf_checkpoint)) or ({}, [])
        self.problems += problems
        return {} if problems else headers

    @cached_property
    def model_size(self) -> ModelSize | None:
        """Returns the model's size; None where its files cannot be read."""
        if self.architecture is None or not self.weight_headers:
            return None
        shapes: Mapping[str, Sequence[int]] = {name: shape for name, (_, shape) in self.weight_headers.items()}
        with contextlib.suppress(ConfigError):  # which has a check of its own
            if found := quantization_of(self.config.model.hf_checkpoint):
                shapes = found.shapes(shapes)  # 4-bit numbers lie packed
        in_files = sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.weight_headers.values())
        return ModelSize(sum(map(math.prod, shapes.values())), in_files)

    @staticmethod
    def there(files: object) -> bool:
        """Returns whether all files of a config's field exist; the check of the files reports those that do not."""
        paths = data_files.paths(files)
        return bool(paths) and all(path.is_file() for path in paths)

    def _loaded(self, load: Callable[[], Result], field: str = "model.hf_checkpoint") -> Result | None:
        """Returns what ``load`` returns; None, and notes the problem, where that is a ConfigError. ``field``: the model's own."""
        try:
            return load()
        except ConfigError as error:
            if error.field == "model.hf_checkpoint":
                error = ConfigError(field, error.value, error.expected)
            met = [known.value for known in self.problems]  # a file that two things are read from is broken for both
            if error.value not in met or not Path(str(error.value)).is_file():
                self.problems.append(error)
            return None
