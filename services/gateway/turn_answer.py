"""Makes of a turn that has ended what its client is told. It is pure."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.chat_tokens import ChatTokens, ParsedCall, ParsedTurn
from services.gateway.wire.request import CalledTool, ChatTurn, MalformedCall, TurnResult, TurnTokens, TurnUsage
from shared.data.stop_strings import written
from shared.sessions.session import Session, Turn


class TurnAnswers:
    """The answers of one model. ``model``: its name."""

    def __init__(self, chat: ChatTokens, model: str) -> None:
        self._chat, self._model = chat, model

    def chat(self, turn: Turn, session: Session, asked: ChatTurn) -> TurnResult:
        """Returns the next message of a conversation."""
        parsed = self._chat.parse(turn, asked.tools)
        if asked.tool_choice == "none" or not asked.tools:
            parsed = replace(parsed, content=parsed.content + "".join(call.text for call in parsed.calls), calls=())
        return self._answer(turn, parsed, stops_of(session, asked), spelled=asked.logprobs)

    def tokens(self, turn: Turn) -> TurnResult:
        """Returns the tokens that follow a prompt."""
        return self._answer(turn, ParsedTurn("", "", ()), (), spelled=False)

    def _answer(self, turn: Turn, parsed: ParsedTurn, stops: Sequence[str], *, spelled: bool) -> TurnResult:
        """Returns an answer; ``spelled``: with the text of each token."""
        called = [call for call in parsed.calls if call.ok]
        malformed = [call for call in parsed.calls if not call.ok]
        ends = written(turn.completion, stops if turn.finish == "stop" else (), self._chat.text)
        content, stopped = _cut(parsed.content + "".join(call.text for call in malformed), ends)
        versions = [version for _, _, version in turn.spans] or [0]
        return TurnResult(
            request_id=turn.request,
            model=self._model,
            created=int(time.time()),
            content=content,
            finish="tool_calls" if called and turn.finish == "stop" else turn.finish,
            usage=TurnUsage(prompt=len(turn.prompt), completion=len(turn.completion), cached=min(turn.cached, len(turn.prompt))),
            versions=(min(versions), max(versions)),
            reasoning=parsed.reasoning,
            tool_calls=[_called(call, turn.request, index) for index, call in enumerate(called)],
            malformed_calls=[MalformedCall(text=call.text, status=call.status) for call in malformed],
            stop_text=stopped,
            tokens=TurnTokens(
                prompt=turn.prompt,
                completion=turn.completion,
                logprobs=turn.log_probs,
                texts=self._chat.tokenizer.pieces(turn.completion) if spelled else (),
            ),
        )


def stops_of(session: Session, asked: ChatTurn) -> list[str]:
    """Returns the strings that end a turn: the task's, and the request's own."""
    return [*session.sampling.stop, *asked.sampling.stop]


def _cut(content: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Returns a content without the stop string that ended it, and that string."""
    found = max(((content.rfind(stop), stop) for stop in stops if stop in content), default=None)
    return (content, None) if found is None else (content[: found[0]], found[1])


def _called(call: ParsedCall, request: str, index: int) -> CalledTool:
    arguments: Mapping[str, Any] | Any = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return CalledTool(id=call.id or f"call_{request[-24:]}_{index}", name=call.name, arguments=text)
