"""What the console says while something is away, and that it comes back by itself; and what it tells browsers of changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.schema.ledger import CheckpointDurable
from shared.schema.service_messages import ServiceStatus
from tests.integration.console.conftest import RUN, TOKEN, ServedConsole
from tests.support.waiting import until

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
