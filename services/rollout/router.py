"""Keeps the replica's engine among the workers of an sglang-router while it answers.

The router fronts the engines for agents that use one address. Each replica registers its own engine there, and again after the router was
restarted. An engine whose replica died is removed by any replica that is still alive, which sees in the registry that it is gone.
"""

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from services.rollout.engine.launch_command import EngineCommand
from shared.bus.connection import TRANSIENT
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.own_address import own_address
from shared.runtime.service_base import Service

ROUTER_VARIABLE = "MYXO_ROUTER_URL"

POLL_INTERVAL_S = 3.0
"""The interval at which the router's workers are compared with the engines that are alive."""

CALL_SECONDS = 5.0


def router_url() -> str | None:
    """Returns ``MYXO_ROUTER_URL``, None where it is unset or empty. Raises ConfigError."""
    url = os.environ.get(ROUTER_VARIABLE, "").rstrip("/")
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(ROUTER_VARIABLE, url, "expected http://host:port of an sglang-router, or nothing")
    return url or None


def reached_at(command: EngineCommand) -> str:
    """Returns the engine's URL for other machines."""
    return f"http://{own_address()}:{urlsplit(command.url).port}"


class Router:
    """Keeps ``service.engine`` among the workers of the router at ``url``."""

    def __init__(self, service: Service, url: str) -> None:
        self._service, self._url = service, url
        self._known = ""
        self._away = False

    async def keep(self) -> None:
        """Runs until cancelled. A router that is unreachable is waited for, since nothing else depends on it."""
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    await self._settle(session)
                    self._away = False
                except (aiohttp.ClientError, TimeoutError, ValueError, MyxoError, *TRANSIENT) as error:
                    if not self._away:
                        self._service.log.warning("router_away", url=self._url, error=str(error) or type(error).__name__)
                    self._away = True
                await asyncio.sleep(POLL_INTERVAL_S)

    async def leave(self) -> None:
        """Removes this replica's engine from the router. A router that does not answer is ignored."""
        self._service.engine = ""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
                for worker in await self._workers(session):
                    if worker["url"] == self._known:
                        await self._remove(session, worker)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._service.log.warning("router_not_left", url=self._url, error=str(error) or type(error).__name__)

    async def _settle(self, session: aiohttp.ClientSession) -> None:
        own, workers = self._service.engine, await self._workers(session)
        if own and own not in {worker["url"] for worker in workers}:
            await self._service.announce()  # first the registry: others remove workers that are not in it
            async with session.post(f"{self._url}/workers", json={"url": own}) as answer:
                answer.raise_for_status()
            self._service.log.info("router_joined", url=self._url, engine=own)
        self._known = own or self._known
        alive = {status.engine for status in await self._service.registry.alive("rollout")} | {own}
        for worker in workers:
            if worker["url"] not in alive:
                await self._remove(session, worker)

    async def _workers(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get(f"{self._url}/workers") as answer:
            answer.raise_for_status()
            return list((await answer.json())["workers"])

    async def _remove(self, session: aiohttp.ClientSession, worker: dict[str, Any]) -> None:
        async with session.delete(f"{self._url}/workers/{worker['id']}") as answer:
            if answer.status != 404:  # another replica has removed it already
                answer.raise_for_status()
        self._service.log.info("router_worker_removed", url=self._url, engine=worker["url"])
