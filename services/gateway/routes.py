"""The gateway's endpoints: a session's key, a body, a turn, an answer in the format of the endpoint."""

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, StrictInt, StrictStr, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.gateway.replicas import Replicas
from services.gateway.turn_decisions import TurnText, fixed_by_task
from services.gateway.turns import LiveTurn, Turns, UnrecordedSessions
from shared.formats import anthropic_messages, openai_chat, openai_responses, token_generate
from shared.formats.request import (
    TASK_HEADER,
    ChatTurn,
    House,
    TokenTurn,
    TurnEvents,
    TurnRefused,
    TurnResult,
    TurnStart,
    deltas_of,
    split,
    started,
    unknown_conversation,
    unknown_model,
)
from shared.formats.request_body import RequestFields, read_body
from shared.hooks import reward_values
from shared.rewards.names import GIVEN
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema.message import Parts, Reason, Reward
from shared.sessions.session import SessionEnded, SessionLog, SessionOver, SessionUnknown, ThreadExtended, TurnRewarded
from shared.sessions.session_store import SessionStore

BODY_SECONDS = 60.0  # The time that a body has to come


async def bounded_body(request: Request, most_bytes: int) -> bytes:
    """Returns a request's body. Raises TurnRefused where it is too large, does not come, or its client is gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise TurnRefused(413, f"expected a body of at most {most_bytes} bytes", code="too_large")
    except ClientDisconnect:
        raise TurnRefused(408, "the client is gone") from None
    except TimeoutError:
        raise TurnRefused(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(body)


def request_id(log: SessionLog, prefix: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Returns the id of a request's turn. ``prefix``: how the format's ids begin. ``headers``: by names in lower case. A client may name
    its requests; another body under the same name is another request. The houses' own SDKs do not, but count a request's repetitions: one
    that is repeated is the session's request with the very same body, where there is one alone."""
    for name in ("idempotency-key", "x-request-id"):
        if given := headers.get(name):
            return prefix + _digest(log.session.id, given, path, body)
    base = f"{prefix}{_digest(path, body)}"
    repeated, own = headers.get("x-stainless-retry-count", "0") not in ("", "0"), uuid.uuid4().hex[:8]
    known = {request[: len(base + own)] for request in [*log.turns, *log.pending] if request.startswith(base)}  # without choices' numbers
    return known.pop() if repeated and len(known) == 1 else base + own


def _digest(*parts: str | bytes) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update((part.encode(errors="replace") if isinstance(part, str) else part) + b"\x00")
    return found.hexdigest()


SILENT_SECONDS = 10.0  # the longest silence of a streamed answer; it begins after that although nothing was sampled


@dataclass
class StreamedAnswer:
    """An answer that reports a turn as it is sampled: events as soon as there are tokens, and what was not sure before at the turn's end.
    ``start``: of a turn of which nothing is known yet, with the request's id. ``events_of``: those of its format. ``text``: makes the text.
    ``ended``: as a whole, without an error."""

    turn: "asyncio.Task[TurnResult]"
    live: LiveTurn
    start: TurnStart
    events_of: Callable[[TurnStart], TurnEvents]
    text: Callable[[], TurnText]
    begun: tuple[TurnEvents, TurnText] | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.turn.add_done_callback(lambda _: self.live.end())

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events, and while none can be sent, though tokens may come, what keeps the connection alive."""
        loop, ended = asyncio.get_running_loop(), False
        silent = loop.time() + SILENT_SECONDS
        while not ended:
            await self.live.news(silent - loop.time())
            ended, sent = self.turn.done(), b""
            if tokens := self.live.taken():
                head = b""
                if self.begun is None:
                    known = replace(self.start, created=int(time.time()), prompt=len(self.live.prompt), cached=self.live.cached)
                    self.begun = self.events_of(known), self.text()
                    head = self.begun[0].begin()
                events, text = self.begun
                sent = head + b"".join(events.delta(piece) for piece in text.add(tokens))
            if not sent and not ended and loop.time() >= silent:
                sent = b": waiting\n\n" if self.begun is None else self.begun[0].ping()
            if sent:
                yield sent
                silent = loop.time() + SILENT_SECONDS
        yield self._end()

    def _end(self) -> bytes:
        """Returns the last events: the rest of a turn that has ended, or why it did not."""
        try:
            result = self.turn.result()
            if self.begun is None:
                begin = (events := self.events_of(replace(started(result), request_id=self.start.request_id))).begin()
                pieces = deltas_of(result)
            else:
                begin, (events, text) = b"", self.begun
                result = replace(result, created=events.start.created)
                pieces = text.finish(result)
            self.start, last = events.start, begin + b"".join([*(events.delta(piece) for piece in pieces), events.end(result)])
            self.ended = True
            return last
        except MyxoError as error:
            events = self.begun[0] if self.begun is not None else self.events_of(self.start)
            refused = error if isinstance(error, TurnRefused) else TurnRefused(503, str(error))
            return (b"" if self.begun is not None else events.begin()) + events.refused(refused)


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The format of a house's clients. ``house``: whose error shape it has. ``parse``: from a body and the turn's
    request id, a `ChatTurn` or `TokenTurn`; raises TurnRefused. ``answer``: the body of a whole answer, of a turn and its results.
    ``events``: those of a streamed one, of the content type ``text/event-stream``. ``id_prefix``: how the house's request ids begin."""

    house: House
    parse: Callable[[bytes, str], Any]
    answer: Callable[..., dict[str, Any]]
    events: Callable[[Any, TurnStart], TurnEvents]
    id_prefix: str


# By path
CHAT_FORMATS = {
    "/v1/chat/completions": WireFormat("openai", openai_chat.parse, openai_chat.answer, openai_chat.ChatEvents, "chatcmpl-"),
    "/v1/completions": WireFormat("openai", openai_chat.parse_completion, openai_chat.answer, openai_chat.CompletionEvents, "cmpl-"),
    "/v1/responses": WireFormat("openai", openai_responses.parse, openai_responses.answer, openai_responses.ResponseEvents, "resp_"),
    "/v1/messages": WireFormat("anthropic", anthropic_messages.parse, anthropic_messages.answer, anthropic_messages.MessageEvents, "msg_"),
}


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


def model_list(contexts: Mapping[str, int], created: int) -> dict[str, Any]:
    """Returns the answer of ``/v1/models``: clients of either house read their own fields of it. ``contexts``: of each model, in tokens."""
    data = [model_entry(model, created, context) for model, context in contexts.items()]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


declare_metrics("""
    gateway_requests_total | requests | that came in
    gateway_refused_<status>_total | requests | that were refused, by the HTTP status of the answer
    gateway_clients_gone_total | requests | whose client had gone before its answer
""")

BODY_BYTES = 32 << 20  # The largest body of a request
ALL = ""  # Counts the requests in hand of all sessions
SESSION_REQUESTS = 64  # The most requests of one session that are read or answered at once
GONE_SECONDS = 0.5  # The interval at which is seen whether a client is still there
RETRY_AFTER_S = 1.0

Route = Callable[[Request, SessionLog, bytes], Awaitable[Response]]  # Answers a request of a session, by its body


class _EndFields(RequestFields):
    reward: Reward | Parts | None = None
    reason: Reason = Field(default="")


class _TurnRewardFields(RequestFields):
    """The body of `/v1/session/reward`. ``turn``: the id of its answer, or its number from 0 in the order in which turns ended."""

    turn: StrictInt | StrictStr
    reward: Reward


@dataclass
class Api:
    """The state that the routes share. ``names``: those that requests may give the model; ``*``: any. ``frozen``: the turns of the run's
    frozen models by name, which are not recorded. ``most``: requests in hand at once. ``counts``: how many of each session are being
    read or answered. ``reward_key``: by a group's id, the name of the reward that counts."""

    sessions: SessionStore
    turns: Turns
    replicas: Replicas
    metrics: Metrics
    model: str
    names: frozenset[str]
    most: int
    started: int = field(default_factory=lambda: int(time.time()))
    counts: Counter[str] = field(default_factory=Counter)
    frozen: Mapping[str, Turns] = field(default_factory=dict)
    reward_key: Callable[[str], str | None] = lambda _: None

    def app(self) -> FastAPI:
        """Returns the app with all endpoints."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for path, wire in CHAT_FORMATS.items():
            app.router.add_route(path, self._refusing(wire.house, self._chat(path, wire)), methods=["POST"])
        routes: list[tuple[str, str, House, Route]] = [
            ("POST", "/v1/messages/count_tokens", "anthropic", self._count),
            ("POST", "/inference/v1/generate", "openai", self._generate),
            ("GET", "/v1/models", "openai", self._models),
            ("GET", "/v1/models/{name:path}", "openai", self._model),
            ("POST", "/v1/conversations", "openai", self._conversation),
            ("POST", "/v1/conversations/{name}/items", "openai", self._conversation),
            ("GET", "/v1/session", "openai", self._session),
            ("POST", "/v1/session/reward", "openai", self._reward),
            ("POST", "/v1/session/end", "openai", self._end),
        ]
        for method, path, house, route in routes:
            app.router.add_route(path, self._refusing(house, route), methods=[method])
        app.add_exception_handler(HTTPException, self._unserved)
        app.add_exception_handler(Exception, self._unserved)
        return app

    async def _unserved(self, request: Request, error: Exception) -> Response:
        """Answers for paths and methods that are not served, and for errors of this gateway's own, which the server logs."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        house: House = "anthropic" if request.url.path.startswith("/v1/messages") else "openai"
        refused = TurnRefused(404 if status == HTTPStatus.NOT_FOUND else 405, f"{request.method} {request.url.path[:200]} is not served")
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            refused = TurnRefused(500, "the gateway failed", code="internal_error")
        return self._refusal(refused, house)

    def _refusing(self, house: House, route: Route) -> Callable[[Request], Awaitable[Response]]:
        """Returns a route that answers refusals in the format of its API, and has a bounded number of requests in progress: of each
        session, and of those whose body is there, so that one session's unfinished requests take nothing from the others."""

        async def answered(request: Request) -> Response:
            self.metrics.add("gateway_requests")
            try:
                log = await self._log(request)
                with _counted(self.counts, log.session.id, SESSION_REQUESTS, "of this session are in hand"):
                    body = await bounded_body(request, BODY_BYTES)
                    with _counted(self.counts, ALL, self.most, "are in hand"):
                        return await route(request, log, body)
            except TurnRefused as error:
                return self._refusal(error, house)
            except SessionOver as error:
                return self._refusal(TurnRefused(410, str(error), code="session_ended"), house)
            except MyxoError as error:  # the store is away
                return self._refusal(TurnRefused(503, str(error), retry_after_s=RETRY_AFTER_S), house)

        return answered

    def _refusal(self, error: TurnRefused, house: House) -> Response:
        self.metrics.add(f"gateway_refused_{error.status}")
        return JSONResponse(error.body(house), error.status, headers=dict(error.headers))

    # --- turns

    def _chat(self, path: str, wire: WireFormat) -> Route:
        async def route(request: Request, log: SessionLog, body: bytes) -> Response:
            parsed = wire.parse(body, request_id(log, wire.id_prefix, path, request.headers, body))
            model, log = self._model_of(log, parsed.model)
            asked = model.noted(log, parsed)
            headers = _headers_of(log, asked)
            if asked.stream:
                return await self._streamed(request, wire, model, log, asked, headers)
            turns = model.results(log, asked)
            await self._watched(request, turns)
            return _answered(wire.answer(asked, *(turn.result() for turn in turns)), headers)

        return route

    async def _streamed(
        self, request: Request, wire: WireFormat, model: Turns, log: SessionLog, asked: ChatTurn, headers: dict[str, str]
    ) -> Response:
        start = TurnStart(request_id=asked.request_id, model=model.model, created=int(time.time()), prompt=0)
        asks = split(asked)
        lives = [LiveTurn() for _ in asks]
        turns = model.results(log, asked, lives)
        answers = [
            StreamedAnswer(turn, live, start, functools.partial(wire.events, one), functools.partial(model.text, log, one, live))
            for turn, live, one in zip(turns, lives, asks, strict=True)
        ]
        try:
            await self._watched(request, [asyncio.create_task(answer.live.news(SILENT_SECONDS)) for answer in answers])
            for turn in turns:
                if turn.done():
                    turn.result()
        except BaseException:
            await cancelled(turns)
            raise
        return StreamingResponse(self._kept(log.session.id, answers), media_type="text/event-stream", headers=headers)

    async def _kept(self, session: str, answers: list[StreamedAnswer]) -> AsyncIterator[bytes]:
        """Yields the answers' events; ends the turns where their client is gone, so that the engine samples for no one."""
        turns = [answer.turn for answer in answers]
        try:
            with _counted(self.counts, session, math.inf, ""), _counted(self.counts, ALL, math.inf, ""):
                async with aclosing(_merged([answer.events() for answer in answers])) as merged:
                    async for events in merged:
                        yield events
                if all(answer.ended for answer in answers):
                    yield answers[0].events_of(answers[0].start).close([turn.result() for turn in turns])
        finally:
            if not all(turn.done() for turn in turns):
                self.metrics.add("gateway_clients_gone")
            await cancelled(turns)

    async def _generate(self, request: Request, log: SessionLog, body: bytes) -> Response:
        asked: TokenTurn = token_generate.parse(body, request_id(log, "gen-", "generate", request.headers, body))
        model, log = self._model_of(log, asked.model)
        [turn] = model.results(log, asked)
        await self._watched(request, [turn])
        return _answered(token_generate.answer(asked, turn.result()), _headers_of(log, asked))

    async def _count(self, request: Request, log: SessionLog, body: bytes) -> Response:
        parsed = anthropic_messages.parse_count(body, "count")
        model, log = self._model_of(log, parsed.model)
        asked = model.noted(log, parsed)
        return JSONResponse({"input_tokens": await model.count(log, asked)}, headers=answer_headers(asked))

    async def _watched(self, request: Request, turns: "Sequence[asyncio.Task[Any]]") -> None:
        """Waits for turns, or until one fails; ends them where their client is gone, so that the engine samples for no one."""
        try:
            while any(not turn.done() for turn in turns):
                await asyncio.wait(turns, timeout=GONE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for turn in turns:
                    if turn.done():
                        turn.result()
                if any(not turn.done() for turn in turns) and await request.is_disconnected():
                    self.metrics.add("gateway_clients_gone")
                    raise TurnRefused(408, "the client is gone")
        except BaseException:
            await cancelled(turns)
            raise

    # --- models and sessions

    async def _models(self, request: Request, log: SessionLog, body: bytes) -> Response:
        contexts = {self.model: await self._context()} | {name: turns.replicas.context for name, turns in self.frozen.items()}
        return JSONResponse(model_list(contexts, self.started))

    async def _model(self, request: Request, log: SessionLog, body: bytes) -> Response:
        model, _ = self._model_of(log, request.path_params["name"])
        context = model.replicas.context if model.model in self.frozen else await self._context()
        return JSONResponse(model_entry(model.model, self.started, context))

    async def _context(self) -> int:
        await self.replicas.present(SILENT_SECONDS)
        return self.replicas.context

    def _model_of(self, log: SessionLog, name: str | None) -> tuple[Turns, SessionLog]:
        """Returns the turns of the model that a request names, the policy's where it names none, with the log of its session."""
        if name is not None and name in self.frozen:
            return self.frozen[name], UnrecordedSessions.log_for(log)
        if name is not None and name not in self.names and "*" not in self.names:
            raise unknown_model(name, self.model, *self.frozen)
        return self.turns, log

    async def _session(self, request: Request, log: SessionLog, body: bytes) -> Response:
        ended = None if log.ended is None else {"reward": log.ended.reward, "reason": log.ended.reason}
        return JSONResponse(
            {"id": log.session.id, "deadline": log.deadline, "turns": len(log.turns), "pending": len(log.pending), "ended": ended}
        )

    async def _end(self, request: Request, log: SessionLog, body: bytes) -> Response:
        asked, _ = read_body(_EndFields, body or b"{}")
        if asked.reward is None and log.session.environment == GIVEN:
            raise TurnRefused(400, "required: nothing else scores this session (rm_type: given)", field="reward", code="missing_parameter")
        try:  # the one that counts is there, or the rollout would fail for it
            reward_values.read(0.0 if asked.reward is None else asked.reward, self.reward_key(log.session.group))
        except ValueError as error:
            raise TurnRefused(400, str(error), field="reward", code="invalid_value") from None
        try:
            end = SessionEnded(at=time.time(), reward=asked.reward, reason=asked.reason)
        except ValidationError as error:
            raise TurnRefused(400, str(error.errors()[0]["msg"]), field="reward") from None
        found = log.ended or (await self.sessions.end(log.session.id, end)).ended  # of one that has ended the log does not grow
        assert found is not None
        if found.reward != asked.reward:
            raise TurnRefused(409, f"the session has ended before, with reward {found.reward}", code="session_ended")
        return JSONResponse({"id": log.session.id, "reward": found.reward})

    async def _conversation(self, request: Request, log: SessionLog, body: bytes) -> Response:
        (items, messages), name = openai_responses.parse_items(body), request.path_params.get("name", "")
        if name and name not in log.threads:
            raise unknown_conversation(name, "conversation_id")
        record = ThreadExtended(name=name or f"conv_{uuid.uuid4().hex}", messages=orjson.dumps(messages).decode())
        await self.sessions.extend_thread(log, record)
        if name:
            return JSONResponse({"object": "list", "data": items, "first_id": "", "last_id": "", "has_more": False})
        return JSONResponse({"id": record.name, "object": "conversation", "created_at": int(time.time()), "metadata": {}})

    async def _reward(self, request: Request, log: SessionLog, body: bytes) -> Response:
        asked, _ = read_body(_TurnRewardFields, body)
        names, turn = list(log.turns), asked.turn
        if isinstance(turn, int):
            turn = names[turn] if 0 <= turn < len(names) else ""
        if turn not in log.turns:
            message = f"{str(asked.turn)[:200]!r} is no turn here that has ended; expected an answer's id, or a number below {len(names)}"
            raise TurnRefused(400, message, field="turn", code="invalid_value")
        found = await self.sessions.reward(log, TurnRewarded(request=turn, reward=asked.reward))
        if found != asked.reward:
            raise TurnRefused(409, f"the turn was rewarded before, with {found}", field="reward", code="turn_rewarded")
        return JSONResponse({"id": log.session.id, "turn": turn, "reward": found})

    async def _log(self, request: Request) -> SessionLog:
        bearer = request.headers.get("authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        try:
            return await self.sessions.find(key)
        except SessionUnknown as error:
            raise TurnRefused(401, str(error), code="invalid_api_key") from None


async def _merged(streams: Sequence[AsyncIterator[bytes]]) -> AsyncGenerator[bytes]:
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
                stream = waiting.pop(task)
                if (found := task.result()) is not None:
                    yield found
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        await cancelled(list(waiting))


@contextlib.contextmanager
def _counted(counts: Counter[str], session: str, most: float, what: str) -> Iterator[None]:
    """Counts a request to its session while the body runs. Raises TurnRefused where the session has ``most`` already."""
    if counts[session] >= most:
        raise TurnRefused(429, f"{most} requests {what}", code="no_room", retry_after_s=RETRY_AFTER_S)
    counts[session] += 1
    try:
        yield
    finally:
        counts[session] -= 1
        if not counts[session]:
            del counts[session]


def _answered(answer: dict[str, Any], headers: dict[str, str]) -> Response:
    try:
        body = orjson.dumps(answer)
    except orjson.JSONEncodeError:  # a call's arguments have an integer of more than 64 bits
        body = json.dumps(answer).encode()
    return Response(body, media_type="application/json", headers=headers)


def _headers_of(log: SessionLog, asked: ChatTurn | TokenTurn) -> dict[str, str]:
    """Returns the headers that name what of a request has no effect, and what stands as the session's task has it."""
    fixed = fixed_by_task(log.session, asked.sampling)
    return answer_headers(asked) | ({TASK_HEADER: ", ".join(fixed)} if fixed else {})
