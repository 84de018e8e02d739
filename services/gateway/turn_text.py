"""Says what of a turn's text is sure while it is sampled. It is pure.

A turn's message is what the family's parser makes of the whole completion (`ChatTokens.parse`); what is sent earlier must be its beginning
to the letter. So the parser is asked once for the channel that is open, reasoning or content, by a letter that is appended and looked for;
from there on plain tokens are decoded as they come. Held back is what the next tokens may still change: white space and parts of a
character at the end, what may become a stop string or a marker, and all content from a marker on, since it may be a tool call.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from services.gateway.chat_tokens import ChatTokens, Messages
from shared.formats.request import TurnDelta, TurnRefused, TurnResult, deltas_of

# The beginning of what some family's parser reads otherwise than as text
MARKER = re.compile(
    r"<[|/]?[^<>\s]{0,60}?(?:tool|think|function|invoke|parameter|channel|message|content|call|dsml|arg_|sep|turn)", re.IGNORECASE
)
MARKER_BEGUN = re.compile(r"<[^<>\s]{0,70}$")  # What may become one
CONTEXT = 8  # Tokens before new ones that are decoded with them: the text of a token may depend on its neighbours
# By how much a completion has to grow until the parser is asked again for the channel that is open: so often is never too often
PATIENCE = 1.1


class TurnText:
    """The text of one turn, sent piece by piece. ``prompt``: token ids. ``stops``: strings that end the turn. ``whole``: nothing is
    sent before its end."""

    def __init__(self, chat: ChatTokens, prompt: Sequence[int], tools: Messages, stops: Sequence[str], *, whole: bool = False) -> None:
        self._chat, self._prompt, self._tools, self._stops = chat, list(prompt), tools, stops
        self._ids: list[int] = []
        self._reasoning, self._content = "", ""  # what was sent
        self._open: Literal["", "reasoning", "content"] = ""
        self._text = ""  # of the channel that is open
        self._read = 0  # tokens of which the text is made
        self._next_read = 0
        self._frozen = whole or not chat.streams_text  # nothing is sure any more before the turn's end

    def add(self, tokens: Sequence[int]) -> list[TurnDelta]:
        """Returns what is sure by these further tokens, and was not before."""
        self._ids += tokens
        if self._frozen:
            return []
        deltas: list[TurnDelta] = []
        if self._open and not self._append():
            deltas += self._sure_deltas()  # what came before the marker
            if self._open == "content" and not self._chat.plain_markers:
                self._frozen = True
                return deltas
            self._open, self._next_read = "", 0
        if not self._open and len(self._ids) >= self._next_read:
            deltas += self._read_channel()
        return deltas + self._sure_deltas()

    def finish(self, result: TurnResult) -> list[TurnDelta]:
        """Returns all of the whole turn that was not sent. Raises TurnRefused where what was sent is not its beginning."""
        reasoning, content = result.reasoning, result.content
        begins = reasoning.startswith(self._reasoning) and content.startswith(self._content)
        if not begins or (self._content and reasoning != self._reasoning):
            message = "the answer is not what was streamed of it; ask again: it was recorded, and is answered as a whole"
            raise TurnRefused(503, message, code="stream_diverged", retry_after_s=0.0)
        return deltas_of(replace(result, reasoning=reasoning[len(self._reasoning) :], content=content[len(self._content) :]))

    def _read_channel(self) -> list[TurnDelta]:
        """Asks the parser which channel is open, and for its text. Returns the rest of the reasoning where it has ended."""
        self._next_read = int(len(self._ids) * PATIENCE) + 1
        settled = self._settled()
        if not settled:
            return []
        parsed = self._chat.parse_tokens(self._prompt, [*self._ids[:settled], *self._chat.letter], self._tools)
        if parsed.calls:
            self._frozen = True
            return []
        if parsed.content.endswith(self._chat.LETTER):
            self._open, self._text = "content", parsed.content[: -len(self._chat.LETTER)]
        elif parsed.reasoning.endswith(self._chat.LETTER):
            self._open, self._text = "reasoning", parsed.reasoning[: -len(self._chat.LETTER)]
        sent = self._content if self._open == "content" else self._reasoning
        ended = self._open == "content" and parsed.reasoning != self._reasoning
        if not self._text.startswith(sent) or (ended and (self._content or not parsed.reasoning.startswith(self._reasoning))):
            self._frozen = True
            return []
        if not self._text.strip():
            self._open = ""  # white space at the beginning is the parser's affair
            return []
        self._read = settled
        if not ended:
            return []
        rest, self._reasoning = parsed.reasoning[len(self._reasoning) :], parsed.reasoning
        return [TurnDelta(reasoning=rest)]

    def _settled(self) -> int:
        """Returns the number of tokens before those at the end that may be a part of a character."""
        for count in range(len(self._ids), max(0, len(self._ids) - CONTEXT), -1):
            if self._whole(self._chat.text(self._ids[max(0, count - CONTEXT) : count]), count):
                return count
        return 0

    def _whole(self, text: str, count: int) -> bool:
        return not text.endswith("\ufffd") and self._ids[count - 1] not in self._chat.byte_ids

    def _append(self) -> bool:
        """Adds the text of further plain tokens. Returns False where there is one that may be a marker."""
        further = self._ids[self._read :]
        plain = next((index for index, token in enumerate(further) if token in self._chat.added_ids), len(further))
        start, end = max(0, self._read - CONTEXT), self._read + plain
        if plain:
            before, text = self._chat.text(self._ids[start : self._read]), self._chat.text(self._ids[start:end])
            if plain == len(further) and not self._whole(text, end):
                return True
            if not text.startswith(before):
                return False
            self._text, self._read = self._text + text[len(before) :], end
        return plain == len(further)

    def _sure_deltas(self) -> list[TurnDelta]:
        if not self._open or self._frozen:
            return []
        sent = self._content if self._open == "content" else self._reasoning
        sure = self._sure(len(sent))
        if len(sure) <= len(sent):
            return []
        if self._open == "content":
            self._content = sure
            return [TurnDelta(content=sure[len(sent) :])]
        self._reasoning = sure
        return [TurnDelta(reasoning=sure[len(sent) :])]

    def _sure(self, sent: int) -> str:
        """Returns the beginning of the text that nothing to come can change; ``sent``: characters that were sent before."""
        text, content = self._text, self._open == "content"
        ends = [at for stop in self._stops if content and (at := text.find(stop, sent)) >= 0]
        if (marker := MARKER.search(text, sent)) is not None:
            ends.append(marker.start())
        if ends:
            self._frozen = content
            if not content:  # the text may close the reasoning: the parser knows
                self._open = ""
            text = text[: min(ends)]
        else:
            held = [_overlap(text, stop) for stop in self._stops if content]
            begun = MARKER_BEGUN.search(text, max(sent, len(text) - 72))
            text = text[: len(text) - max([0, *held, *([] if begun is None else [len(text) - begun.start()])])]
        return text.rstrip().rstrip("\ufffd").rstrip()


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
