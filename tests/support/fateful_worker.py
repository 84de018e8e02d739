"""A worker process whose calls do what they are told to: wait, or misbehave. ``python -m tests.support.fateful_worker``."""

import asyncio
import collections
import ctypes
import itertools
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from shared.process.call_server import serve_calls


class FatefulCalls:
    """Answers ``{"verb": "act", "what": name}`` with its process, and notes that the call has begun."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.waits = ["act"]
        self.block_s: float | None = setup["block_s"]
        self._notes = Path(setup["notes"])

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        what = request["what"]
        (self._notes / f"{what}-{uuid.uuid4().hex}").touch()
        if what == "wait until told":
            while not (self._notes / "told").exists():
                await asyncio.sleep(0.05)
        elif what.startswith("wait"):
            await asyncio.sleep(float(what.split()[1]))
        else:
            await asyncio.sleep(0.3)  # the others have begun by then
            await ACTS[what]()
        return {"process": os.getpid()}


async def _sleep() -> None:
    time.sleep(3600)


async def _spin() -> None:
    while True:
        pass


async def _swallow() -> None:
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


async def _hold_the_interpreter() -> None:
    collections.deque(itertools.repeat(None), maxlen=0)


async def _spin_in_a_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_spin())


async def _leave() -> None:
    os._exit(3)


async def _leave_in_a_thread() -> None:
    await asyncio.to_thread(os._exit, 3)


async def _exit() -> None:
    sys.exit(4)


async def _exit_in_a_task() -> None:
    await asyncio.create_task(_exit())


async def _crash() -> None:
    ctypes.string_at(0)


async def _crash_in_a_thread() -> None:
    await asyncio.to_thread(lambda: (time.sleep(0.05), ctypes.string_at(0)))  # the loop is idle by then


async def _fork() -> None:
    if os.fork() == 0:
        raise ValueError("in the child")


async def _stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(3600)


async def _hang() -> None:
    await asyncio.sleep(3600)


async def _hang_in_threads() -> None:
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 3600) for _ in range(16)))


ACTS = {act.__name__.removeprefix("_").replace("_", " "): act for act in (
    _sleep, _spin, _swallow, _hold_the_interpreter, _spin_in_a_group, _leave, _leave_in_a_thread, _exit, _exit_in_a_task, _crash,
    _crash_in_a_thread, _stop_the_loop, _fork, _hang, _hang_in_threads,
)}  # fmt: skip


if __name__ == "__main__":
    serve_calls(FatefulCalls)
