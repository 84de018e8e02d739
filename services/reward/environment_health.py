"""Watches one environment outside of Myxo: asks it for its description every few seconds, publishes its status, and gives it no work while
it is unreachable.

States: `starting` until the first answer; `ready`; `away`: no connection can be made; `refused`: the server is no environment of this
protocol version; `late`: it takes connections and does not answer in time. While it is starting, away or refused, its groups wait in the
queue. A late one still gets work: its groups die at their deadlines and are replaced, so that it cannot stop the run.
"""

import asyncio
import contextlib
import time

from shared.bus.connection import TRANSIENT
from shared.bus.registry import ENVIRONMENT
from shared.environment.environment import Environment
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service


class EnvironmentHealthCheck:
    """The health check of one environment. Every reward service makes its own; they publish the same status."""

    def __init__(self, service: Service, environment: Environment) -> None:
        self._service, self._environment = service, environment
        self._describe_seconds = service.config.bus.registry_ttl / 2  # with a heartbeat between two it stays below the TTL
        self._log = service.log.bind(environment=environment.name, url=environment.shown)
        self.state, self.detail = "starting", ""
        self.reachable = asyncio.Event()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await self._describe()
            with contextlib.suppress(MyxoError, *TRANSIENT):  # the next heartbeat is near
                await self._service.registry.renew(self._status())
            await asyncio.sleep(self._service.heartbeat)

    async def leave(self) -> None:
        """Removes the status; where another reward service also watches, it is published again within a heartbeat."""
        with contextlib.suppress(MyxoError, *TRANSIENT):
            await self._service.registry.leave(self._status())

    def lost(self, reason: str) -> None:
        """Stops taking groups until the environment has described itself again, because a caller could not reach it."""
        self._say("away", reason)

    async def _describe(self) -> None:
        try:
            description = await self._environment.describe(self._describe_seconds)
        except EnvironmentAway as error:
            self._say("away", error.reason)
        except EnvironmentFailed as error:
            self._say("refused", error.reason)
        except DeadlineExceeded:
            self._say("late", f"describe was not answered within {self._describe_seconds:g} s")
        else:
            if not description.scores:
                self._say("refused", f"verbs is {', '.join(description.verbs)}; expected 'score' where it is to score")
                return
            needs, given = description.timeout, self._service.config.reward.reward_timeout
            self._say("ready", f"needs up to {needs:g} s, reward_timeout gives {given:g} s" if needs is not None and needs > given else "")

    def _say(self, state: str, detail: str) -> None:
        if state != self.state:
            tell = self._log.info if state == "ready" and not detail else self._log.warning
            tell("environment_state", state=state, reason=detail, before=self.state)
        self.state, self.detail = state, detail
        if state in ("ready", "late"):
            self.reachable.set()
        else:
            self.reachable.clear()

    def _status(self) -> ServiceStatus:
        return ServiceStatus(
            service=ENVIRONMENT,
            instance=self._environment.name,
            host="",
            pid=0,
            http=self._environment.shown,
            state=self.state,
            detail=self.detail,
            at=time.time(),
        )
