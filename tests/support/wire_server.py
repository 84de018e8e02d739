"""A server that speaks the gateway's formats and answers with given results, so that real clients can be heard about their form."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from services.gateway import routes
from services.gateway.routes import CHAT_FORMATS, WireFormat
from services.gateway.turn_decisions import Constraints, unconstrained
from shared.formats import anthropic_messages, token_generate
from shared.formats.request import (
    CalledTool,
    ChatTurn,
    TokenTurn,
    TurnEvents,
    TurnRefused,
    TurnResult,
    TurnTokens,
    TurnUsage,
    deltas_of,
    started,
)
from shared.runtime.addresses import HttpAddress
from shared.runtime.http_endpoints import serving

TOKENS = TurnTokens(
    prompt=np.arange(5, dtype=np.int32),
    completion=np.asarray([7, 8, 9], np.int32),
    logprobs=np.asarray([-0.5, -1.25, 0.0], np.float32),
    texts=[b"The ", b"sum\xe2\x82", "é".encode()],
    top=[[(b"The ", -0.5), (b"A", -1.5)], [(b"\xe2", -0.25), (b"\x82", -2.0)], [("é".encode(), 0.0), (b"no", -9999.0)]],
)

PLAIN = TurnResult(
    request_id="chatcmpl-1",
    model="tiny",
    created=1_700_000_000,
    content="The sum is 4.",
    finish="stop",
    usage=TurnUsage(prompt=5, completion=3, cached=2),
    versions=(3, 4),
    tokens=TOKENS,
)
CALLS = replace(
    PLAIN,
    content="I shall see.",
    finish="tool_calls",
    usage=TurnUsage(prompt=5, completion=3, cached=2, reasoning=1),
    reasoning="Two sums, so two calls.",
    tool_calls=[
        CalledTool(id="call_1", name="add", arguments='{"a": 1, "b": "zwölf"}'),
        CalledTool(id="call_2", name="add", arguments="{}"),
    ],
)


@dataclass
class WireServer:
    """``answers``: what the next requests get, in order; the last one also those after it. ``turns``: what they were read as."""

    url: str = ""
    answers: list[TurnResult | TurnRefused] = field(default_factory=list)
    turns: list[ChatTurn | TokenTurn] = field(default_factory=list)
    constraints: Constraints = "refuse"

    def answer(self, turn: ChatTurn | TokenTurn) -> TurnResult:
        self.turns.append(turn)
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(given, TurnRefused):
            raise given
        return given


@asynccontextmanager
async def wire_server() -> AsyncIterator[WireServer]:
    """Serves on a free port of loopback."""
    server, app = WireServer(), FastAPI()
    for path, wire in CHAT_FORMATS.items():
        app.add_api_route(path, _chat_route(server, wire), methods=["POST"])

    async def count(request: Request) -> Response:
        try:
            server.turns.append(anthropic_messages.parse_count(await request.body(), "count"))
        except TurnRefused as error:
            return JSONResponse(error.body("anthropic"), error.status, headers=dict(error.headers))
        return JSONResponse({"input_tokens": 11})

    async def generate(request: Request) -> Response:
        try:
            turn = token_generate.parse(await request.body(), "gen-1")
            return JSONResponse(token_generate.answer(turn, server.answer(turn)))
        except TurnRefused as error:
            return JSONResponse(error.body("openai"), error.status, headers=dict(error.headers))

    async def models() -> Response:
        return JSONResponse(routes.model_list({"tiny": 512}, PLAIN.created))

    app.add_api_route("/v1/messages/count_tokens", count, methods=["POST"])
    app.add_api_route("/inference/v1/generate", generate, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    async with serving(app, HttpAddress("127.0.0.1", 0)) as address:
        server.url = f"http://{address}"
        yield server


def _chat_route(server: WireServer, wire: WireFormat):
    async def route(request: Request) -> Response:
        try:
            turn = unconstrained(wire.parse(await request.body(), "id"), server.constraints, evaluation=False, notes=True)
            if turn.stream and isinstance(server.answers[0], TurnRefused):  # begun already
                return StreamingResponse(refused_turn(wire.events(turn, started(PLAIN)), server.answers[0]), media_type="text/event-stream")
            result = server.answer(turn)
            if turn.stream:
                return StreamingResponse(whole_turn(wire.events(turn, started(result)), result), media_type="text/event-stream")
            return routes._answered(wire.answer(turn, result), routes.answer_headers(turn))
        except TurnRefused as error:
            return JSONResponse(error.body(wire.house), error.status, headers=dict(error.headers))

    return route


def whole_turn(events: TurnEvents, result: TurnResult) -> Iterator[bytes]:
    """Yields the events of a turn that has ended."""
    yield events.begin()
    yield from map(events.delta, deltas_of(result))
    yield events.end(result)
    yield events.close([result])


def refused_turn(events: TurnEvents, refused: TurnRefused) -> Iterator[bytes]:
    """Yields the events of a turn that fails once it has begun."""
    yield events.begin()
    yield events.refused(refused)
