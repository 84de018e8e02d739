"""Sends JSON over HTTP to one engine, with a deadline on every call and the engine's own words in every error, and reads what it can do.

Two generations of SGLang are in use. From 0.5.21 on, a weight push lies between ``/begin_weight_update`` and ``/end_weight_update``, and is
refused outside; before, there are no such endpoints.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.request_slots import EngineLoad
from shared.config.engine_limits import Capabilities, longest_sequence
from shared.runtime.errors import INFRASTRUCTURE, DeadlineExceeded, MyxoError
from shared.runtime.safe_files import parse_json


class EngineError(MyxoError):
    """The engine refused a call, or its answer is unusable.

    ``where``: the engine's address and the endpoint, for example ``http://127.0.0.1:30000/generate``. ``reason``: the engine's own message,
    or what was wrong with its answer. ``status``: the HTTP status, None where there was no answer."""

    fault = INFRASTRUCTURE

    def __init__(self, where: str, reason: str, status: int | None = None) -> None:
        self.where, self.reason, self.status = where, reason, status
        answered = "" if status is None else f" (HTTP {status})"
        super().__init__(f"engine at {where}{answered}: {reason}")


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer: the engine is dead, or was never there."""


class InvalidRequest(MyxoError):
    """A request was not sent, because the engine would have refused it or crashed."""


# The time after which idle connections are closed. SGLang closes its side after 5 s; a request sent then would look like a dead engine.
IDLE_SECONDS = 3.0
CLOSED = "its client is closed: another engine took its place, or the service ends"
EVENT_END = b"\n\n"  # of a stream of server-sent events, as SGLang writes it
CONNECT_SECONDS = 10.0  # the deadline for a connection to an external engine: a machine that is off answers nothing at all


class EngineTransport:
    """One HTTP session to one engine. Must be made, used and closed in one event loop. ``where``: `EngineProcess.receiver`, in which
    the engine's server listens, or the URL of an external engine. ``key``: its API key; empty: it has none. ``pairs``: whether its
    prompts are computed by other engines."""

    pairs = False

    def __init__(self, where: Path | str, key: str = "") -> None:
        # the service bounds the number of requests in flight
        options: dict[str, Any] = {"limit": 0, "keepalive_timeout": IDLE_SECONDS}
        connector: aiohttp.BaseConnector
        if isinstance(where, Path):
            self.url, base, connecting = f"unix:{where / SOCKET}", "http://engine", None
            connector = aiohttp.UnixConnector(str(where / SOCKET), **options)
        else:
            self.url = base = where
            connector, connecting = aiohttp.TCPConnector(**options), CONNECT_SECONDS
        headers, timeout = {"Authorization": f"Bearer {key}"} if key else {}, aiohttp.ClientTimeout(total=None, sock_connect=connecting)
        self._open = set[aiohttp.ClientResponse]()
        self._session = aiohttp.ClientSession(base, connector=connector, timeout=timeout, headers=headers)

    async def close(self) -> None:
        """Closes the session and its connections. Whoever reads an answer meets EngineUnreachable: aiohttp would never wake them."""
        for response in self._open:
            response.content.set_exception(aiohttp.ServerDisconnectedError(CLOSED))
        await self._session.close()

    async def get(self, path: str, deadline: float) -> Any:
        """Sends a GET, which changes nothing in the engine. Otherwise as `post`."""
        return await self._call("GET", path, None, deadline, "nothing was changed")

    async def post(self, path: str, body: Any, deadline: float, next_action: str) -> Any:
        """Sends a POST and returns the parsed JSON, None for an empty answer, or the text of an answer that is not JSON.

        ``body``: anything that orjson takes, also numpy arrays; None for none. ``deadline``: seconds for everything, connecting and reading
        included. ``next_action``: what happens should the deadline pass, for its error. Raises DeadlineExceeded: no complete answer came in
        time. EngineError: the status is other than 2xx; with the engine's message. EngineUnreachable: there is no connection, or it broke.
        """
        return await self._call("POST", path, body, deadline, next_action)

    @asynccontextmanager
    async def stream(self, path: str, data: bytes | None, method: str = "POST") -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request, with JSON or nothing, and yields the answer as it comes, whatever its status. It has no deadline of its own.
        Raises EngineUnreachable, also where another engine took this one's place, and no error of the HTTP library's."""
        if self._session.closed:
            raise EngineUnreachable(self.url + path, CLOSED)
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, path, data=data, headers=headers) as response:
                self._open.add(response)
                try:
                    yield response
                finally:
                    self._open.discard(response)
        except aiohttp.ClientError as error:
            raise EngineUnreachable(self.url + path, f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def events(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Sends a POST whose answer is a stream of events, and yields their data as they come. It has no deadline of its own. Raises
        EngineError where the answer, or one of its events, is an error; EngineUnreachable."""
        async with self.stream(path, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response:
            if not response.ok:
                raise EngineError(self.url + path, message_of(_parsed(await response.read())), response.status)
            yield self._data(path, response)

    async def _data(self, path: str, response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
        async for event in whole_events(response):
            if event.startswith(b"data: {") and event.endswith(EVENT_END):
                data = _parsed(event[len(b"data: ") :])
                if "error" in data:
                    raise EngineError(self.url + path, message_of(data))
                yield data

    async def _call(self, method: str, path: str, body: Any, deadline: float, next_action: str) -> Any:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with asyncio.timeout(deadline), self.stream(path, data, method) as response:
                answer = _parsed(await response.read())
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {method} {path}", f"the engine at {self.url}", deadline, next_action) from None
        if not response.ok:
            raise EngineError(self.url + path, message_of(answer), response.status)
        return answer


async def whole_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields an answer event by event, each with the empty line that ends it, then what follows the last: all of one that is no stream."""
    rest = b""
    async for chunk in response.content.iter_any():
        *events, rest = (rest + chunk).split(EVENT_END)
        for event in events:
            yield event + EVENT_END
    if rest:
        yield rest


def message_of(answer: Any) -> str:
    """Returns the engine's message in an error answer; SGLang has four shapes for it."""
    if isinstance(answer, dict):
        error = answer.get("error")
        named = error.get("message") if isinstance(error, dict) else error
        if message := named or answer.get("message") or answer.get("detail"):
            return str(message)
    return str(answer) if answer else "(no message)"


def _parsed(data: bytes) -> Any:
    if not data:
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")


# Metrics of an engine: tokens by the kind of step that processed them, and requests whose prefill has begun.
DRAWN, BEGUN = "sglang:realtime_tokens_total", "sglang:queue_time_seconds_count"

# Metrics of its load: requests that run and that wait, the share of its memory for keys and values, requests taken back for want of it.
RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"
USAGE, RETRACTED = "sglang:token_usage", "sglang:num_retracted_requests_total"


def parse_generated_tokens(page: str, overlaps: bool) -> int | None:
    """Returns the number of tokens that an engine has generated, from its Prometheus page; None where the page lacks it.

    SGLang counts the tokens of its decode steps. A sample's first token is generated by its prefill and not counted there; it is taken from
    the number of samples whose prefill has begun. An engine that ``overlaps`` its steps computes, and counts, one token beyond each
    sample's end, which makes up for it."""
    if DRAWN not in page:
        return None
    decoded = _sum_of(page, DRAWN, 'mode="decode"')
    return int(decoded if overlaps else decoded + _sum_of(page, BEGUN, ""))


def parse_load(page: str) -> EngineLoad | None:
    """Returns an engine's load from its Prometheus page; None where the page lacks it. With priorities, SGLang has lines for each beside
    the sum."""
    if RUNNING not in page or QUEUED not in page:
        return None
    page = "\n".join(line for line in page.splitlines() if 'priority="' not in line or 'priority=""' in line)
    usages = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(USAGE + "{")]
    return EngineLoad(
        running=int(_sum_of(page, RUNNING, "", "tp_rank|moe_ep_rank")),  # each stage of a pipeline runs others at a time
        queued=int(_sum_of(page, QUEUED, "")),
        kv_usage=max(usages, default=0.0),
        retracted=int(_sum_of(page, RETRACTED, "")),
    )


def _sum_of(page: str, name: str, label: str, same: str = "tp_rank|moe_ep_rank|pp_rank") -> float:
    """Returns the sum of a metric's lines; of those that differ by ranks of kind ``same`` alone, which count the same, the largest."""
    counts: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(name + "{") and label in line:
            where, _, count = re.sub(rf'\b({same})="\d+"', "", line).rpartition(" ")
            counts[where] = max(counts.get(where, 0.0), float(count))
    return sum(counts.values())


async def read_capabilities(transport: EngineTransport, deadline: float) -> Capabilities:
    """Returns the engine's capabilities. ``deadline``: seconds, for each of the four requests. Raises EngineError: an answer lacks a needed
    field, or there is no readable ``config.json``. DeadlineExceeded, EngineUnreachable."""
    info = await transport.get("/server_info", deadline)
    model = await transport.get("/model_info", deadline)
    served = await transport.get("/v1/models", deadline)
    try:
        at = Path(model["model_path"])  # of the version that was loaded last, which may be gone
        config = parse_json((at if at.is_dir() else Path(model.get("tokenizer_path") or at)).joinpath("config.json").read_bytes())
        context = served["data"][0]["max_model_len"]
        return Capabilities(
            release=info["version"],
            vocab_size=int((config if "vocab_size" in config else config["text_config"])["vocab_size"]),
            max_sequence=longest_sequence(context, info["max_total_num_tokens"], info.get("page_size") or 1),
            weight_sessions=await _has_weight_sessions(transport, deadline),
            overlaps=not info["disable_overlap_schedule"],
            ranks=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
            kept_tokens=0 if info.get("disable_radix_cache", True) else int(info["max_total_num_tokens"]) * int(info.get("dp_size") or 1),
            speculates=(info.get("speculative_algorithm") or "NONE") != "NONE",
        )
    except (KeyError, TypeError, IndexError, AttributeError, OSError, ValueError) as error:
        raise EngineError(transport.url, f"its description lacks something: {type(error).__name__} {error}") from error


async def _has_weight_sessions(transport: EngineTransport, deadline: float) -> bool:
    """Returns whether there is an endpoint for it. By GET nothing happens: an endpoint for POST alone answers 405, a missing one 404."""
    try:
        await transport.get("/begin_weight_update", deadline)
    except EngineError as error:
        if error.status is None:
            raise
        return error.status != HTTPStatus.NOT_FOUND
    return True
