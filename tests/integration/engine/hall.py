"""A run with a gateway before its replica, on a real engine."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from shared.bus.registry import Registry
from shared.sessions.session_store import SessionStore
from tests.integration.engine.bench import Bench
from tests.integration.engine.source import Source
from tests.support.gateways import Played, ready_gateway, started_gateway
from tests.support.service_process import ServiceProcess

CHUNK = 24
"""Tokens after which a turn is recorded here."""


class Hall:
    """A replica on a real engine, and gateways before it."""

    def __init__(self, desk: Bench, directory: Path, environment: dict[str, str]) -> None:
        self.desk, self.directory, self.environment = desk, directory, environment
        self.registry = Registry(desk.service.bus, desk.service.run)
        self.sessions = SessionStore(desk.service.store, desk.service.run)
        self.processes: list[ServiceProcess] = []
        self.urls: list[str] = []

    async def start(self) -> str:
        number = len(self.processes)
        process = started_gateway(number, self.directory, self.environment)
        self.processes.append(process)
        self.urls.append(await ready_gateway(self.registry, number, process))
        return self.urls[-1]

    async def session(self, **fields: Any) -> Played:
        return await Played.opened(self.sessions, **fields)

    async def pushed(self, model: torch.nn.Module, version: int) -> None:
        source = Source(self.desk, model, version)
        await source.prepare()
        await source.commit((await source.receive()).digest)
        source.leave()


NewHall = Callable[..., Awaitable[Hall]]
