"""Publishes tasks: one worker sends the outstanding tasks of the state, so that a full queue delays no decision."""

import asyncio
from collections.abc import Callable
from functools import partial

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.evaluation import groups as eval_groups
from services.buffer.state import BufferState, EvaluationState, GroupState
from shared.bus.connection import Bus
from shared.bus.subjects import EVAL, TRAIN, Subjects
from shared.config.run_config import RunConfig
from shared.data.data_source import PromptStream
from shared.data.prompts import Prompt, PromptFile
from shared.schema.messages import Payload, Sampling, Task

BATCH = 64
"""Tasks that are published together, and confirmed before the next ones are."""

BATCH_BYTES = 1 << 20
"""Prompt tokens that are published together, about: what is in flight to the bus is bound."""


class TaskPublisher:
    """Builds tasks and publishes them. Repeats are harmless: the bus and the buffer both know a group's attempt by its id."""

    def __init__(self, bus: Bus, config: RunConfig, prompts: PromptStream, heldout: PromptFile | None, stop_ids: list[int]) -> None:
        self._bus, self._config, self._subjects = bus, config, Subjects(config.run.name)
        self._prompts, self._heldout = prompts, heldout
        rollout, evaluation = config.rollout, config.eval
        self._sampling = Sampling(
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            max_new_tokens=rollout.rollout_max_response_len,
            stop=rollout.rollout_stop,
            stop_token_ids=sorted({*rollout.rollout_stop_token_ids, *stop_ids}),
        )
        temperature, longest = evaluation.eval_temperature, evaluation.eval_max_response_len
        self._eval_sampling = self._sampling.model_copy(
            update={
                "temperature": rollout.rollout_temperature if temperature is None else temperature,
                "max_new_tokens": longest or rollout.rollout_max_response_len,
            }
        )
        self._queue: asyncio.Queue[tuple[str, Callable[[], Task]]] = asyncio.Queue()

    def group(self, group: GroupState, state: BufferState, limits: BufferConfig) -> None:
        """Queues a training group's present attempt. Its prompt is read only when it is published: no decision waits for a tokenizer."""
        minimum = policy.min_version(group, state, limits)
        make = partial(self._training_task, group.number, group.id, group.attempt, minimum, group.partial, group.renew_below)
        self._queue.put_nowait((TRAIN, make))

    def evaluation(self, evaluation: EvaluationState) -> None:
        """Queues the held-out prompts of an evaluation that have not come back."""
        assert self._heldout is not None  # evaluations only start where the run has held-out prompts
        samples = self._config.eval.n_samples_per_eval_prompt
        for name, row in eval_groups(evaluation):
            make = partial(self._task, name, 0, self._heldout[row], samples, self._eval_sampling, evaluation.version)
            self._queue.put_nowait((EVAL, make))

    async def run(self) -> None:
        """Publishes until cancelled. Raises ConfigError where a prompt cannot be read."""
        next_task: tuple[str, Callable[[], Task]] | None = None
        while True:
            task_class, make = next_task or await self._queue.get()
            batch, size, next_task = [make()], 0, None
            while len(batch) < BATCH and (size := size + batch[-1].prompt_tokens.nbytes) < BATCH_BYTES and not self._queue.empty():
                next_task = self._queue.get_nowait()
                if next_task[0] != task_class:
                    break
                batch.append(next_task[1]())
                next_task = None
            tasks = {f"{task.group}.{task.attempt}": task for task in batch}
            await self._bus.publish_all(self._subjects.task(task_class), tasks, deadline=600)

    def _training_task(self, number: int, name: str, attempt: int, minimum: int, unfinished: Payload | None, renew_below: int) -> Task:
        samples = self._config.rollout.n_samples_per_prompt
        task = self._task(name, attempt, self._prompts.at(number), samples, self._sampling, minimum)
        task.partial, task.renew_below = unfinished, renew_below
        return task

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
