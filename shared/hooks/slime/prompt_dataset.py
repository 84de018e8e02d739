"""``slime.utils.data``: a file of prompts as samples, for code of the user's that reads one by itself."""

import random
from pathlib import Path
from typing import Any

from shared.data import data_files
from shared.data.rows import RowEntry, open_rows
from shared.hooks.hook_sample import HookSample
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
        self.origin_samples = [one for one in found if max_length is None or self._length(one) <= max_length]
        self.samples, self.epoch_id, self.seed = list(self.origin_samples), -1, seed

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
