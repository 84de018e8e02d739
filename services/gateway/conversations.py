"""Knows which turn a conversation goes on from. It is pure.

Clients send the whole conversation each time. Each turn is kept with the digest of the messages up to its answer; the longest beginning of
a new request that has such a digest is the turn that it continues, and only what follows is rendered.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from services.gateway.wire.request_body import shallow
from shared.sessions.session import Turn

Messages = Sequence[Mapping[str, Any]]


def digests(messages: Messages, tools: Messages) -> list[str]:
    """Returns the digest of each beginning of a conversation, by its number of messages: the first is that of none."""
    running = hashlib.sha256(_canonical(list(tools)))
    found = [running.hexdigest()]
    for message in messages:
        running.update(b"\n" + _canonical(_told(message)))
        found.append(running.hexdigest())
    return found


def continued(turns: Iterable[Turn], messages: Messages, tools: Messages, reasoning: Callable[[Turn], str]) -> tuple[Turn, Messages] | None:
    """Returns the turn that a conversation continues, with the messages that are new; None where there is no such turn.

    Args:
        reasoning: of a turn. Of several that say the same, the one counts whose reasoning the client has sent back, else the newest.
    """
    known: dict[str, list[Turn]] = {}
    for turn in turns:
        if turn.conversation:
            known.setdefault(turn.conversation, []).append(turn)
    found = digests(messages, tools)
    for count in range(len(messages) - 1, 0, -1):
        if alike := known.get(found[count]):
            thought = messages[count - 1].get("reasoning_content") if len(alike) > 1 else None
            fitting = [turn for turn in alike if thought and reasoning(turn) == thought]
            return (fitting or alike)[-1], messages[count:]
    return None


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a message tells it from others. Reasoning is none of it: many clients do not send it back."""
    told = {key: value for key, value in message.items() if key in ("role", "content", "name", "tool_call_id")}
    if message.get("role") == "assistant":
        told.pop("name", None)
        told["calls"] = [[call["function"]["name"], _object(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    return told


def _object(arguments: Any) -> Any:
    """Returns the arguments of a call as an object where they are one: some clients write their text anew."""
    try:
        return shallow(json.loads(arguments)) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
