"""Answers the calls of a `shared.process.worker_pool.WorkerPool` in one of its processes.

It speaks in `shared.process.frames`. In, once, the setup; out: ``{"waits": [verb, …], "block_s": seconds or None}``, as `Calls` has them,
or ``{"refused": [field, value, expected]}`` where the setup cannot be met. Then a request is ``[id, request]`` and is answered with
``[id, None]`` when it is taken up and with ``[id, answer]``, a map, when it is done; the request None cancels the call of its id, which is
answered at once.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol

from shared.process import frames, running_call
from shared.process.frames import FrameStream
from shared.process.running_call import BlockedCall, CallExit, RunningCall, is_blocked
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import error_text

FIRST_STEPS_SECONDS = 0.001
"""The time that a call has the event loop for itself before the next one is taken up. An async function that computes without ever waiting
then ends before the next call's deadline begins."""


TERMINAL, DEBUGGED = "MYXO_TERMINAL", "MYXO_DEBUGGED"
"""The environment variables that name the terminal for `debug`, and the file that it makes: no deadline runs once that is there."""


def debug() -> None:
    """Opens the debugger where its caller is, on the terminal of the one who started this process: its own input is the service's."""
    import pdb  # only here: it takes long

    Path(os.environ[DEBUGGED]).touch()
    terminal = os.environ[TERMINAL]
    debugger = pdb.Pdb(stdin=open(terminal), stdout=open(terminal, "w"))  # noqa: SIM115  # it reads on after this
    debugger.set_trace(sys._getframe(1))


class Calls(Protocol):
    """Base of what a worker answers calls with. ``waits``: the verbs of calls that give way to others. ``block_s``: the seconds for which
    a call may block the loop before it is ended alone; None: the service sees to it."""

    waits: Sequence[str] = ()
    block_s: float | None = None

    async def answer(self, request: dict[str, Any]) -> dict[str, object]: ...


def serve_calls(opened: Callable[[dict[str, Any]], Calls]) -> None:
    """Answers requests until the service is gone. ``opened`` makes of the setup what answers them; it may raise ConfigError."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    channel.send([call_id, None])
    try:
        calls = opened(setup)
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {"waits": list(calls.waits), "block_s": calls.block_s}])
    try:
        asyncio.run(_serve(channel, calls))  # one loop for all calls: functions may keep connections
    except* EOFError:
        pass


async def _serve(channel: FrameStream, calls: Calls) -> None:
    """Serves calls. Raises EOFError when the service is gone; an exception of a call ends the process."""
    requests, tasks, serving = await channel.stream(), dict[int, asyncio.Task[None]](), asyncio.current_task()
    assert serving is not None
    if path := os.environ.get(running_call.VARIABLE):
        RunningCall(Path(path), calls.block_s).follow(asyncio.get_running_loop())
    async with asyncio.TaskGroup() as running:
        while True:
            call_id, request = await frames.read(requests)
            if request is None:  # the call is late, or is not waited for any longer
                if call_id in tasks:
                    tasks[call_id].cancel()
                channel.send([call_id, {"error": "cancelled"}])
                continue
            channel.send([call_id, None])
            context = copy_context()
            context.run(running_call.CALL_ID.set, call_id)
            tasks[call_id] = running.create_task(_call(channel, calls, serving, call_id, request), context=context)
            tasks[call_id].add_done_callback(lambda _, call_id=call_id: tasks.pop(call_id))  # type: ignore[misc]
            if request.get("verb") in calls.waits:
                await asyncio.sleep(FIRST_STEPS_SECONDS)


async def _call(channel: FrameStream, calls: Calls, serving: asyncio.Task[None], call_id: int, request: dict[str, Any]) -> None:
    try:
        answer = await calls.answer(request)
    except asyncio.CancelledError:  # late, or the function's own doing
        if serving.cancelling():  # the process ends, which is no answer
            return
        answer = {"error": "the call was cancelled"}
    except (BlockedCall, CallExit, SystemExit, KeyboardInterrupt, BaseExceptionGroup) as error:
        answer = {"error": error_text(error), "blocked": is_blocked(error)}
    channel.send([call_id, answer])
