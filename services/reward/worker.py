"""Scores groups in a process of its own, which the service kills when a call blocks it.

``python -m services.reward.worker``; it speaks as `services.reward.worker_pool.WorkerPool` says. In, once: ``{"verifier": name}``, or
``{"config": JSON}`` for the user's own functions; out: ``{"waits": [verb, …]}`` with the verbs whose functions are async, or
``{"refused": [field, value, expected]}`` where a function cannot be imported. Then in: ``{"responses": [text, …], "label": text}`` for a
verifier, else what `services.reward.custom_functions.Functions.answer` takes; out: ``{"scores": [score, …]}``, for functions with
``"filtered"``, or ``{"error": text}``.
"""

import asyncio
from typing import Any, Protocol

from services.reward import frames
from services.reward.frames import FrameStream
from services.reward.verifiers import VERIFIERS
from shared.runtime.errors import ConfigError

FIRST_STEPS_SECONDS = 0.001
"""The time that a call has the event loop for itself before the next one is taken up. An async function that computes without ever waiting
then ends before the next call's deadline begins."""


class Calls(Protocol):
    """What a worker answers calls with. ``waits``: the verbs of calls that give way to others."""

    waits: list[str]

    async def answer(self, request: dict[str, Any]) -> dict[str, object]: ...


class VerifierCalls:
    """Answers calls by one verifier, one after the other."""

    def __init__(self, name: str) -> None:
        self._name, self._verifier = name, VERIFIERS[name]
        self._verifier("", "x")  # loads lazy imports now: sympy takes seconds, which no call's deadline should include
        self.waits: list[str] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns a score for each response."""
        try:
            return {"scores": [{"reward": float(self._verifier(text, request["label"]))} for text in request["responses"]]}
        except Exception as error:  # an exception of a verifier fails the sample, not this process
            return {"error": f"verifier {self._name}: {type(error).__name__}: {error}"}


def main() -> None:
    """Answers requests until the service is gone."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    channel.send([call_id, None])
    try:
        calls = _calls(setup)
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {"waits": calls.waits}])
    try:
        asyncio.run(_serve(channel, calls))  # one loop for all calls: functions may keep connections
    except* EOFError:
        pass


def _calls(setup: dict[str, Any]) -> Calls:
    if "verifier" in setup:
        return VerifierCalls(setup["verifier"])
    from services.reward.custom_functions import Functions  # imports the whole config, which verifiers do without
    from shared.config.run_config import RunConfig

    return Functions(RunConfig.model_validate_json(setup["config"]))


async def _serve(channel: FrameStream, calls: Calls) -> None:
    """Serves calls. Raises EOFError when the service is gone; an exception of a call ends the process."""
    requests, tasks = await channel.stream(), dict[int, asyncio.Task[None]]()
    async with asyncio.TaskGroup() as running:
        while True:
            call_id, request = await frames.read(requests)
            if request is None:  # the call is late, so it is cancelled
                if call_id in tasks:
                    tasks[call_id].cancel()
                channel.send([call_id, {"error": "cancelled"}])
                continue
            channel.send([call_id, None])
            tasks[call_id] = running.create_task(_call(channel, calls, call_id, request))
            tasks[call_id].add_done_callback(lambda _, call_id=call_id: tasks.pop(call_id))  # type: ignore[misc]
            if request.get("verb") in calls.waits:
                await asyncio.sleep(FIRST_STEPS_SECONDS)


async def _call(channel: FrameStream, calls: Calls, call_id: int, request: dict[str, Any]) -> None:
    try:
        answer = await calls.answer(request)
    except asyncio.CancelledError:  # late, or the function's own doing
        answer = {"error": "the call was cancelled"}
    channel.send([call_id, answer])


if __name__ == "__main__":
    main()
