"""The user's own functions in a process apart, killed from outside when they take too long.

``python -m services.reward.hooks_worker``; it speaks `services.reward.frames`. In, once: ``{"config": JSON}``; out: ``{"ready": True}``,
or ``{"refused": [field, value, expected]}`` where a function cannot be imported. Then in: ``{"verb": "score", "samples": [blob, …]}``, out:
``{"scores": [score, …]}``; in: ``{"verb": "select", "samples": [blob, …], "scores": [score, …]}``, out: ``{"filtered": reason or nil,
"scores": [score, …]}``; either may be answered with ``{"error": text}``. Blobs are those of `shared.sample`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict
from typing import Any

from services.reward.frames import Channel
from services.reward.functions import Functions
from shared import sample
from shared.config import RunConfig
from shared.embedded import die_with_parent
from shared.errors import ConfigError
from shared.hooks import HookFailed
from shared.messages import Score


def main() -> None:
    """Answers requests until the service is gone."""
    die_with_parent()
    channel = Channel()
    with contextlib.suppress(EOFError), asyncio.Runner() as runner:  # one loop for all calls: functions may keep connections
        try:
            functions = Functions(RunConfig.model_validate_json(channel.receive()["config"]))
        except ConfigError as error:
            channel.send({"refused": [error.field, str(error.value), error.expected]})
            return
        channel.send({"ready": True})
        while True:
            channel.send(runner.run(_answer(functions, channel.receive())))


async def _answer(functions: Functions, request: dict[str, Any]) -> dict[str, object]:
    samples = sample.decode(request["samples"])
    try:
        if request["verb"] == "score":
            return {"scores": [asdict(score) for score in await functions.score(samples)]}
        verdict = await functions.select(samples, [Score(**score) for score in request["scores"]])
        return {"filtered": verdict.filtered, "scores": [asdict(score) for score in verdict.scores]}
    except HookFailed as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
