"""A console as a process of its own, beside real servers that can be killed, with a run on them that no service works on."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.console.console_app import console_app
from services.console.run_source import RunSource
from shared.accounts.permissions import CONSOLE, rights_of
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.runtime.tasks import background
from tests.support.run_config import run_config
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

RUN, TOKEN = "test", "a-token-that-nobody-guesses-0123456789"


class AskedConsole:
    """A console's API, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=f"{url}/api/", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

    async def get(self, path: str, *parameters: tuple[str, Any]) -> tuple[int, Any]:
        """The status of an answer, and its JSON or bytes."""
        answer = await self.client.get(path, params=parameters or None)
        return answer.status_code, answer.json() if answer.headers["content-type"] == "application/json" else answer.content

    async def until(self, path: str, *parameters: tuple[str, Any], there: Callable[[Any], object] = bool) -> Any:
        """Returns an answer once it is as expected."""
        found: Any = None

        async def fits() -> bool:
            nonlocal found
            status, found = await self.get(path, *parameters)
            return status == 200 and bool(there(found))

        await until(fits, f"{path} as expected", 60, pause=0.1)
        return found


@asynccontextmanager
async def console_of(run: str, nats_url: str | None, redis_url: str | None, directory: Path | None) -> AsyncIterator[AskedConsole]:
    """A console in this process."""
    source = RunSource(run, nats_url, redis_url, directory)
    app = console_app(source, TOKEN, ["127.0.0.1"])
    async with background(source.keep()), http_endpoints.serving(app, HttpAddress("127.0.0.1", 0)) as at:
        console = AskedConsole(f"http://{at}")
        async with console.client:
            yield console


@dataclass
class ServedConsole:
    """The console and what it looks at. ``url``: of the console; ``bus``: the test's own connection, which may do all."""

    config: RunConfig

    nats: EmbeddedNats
    valkey: EmbeddedValkey
    bus: Bus
    process: ServiceProcess
    url: str
    api: AskedConsole
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=30))

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(self.url + path, headers={"Authorization": f"Bearer {TOKEN}", **headers})

    async def overview(self) -> dict[str, Any]:
        answer = await self.get("/api/overview")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def until_away(self, what: str, away: bool = True) -> None:
        async def told() -> bool:
            return any(part["name"] == what for part in (await self.overview())["away"]) is away

        await until(told, f"that {what} is {'away' if away else 'back'}", 60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedConsole]:
    rights = rights_of(CONSOLE, RUN)
    nats, valkey = EmbeddedNats(tmp_path / "nats", rights), EmbeddedValkey(tmp_path / "valkey", guest=rights)
    # a silent service is away by name for half of this, which a console on a crowded machine has to see
    config = run_config(tmp_path, run={"name": RUN}, bus={"registry_ttl": 20})
    nats.start()
    valkey.start()
    bus = await Bus.connect(nats.url, "test")
    try:
        await runs.create(bus, config, valkey.url, vocabulary=100)
        environment = {
            "MYXO_RUN": RUN,
            "NATS_URL": nats.guest_url,
            "REDIS_URL": valkey.guest_url,
            "MYXO_RUN_DIRECTORY": str(config.run.root),
            "MYXO_CONSOLE": "127.0.0.1:0",
            "MYXO_CONSOLE_TOKEN": TOKEN,
            "MYXO_CONSOLE_HOSTS": "console.example.org",
        }
        with ServiceProcess("console", tmp_path / "console.log", environment) as process:

            async def address() -> str | None:
                assert process.process.poll() is None, process.words()
                found = re.search(r'"at": "([^"]+)"', process.words())
                return None if found is None else found[1]

            await until(address, "the console", 60)
            url = f"http://{await address()}"
            console = ServedConsole(config, nats, valkey, bus, process, url, AskedConsole(url))
            async with console.client, console.api.client:
                yield console
    finally:
        await bus.close()
        await asyncio.to_thread(valkey.stop)
        await asyncio.to_thread(nats.stop)
