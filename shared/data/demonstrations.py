"""Demonstrations from rows of a file: text with a response, or a chat of which the assistant's turns are trained."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.config.engine_limits import longest_trained
from shared.config.run_config import RunConfig
from shared.data.chat_template import BrokenTemplate
from shared.data.prompts import Chat, chat_problem, chat_tools, present
from shared.data.rows import RowEntry, open_rows
from shared.data.tokenizer import Tokenizer, in_call_form
from shared.runtime.errors import ConfigError
from shared.schema.sample import Sample

TRAINED_ROLE = "assistant"

PLACEHOLDER = "510e527fade682d1"
"""Stands for an assistant's message where only what the template writes behind it is looked at: no template has it."""


class Piece(NamedTuple):
    """A part of a rendered chat. ``trained``: whether the model learns to write it."""

    text: str
    trained: bool


class DemonstrationLine(NamedTuple):
    """The text of one sample of a demonstration. ``turn``: the chat's message of its last piece; -1 for text."""

    pieces: list[Piece]
    turn: int


def lines(tokenizer: Tokenizer, chat: Chat) -> list[DemonstrationLine]:
    """Returns a chat rendered by the model's template, cut where the assistant's turns begin and end.

    A turn begins behind the generation prompt of the messages before it, where generation begins too; it ends with the chat rendered up to
    it. Turns are in one line for as long as what the template writes for a part of the chat begins what it writes for more of it. A turn in
    front of which the template writes the chat anew (Qwen3's leaves out the reasoning of earlier turns) begins another line, with all that
    is before it in one piece. So each turn is trained once, behind the very prompt that a rollout has there; one with ``step_loss_mask`` 0
    never.

    Raises:
        ValueError: no assistant's turn, or a template that rewrites the generation prompt. ConfigError: it refuses the chat.
    """
    messages, variables = chat
    turns = [index for index, message in enumerate(messages) if message["role"] == TRAINED_ROLE]
    if not any(map(_is_trained, (messages[turn] for turn in turns))):
        raise ValueError(f"no message has the role {TRAINED_ROLE} and a step_loss_mask of 1, the default; there is nothing to train")
    if turns[0] == 0:
        raise ValueError(f"the first message has the role {TRAINED_ROLE}; expected one to answer before it")
    found, before = list[DemonstrationLine](), ""
    for turn in turns:
        begun = tokenizer.render(messages[:turn], variables)
        ended = tokenizer.render(messages[: turn + 1], {**variables, "add_generation_prompt": False})
        if not ended.startswith(begun):
            shown = slice(max(len(begun) - 40, 0), len(begun))
            rewritten = f"the generation prompt of message {turn}: {begun[shown]!r} becomes {ended[shown]!r}"
            raise ValueError(f"the chat template rewrites {rewritten}, so that the assistant's tokens cannot be found")
        if not found or not begun.startswith(before):
            found.append(DemonstrationLine([], turn))
            before = ""
        pieces = [*found[-1].pieces, Piece(begun[len(before) :], False), Piece(ended[len(begun) :], _is_trained(messages[turn]))]
        found[-1], before = DemonstrationLine(pieces, turn), ended
    return [line for line in found if any(piece.trained for piece in line.pieces)]


def _is_trained(message: dict[str, Any]) -> bool:
    """Returns whether an assistant's turn is trained: slime's key of a message says so. Raises ValueError for another value than 0 or 1."""
    if (trained := message.get("step_loss_mask", 1)) not in (0, 1):
        raise ValueError(f"a message has the step_loss_mask {trained!r}; expected 0 or 1")
    return bool(trained)


def _behind(tokenizer: Tokenizer, chat: Chat, turn: int) -> str:
    """Returns what the template writes for the message behind a turn: nothing where there is none, or it refuses a chat that ends there."""
    said = [*chat.messages[:turn], {"role": TRAINED_ROLE, "content": PLACEHOLDER}, *chat.messages[turn + 1 : turn + 2]]
    variables = {**chat.variables, "add_generation_prompt": False}
    try:
        end, behind = (tokenizer.render(said[:stop], variables).partition(PLACEHOLDER)[2] for stop in (turn + 1, turn + 2))
    except ConfigError:
        return ""
    return behind.removeprefix(end)


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
        self._most = longest_trained(config)

    def __len__(self) -> int:
        return len(self._rows)

    def check(self, row: int) -> int:
        """Reads a row and renders its chat. Returns the number of its samples.

        Raises ConfigError for what cannot be used, and for a sample that is longer than a micro-batch of the trainer.
        """
        entry = self._rows.entry(row)
        chat, found = self._lines(entry)
        for line in found:
            if sum(len(piece.text.encode()) for piece in line.pieces) + len(self._tokenizer.text_prefix) < self._most:
                continue  # a token has a byte at least
            if (tokens := self._sample(entry, "", 0, line, chat).length) > self._most:
                key = self._sft.sft_response_key if chat is None else self._sft.sft_messages_key
                budget = f"a micro-batch holds {self._most} (max_tokens_per_gpu, of each context-parallel rank; index_topk)"
                raise entry.refusal(key, f"the demonstration has {tokens} tokens, {budget}")
        return len(found)

    def __getitem__(self, row: int) -> Sample:
        """Returns the first of a row's `samples`, which is the only one unless its chat is split."""
        return self.samples(row)[0]

    def samples(self, row: int) -> list[Sample]:
        """Returns a row as samples of version 0, one but for a chat of several `lines`: a prompt goes up to the first trained token.

        The end of a response is trained. Where the template writes no stop token in an assistant's turn, that is one that begins the next
        message (GLM-4.5's headers), else the model's first. Text that a template writes after a stop token is not trained. Raises
        ConfigError for a row that cannot be used.
        """
        entry = self._rows.entry(row)
        chat, found = self._lines(entry)
        return [self._sample(entry, f"sft-{row}", index, line, chat) for index, line in enumerate(found)]

    def chat(self, row: int) -> Chat | None:
        """Returns a row's chat; None for text. Raises ConfigError for what is no chat."""
        return self._chat(self._rows.entry(row))

    def questions(self, row: int) -> list[str | list[dict[str, Any]]]:
        """Returns what the trained turns of a row answer, as prompts have it. Raises ConfigError for a row that cannot be used."""
        entry = self._rows.entry(row)
        if (chat := self._chat(entry)) is None:
            return [entry.text(self._sft.sft_prompt_key, "sft.sft_prompt_key")]
        return [chat.messages[:turn] for turn, message in enumerate(chat.messages) if message["role"] == TRAINED_ROLE]

    def _sample(self, entry: RowEntry, group: str, index: int, line: DemonstrationLine, chat: Chat | None) -> Sample:
        stops = self._tokenizer.stop_ids
        tokens = self._tokens(line.pieces, chat)
        masks = [_mask(ids, piece.trained, [] if chat is None else stops) for ids, piece in zip(tokens, line.pieces, strict=True)]
        for turn in range(1, len(tokens) - 1, 2):
            if line.pieces[turn].trained and not np.isin(tokens[turn], stops).any():
                masks[turn + 1][:1] = np.isin(tokens[turn + 1][:1], stops)
        if chat is None or not np.isin(tokens[-1], stops).any():
            header = self._tokenizer.encode("" if chat is None else _behind(self._tokenizer, chat, line.turn))[:1]
            tokens.append(header if np.isin(header, stops).any() else np.array(stops[:1], np.int32))
            masks.append(np.full(1, line.pieces[-1].trained, np.uint8))
        ids, mask = np.concatenate(tokens).astype(np.int32), np.concatenate(masks).astype(np.uint8)
        trained = np.flatnonzero(mask)
        first, end = int(trained[0]), int(trained[-1]) + 1
        if not first:
            raise entry.refusal(self._sft.sft_prompt_key, "has no tokens; the first trained token needs one before it")
        return Sample(
            group=group,
            index=index,
            prompt=ids[:first],
            response=ids[first:end],
            log_probs=np.zeros(end - first, np.float32),
            mask=mask[first:end],
            segments=[(0, end - first, 0)],
            finish="stop",
            text="",
        )

    def _tokens(self, pieces: Sequence[Piece], chat: Chat | None) -> list[NDArray[np.int32]]:
        """Returns the ids of each piece; a text's prompt begins as the checkpoint begins a text."""
        begins = self._data.add_special_tokens and chat is None
        first = self._tokenizer.encode(pieces[0].text, begins)
        return [first, *(self._tokenizer.encode_behind(before.text, piece.text) for before, piece in pairwise(pieces))]

    def _chat(self, entry: RowEntry) -> Chat | None:
        key = self._sft.sft_messages_key
        messages = present(entry.values.get(key))
        if messages is None and (key not in entry.values or entry.values.get(self._sft.sft_prompt_key) is not None):
            return None  # a table of both kinds has each key in every row
        if (problem := chat_problem(messages)) is not None:
            raise entry.refusal(key, f"expected a list of chat messages with role and content, {problem}")
        variables = {**self._data.apply_chat_template_kwargs, **chat_tools(entry, self._data.tool_key)}
        return Chat(in_call_form(self._tokenizer, messages, variables, keep_text=True), variables)

    def _lines(self, entry: RowEntry) -> tuple[Chat | None, list[DemonstrationLine]]:
        """Returns a row's chat, where it has one, and its lines."""
        sft = self._sft
        for key in (self._data.multimodal_keys or {}).values():
            if present(entry.values.get(key)):
                raise entry.refusal(key, "expected none: demonstrations are trained as text, without what a row shows")
        if (chat := self._chat(entry)) is None:
            prompt = entry.text(sft.sft_prompt_key, "sft.sft_prompt_key")
            response = entry.text(sft.sft_response_key, "sft.sft_response_key")
            return None, [DemonstrationLine([Piece(prompt, False), Piece(response, True)], -1)]
        try:
            return chat, lines(self._tokenizer, chat)
        except BrokenTemplate:
            raise
        except ConfigError as error:
            raise entry.refusal(sft.sft_messages_key, error.expected) from None
        except ValueError as error:
            raise entry.refusal(sft.sft_messages_key, str(error)) from None


def _mask(tokens: NDArray[np.int32], trained: bool, stop_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Returns uint8 [T]: 1 up to and with the last stop token of a trained stretch, or all over where it has no stop token."""
    mask = np.full(len(tokens), trained, np.uint8)
    stops = np.flatnonzero(np.isin(tokens, stop_ids))
    if stops.size:
        mask[int(stops[-1]) + 1 :] = 0
    return mask
