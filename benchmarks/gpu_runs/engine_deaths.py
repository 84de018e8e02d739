"""Kills one engine of a run inside pushes, again and again, and notes what the bus says of each of them.

It watches the requests that the trainer makes of the engine's replica over the bus. When the one to receive weights passes, at once or a
few milliseconds later (`INTO_PUSH_S`), every process of the engine gets SIGKILL; the replica itself lives on, starts another engine, and
gets that one's weights as it is configured to.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import nats.errors

from benchmarks.example_run import lines
from myxo.run.run_directory import RunDirectory
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.process.child_process import descendants
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsPushed, WeightsReceive

POLL_S = 0.2
PUSHES_BEFORE = 3
"""Pushes that end well, to all replicas, before the next death."""

INTO_PUSH_S = (0.003, 0.0, 0.006)
"""From the request to the kill, of one death after another: while buckets come, and before any has."""

REPORT_SECONDS = 60.0
"""Until the trainer must have told what came of the push with the death; its own deadline is `weights.push_timeout`."""


class RunEnded(Exception):
    """The run is over before what was awaited had come."""


@dataclass
class EngineDeath:
    """One death. ``at``: seconds since the epoch. version: that was being received.

    killed_after: milliseconds from the request until the last process had its signal. push: the event of that push; None: none came.
    back_after: seconds until the replica served again; None: it did not.
    """

    at: float
    version: int
    processes: int
    killed_after_ms: float
    push: WeightsPushed | None = None
    back_after: float | None = None


@dataclass
class _Armed:
    """The processes that the next request kills, and what came of it."""

    pids: list[int]
    death: EngineDeath | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class EngineDeaths:
    """The deaths of one run's engine.

    Args:
        root: the run's directory. victim: the instance of the replica whose engine dies. kills: how often. running: whether the run is.
        seconds_left: of the run's time.

    Attributes:
        deaths: so far. ended: whether all of them, and what comes after them, are over. problem: why they are not, in words.
    """

    def __init__(self, root: Path, victim: str, kills: int, running: Callable[[], bool], seconds_left: Callable[[], float]) -> None:
        self._directory, self._victim, self._kills = RunDirectory(root), victim, kills
        self._running, self._seconds_left = running, seconds_left
        self._subjects = Subjects(root.name)
        self.deaths: list[EngineDeath] = []
        self.ended, self.problem = False, ""
        self._pushes: list[WeightsPushed] = []
        self._armed: _Armed | None = None

    async def run(self) -> None:
        """Kills as often as it is told to and as there is time for, and returns when the engine serves again after the last death."""
        try:
            await self._run()
        except (RunEnded, TimeoutError, MyxoError, OSError, nats.errors.Error) as error:
            self.problem = f"{len(self.deaths)} of {self._kills} deaths: {error or type(error).__name__}"
        finally:
            self.ended = True

    async def _run(self) -> None:
        await self._until(lambda: self._directory.servers() is not None, "the run's servers")
        servers = self._directory.servers()
        assert servers is not None
        connection = await nats.connect(servers.nats_url, error_cb=_ignored, max_reconnect_attempts=-1)
        bus = await Bus.connect(servers.nats_url, "gpu-runs", deadline=30)
        try:
            await connection.subscribe(self._subjects.replica_weights(self._victim, "receive"), cb=self._receive_asked)
            await connection.subscribe(self._subjects.event("weights", "pushed"), cb=self._pushed)
            registry = Registry(bus, self._subjects.run)
            longest = 0.0
            while len(self.deaths) < self._kills and self._seconds_left() > 2 * longest:
                began = time.monotonic()
                await self._die_once(registry)
                longest = max(longest, time.monotonic() - began)
            await self._healthy_pushes(f"pushes after {len(self.deaths)} deaths")
        finally:
            await bus.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.close(), 5)

    async def _die_once(self, registry: Registry) -> None:
        await self._healthy_pushes(f"pushes to all replicas before death {len(self.deaths) + 1}")
        (status,) = [found for found in await registry.alive("rollout") if found.instance == self._victim]
        self._armed = armed = _Armed(engine_processes(self._directory.log(self._victim)))
        await self._until(armed.done.is_set, "a push to kill the engine in", pause=0.005)
        death = armed.death
        assert death is not None
        self.deaths.append(death)
        end = time.monotonic() + REPORT_SECONDS
        await self._until(lambda: self._found_push(death) or time.monotonic() > end, "the end of the push with the death")
        death.push = self._found_push(death)
        while death.back_after is None:
            self._check_running(f"{self._victim} serves again")
            for found in await registry.alive("rollout"):
                if found.instance == self._victim and serves_again(found, status.incarnation):
                    death.back_after = round(time.time() - death.at, 1)
            await asyncio.sleep(POLL_S)

    def _found_push(self, death: EngineDeath) -> WeightsPushed | None:
        return next((push for push in self._pushes if push.version == death.version and push.at >= death.at), None)

    async def _healthy_pushes(self, what: str) -> None:
        """Returns after so many further pushes that replicas, the victim among them, serve."""
        before = len(self._pushes)

        def enough() -> bool:
            own = [part for push in self._pushes[before:] for part in push.replicas if part.replica == self._victim]
            return sum(not part.failure for part in own) >= PUSHES_BEFORE

        await self._until(enough, what)

    async def _until(self, condition: Callable[[], Any], what: str, pause: float = 0.05) -> None:
        while not condition():
            self._check_running(what)
            await asyncio.sleep(pause)

    def _check_running(self, what: str) -> None:
        if not self._running():
            raise RunEnded(f"the run ended before {what}")

    async def _receive_asked(self, message: Any) -> None:
        armed, asked = self._armed, time.monotonic()
        if armed is None:
            return
        self._armed = None
        await asyncio.sleep(INTO_PUSH_S[len(self.deaths) % len(INTO_PUSH_S)])
        at, killed = time.time(), 0
        for pid in armed.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        took = 1000 * (time.monotonic() - asked)
        armed.death = EngineDeath(at, WeightsReceive.decode(message.data).version, killed, round(took, 2))
        armed.done.set()

    async def _pushed(self, message: Any) -> None:
        self._pushes.append(WeightsPushed.decode(message.data))


def engine_processes(log: Path) -> list[int]:
    """Returns the processes of a replica's newest engine, those that others have started first. Raises RunEnded where it has none."""
    started = [line["pid"] for line in lines(log) if line["event"] == "engine_starting"]
    if not started or not (found := descendants(started[-1])):
        raise RunEnded(f"{log.stem} had an engine to kill")
    return [process.pid for process in reversed(found)]


def serves_again(status: ServiceStatus, incarnation: str) -> bool:
    """Returns whether a replica serves with another engine than the one that it had."""
    return status.state == "ready" and status.version >= 0 and status.incarnation != incarnation


async def _ignored(_: Exception) -> None:
    pass
