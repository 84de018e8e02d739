"""Serves an environment on a run's bus: MessagePack maps, by request and reply."""

import asyncio
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.bus.subjects import Subjects
from shared.environment.protocol import DESCRIBE
from shared.environment.serving import ServedEnvironment
from shared.runtime.errors import BadMessage
from shared.schema import codec


async def serve_on_bus(environment: ServedEnvironment, connection: Client, run: str, name: str) -> None:
    """Subscribes to the environment's subjects, in a queue group of its name: instances share the work."""
    running: set[asyncio.Task[None]] = set()
    for verb in (DESCRIBE, *environment.verbs):

        async def on_request(message: Msg, verb: str = verb) -> None:  # a long call must not hold up the next one
            task = asyncio.create_task(_respond(environment, verb, message))
            running.add(task)
            task.add_done_callback(running.discard)

        await connection.subscribe(Subjects(run).environment(name, verb), queue=name, cb=on_request)


async def _respond(environment: ServedEnvironment, verb: str, message: Msg) -> None:
    answer: dict[str, Any]
    try:
        question = codec.unpack(message.data)
        if not isinstance(question, dict):
            raise BadMessage("expected a map")
        answer = await environment.answer(verb, question)
    except Exception as error:  # of the user's code, too
        answer = {"error": f"{type(error).__name__}: {error}"}
    await message.respond(codec.pack(answer))
