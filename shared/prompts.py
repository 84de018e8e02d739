"""Prompts from a JSONL file: text or chat messages, label, metadata, environment; rendered and tokenised without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared import codec
from shared.config import RunConfig
from shared.errors import ConfigError, nearest
from shared.jsonl import JsonLines
from shared.sections import DataSection, RewardSection
from shared.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to generate from. ``content`` as it stands in the file; ``tokens``: int32 [P]; ``environment`` scores it."""

    content: str | list[dict[str, Any]]
    tokens: NDArray[np.int32]
    label: str | None
    metadata: dict[str, Any]
    environment: str


class PromptFile:
    """The prompts of a file, by row.

    Args:
        lines: the file. data: keys and template. max_tokens: the longest prompt accepted (None: any).
        reward: which environments there are, and which scores prompts that name none.
    """

    def __init__(
        self, lines: JsonLines, data: DataSection, tokenizer: Tokenizer, max_tokens: int | None, reward: RewardSection | None = None
    ) -> None:
        self._lines, self._data, self._tokenizer, self._max_tokens = lines, data, tokenizer, max_tokens
        self._reward = reward or RewardSection()
        self._environments = self._reward.environment_names()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Prompt:
        """Raises ConfigError with file, line, key and what would be right."""
        lines, data = self._lines, self._data
        entry = lines[row]
        content = lines.require(row, data.input_key)
        label: Any = lines.require(row, data.label_key) if data.label_key is not None else None
        metadata = entry.get(data.metadata_key) or {}
        if isinstance(label, int | float) and not isinstance(label, bool):
            label = str(label)
        if label is not None and not isinstance(label, str):
            self._refuse(row, data.label_key, label, "text or a number")
        if not isinstance(metadata, dict):
            self._refuse(row, data.metadata_key, metadata, "an object")
        try:
            codec.pack([content, label, metadata])
        except (TypeError, UnicodeError) as error:  # an integer over 64 bits, half a surrogate pair
            self._refuse(row, data.input_key, str(error), "text and numbers that MessagePack carries")
        tokens = self._tokenizer.encode(self._render(row, content))
        if not len(tokens):
            self._refuse(row, data.input_key, content, "a prompt that is not empty")
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            self._refuse(row, data.input_key, f"{len(tokens)} tokens", f"at most rollout_max_prompt_len = {self._max_tokens} tokens")
        return Prompt(content, tokens, label, metadata, self._environment(row, metadata))

    def check(self) -> None:
        """Reads every prompt once. Raises ConfigError for the first that does not fit."""
        for row in range(len(self)):
            self[row]

    def _environment(self, row: int, metadata: dict[str, Any]) -> str:
        """The prompt's own ``metadata.rm_type``, as slime has it, else the run's."""
        name = metadata.get("rm_type")
        if name is None:
            return self._reward.rm_type
        if name not in self._environments:
            expected = f"a verifier or environment of [reward] ({nearest(str(name), self._environments)})"
            self._refuse(row, f"{self._data.metadata_key}.rm_type", name, expected)
        return str(name)

    def _render(self, row: int, content: Any) -> str:
        if isinstance(content, str):
            if not self._data.apply_chat_template:
                return content
            content = [{"role": "user", "content": content}]
        if not isinstance(content, list) or not content or not all(_is_chat_message(message) for message in content):
            self._refuse(row, self._data.input_key, content, "text, or a list of chat messages with role and content")
        return self._tokenizer.render(content, self._data.apply_chat_template_kwargs)

    def _refuse(self, row: int, key: str | None, value: object, expected: str) -> Any:
        raise ConfigError(f"{self._lines.field}:{key}", self._lines.where(row), f"expected {expected}, found {value!r}")


def _is_chat_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def training_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptFile:
    """The run's training prompts."""
    lines = JsonLines(config.data.prompt_data, "data.prompt_data")
    return PromptFile(lines, config.data, tokenizer, config.rollout.rollout_max_prompt_len, config.reward)


def eval_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptFile | None:
    """The run's held-out prompts; None where the run evaluates nothing."""
    if config.eval.eval_prompt_data is None:
        return None
    lines = JsonLines(config.eval.eval_prompt_data, "eval.eval_prompt_data")
    return PromptFile(lines, config.data, tokenizer, config.rollout.rollout_max_prompt_len, config.reward)
