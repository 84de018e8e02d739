"""Keeps the replica's engine among the workers of an sglang-router while it serves verified weights.

The router fronts the engines for agents that use one address. Each replica registers its own engine there (the address of its
`EngineProxy`), and again after the router was restarted; it takes it off when it is fenced. An engine whose replica died is removed by any
replica that is still alive, which sees in the registry that it is gone. The router's control plane takes a key.
"""

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from shared.bus.connection import TRANSIENT
from shared.runtime.addresses import ROUTER_KEY, router_key
from shared.runtime.errors import ConfigError, MyxoError
from shared.service.service_base import Service

ROUTER_VARIABLE = "MYXO_ROUTER_URL"
POLL_INTERVAL_S = 3.0  # the interval at which the router's workers are compared with the engines that are alive
CALL_SECONDS, LEAVE_SECONDS = 5.0, 1.0  # the deadlines for one call to the router, while the replica works and when it leaves
FAILURES = (aiohttp.ClientError, TimeoutError, ValueError)


def router_url() -> str | None:
    """Returns ``MYXO_ROUTER_URL``, None where it is unset or empty. Raises ConfigError."""
    url = os.environ.get(ROUTER_VARIABLE, "").rstrip("/")
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(ROUTER_VARIABLE, url, "expected http://host:port of an sglang-router, or nothing")
    return url or None


class Router:
    """Keeps ``service.engine`` among the workers of the router at ``url``. Raises ConfigError without a key to its control plane."""

    def __init__(self, service: Service, url: str) -> None:
        self._service, self._url = service, url
        self._known = ""
        if (key := router_key()) is None:
            raise ConfigError(
                ROUTER_KEY, None, f"required with {ROUTER_VARIABLE}, or {ROUTER_KEY}_FILE: the key to the router's control plane"
            )
        self._headers = {"Authorization": f"Bearer {key}"}

    async def keep(self) -> None:
        """Runs until cancelled. A router that is unreachable is waited for, since nothing else depends on it."""
        away = False
        async with self._session(CALL_SECONDS) as session:
            while True:
                try:
                    await self._settle(session)
                    away = False
                except (*FAILURES, MyxoError, *TRANSIENT) as error:
                    if not away:
                        self._service.log.warning("router_away", url=self._url, error=str(error) or type(error).__name__)
                    away = True
                await asyncio.sleep(POLL_INTERVAL_S)

    async def leave(self) -> None:
        """Removes this replica's engine from the router. A router that does not answer is ignored."""
        self._service.engine = ""
        try:
            async with self._session(LEAVE_SECONDS) as session:
                for worker in await self._workers(session):
                    if worker["url"] == self._known:
                        await self._remove(session, worker)
        except FAILURES as error:
            self._service.log.warning("router_not_left", url=self._url, error=str(error) or type(error).__name__)

    def _session(self, seconds: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), headers=self._headers)

    async def _settle(self, session: aiohttp.ClientSession) -> None:
        own, workers = self._service.engine, await self._workers(session)
        if own and own not in {worker["url"] for worker in workers}:
            await self._service.announce()  # first the registry: others remove workers that are not in it
            async with session.post(
                f"{self._url}/workers", json={"url": own, "model_id": str(self._service.config.model.hf_checkpoint)}, raise_for_status=True
            ):
                self._service.log.info("router_joined", url=self._url, engine=own)
        self._known = own or self._known
        alive = {status.engine for status in await self._service.registry.alive("rollout")} | {own}
        for worker in workers:
            if worker["url"] not in alive:
                await self._remove(session, worker)

    async def _workers(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get(f"{self._url}/workers", raise_for_status=True) as answer:
            return list((await answer.json())["workers"])

    async def _remove(self, session: aiohttp.ClientSession, worker: dict[str, Any]) -> None:
        async with session.delete(f"{self._url}/workers/{worker['id']}") as answer:
            if answer.status != 404:  # another replica has removed it already
                answer.raise_for_status()
        self._service.log.info("router_worker_removed", url=self._url, engine=worker["url"])
