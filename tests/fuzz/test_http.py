"""The HTTP endpoints: what their OpenAPI pages allow and what they do not (schemathesis), and bytes that are no HTTP at all."""

import asyncio
import contextlib
import importlib.util
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from shared.runtime.addresses import HttpAddress
from shared.runtime.http_endpoints import health_app, serving
from tests.fuzz.mutations import spoiled_bytes

ROOT = Path(__file__).resolve().parents[2]

CALM = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))


def example_environment() -> FastAPI:
    path = ROOT / "examples" / "environments" / "python-fastapi" / "environment.py"
    spec = importlib.util.spec_from_file_location("example_environment", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.app


def health() -> Starlette:
    return health_app(lambda: {"ok": True, "state": "ready", "service": "rollout"}, CollectorRegistry())


def answers(code: int, kind: str, schema: dict[str, str]) -> dict[str, Any]:
    return {str(code): {"description": "", "content": {kind: {"schema": schema}}}}


HEALTH_PAGE = {
    "openapi": "3.1.0",
    "info": {"title": "health", "version": "1"},
    "paths": {
        "/healthz": {"get": {"responses": answers(200, "application/json", {"type": "object"})}},
        "/metrics": {"get": {"responses": answers(200, "text/plain", {"type": "string"})}},
    },
}
"""What a service's own pages answer: they publish no page of OpenAPI."""

APPS: dict[str, Callable[[], Starlette]] = {"health": health, "example-environment": example_environment}


@contextlib.contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serves an app as services do, in another thread; yields its URL."""
    loop, address, ready, stop = asyncio.new_event_loop(), list[str](), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(app, HttpAddress("127.0.0.1", 0)) as where:
            address.append(where)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    try:
        yield f"http://{address[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module", params=APPS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server's URL and its OpenAPI page."""
    app = APPS[request.param]()
    with served(app) as url:
        yield url, app.openapi() if isinstance(app, FastAPI) else HEALTH_PAGE


def call_all(endpoint: tuple[str, dict[str, Any]], examples: settings) -> int:
    """Calls every operation of the page with generated requests, valid and not; returns with how many."""
    url, page = endpoint
    calls = 0
    for result in schemathesis.openapi.from_dict(page).get_all_operations():
        operation = result.ok()
        modes = schemathesis.GenerationMode
        cases = [operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)]

        @examples
        @given(case=st.one_of(cases))
        def call(case: schemathesis.Case) -> None:
            nonlocal calls
            calls += 1
            # a page cannot say which texts are numbers: a label that is none is refused although its schema allows it
            case.call_and_validate(
                base_url=url, timeout=60, excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
            )

        call()
    return calls


def test_every_operation_answers_as_its_page_says(endpoint: tuple[str, dict[str, Any]]) -> None:
    assert call_all(endpoint, CALM) >= 2


@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_every_operation_answers_as_its_page_says_for_longer(endpoint: tuple[str, dict[str, Any]]) -> None:
    assert call_all(endpoint, LONG) >= 2


REQUEST = b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def send(url: str, data: bytes) -> None:
    """Sends bytes, and reads a little of what comes back, if anything does."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as link:
        link.settimeout(0.05)
        link.sendall(data)
        link.recv(1000)


def send_many(endpoint: tuple[str, dict[str, Any]], seconds: float, seed: int) -> None:
    url, page = endpoint
    dice, ends = random.Random(seed), time.monotonic() + seconds
    requests = [
        REQUEST.replace(b"GET /healthz", f"{verb} {path}".encode())
        for path, verbs in page["paths"].items()
        for verb in map(str.upper, verbs)
    ]
    while time.monotonic() < ends:
        send(url, spoiled_bytes(dice, dice.choice(requests)))
    path = next(path for path, verbs in page["paths"].items() if "get" in verbs)
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
        assert answer.status == 200, f"after seed {seed}"


def test_a_server_outlives_what_is_no_http(endpoint: tuple[str, dict[str, Any]]) -> None:
    send_many(endpoint, 2.0, 0)


@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_a_server_outlives_what_is_no_http_for_longer(endpoint: tuple[str, dict[str, Any]]) -> None:
    send_many(endpoint, 60.0, time.time_ns())
