"""``slime.rollout.data_source`` and ``slime.utils.data``: where prompts come from, and a file of prompts as samples.

Classes of the user's derive from the sources. One that is the run's (``data_source``) is made in a process of its own
(`shared.data.source_process`), whose ``args`` know the run's config.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from shared.data import data_files
from shared.data.prompts import PromptFile
from shared.data.rows import RowEntry, open_rows
from shared.data.tokenizer import Tokenizer
from shared.hooks.hook_sample import HookSample
from shared.hooks.loading import load_function
from shared.rewards.reference import Reference
from shared.runtime.safe_files import parse_json


class Dataset:
    """The prompts of a JSONL or Parquet file, or of a part ``PATH@[start:stop]`` of one.

    Args:
        tokenizer: transformers'. processor: of images, which there are none of. max_length: tokens; longer prompts are left out.

    Attributes:
        origin_samples: in the file's order. samples: in the present one.

    Raises ConfigError for a row that does not have the keys, ValueError for ``multimodal_keys``.
    """

    def __init__(
        self,
        path: Any,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Any = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if multimodal_keys is not None:
            raise ValueError("multimodal_keys: prompts are text here")
        self._tokenizer, self._keys = tokenizer, (prompt_key, label_key, tool_key, metadata_key)
        self._template = (apply_chat_template_kwargs or {}) if apply_chat_template else None
        files = [data_files.parse(str(one)) for one in (path if isinstance(path, list | tuple) else [path])]
        rows = open_rows(files, "Dataset.path")
        found = [self._sample(rows.entry(row)) for row in range(len(rows))]
        self._hold([one for one in found if max_length is None or self._length(one) <= max_length], seed)

    def _hold(self, samples: list[HookSample], seed: int) -> None:
        self.origin_samples, self.samples, self.epoch_id, self.seed = samples, list(samples), -1, seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Puts the samples into the order of an epoch, which follows from the seed and the epoch alone."""
        if self.epoch_id != new_epoch_id:
            order = list(range(len(self.origin_samples)))
            random.Random(self.seed + new_epoch_id).shuffle(order)
            self.samples, self.epoch_id = [self.origin_samples[index] for index in order], new_epoch_id

    def __getitem__(self, index: int) -> HookSample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)

    def _sample(self, entry: RowEntry) -> HookSample:
        prompt_key, label_key, tool_key, metadata_key = self._keys
        content = entry.value(prompt_key, "prompt_key")
        metadata, tools = dict(entry.values.get(metadata_key) or {}), None if tool_key is None else entry.values.get(tool_key)
        if tools is not None:
            metadata["tools"] = tools = parse_json(tools) if isinstance(tools, str) else list(tools)
        if self._template is not None:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            settings = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **self._template}
            content = self._tokenizer.apply_chat_template(messages, **settings)
        label = None if label_key is None else entry.value(label_key, "label_key")
        return HookSample(prompt=content, label=label, metadata=metadata)

    def _length(self, sample: HookSample) -> int:
        return len(self._tokenizer.encode(sample.prompt, add_special_tokens=False)) if isinstance(sample.prompt, str) else 0


def read_file(path: str | Path) -> Any:
    """Yields the rows of a file, or of a part ``PATH@[start:stop]`` of one, as dicts."""
    rows = open_rows([data_files.parse(str(path))], "read_file.path")
    for row in range(len(rows)):
        yield dict(rows.entry(row).values)


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


class PromptSamples(Dataset):
    """The prompts of the run's files as samples."""

    def __init__(self, args: Any) -> None:
        config = args.run_config
        tokenizer = Tokenizer(config.model.hf_checkpoint)
        file = PromptFile(config, tokenizer, "data.prompt_data", config.data.prompt_data)
        prompts = [file[row] for row in range(len(file))]
        render = config.data.apply_chat_template
        samples = [
            HookSample(
                prompt=tokenizer.decode(prompt.tokens, skip_special_tokens=False) if render else prompt.content,
                label=Reference(prompt.label, prompt.label_json).value,
                metadata=prompt.metadata,
            )
            for prompt in prompts
        ]
        self._hold(samples, args.rollout_seed)


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
