"""Watches a run from outside, by what passes over its bus, and says in which phase it is. It asks nothing of the services."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors

from myxo.run.run_directory import RunDirectory
from shared.schema import codec
from tests.chaos.fast.fast_config import RUN
from tests.chaos.link_proxy import ProxiedAddresses
from tests.chaos.schedule import EVALUATION, PUSH, SAVE, SHUTDOWN, START, Fault

POLL_S = 0.01
PUSH_MEMORY_S = 0.02
"""A push is under way for so long after each of its requests, as far as this can see."""

DUPLICATED = ("task", "generated", "scored")
SHARE, LATEST_S = 0.3, 2.0
"""The share of messages that come twice, and how much later at most: behind others that were sent after them."""

COPY = "Chaos-Copy"


class Observer:
    """Follows one run; use as an async context manager.

    Attributes:
        steps: trained as far as was seen. trained_at: when each was, monotonic seconds. finished: the ledger says so. evaluating:
            evaluations under way.
    """

    def __init__(self, root: Path, addresses: ProxiedAddresses | None) -> None:
        self._directory, self._addresses = RunDirectory(root), addresses
        self._phase = root / "phase"
        self._connection: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self.steps, self.trained_at = 0, dict[int, float]()
        self.finished = False
        self.evaluating = 0
        self._pushed_at = float("-inf")
        self._draw: random.Random | None = None
        self._copies = 0
        self._copying: set[asyncio.Task[None]] = set()

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
        if fault.phase == START:  # before its servers are up there is no run: the launcher then ends, and says why
            return self._connection is not None
        if fault.phase == SHUTDOWN:
            return self.finished
        if self.steps < fault.step:
            return False
        if fault.phase == PUSH:
            return time.monotonic() - self._pushed_at < PUSH_MEMORY_S
        if fault.phase == SAVE:
            return self._phase.exists()
        return fault.phase != EVALUATION or self.evaluating > 0

    @contextlib.asynccontextmanager
    async def duplicating(self, seed: int = 0) -> AsyncIterator[Callable[[], int]]:
        """Has messages come a second time while the body runs. Yields what counts the copies."""
        self._draw, before = random.Random(seed), self._copies
        try:
            yield lambda: self._copies - before
        finally:
            self._draw = None

    async def messages(self, stream: str) -> int:
        """Returns how many messages a stream holds now."""
        return int((await self._connection.jetstream().stream_info(stream)).state.messages)

    async def _connect(self) -> None:
        while (servers := self._directory.servers()) is None:
            await asyncio.sleep(POLL_S)
        direct = servers.nats_url
        if self._addresses is not None:  # not by way of a link that may be cut
            direct = direct.replace(f":{self._addresses.nats_port}", f":{self._addresses.own_nats_port}")
        while self._connection is None:
            with contextlib.suppress(OSError, nats.errors.Error):
                self._connection = await nats.connect(
                    direct, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore, connect_timeout=1
                )
        await self._connection.subscribe(f"{RUN}.ledger.>", cb=self._ledger)
        await self._connection.subscribe(f"{RUN}.rollout.*.weights.*", cb=self._push)
        for kind in DUPLICATED:
            await self._connection.subscribe(f"{RUN}.{kind}.>", cb=self._message)

    async def _push(self, _: Any) -> None:
        self._pushed_at = time.monotonic()

    async def _message(self, message: Any) -> None:
        if self._draw is not None and COPY not in (message.headers or {}) and self._draw.random() < SHARE:
            task = asyncio.create_task(self._copy(message.subject, message.data, self._draw.uniform(0, LATEST_S)))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)

    async def _copy(self, subject: str, data: bytes, later_s: float) -> None:
        await asyncio.sleep(later_s)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._connection.publish(subject, data, headers={COPY: "1"})
            self._copies += 1

    async def _ledger(self, message: Any) -> None:
        record, at = codec.unpack(message.data), time.monotonic()
        match record["kind"]:
            case "BatchTrained":
                self.steps = max(self.steps, record["step"] + 1)
                self.trained_at.setdefault(record["step"], at)
            case "EvalStarted":
                self.evaluating += 1
            case "EvalEnded":
                self.evaluating -= 1
            case "RunFinished":
                self.finished = True


async def _ignore(_: Exception) -> None:
    pass
