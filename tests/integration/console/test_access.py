"""Who gets anything from a console, and then to read alone; and what it says while something is away, and that it comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.console.console_app import WEB
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.schema.ledger import CheckpointDurable
from shared.schema.service_messages import ServiceStatus
from tests.integration.console.conftest import RUN, TOKEN, ServedConsole
from tests.support.waiting import until

FILES = sorted(str(path.relative_to(WEB)) for path in WEB.rglob("*") if path.is_file())


def wrong_ways_in() -> dict[str, dict[str, str]]:
    """Headers of strangers."""
    return {
        "nothing": {},
        "another token": {"Authorization": f"Bearer {TOKEN[:-1]}x"},
        "a part of it": {"Authorization": f"Bearer {TOKEN[:-1]}"},
        "an empty one": {"Authorization": "Bearer"},
        "another scheme": {"Authorization": f"Basic {TOKEN}"},
        "no ASCII": {"Authorization": b"Bearer \xff\xfe\xf6".decode("latin-1")},
        "a cookie of another name": {"Cookie": f"token={TOKEN}"},
        "a wrong cookie": {"Cookie": "myxo-console-000000000000=x; =;;; myxo"},
    }


async def test_a_stranger_gets_401_on_every_path(served: ServedConsole) -> None:
    openapi = (await served.get("/api/openapi.json")).json()
    paths = ["/", "/api/openapi.json", "/docs", "/nothing", "/api/nothing", *openapi["paths"], *(f"/{name}" for name in FILES)]
    assert {"/api/overview", "/api/events"} < set(paths) and "/app.js" in paths
    for way, headers in wrong_ways_in().items():
        for path in paths if way in ("nothing", "another token") else paths[:6]:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = await served.client.get(served.url + path.replace("{", "").replace("}", ""), headers=raw)
            assert answer.status_code == 401, (way, path)
            assert TOKEN not in answer.text and "set-cookie" not in answer.headers
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert (await served.client.request(method, f"{served.url}/api/overview")).status_code == 401
    for query in ("token=", "token=x", f"token={TOKEN}x", f"Token={TOKEN}"):
        assert (await served.client.get(f"{served.url}/?{query}")).status_code == 401
    assert (await served.client.get(f"{served.url}/api/overview?token={TOKEN}")).status_code == 401, "only the first page takes it"


@pytest.mark.extra
async def test_every_file_comes_with_the_token_and_is_not_asked_of_others(served: ServedConsole) -> None:
    for name in FILES:
        answer = await served.get(f"/{name}")
        assert answer.status_code == 200, name
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        if name.endswith(".js"):
            assert "javascript" in answer.headers["content-type"]
    for name in (path for path in FILES if "vendor" not in path and Path(path).suffix in (".js", ".css", ".html")):
        text = (WEB / name).read_text().replace("http://www.w3.org/2000/svg", "")  # a namespace, which nobody asks for
        assert "http://" not in text and "https://" not in text, name
    for path in ("/../console_app.py", "/%2e%2e/console_app.py", "/..%2fconsole_app.py"):
        assert (await served.get(path)).status_code == 404


async def test_the_printed_address_gives_a_cookie_and_leaves_the_address_line(served: ServedConsole) -> None:
    answer = await served.client.get(f"{served.url}/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    async with httpx.AsyncClient(timeout=30) as browser:
        page = await browser.get(f"{served.url}/", headers={"Cookie": cookie.split(";")[0]})
        assert page.status_code == 200 and TOKEN not in page.text
        assert (await browser.get(f"{served.url}/api/overview", headers={"Cookie": cookie.split(";")[0]})).status_code == 200


async def test_whoever_has_the_token_may_only_read(served: ServedConsole) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        answer = await served.client.request(method, f"{served.url}/api/overview", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 405, method


TRICKS = (
    "evil@127.0.0.1",
    "evil:x@localhost",
    "localhost/evil",
    "localhost#@evil",
    "localhost?evil",
    "localhost:80:80",
    "localhost:x",
    "::1",
)
"""Host headers that a reader of URLs takes for this machine's name, and that are no Host header."""


async def test_it_answers_to_its_own_names_alone(served: ServedConsole) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "127.0.0.2", "[::", "a@b", *TRICKS):
        assert (await served.get("/", Host=host)).status_code == 421, host
        assert (await served.client.get(f"{served.url}/?token={TOKEN}", headers={"Host": host})).status_code == 421, host
    for host in ("localhost:1", "[::1]:8770", "127.0.0.1", "LOCALHOST", "console.example.org"):
        assert (await served.get("/", Host=host)).status_code == 200, host


SECONDS = 60


def crash(server: object) -> None:
    process = server.process  # type: ignore[attr-defined]
    process.kill()
    process.wait(30)


@pytest.mark.extra
async def test_a_server_that_is_killed_is_named_and_comes_back(served: ServedConsole) -> None:
    await served.until_away("NATS", False)
    await served.until_away("Redis", False)
    for server, name in ((served.nats, "NATS"), (served.valkey, "Redis")):
        crash(server)
        await served.until_away(name)

        async def waits() -> Any:
            return (await served.overview())["waiting"]

        waiting = await until(waits, f"what waits for {name}", SECONDS)
        assert waiting["trouble"] and f"{name}, which is away" in waiting["awaited"] and waiting["since"] > 0, waiting
        assert (await served.get("/")).status_code == 200
        for page in ("run", "flow", "weights", "samples", "health"):
            answer = await served.get(f"/api/{page}")
            assert answer.status_code in (200, 404, 503), (page, answer.text)
        await asyncio.to_thread(server.start)
        await served.until_away(name, False)
    assert served.process.process.poll() is None


@pytest.mark.extra
async def test_a_service_is_named_while_it_is_silent_or_gone(served: ServedConsole) -> None:
    registry = Registry(served.bus, RUN)
    kinds = ("buffer", "reward", "rollout", "trainer")
    renewed = set(kinds)

    async def renew() -> None:
        at = 0.0
        while True:
            at += 1
            for kind in renewed & set(kinds):
                await registry.renew(ServiceStatus(service=kind, instance=f"{kind}-0", host="h", pid=1, http="", state="ready", at=at))
            await asyncio.sleep(0.5)

    work = asyncio.create_task(renew())
    try:
        for kind in kinds:
            await served.until_away(kind, False)
        renewed.discard("trainer")
        await served.until_away("trainer-0")
        await served.until_away("trainer")  # its status has expired
        await served.until_away("trainer-0", False)
        renewed.add("trainer")
        await served.until_away("trainer", False)
    finally:
        work.cancel()


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, int]]]:
    """Yields (kind, data) of server-sent events."""
    kind = "message"
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))
            kind = "message"


@pytest.mark.extra(each=True)
async def test_browsers_hear_of_what_is_new_and_that_the_console_lives(served: ServedConsole) -> None:
    await served.until_away("NATS", False)
    names = Subjects(RUN)
    async with served.client.stream("GET", f"{served.url}/api/events", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        heard = events(answer)
        async with asyncio.timeout(SECONDS):
            kind, first = await anext(heard)
            assert kind == "message" and set(first) == {"overview", "run", "flow", "weights", "samples", "health", "clients"}
            while (await anext(heard))[0] != "heartbeat":
                pass
            crash(served.nats)
            changed: dict[str, int] = {}
            while "overview" not in changed:
                changed |= {page: revision for kind, data in [await anext(heard)] if kind == "message" for page, revision in data.items()}
            assert changed["overview"] > first["overview"]
    await asyncio.to_thread(served.nats.start)
    await served.until_away("NATS", False)
    await served.bus.publish(names.ledger("checkpoint_durable"), CheckpointDurable(steps=1, at=0.0), deadline=SECONDS)
    assert served.process.process.poll() is None, served.process.words()


@pytest.mark.extra
async def test_forty_browsers_come_and_go(served: ServedConsole) -> None:
    async def visit() -> None:
        async with (
            httpx.AsyncClient(timeout=SECONDS) as browser,
            browser.stream("GET", f"{served.url}/api/events", headers={"Authorization": f"Bearer {TOKEN}"}) as answer,
        ):
            await anext(events(answer))

    await asyncio.gather(*(visit() for _ in range(40)))
    assert (await served.overview())["run"] == RUN
