"""Sending tasks out: one worker that publishes what the state says is outstanding, so that a full queue holds up no decision."""

from __future__ import annotations

import asyncio

from services.buffer import policy
from services.buffer.evaluation import groups as eval_groups
from services.buffer.limits import Limits
from services.buffer.state import BufferState, Evaluation, Group
from shared.bus import Bus
from shared.config import RunConfig
from shared.messages import Sampling, Task
from shared.prompts import Prompt, PromptFile, PromptStream
from shared.subjects import EVAL, TRAIN, Subjects

IN_FLIGHT = 32
"""Publishes awaiting their confirmation at once."""


class Dispatch:
    """Builds tasks and publishes them. Repeats are harmless: the bus and the buffer both know a group's attempt by its id."""

    def __init__(self, bus: Bus, config: RunConfig, prompts: PromptStream, heldout: PromptFile | None, stop_ids: list[int]) -> None:
        self._bus, self._config, self._subjects = bus, config, Subjects(config.run.name)
        self._prompts, self._heldout = prompts, heldout
        rollout, evaluation = config.rollout, config.eval
        stops = sorted({*rollout.rollout_stop_token_ids, *stop_ids})
        self._sampling = Sampling(
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            max_new_tokens=rollout.rollout_max_response_len,
            stop=rollout.rollout_stop,
            stop_token_ids=stops,
        )
        temperature, longest = evaluation.eval_temperature, evaluation.eval_max_response_len
        self._eval_sampling = self._sampling.model_copy(
            update={
                "temperature": rollout.rollout_temperature if temperature is None else temperature,
                "max_new_tokens": longest or rollout.rollout_max_response_len,
            }
        )
        self._queue: asyncio.Queue[tuple[str, Task]] = asyncio.Queue()

    def group(self, group: Group, state: BufferState, limits: Limits) -> None:
        """Queues a training group's present attempt."""
        prompt = self._prompts.at(group.number)
        minimum = policy.min_version(group, state, limits)
        task = self._task(group.id, group.attempt, prompt, self._config.rollout.n_samples_per_prompt, self._sampling, minimum)
        task.partial, task.renew_below = group.partial, group.renew_below
        self._queue.put_nowait((TRAIN, task))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Queues the held-out prompts of an evaluation that have not come back."""
        assert self._heldout is not None  # evaluations only start where the run has held-out prompts
        samples = self._config.eval.n_samples_per_eval_prompt
        for name, row in eval_groups(evaluation):
            task = self._task(name, 0, self._heldout[row], samples, self._eval_sampling, evaluation.version)
            self._queue.put_nowait((EVAL, task))

    async def run(self) -> None:
        """Publishes until cancelled."""
        gate = asyncio.Semaphore(IN_FLIGHT)
        async with asyncio.TaskGroup() as running:
            while True:
                task_class, task = await self._queue.get()
                await gate.acquire()
                running.create_task(self._publish(task_class, task, gate))

    async def _publish(self, task_class: str, task: Task, gate: asyncio.Semaphore) -> None:
        try:
            await self._bus.publish(self._subjects.task(task_class), task, msg_id=f"{task.group}.{task.attempt}", deadline=600)
        finally:
            gate.release()

    def _task(self, name: str, attempt: int, prompt: Prompt, samples: int, sampling: Sampling, minimum: int) -> Task:
        return Task(
            group=name,
            attempt=attempt,
            n=samples,
            prompt=prompt.content,
            prompt_tokens=prompt.tokens,
            label=prompt.label,
            metadata=prompt.metadata,
            environment=prompt.environment,
            sampling=sampling,
            min_version=minimum,
        )
