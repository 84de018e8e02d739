"""One replica: its engine, the weight version it serves, and the gate that generation waits at.

Invariant: the gate is open only while the engine runs and holds every byte of `version`. A push closes it; a push that failed, and an
engine that died, leave it closed (fenced) until a push has gone through.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path
from typing import Any, Protocol

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.launch_command import EngineCommand, engine_command
from services.rollout.router import reached_at, router_url
from shared.runtime import devices, failure_summary
from shared.runtime.embedded_servers import free_port
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.service_base import Service

NO_WEIGHTS = -1
"""Version of a replica that no push has reached yet."""

WATCH_SECONDS = 1.0
OPEN_SECONDS = 60.0
"""For an engine that gave its memory back to take it again."""

STOP_SECONDS = 3.0
RESTART_SECONDS = 2.0
"""Pause before a dead engine is started again."""


class EngineStartGate(Protocol):
    """Says when an engine may take its GPU's memory; `services.rollout.colocated_engine.ColocatedEngine` is one."""

    async def may_start(self) -> None:
        """Returns when an engine may be started."""

    async def started(self) -> None:
        """Takes note of an engine that has come up."""


class Replica:
    """See the module's docstring. ``client`` is usable while ``engine_up`` is set."""

    def __init__(self, service: Service) -> None:
        self._service, self._rollout = service, service.config.rollout
        if devices.resolve(self._rollout.rollout_device) == "cuda":
            service.ranks = self._rollout.rollout_num_gpus_per_engine
        self.client: EngineClient | None = None
        self.version = NO_WEIGHTS
        self.engine_up = asyncio.Event()
        self.incarnation = 0
        self.asleep = False  # it is the trainer's turn on the GPU that both compute on
        self.start_gate: EngineStartGate | None = None
        self._exposed = bool(router_url())
        self._life = service.incarnation
        self._gate = asyncio.Event()
        self._process: EngineProcess | None = None

    # --- the gate

    @property
    def serving(self) -> bool:
        return self._gate.is_set()

    async def wait_serving(self, min_version: int, deadline: float) -> EngineClient:
        """Waits until the replica serves ``min_version`` or newer. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        while True:
            if self.asleep:  # nobody is late: the trainer has its turn
                end = loop.time() + deadline
            remaining = end - loop.time()
            if remaining <= 0:
                then = f"it serves version {self.version} ({self._service.state}); the work goes back to the queue"
                raise DeadlineExceeded(f"weights of version {min_version} or newer", "the trainer", deadline, then)
            try:
                await asyncio.wait_for(self._gate.wait(), timeout=min(remaining, WATCH_SECONDS))
            except TimeoutError:
                continue
            if self.version >= min_version and self.client is not None:
                return self.client
            await asyncio.sleep(min(remaining, 0.05))

    def close_gate(self) -> None:
        """Nothing new is sent to the engine."""
        self._gate.clear()

    async def open_gate(self, version: int, *, deadline: float = OPEN_SECONDS) -> None:
        """The engine serves ``version`` from here on; in the trainer's turn: as soon as that is over. Raises as `EngineMemory.wake`."""
        if not self.asleep and self.client is not None and self.client.occupation.asleep:
            await self.client.occupation.wake(deadline=deadline)
        self.version = self._service.version = version
        self._service.state = "asleep" if self.asleep else "ready"
        self._service.metrics.set("version", version)
        if not self.asleep:
            self._gate.set()
        await self._service.announce()

    async def fence(self, reason: str) -> None:
        """The engine's weights are not to be trusted: no work until a push has gone through."""
        self._gate.clear()
        self._reincarnate()
        self.version = self._service.version = NO_WEIGHTS
        self._service.state = "fenced"
        self._service.log.warning("fenced", reason=reason)
        await self._service.announce()
        await self._service.tell("fenced", reason)

    async def kill_engine(self, reason: str) -> None:
        """For an engine that will not answer any more; `keep_engine` starts it anew."""
        if self._process is not None:
            self._service.log.warning("engine_killed", reason=reason)
            await self._process.stop(0)

    def _reincarnate(self) -> None:
        """What the trainer was told of this replica's weights does not hold any longer."""
        self.incarnation += 1
        self._service.incarnation = f"{self._life}.{self.incarnation}"

    # --- the engine

    async def keep_engine(self) -> None:
        """Starts the engine, watches it, and starts it again when it dies. Runs until cancelled; then stops it."""
        try:
            while True:
                await self._start()
                assert self._process is not None  # set by _start
                while self._process.alive():
                    await asyncio.sleep(WATCH_SECONDS)
                self.engine_up.clear()
                await self.fence(f"the engine died: {failure_summary.of_log(self._process.process.last_lines())}")
                await self._close()
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            await self._close()

    async def _start(self) -> None:
        service, rollout = self._service, self._rollout
        service.state = "starting"
        if self.start_gate is not None:
            await self.start_gate.may_start()
        command = self._command()
        self._process = EngineProcess(command, self._log_file())
        seconds = await self._process.wait_ready(rollout.engine_start_timeout)
        self.client = await EngineClient.connect(command.url, admin_key=command.admin_key, deadline=60)
        await self.client.open_receiver(self._process.receiver, deadline=60)
        self._reincarnate()
        service.engine = reached_at(command) if self._exposed else ""
        service.state = "fenced"
        service.log.info("engine_ready", seconds=round(seconds, 1), url=command.url, release=self.client.capabilities.release)
        service.metrics.set("engine_start_seconds", seconds)
        self.engine_up.set()
        await service.announce()
        if self.start_gate is not None:
            await self.start_gate.started()

    def _command(self) -> EngineCommand:
        rollout = self._rollout
        device = devices.resolve(rollout.rollout_device)
        flags: dict[str, Any] = {"tp-size": rollout.rollout_num_gpus_per_engine} if device == "cuda" else {}
        # keys and values that old weights made must not serve requests that begin under new ones: seen as differences of 1e-4 and more
        # between engine and trainer as soon as prompts repeat. `disable-radix-cache = false` in [rollout.sglang] takes the cache back
        flags["disable-radix-cache"] = True
        if devices.engines_release(self._service.config):
            flags["enable-memory-saver"] = True
            flags["enable-weights-cpu-backup"] = devices.engines_back_up(self._service.config)
        flags |= rollout.sglang
        return engine_command(
            self._service.config.model.hf_checkpoint,
            free_port(),
            device=device,
            random_seed=self._service.config.data.rollout_seed + _seed(self._service.instance),
            flags=flags,
            threads=1 if device == "cpu" else None,
            exposed=self._exposed,
        )

    def _log_file(self) -> Path:
        directory = os.environ.get("MYXO_LOG_DIR")
        root = Path(directory) if directory else self._service.config.run.root / "logs"
        return root / f"{self._service.instance}-engine.log"

    async def _close(self) -> None:
        self._service.engine = ""
        if self.client is not None:
            await self.client.close()
            self.client = None
        if self._process is not None:
            try:
                await self._process.stop(STOP_SECONDS if self._service.stopping.is_set() else 0)
            except MyxoError as error:
                self._service.log.error("engine_not_stopped", error=str(error))
            self._process = None


def _seed(instance: str) -> int:
    """A number that instances do not share, so that replicas sample apart from each other."""
    return zlib.crc32(instance.encode()) % 2**20
