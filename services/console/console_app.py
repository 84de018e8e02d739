"""The console as an ASGI app, and its service."""

import asyncio
import contextlib
import hashlib
import hmac
import mimetypes
import os
import re
import signal
from collections.abc import Collection, Iterable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.console.pages import run, sample_pages, session_list, weights
from services.console.pages.clients import ClientHistory
from services.console.run_histories import RunPipeline, runs_beside
from services.console.run_source import RunSource, SourceAway
from shared import __version__
from shared.bus.subjects import RUN_ID
from shared.runtime import addresses, http_endpoints, telemetry
from shared.runtime.addresses import HTTP_VARIABLE, HttpAddress
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import background
from shared.view.live_services import trained_steps
from shared.view.stall import TROUBLES, Stall

LEAST_TOKEN = 16  # Characters of the shortest token that is taken
OWN_NAMES = ("127.0.0.1", "localhost", "::1")  # The names of this machine for itself

# A Host header: a name or an address, and a port (RFC 9110, section 7.2)
HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[(?P<v6>[0-9a-f:.]+)\])(:[0-9]{1,5})?", re.IGNORECASE)

READING = ("GET", "HEAD")

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_STRANGER = "401: this console shows a run to whoever has its token. Open the address that `myxo up` or `myxo console` has printed.\n"


class AccessToken:
    """An ASGI layer around the whole app that admits only requests with the console's token.

    ``GET /?token=…`` sets a cookie and redirects to ``/``, so that the token leaves the address line; programs send ``Authorization:
    Bearer``. The ``Host`` header has to name this machine: a page of a foreign site whose name was bound to 127.0.0.1 (DNS rebinding) is
    refused. ``names``: of the hosts by which the console may be asked, besides `OWN_NAMES`; ``token``: what opens it.
    """

    def __init__(self, app: ASGIApp, token: str, names: Iterable[str] = ()) -> None:
        self._app, self._token = app, token
        self._names = frozenset(name.lower() for name in (*OWN_NAMES, *names))
        # browsers send a cookie to every port of a host: consoles side by side need names of their own
        self._cookie = f"myxo-console-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._refusal(scope) or self._entrance(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                own = scope["path"].startswith("/api/") or answer is not None
                headers["Cache-Control"] = "no-store" if own else "no-cache"  # files are asked for again each time, and answered with 304
            await send(message)

        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns what a request is refused with; None where it may pass."""
        headers = Headers(scope=scope)
        if not _names_one(headers.getlist("host"), self._names):
            known = ", ".join(sorted(self._names))
            text = f"421: the console is not asked by this name; it answers to {known}, and to those of console.console_hosts\n"
            return PlainTextResponse(text, 421)
        if not self._opens(headers, _query_token(scope)):
            return PlainTextResponse(_STRANGER, 401, {"WWW-Authenticate": "Bearer"})
        if scope["method"] not in READING:
            return PlainTextResponse("405: the console only reads\n", 405, {"Allow": ", ".join(READING)})
        return None

    def _opens(self, headers: Headers, query: str) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else ""
        texts = query, bearer, _cookie(headers, self._cookie)
        return any([hmac.compare_digest(text.encode(errors="surrogateescape"), self._token.encode()) for text in texts])

    def _entrance(self, scope: Scope) -> Response | None:
        """Returns the redirection of a request that has brought the token in its address; None for any other."""
        if scope["path"] != "/" or not _query_token(scope):
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", secure=scope["scheme"] == "https")
        return answer


def _query_token(scope: Scope) -> str:
    """Returns the token in the address; only the first page has one."""
    if scope["path"] != "/":
        return ""
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _names_one(given: list[str], names: Collection[str]) -> bool:
    """Returns whether the one Host header names one of the hosts, at whatever port: containers publish another than they listen at."""
    found = HOST.fullmatch(given[0]) if len(given) == 1 else None
    return found is not None and (found["v6"] or found["name"]).lower() in names


WEB = Path(__file__).with_name("web")


class AwayPart(BaseModel):
    """Something that is away: a server, a service, or the ledger. ``since``: seconds since the epoch."""

    name: str
    since: float
    why: str


class WaitPart(BaseModel):
    """What the run waits for: ``awaited`` follows "waiting for"; ``since``: seconds since the epoch, 0: not known; ``trouble``: no healthy
    run waits for it."""

    awaited: str
    since: float
    next_action: str
    trouble: bool


class Overview(BaseModel):
    """What stands above all pages. ``live``: whether the run is on a bus, or read from its directory alone; ``at_rest``: whether
    that bus is served for the console alone. ``steps``: trained, of ``of``.

    ``phase``: running, finished, failed, or None where it is not known; ``failure``: why it failed. ``runs``: others beside this one's
    directory. ``waiting``: what the next step waits for; None where that is not known, or none is to come. ``serves``: whether the run
    trains for clients of `myxo serve`.
    """

    run: str
    version: str
    live: bool
    at_rest: bool
    phase: str | None
    failure: str
    steps: int | None
    of: int | None
    away: list[AwayPart]
    waiting: WaitPart | None
    runs: list[str]
    serves: bool


def overview(source: RunSource, wait: Stall | None) -> Overview:
    """Returns what stands above all pages."""
    steps = trained_steps(source.statuses)
    away = [AwayPart(name=name, since=it.since, why=it.why) for name, it in sorted(source.away.items())]
    return Overview(
        run=source.run,
        version=__version__,
        live=source.live,
        at_rest=source.at_rest,
        phase=source.phase,
        failure=source.failure,
        steps=steps if steps >= 0 else source.trained,
        of=source.config.rollout.num_rollout if source.config is not None else None,
        away=away,
        waiting=None
        if wait is None
        else WaitPart(awaited=wait.awaited, since=wait.since, next_action=wait.next_action, trouble=wait.cause in TROUBLES),
        runs=runs_beside(source.directory),
        serves=source.config is not None and source.config.tinker.tinker_endpoint,
    )


def console_app(source: RunSource, token: str, names: Iterable[str] = ()) -> FastAPI:
    """Returns the app. ``token``: what opens it; ``names``: of the hosts by which it may be asked."""
    mimetypes.add_type("text/javascript", ".js")  # some machines' own tables say text/plain, which a browser does not run
    app = FastAPI(title="Myxo console", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")

    @app.exception_handler(SourceAway)
    async def on_away(_request: Request, error: SourceAway) -> JSONResponse:
        return JSONResponse({"detail": str(error), "away": sorted(source.away)}, 503)

    pipeline = RunPipeline(source)

    @app.get("/api/overview", tags=["console"])
    async def read_overview() -> Overview:
        """What stands above all pages."""
        return overview(source, pipeline.wait())

    @app.get("/api/events", response_class=StreamingResponse, tags=["console"])
    async def read_events() -> StreamingResponse:
        """Server-sent events: which page's data has changed, ``{page: revision}``; a ``heartbeat`` each 5 s."""
        return StreamingResponse(source.feed.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    routers = {
        "run": run.router(source),
        "weights": weights.router(source),
        "samples": sample_pages.router(source),
    }
    for page, router in routers.items():
        app.include_router(router, prefix=f"/api/{page}", tags=[page])
    app.get("/api/flow", tags=["flow"])(pipeline.flow)
    app.get("/api/health", tags=["health"])(pipeline.health)
    app.get("/api/clients", tags=["clients"])(source.shared(ClientHistory).newest)
    app.include_router(session_list.router(source), prefix="/api/samples", tags=["samples"])
    app.mount("/", StaticFiles(directory=WEB, html=True))
    app.add_middleware(AccessToken, token=token, names=list(names))
    return app


ADDRESS, HOSTS, DIRECTORY, AT_REST = "MYXO_CONSOLE", "MYXO_CONSOLE_HOSTS", "MYXO_RUN_DIRECTORY", "MYXO_RUN_AT_REST"

URL = "MYXO_CONSOLE_URL"

NICENESS = 5  # How far it stands back, on a machine that has little time, behind the services that it looks at
LOOPBACK = HttpAddress("127.0.0.1", 0)


async def serve() -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError for an environment that cannot be used."""
    os.nice(NICENESS)
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    source, given_token = source_of_environment(), addresses.console_token()
    token = given_token or addresses.new_console_token()
    if len(token) < LEAST_TOKEN:
        raise ConfigError(addresses.CONSOLE_TOKEN, "…", f"at least {LEAST_TOKEN} characters that cannot be guessed")
    given = os.environ.get(ADDRESS)
    address = addresses.parsed(given, ADDRESS) if given else LOOPBACK
    names = [name for name in os.environ.get(HOSTS, "").split(",") if name]
    if not address.wildcard:
        names.append(address.host)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(background(source.keep()))
        if os.environ.get(HTTP_VARIABLE):
            app = http_endpoints.health_app(lambda: {"ok": True, "service": "console", "away": sorted(source.away)}, CollectorRegistry())
            await stack.enter_async_context(http_endpoints.serving(app, addresses.http_address("127.0.0.1")))
        at = await stack.enter_async_context(http_endpoints.serving(console_app(source, token, names), address))
        # a token that was made here is known here alone
        structlog.get_logger().info(telemetry.CONSOLE_SERVES, at=at, **({} if given_token else {"url": f"http://{at}/?token={token}"}))
        await stopping.wait()


def print_address() -> None:
    """Prints the address of the console of this environment, with its token. Raises ConfigError where the token is not in it."""
    token = addresses.console_token()
    if token is None:
        raise ConfigError(addresses.CONSOLE_TOKEN, None, "required in the environment, or its file; `myxo up` has printed the address")
    print(f"{os.environ.get(URL) or 'http://' + os.environ.get(ADDRESS, str(LOOPBACK))}/?token={token}")


def source_of_environment() -> RunSource:
    """Returns the run that the environment names. Raises ConfigError."""
    run, directory = os.environ.get("MYXO_RUN", ""), os.environ.get(DIRECTORY)
    if not RUN_ID.match(run):
        raise ConfigError("MYXO_RUN", run, "required in the environment: the run's id, lower-case letters, digits, '-' and '_'")
    nats_url = addresses.nats_url()
    if nats_url is None and directory is None:
        raise ConfigError("NATS_URL", None, f"required in the environment, or {DIRECTORY} with the directory of a run that is over")
    where = None if directory is None else Path(directory)
    return RunSource(run, nats_url, addresses.redis_url(), where, at_rest=bool(os.environ.get(AT_REST)))
