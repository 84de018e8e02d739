"""``slime.rollout.data_source``: where prompts come from. Classes of the user's derive from these.

A class that is the run's source of prompts (``data_source``) is made in a process of its own (`shared.data.source_process`), whose ``args``
know the run's config.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from shared.data.prompts import PromptFile
from shared.data.tokenizer import Tokenizer
from shared.hooks.hook_sample import HookSample
from shared.hooks.slime.function_loading import load_function
from shared.rewards.reference import Reference

Group = list[HookSample]


class DataSource(ABC):
    """The base of sources of prompts. A group is the n samples of one prompt."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Returns the next ``num_samples`` groups."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Takes groups back, to be given out again."""

    @abstractmethod
    def save(self, rollout_id: int) -> Any:
        """Keeps the position, under the number of a step."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> Any:
        """Goes to a position that was kept."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts."""


class PromptSamples:
    """The prompts of the run's files as samples. ``samples``: in the present order."""

    def __init__(self, args: Any) -> None:
        config = args.run_config
        tokenizer, self._seed = Tokenizer(config.model.hf_checkpoint), args.rollout_seed
        file = PromptFile(config, tokenizer, "data.prompt_data", config.data.prompt_data)
        prompts = [file[row] for row in range(len(file))]
        render = config.data.apply_chat_template
        self._origin = [
            HookSample(
                prompt=tokenizer.decode(prompt.tokens, skip_special_tokens=False) if render else prompt.content,
                label=Reference(prompt.label, prompt.label_json).value,
                metadata=prompt.metadata,
            )
            for prompt in prompts
        ]
        self.samples, self._epoch = list(self._origin), -1

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> HookSample:
        return self.samples[index]

    def shuffle(self, new_epoch_id: int) -> None:
        """Puts the samples into the order of an epoch, which follows from the seed and the epoch alone."""
        if self._epoch != new_epoch_id:
            order = list(range(len(self._origin)))
            random.Random(self._seed + new_epoch_id).shuffle(order)
            self.samples, self._epoch = [self._origin[index] for index in order], new_epoch_id


class RolloutDataSource(DataSource):
    """The prompts of the run's files, epoch after epoch.

    Attributes:
        dataset: the prompts; None where the run names no files. epoch_id, sample_offset: the position. sample_group_index, sample_index:
            the next group's and sample's. metadata: anything that is to be kept with the position.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = PromptSamples(args) if args.run_config.data.prompt_data is not None else None
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[Group]:
        return [self._group(prompt) for prompt in self._next(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Raises RuntimeError: this source takes nothing back."""
        raise RuntimeError(f"{type(self).__name__} takes no samples back; RolloutDataSourceWithBuffer does")

    def save(self, rollout_id: int) -> None:
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")
        path.write_text(json.dumps({name: getattr(self, name) for name in names}))

    def load(self, rollout_id: int | None = None) -> None:
        """Goes to the position that `save` kept; stays where it is where there is none."""
        path = self._path(self.args.load, rollout_id)
        if path.exists():
            vars(self).update(json.loads(path.read_text()))
            if self.dataset is not None and self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def _path(self, directory: str, rollout_id: int | None) -> Path:
        return Path(directory) / "rollout" / f"global_dataset_state_{rollout_id}.json"

    def _next(self, count: int) -> list[HookSample]:
        if self.dataset is None:
            return [HookSample() for _ in range(count)]
        found: list[HookSample] = []
        while len(found) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            part = self.dataset.samples[self.sample_offset : self.sample_offset + count - len(found)]
            self.sample_offset += len(part)
            found += part
        return found

    def _group(self, prompt: HookSample) -> Group:
        group = [deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same with a buffer, out of which groups that were given back come first, as a buffer filter chooses."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        path = args.buffer_filter_path
        self.buffer_filter: Callable[..., list[Group]] = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[Group]:
        again = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer and num_samples else []
        return again + super().get_samples(num_samples - len(again))

    def add_samples(self, samples: list[Group]) -> None:
        """Takes groups back. Raises ValueError for what is no list of whole groups."""
        wanted = self.args.n_samples_per_prompt
        for group in samples:
            if not isinstance(group, list) or len(group) != wanted:
                raise ValueError(f"a group given back is a list of {wanted} samples (n_samples_per_prompt)")
        self.buffer += samples

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Takes the oldest groups out of a buffer and returns them."""
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken
