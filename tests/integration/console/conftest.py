"""A console as a process of its own, beside real servers that can be killed, with a run on them that no service works on."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.accounts.permissions import CONSOLE, rights_of
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from tests.support.run_config import run_config
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

RUN, TOKEN = "test", "a-token-that-nobody-guesses-0123456789"


@dataclass
class ServedConsole:
    """The console and what it looks at. ``url``: of the console; ``bus``: the test's own connection, which may do all."""

    nats: EmbeddedNats
    valkey: EmbeddedValkey
    bus: Bus
    process: ServiceProcess
    url: str
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
            console = ServedConsole(nats, valkey, bus, process, f"http://{await address()}")
            yield console
            await console.client.aclose()
    finally:
        await bus.close()
        await asyncio.to_thread(valkey.stop)
        await asyncio.to_thread(nats.stop)
