"""Generating one group: n samples of a prompt, each carried on after every interruption until it has ended.

A sample keeps the tokens, log-probs and version spans that it already has; going on means handing prompt and tokens back to the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.client import EngineClient
from services.rollout.engine.errors import EngineError
from services.rollout.engine.generation import Generation, GenerationRequest
from services.rollout.replica import Replica
from shared.errors import DeadlineExceeded
from shared.messages import Task
from shared.sample import Sample
from shared.tokenizer import Tokenizer

ENGINE_TRIES = 5
"""Engine failures in a row after which a group is given up for this delivery."""

RETRY_PAUSE = 0.5


@dataclass
class Partial:
    """What one sample has so far. tokens: int32 [R]; log_probs: float32 [R]; segments tile [0, R)."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    def extend(self, generation: Generation, longest: int) -> None:
        """Appends what the engine gave; an aborted generation leaves the sample unfinished."""
        offset = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, generation.tokens])
        self.log_probs = np.concatenate([self.log_probs, generation.log_probs])
        for start, end, version in generation.spans:
            if self.segments and self.segments[-1][2] == version:
                self.segments[-1] = (self.segments[-1][0], offset + end, version)
            else:
                self.segments.append((offset + start, offset + end, version))
        if generation.finish != "abort":
            self.finish = generation.finish
        elif len(self.tokens) >= longest:
            self.finish = "length"


async def generate_group(replica: Replica, task: Task, tokenizer: Tokenizer, deadline: float) -> list[Sample]:
    """All samples of the task, finished.

    Args:
        deadline: seconds of waiting for weights, and of generating, each.

    Raises DeadlineExceeded, or EngineError when the engine failed `ENGINE_TRIES` times in a row.
    """
    partials = [Partial() for _ in range(task.n)]
    loop = asyncio.get_running_loop()
    failures, spent = 0, 0.0
    while open_partials := [partial for partial in partials if partial.finish is None]:
        client = await replica.wait_serving(task.min_version, deadline)
        began = loop.time()
        try:
            generations = await _ask(client, task, open_partials, deadline - spent)
            failures = 0
        except EngineError:
            failures += 1
            if failures >= ENGINE_TRIES:
                raise
            await asyncio.sleep(RETRY_PAUSE * failures)  # it may be restarting: the gate closes as soon as that is seen
            continue
        spent += loop.time() - began
        for partial, generation in zip(open_partials, generations, strict=True):
            partial.extend(generation, task.sampling.max_new_tokens)
        if spent >= deadline:
            raise DeadlineExceeded(f"{task.n} samples of {task.group}", "the engine", deadline, "the group goes back to the queue")
    return [_sample(task, index, partial, tokenizer) for index, partial in enumerate(partials)]


async def _ask(client: EngineClient, task: Task, partials: list[Partial], seconds: float) -> list[Generation]:
    prompt = task.prompt_tokens
    requests = [
        GenerationRequest(
            tokens=np.concatenate([prompt, partial.tokens]) if len(partial.tokens) else prompt,
            max_new_tokens=task.sampling.max_new_tokens - len(partial.tokens),
        )
        for partial in partials
    ]
    return await client.generate_group(requests, task.sampling, deadline=max(seconds, 1.0))


def _sample(task: Task, index: int, partial: Partial, tokenizer: Tokenizer) -> Sample:
    return Sample(
        group=task.group,
        index=index,
        prompt=task.prompt_tokens,
        response=partial.tokens,
        log_probs=partial.log_probs,
        mask=np.ones(len(partial.tokens), np.uint8),
        segments=partial.segments,
        finish=partial.finish or "abort",
        text=tokenizer.decode(partial.tokens),
        prompt_text=task.prompt,
        label=task.label,
        metadata=task.metadata,
    )
