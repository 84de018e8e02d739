"""Generates one group: n samples of a prompt, each continued after every interruption until it has ended.

A sample keeps the tokens, log-probs and version spans that it already has; to continue it, prompt and tokens are sent to the engine again.
"""

import asyncio
from contextlib import nullcontext

import numpy as np

from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.generation import Generation, GenerationRequest, first_tokens
from services.rollout.in_flight import InFlight
from services.rollout.partial_samples import Partial
from services.rollout.replica import Replica
from shared.data.stop_strings import end_across
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Task

ENGINE_TRIES = 5
"""The number of engine failures in a row after which a group is given up for this delivery."""

RETRY_PAUSE = 0.5


async def generate_group(
    replica: Replica, task: Task, partials: list[Partial], tokenizer: Tokenizer, deadline: float, in_flight: InFlight | None
) -> None:
    """Generates all of the task's samples until they have ended.

    Args:
        partials: one for each sample, with its output so far; they grow in place.
        tokenizer: the model's, for stop strings of which an interrupted sample had the beginning.
        deadline: seconds for waiting for weights, and as many for generating.
        in_flight: may stop the group; None for groups that are never stopped.

    Raises Stopped, DeadlineExceeded, or EngineError when the engine failed `ENGINE_TRIES` times in a row.
    """
    loop = asyncio.get_running_loop()
    failures, spent = 0, 0.0
    while open_partials := [partial for partial in partials if partial.finish is None]:
        client = await replica.wait_serving(task.min_version, deadline)
        requests = _requests(task, open_partials)
        began, life = loop.time(), replica.incarnation
        try:
            with in_flight.asked(task.group, partials, requests, replica.version) if in_flight else nullcontext():
                generations = await client.generate_group(requests, task.sampling, deadline=max(deadline - spent, 1.0))
            if replica.incarnation != life:
                raise EngineError(client.url, "its weights became untrusted while it generated this, which is discarded")
            failures = 0
        except EngineError:
            failures += 1
            if failures >= ENGINE_TRIES:
                raise
            await asyncio.sleep(RETRY_PAUSE * failures)  # it may be restarting: the gate closes as soon as that is seen
            continue
        spent += loop.time() - began
        for partial, generation in zip(open_partials, generations, strict=True):
            partial.extend(_ended(partial, generation, task.sampling.stop, tokenizer), task.sampling.max_new_tokens)
        if spent >= deadline:
            raise DeadlineExceeded(f"{task.n} samples of {task.group}", "the engine", deadline, "the group goes back to the queue")


def _ended(partial: Partial, generation: Generation, stops: list[str], tokenizer: Tokenizer) -> Generation:
    """Returns what was drawn, up to the end of a stop string that began before it."""
    count = end_across(partial.tokens, generation.tokens, stops, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
    return generation if count is None else first_tokens(generation, count)


def _requests(task: Task, partials: list[Partial]) -> list[GenerationRequest]:
    prompt = task.prompt_tokens
    return [
        GenerationRequest(
            tokens=np.concatenate([prompt, partial.tokens]) if len(partial.tokens) else prompt,
            max_new_tokens=task.sampling.max_new_tokens - len(partial.tokens),
            seed=partial.seed,
            routed_from=partial.routed_from,
        )
        for partial in partials
    ]
