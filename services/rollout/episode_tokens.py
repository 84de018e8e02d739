"""The token ids of an episode: its opening, and what stands between two messages of the model. Pure.

What the model has drawn is never tokenised again: each turn's ids are those of the turn before, what was drawn, and the ids of what the
chat template puts behind a message of the model's. That text is taken from behind a placeholder, so that a template which rewrites earlier
messages (thoughts that it leaves out) changes nothing in what was drawn; and it must begin as the end of a message does.
"""

from collections.abc import Sequence
from typing import Any, Literal

from shared.data.call_form import in_call_form
from shared.data.tokenizer import Tokenizer
from shared.environment.protocol import Reply
from shared.runtime.errors import ConfigError

_PLACEHOLDER = "3c6ef372fe94f82b"
"""Stands for the model's message: no template has it."""


class EpisodeTokens:
    """The ids of one episode.

    Args:
        as_chat: through the chat template; else texts stand one behind the other. variables: more of the template's.
        control_tokens: what those are that the environment's texts spell, through the template: text, or control tokens (as_written).
    """

    def __init__(
        self, tokenizer: Tokenizer, as_chat: bool, variables: dict[str, Any], control_tokens: Literal["text", "as_written"] = "text"
    ) -> None:
        self._tokenizer, self._as_chat = tokenizer, as_chat
        self._control = tokenizer.control_tokens[control_tokens if as_chat else "as_written"]
        self._variables = {key: self._control.guarded(value) if key == "tools" else value for key, value in variables.items()}

    def opening(self, prompt: str | list[dict[str, Any]], ids: Sequence[int], messages: Sequence[Reply]) -> list[int]:
        """Returns the ids that the first turn goes on from: the prompt, and what ``reset`` has added.

        Args:
            ids: of the prompt alone, which stay where text is put behind text.

        Raises ConfigError.
        """
        if self._as_chat:
            first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            formed = in_call_form(self._tokenizer, [*first, *messages], self._variables, keep_text=True)
            told = self._guarded(formed[len(first) :])
            return self._ids(self._tokenizer.render([*formed[: len(first)], *told], self._variables))
        return [*ids, *self._ids(_text(messages))]

    def reply(self, messages: Sequence[Reply], last: int | None) -> tuple[str, list[int]]:
        """Returns what stands behind the model's message up to its next one, as text and ids; none of it is the model's.

        Args:
            last: the token that ended the message, where it ended by itself: what the template ends a message with is not put there twice.

        Raises ConfigError where the template does not go on from a message as it ended one.
        """
        text = self._behind(messages) if self._as_chat else _text(messages)
        if last is not None and text.startswith(end := self._tokenizer.pieces([last])[0]):
            text = text[len(end) :]
        return self._control.plain(text), self._ids(text)

    def _behind(self, messages: Sequence[Reply]) -> str:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        ended = self._tokenizer.render(said, {**self._variables, "add_generation_prompt": False})
        gone_on = self._tokenizer.render([*said, *self._guarded(messages)], self._variables)
        (_, found, end), (_, found_on, text) = ended.partition(_PLACEHOLDER), gone_on.partition(_PLACEHOLDER)
        if not (found and found_on) or not text.startswith(end):
            expected = "the chat template goes on from a message otherwise than it ended one; episodes need one that only appends"
            raise ConfigError("data.apply_chat_template", self._control.plain(gone_on)[-200:], expected)
        return text

    def _guarded(self, messages: Sequence[Reply]) -> list[Reply]:
        return [self._control.guarded(one) | {"role": one["role"]} for one in messages]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._control.encode(text).tolist()
        return ids


def _text(messages: Sequence[Reply]) -> str:
    return "".join(message["content"] for message in messages)
