"""Demonstrations from rows of a file: text with a response, or a chat of which the assistant's turns are trained."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.config.run_config import RunConfig
from shared.data.prompts import chat_problem, chat_tools
from shared.data.rows import RowEntry, open_rows
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.schema.sample import Sample

TRAINED_ROLE = "assistant"


class Piece(NamedTuple):
    """A part of a rendered chat. ``trained``: whether the model learns to write it."""

    text: str
    trained: bool


def pieces(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> list[Piece]:
    """Returns a chat rendered by the model's template, cut where the assistant's turns begin and end.

    A turn begins behind the generation prompt of the messages before it, where generation begins too; it ends with the chat rendered up to
    it. What the template writes for a part of the chat has to stand at the beginning of what it writes for more of it. A turn with
    ``step_loss_mask`` 0 is not trained.

    Raises:
        ValueError: no assistant's turn, or a template under which they cannot be told apart. ConfigError: it refuses the chat.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == TRAINED_ROLE]
    if not any(map(_is_trained, (messages[turn] for turn in turns))):
        raise ValueError(f"no message has the role {TRAINED_ROLE} and a step_loss_mask of 1, the default; there is nothing to train")
    if turns[0] == 0:
        raise ValueError(f"the first message has the role {TRAINED_ROLE}; expected one to answer before it")
    found: list[Piece] = []
    before = ""
    for turn in turns:
        begun = tokenizer.render(list(messages[:turn]), variables)
        ended = tokenizer.render(list(messages[: turn + 1]), {**variables, "add_generation_prompt": False})
        for earlier, later, what in ((before, begun, "the turns before"), (begun, ended, "the generation prompt of")):
            if not later.startswith(earlier):
                raise ValueError(_not_nested(turn, what, earlier, later))
        found += [Piece(begun[len(before) :], False), Piece(ended[len(begun) :], _is_trained(messages[turn]))]
        before = ended
    return found


def _is_trained(message: dict[str, Any]) -> bool:
    """Returns whether an assistant's turn is trained: slime's key of a message says so."""
    return bool(message.get("step_loss_mask", 1) == 1)


class DemonstrationFile:
    """The demonstrations of a run, read row by row. A row holds a chat where it has ``sft_messages_key``, else text.

    Raises ConfigError for ``sft_data`` that cannot be read, or a model without a token to end a response with.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.sft.sft_data is not None  # only made for runs with a warm start
        if not tokenizer.stop_ids:
            raise ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), "names no eos token for demonstrations to end with")
        self._rows = open_rows(config.sft.sft_data, "sft.sft_data")
        self._sft, self._data, self._tokenizer = config.sft, config.data, tokenizer
        self._most = config.longest_sample

    def __len__(self) -> int:
        return len(self._rows)

    def check(self, row: int) -> None:
        """Reads a row and renders its chat. Raises ConfigError for what cannot be used, or is longer than a micro-batch of the trainer."""
        entry = self._rows.entry(row)
        stretches, is_chat = self._stretches(entry)
        if sum(len(piece.text.encode()) for piece in stretches) < self._most:
            return  # a token has a byte at least
        tokens = sum(len(self._tokenizer.encode(piece.text)) for piece in stretches) + (not is_chat)
        if tokens > self._most:
            key = self._sft.sft_messages_key if is_chat else self._sft.sft_response_key
            budget = f"a micro-batch holds {self._most} (max_tokens_per_gpu, of each context-parallel rank)"
            raise entry.refusal(key, f"the demonstration has {tokens} tokens, {budget}")

    def __getitem__(self, row: int) -> Sample:
        """Returns a row as a sample of version 0: its prompt goes up to the first trained token.

        The end of a response is trained: a text response gets the model's first stop token, and so does a chat whose template writes none;
        text that a template writes after a stop token is not trained. Raises ConfigError for a row that cannot be used.
        """
        entry = self._rows.entry(row)
        stretches, is_chat = self._stretches(entry)
        stops = self._tokenizer.stop_ids
        tokens = [self._tokenizer.encode(piece.text) for piece in stretches]
        masks = [_mask(ids, piece.trained, stops if is_chat else []) for ids, piece in zip(tokens, stretches, strict=True)]
        if not (is_chat and np.isin(tokens[-1], stops).any()):
            tokens.append(np.array(stops[:1], np.int32))
            masks.append(np.full(1, stretches[-1].trained, np.uint8))
        ids, mask = np.concatenate(tokens).astype(np.int32), np.concatenate(masks).astype(np.uint8)
        trained = np.flatnonzero(mask)
        first, end = int(trained[0]), int(trained[-1]) + 1
        if not first:
            raise entry.refusal(self._sft.sft_prompt_key, "has no tokens; the first trained token needs one before it")
        length = end - first
        return Sample(
            group=f"sft-{row}",
            index=0,
            prompt=ids[:first],
            response=ids[first:end],
            log_probs=np.zeros(length, np.float32),
            mask=mask[first:end],
            segments=[(0, length, 0)],
            finish="stop",
            text="",
        )

    def _stretches(self, entry: RowEntry) -> tuple[list[Piece], bool]:
        """Returns a row's pieces, and whether they are a chat's."""
        sft, key = self._sft, self._sft.sft_messages_key
        if key not in entry.values:
            prompt = entry.text(sft.sft_prompt_key, "sft.sft_prompt_key")
            return [Piece(prompt, False), Piece(entry.text(sft.sft_response_key, "sft.sft_response_key"), True)], False
        messages = entry.values[key]
        if (problem := chat_problem(messages)) is not None:
            raise entry.refusal(key, f"expected a list of chat messages with role and content, {problem}")
        variables = {**self._data.apply_chat_template_kwargs, **chat_tools(entry, self._data.tool_key)}
        try:
            return pieces(self._tokenizer, messages, variables), True
        except ConfigError as error:
            raise entry.refusal(key, error.expected) from None
        except ValueError as error:
            raise entry.refusal(key, str(error)) from None


def _mask(tokens: NDArray[np.int32], trained: bool, stop_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Returns uint8 [T]: 1 up to and with the last stop token of a trained stretch, or all over where it has no stop token."""
    mask = np.full(len(tokens), trained, np.uint8)
    stops = np.flatnonzero(np.isin(tokens, stop_ids))
    if stops.size:
        mask[int(stops[-1]) + 1 :] = 0
    return mask


def _not_nested(turn: int, what: str, earlier: str, later: str) -> str:
    differing = (index for index, (before, after) in enumerate(zip(earlier, later, strict=False)) if before != after)
    at = next(differing, min(len(earlier), len(later)))
    start = max(at - 20, 0)
    return (
        f"the chat template rewrites {what} message {turn}: {earlier[start : at + 20]!r} becomes {later[start : at + 20]!r}, so that the "
        "assistant's tokens cannot be told; give each assistant's turn a line of its own, or the model another chat_template.jinja"
    )
