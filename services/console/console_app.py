"""The console's app: the pages' answers under ``/api``, the feed of changes, and the files that the browser runs."""

import mimetypes
from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from services.console.access_token import AccessToken
from services.console.other_runs import runs_beside
from services.console.pages import flow, health, run, sample_pages, session_list, weights
from services.console.run_pipeline import RunPipeline
from services.console.run_source import RunSource, SourceAway
from shared import __version__
from shared.live.stall import TROUBLES, Stall

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
    directory. ``waiting``: what the next step waits for; None where that is not known, or none is to come.
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


def overview(source: RunSource, wait: Stall | None) -> Overview:
    """Returns what stands above all pages."""
    gauges = [status.gauges for status in source.statuses]
    steps = [int(gauge[name]) for gauge in gauges for name in ("trained_steps", "step") if name in gauge and gauge[name] >= 0]
    away = [AwayPart(name=name, since=it.since, why=it.why) for name, it in sorted(source.away.items())]
    return Overview(
        run=source.run,
        version=__version__,
        live=source.live,
        at_rest=source.at_rest,
        phase=source.phase,
        failure=source.failure,
        steps=max(steps, default=source.trained),
        of=source.config.rollout.num_rollout if source.config is not None else None,
        away=away,
        waiting=None if wait is None else _wait_part(wait),
        runs=runs_beside(source.directory),
    )


def _wait_part(wait: Stall) -> WaitPart:
    return WaitPart(awaited=wait.awaited, since=wait.since, next_action=wait.next_action, trouble=wait.cause in TROUBLES)


def frame_router(source: RunSource, pipeline: RunPipeline) -> APIRouter:
    """Returns the routes that belong to no page."""
    router = APIRouter()

    @router.get("/overview")
    async def read_overview() -> Overview:
        """What stands above all pages."""
        return overview(source, pipeline.wait())

    @router.get("/events", response_class=StreamingResponse)
    async def read_events() -> StreamingResponse:
        """Server-sent events: which page's data has changed, ``{page: revision}``; a ``heartbeat`` each 5 s."""
        return StreamingResponse(source.feed.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    return router


def console_app(source: RunSource, token: str, names: Iterable[str] = ()) -> FastAPI:
    """Returns the app. ``token``: what opens it; ``names``: of the hosts by which it may be asked."""
    mimetypes.add_type("text/javascript", ".js")  # some machines' own tables say text/plain, which a browser does not run
    app = FastAPI(title="Myxo console", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")

    @app.exception_handler(SourceAway)
    async def on_away(_request: Request, error: SourceAway) -> JSONResponse:
        return JSONResponse({"detail": str(error), "away": sorted(source.away)}, 503)

    pipeline = RunPipeline(source)
    app.include_router(frame_router(source, pipeline), prefix="/api", tags=["console"])
    routers = {"run": run.router(source), "weights": weights.router(source), "samples": sample_pages.router(source)}
    routers |= {"flow": flow.router(pipeline), "health": health.router(pipeline)}
    for page, router in routers.items():
        app.include_router(router, prefix=f"/api/{page}", tags=[page])
    app.include_router(session_list.router(source), prefix="/api/samples", tags=["samples"])
    app.mount("/", StaticFiles(directory=WEB, html=True))
    app.add_middleware(AccessToken, token=token, names=list(names))
    return app
