"""The endpoints for turns of conversations, each with the format that it speaks; and the list of models, which is one for both houses."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.gateway.wire import anthropic_messages, openai_chat, openai_responses
from services.gateway.wire.request import ChatTurn, TokenTurn, TurnResult
from services.gateway.wire.turn_events import TurnEvents, TurnStart
from services.gateway.wire.turn_refused import House


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How a house's clients ask for a turn and are answered.

    Attributes:
        house: whose error shape it has.
        parse: from a body and the turn's request id; raises TurnRefused.
        answer: the body of a whole answer; raises TurnRefused where the turn was aborted.
        events: those of a streamed one, of the content type ``text/event-stream``.
        id_prefix: how the house's request ids begin.
    """

    house: House
    parse: Callable[[bytes, str], ChatTurn]
    answer: Callable[[ChatTurn, TurnResult], dict[str, Any]]
    events: Callable[[ChatTurn, TurnStart], TurnEvents]
    id_prefix: str


CHAT_FORMATS = {
    "/v1/chat/completions": WireFormat("openai", openai_chat.parse, openai_chat.answer, openai_chat.ChatEvents, "chatcmpl-"),
    "/v1/responses": WireFormat("openai", openai_responses.parse, openai_responses.answer, openai_responses.ResponseEvents, "resp_"),
    "/v1/messages": WireFormat("anthropic", anthropic_messages.parse, anthropic_messages.answer, anthropic_messages.MessageEvents, "msg_"),
}
"""By path."""


def answer_headers(turn: ChatTurn | TokenTurn) -> dict[str, str]:
    """Returns the headers of an answer: nothing of a request is ignored in silence."""
    return {"X-Myxo-Ignored": ", ".join(turn.ignored)} if turn.ignored else {}


def model_entry(model: str, created: int, context_length: int) -> dict[str, Any]:
    """Returns an entry of ``/v1/models``, and the answer of ``/v1/models/NAME``. ``created``: seconds since the epoch."""
    openai = {"id": model, "object": "model", "created": created, "owned_by": "myxo", "max_model_len": context_length}
    since = datetime.fromtimestamp(created, UTC).isoformat()
    return openai | {
        "type": "model",
        "display_name": model,
        "created_at": since,
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }


def model_list(model: str, created: int, context_length: int) -> dict[str, Any]:
    """Returns the answer of ``/v1/models``: clients of either house read their own fields of it."""
    entry = model_entry(model, created, context_length)
    return {"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model}
