"""The order in which tool calls and their results stand in a conversation: the same in every house, since a model knows no other."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.wire.turn_refused import TurnRefused


def check_tool_results(messages: Iterable[Mapping[str, Any]], field: str) -> None:
    """Raises TurnRefused where a result follows no call of its id, or a call is followed by something other than the calls' results.

    Args:
        field: the body's field that holds the conversation.
    """
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                raise _misplaced(field, f"a tool's result for {message['tool_call_id']!r} follows no call of that id")
            open_calls.remove(message["tool_call_id"])
        else:
            _check_all_answered(open_calls, field)
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
            if len(set(open_calls)) < len(open_calls):
                raise _misplaced(field, "two tool calls of one message have the same id")
    _check_all_answered(open_calls, field)


def _check_all_answered(open_calls: list[str], field: str) -> None:
    if open_calls:
        raise _misplaced(field, f"the tool call {open_calls[0]!r} is not followed by its result")


def _misplaced(field: str, message: str) -> TurnRefused:
    return TurnRefused(400, message[:500], field=field, code="invalid_value")
