"""Runs the user's own functions in a separate process, which the service kills when they block it.

``python -m services.reward.hooks_worker``; it speaks as `services.reward.worker_pool.WorkerPool` says. In, once: ``{"config": JSON}``; out:
``{"ready": True, "waits": [verb, …]}`` with the verbs whose functions are async, or ``{"refused": [field, value, expected]}`` where a
function cannot be imported. Then in: ``{"verb": "score", "samples": [blob, …]}``, out: ``{"scores": [score, …]}``; in: ``{"verb": "select",
"samples": [blob, …], "scores": [score, …]}``, out: ``{"filtered": reason or nil, "scores": [score, …]}``; either may be answered with
``{"error": text}``. Blobs are those of `shared.schema.sample`.
"""

import asyncio
from dataclasses import asdict
from typing import Any

from services.reward import frames
from services.reward.custom_functions import Functions
from services.reward.frames import FrameStream
from shared.config.run_config import RunConfig
from shared.hooks import HookFailed
from shared.runtime.errors import ConfigError
from shared.schema import sample
from shared.schema.sample import Score

FIRST_STEPS_SECONDS = 0.001
"""The time that a call has the event loop for itself before the next one is taken up. An async function that computes without ever waiting
then ends before the next call's deadline begins."""


def main() -> None:
    """Answers requests until the service is gone."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    try:
        functions = Functions(RunConfig.model_validate_json(setup["config"]))
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {"ready": True, "waits": functions.waiting()}])
    try:
        asyncio.run(_serve(channel, functions))  # one loop for all calls: functions may keep connections
    except* EOFError:
        pass


async def _serve(channel: FrameStream, functions: Functions) -> None:
    """Serves calls. Raises EOFError when the service is gone; an exception of a call ends the process."""
    requests, calls, waiting = await channel.stream(), dict[int, asyncio.Task[None]](), functions.waiting()
    async with asyncio.TaskGroup() as running:
        while True:
            call_id, request = await frames.read(requests)
            if request is None:  # the call is late, so it is cancelled
                if call_id in calls:
                    calls[call_id].cancel()
                channel.send([call_id, {"error": "cancelled"}])
                continue
            channel.send([call_id, None])
            calls[call_id] = running.create_task(_call(channel, functions, call_id, request))
            calls[call_id].add_done_callback(lambda _, call_id=call_id: calls.pop(call_id))  # type: ignore[misc]
            if request["verb"] in waiting:
                await asyncio.sleep(FIRST_STEPS_SECONDS)


async def _call(channel: FrameStream, functions: Functions, call_id: int, request: dict[str, Any]) -> None:
    try:
        answer = await _answer(functions, request)
    except asyncio.CancelledError:  # late, or the function's own doing
        answer = {"error": "the call was cancelled"}
    channel.send([call_id, answer])


async def _answer(functions: Functions, request: dict[str, Any]) -> dict[str, object]:
    samples = sample.decode(request["samples"])
    try:
        if request["verb"] == "score":
            return {"scores": [asdict(score) for score in await functions.score(samples)]}
        result = await functions.select(samples, [Score(**score) for score in request["scores"]])
        return {"filtered": result.filtered, "scores": [asdict(score) for score in result.scores]}
    except HookFailed as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
