"""Generates one group: n samples of a prompt, each continued after every interruption until it has ended.

Each sample is a request of its own, in a slot of its own (`services.rollout.request_slots`), which it leaves when it ends: a group does not
keep the places of its short samples until its longest one has ended. A sample keeps the tokens, log-probs and version spans that it already
has; to continue it, prompt and tokens are sent to the engine again.
"""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.generation import Generation, GenerationRequest, first_tokens
from services.rollout.in_flight import InFlight, Requests, Stopped
from services.rollout.partial_samples import Partial
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from shared.data.stop_strings import end_across
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.tasks import cancelled
from shared.schema.messages import Task

ENGINE_TRIES = 5
"""The number of engine failures in a row after which a sample, and its group with it, is given up for this delivery."""

RETRY_PAUSE = 0.5


async def generate_group(
    replica: Replica,
    task: Task,
    partials: list[Partial],
    tokenizer: Tokenizer,
    deadline: float,
    in_flight: InFlight | None,
    slots: GroupSlots,
) -> None:
    """Generates all of the task's samples until they have ended.

    Args:
        partials: one for each sample, with its output so far; they grow in place.
        tokenizer: the model's, for stop strings of which an interrupted sample had the beginning.
        deadline: seconds for waiting for weights, and as many for each sample's time in the engine.
        in_flight: may stop the group; None for groups that are never stopped. slots: of the group.

    Raises Stopped once every sample has ended or was stopped; DeadlineExceeded, or EngineError when the engine failed `ENGINE_TRIES` times
    in a row for one of them: the others are cancelled then.
    """
    group = _Group(replica, task, partials, tokenizer, deadline, in_flight, slots)
    left = {asyncio.create_task(group.sample(index)) for index in range(len(partials))}
    stopped: Stopped | None = None
    try:
        while left:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
            for error in [sample.exception() for sample in ended]:
                if isinstance(error, Stopped):
                    stopped = error
                elif error is not None:
                    raise error
    finally:
        await cancelled(left)
    if stopped is not None:
        raise stopped


@dataclass(frozen=True)
class _Group:
    """What the samples of one group have in common."""

    replica: Replica
    task: Task
    partials: list[Partial]
    tokenizer: Tokenizer
    deadline: float
    in_flight: InFlight | None
    slots: GroupSlots
    requests: Requests = field(default_factory=Requests)

    async def sample(self, index: int) -> None:
        """Generates one sample to its end. Raises Stopped, DeadlineExceeded, EngineError."""
        partial, failures, spent = self.partials[index], 0, 0.0
        while partial.finish is None:
            await self.replica.wait_serving(self.task.min_version, self.deadline)
            async with self.slots.slot(index):
                # it may have changed since, or be changed while the slot is waited for
                client = await self.replica.wait_serving(self.task.min_version, self.deadline)
                began = asyncio.get_running_loop().time()
                try:
                    generation = await self._drawn(client, partial, self.deadline - spent)
                    failures = 0
                except EngineError:
                    failures += 1
                    if failures >= ENGINE_TRIES:
                        raise
                    generation = None
            if generation is None:
                await asyncio.sleep(RETRY_PAUSE * failures)  # it may be restarting: the gate closes as soon as that is seen
                continue
            spent += asyncio.get_running_loop().time() - began
            partial.extend(_ended(partial, generation, self.task.sampling.stop, self.tokenizer), self.task.sampling.max_new_tokens)
            if spent >= self.deadline and partial.finish is None:
                raise DeadlineExceeded(
                    f"sample {index} of {self.task.group}", "the engine", self.deadline, "the group goes back to the queue"
                )
        self.slots.end()

    async def _drawn(self, client: EngineClient, partial: Partial, seconds: float) -> Generation:
        """Returns what the engine draws for a sample in one request. Raises Stopped, DeadlineExceeded, EngineError."""
        request, life = _request(self.task, partial), self.replica.incarnation
        version = self.replica.version
        asked = (
            self.in_flight.asked(self.task.group, self.partials, self.requests, request.rid, version) if self.in_flight else nullcontext()
        )
        with asked:
            [generation] = await client.generate_group([request], self.task.sampling, deadline=max(seconds, 1.0))
        if self.replica.incarnation != life:
            raise EngineError(client.url, "its weights became untrusted while it generated this, which is discarded")
        return generation


def _ended(partial: Partial, generation: Generation, stops: list[str], tokenizer: Tokenizer) -> Generation:
    """Returns what was drawn, up to the end of a stop string that began before it."""
    count = end_across(partial.tokens, generation.tokens, stops, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
    return generation if count is None else first_tokens(generation, count)


def _request(task: Task, partial: Partial) -> GenerationRequest:
    return GenerationRequest(
        tokens=np.concatenate([task.prompt_tokens, partial.tokens]) if len(partial.tokens) else task.prompt_tokens,
        max_new_tokens=task.sampling.max_new_tokens - len(partial.tokens),
        seed=partial.seed,
        routed_from=partial.routed_from,
    )
