"""Watches a run from outside, by what passes over its bus, and says in which phase it is. It asks nothing of the services."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import nats
import nats.errors

from myxo.run.run_directory import RunDirectory
from shared.schema import codec
from tests.chaos.fast.fast_config import RUN
from tests.chaos.schedule import EVALUATION, FLOW, LAST_STEP, PUSH, SAVE, SHUTDOWN, START, Fault

POLL_S = 0.01
PUSH_MEMORY_S = 0.02


class Observer:
    """Follows one run; use as an async context manager.

    Attributes:
        steps: trained as far as was seen. trained_at: when each was, monotonic seconds. finished: the ledger says so.
    """

    def __init__(self, root: Path) -> None:
        self._directory = RunDirectory(root)
        self._phase = root / "phase"
        self._connection: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self.steps, self.trained_at = 0, dict[int, float]()
        self.finished = False
        self.evaluating = 0
        self._pushed_at = float("-inf")
        self.seen_at = time.monotonic()

    async def __aenter__(self) -> "Observer":
        self._connecting = asyncio.create_task(self._connect())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._connection.close(), 2)

    def is_due(self, fault: Fault) -> bool:
        """Returns whether the phase of a fault has come."""
        if self.steps < fault.step and fault.phase not in (START, SHUTDOWN):
            return False
        match fault.phase:
            case "push":
                return time.monotonic() - self._pushed_at < PUSH_MEMORY_S
            case "save":
                return self._phase.exists()
            case "evaluation":
                return self.evaluating > 0
            case "shutdown":
                return self.finished
        return fault.phase in (FLOW, START, LAST_STEP)

    async def _connect(self) -> None:
        while (servers := self._directory.servers()) is None:
            await asyncio.sleep(POLL_S)
        while self._connection is None:
            with contextlib.suppress(OSError, nats.errors.Error):
                self._connection = await nats.connect(
                    servers.nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore, connect_timeout=1
                )
        await self._connection.subscribe(f"{RUN}.ledger.>", cb=self._ledger)
        await self._connection.subscribe(f"{RUN}.rollout.*.weights.*", cb=self._push)

    async def _push(self, _: Any) -> None:
        self._pushed_at = time.monotonic()

    async def _ledger(self, message: Any) -> None:
        record, self.seen_at = codec.unpack(message.data), time.monotonic()
        match record["kind"]:
            case "BatchTrained":
                self.steps = max(self.steps, record["step"] + 1)
                self.trained_at.setdefault(record["step"], self.seen_at)
            case "EvalStarted":
                self.evaluating += 1
            case "EvalEnded":
                self.evaluating -= 1
            case "RunFinished":
                self.finished = True


async def _ignore(_: Exception) -> None:
    pass


__all__ = ["EVALUATION", "PUSH", "SAVE", "Observer"]
