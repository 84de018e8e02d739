"""Publishes tasks: a worker for each class sends the outstanding tasks of the state, so that a full queue delays no decision."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.policy import BUFFER
from services.buffer.prompt_supply import PromptSupply
from services.buffer.state import BufferState, EvaluationState, GroupState
from shared.bus.connection import Bus
from shared.bus.subjects import EVAL, TRAIN, Subjects
from shared.config.eval_views import EvalView, eval_views
from shared.config.rollout_section import RolloutSection
from shared.config.run_config import RunConfig
from shared.data.prompts import Prompt
from shared.runtime.errors import TASK, BadMessage, ConfigError, MessageTooLarge
from shared.schema.digests import reference
from shared.schema.ledger import eval_group_parts
from shared.schema.messages import Evaluate, Failed, Payload, Sampling, Task
from shared.store.payload_store import Store

GiveUp = Callable[[Sequence[Failed]], Awaitable[None]]
BATCH = 64  # Tasks that are published together, and confirmed before the next ones are
BATCH_BYTES = 1 << 20  # Prompt tokens that are published together, about: what is in flight to the bus is bound


class TaskPublisher:
    """Builds tasks and publishes them. Repeats are harmless: the bus and the buffer both know a group's attempt by its id."""

    def __init__(self, bus: Bus, config: RunConfig, prompts: PromptSupply, store: Store) -> None:
        self._bus, self._subjects, self._prompts, self._store = bus, Subjects(config.run.name), prompts, store
        self._samples, self._sampling = config.rollout.n_samples_per_prompt, _sampling(config.rollout, prompts.stop_ids)
        self._sets = {view.name: _set_fields(view, prompts.stop_ids) for view in eval_views(config)}
        self._longest: dict[str | None, int | None] = {view.name: view.max_context_len for view in eval_views(config)}
        self._longest[None] = config.rollout.rollout_max_context_len  # of training groups
        self._queues: dict[str, asyncio.Queue[dict[str, Any]]] = {TRAIN: asyncio.Queue(), EVAL: asyncio.Queue()}
        self._by_function: asyncio.Queue[Evaluate] = asyncio.Queue()
        self._asked = -1  # the newest version that the evaluation function was asked for

    def outstanding(self, state: BufferState, limits: BufferConfig) -> None:
        """Queues all that is under way, again: a buffer that was killed may not have published it."""
        for group in state.outstanding:
            self.group(group, state, limits)
        for evaluation in state.evaluations.values():
            self.evaluation(evaluation, limits)

    @property
    def queued(self) -> int:
        """Returns how many training groups have not been given their prompt yet."""
        return self._queues[TRAIN].qsize()

    def group(self, group: GroupState, state: BufferState, limits: BufferConfig) -> None:
        """Queues a training group's present attempt. Its prompt is read only when it is published: no decision waits for a tokenizer."""
        attempt = {"group": group.id, "attempt": group.attempt, "partial": group.partial, "renew_below": group.renew_below}
        minimum = policy.min_version(group, state, limits)
        self._queues[TRAIN].put_nowait({**attempt, "n": self._samples, "sampling": self._sampling, "min_version": minimum})

    def evaluation(self, evaluation: EvaluationState, limits: BufferConfig) -> None:
        """Queues the held-out prompts of an evaluation that have not come back; or, once for all sets of its version, that the user's
        function evaluates it."""
        if limits.eval_function:
            if evaluation.version > self._asked:
                self._asked, deadline = evaluation.version, limits.eval_deadline(evaluation.started)
                self._by_function.put_nowait(Evaluate(version=evaluation.version, deadline=deadline))
            return
        own = self._sets.get(evaluation.dataset, {})  # a set that the run does not have any more has no prompts either
        fields = {"attempt": 0, **own, "min_version": evaluation.version, "deadline": limits.eval_deadline(evaluation.started)}
        for name in evaluation.pending:
            self._queues[EVAL].put_nowait({"group": name, **fields})

    def publishers(self, give_up: GiveUp, state: BufferState) -> tuple[Coroutine[Any, Any, None], ...]:
        """Returns what publishes all that is queued, until cancelled. ``give_up``: as in `publish`."""
        return self.publish(TRAIN, give_up, state), self.publish(EVAL, give_up, state), self.ask_function()

    async def publish(self, task_class: str, give_up: GiveUp, state: BufferState) -> None:
        """Publishes the tasks of a class until cancelled. ``give_up``: takes the groups whose prompt cannot be read, or sent."""
        queue = self._queues[task_class]
        while True:
            batch, size = [await queue.get()], 0
            tasks: dict[str, Task] = {}
            while batch:
                fields = batch.pop()
                try:
                    # a source of the user's, or what decodes pictures, may take long over a prompt: meanwhile the buffer keeps its lease
                    prompt, slow = self._prompts.of_group, self._prompts.drawn or self._prompts.most_pictures
                    found = await asyncio.to_thread(prompt, fields["group"]) if slow else prompt(fields["group"])
                    task = self._task(found, **fields)
                    if found is not None and found.pictures:
                        stored = await self._stored(task, found.pictures)
                        task = task.model_copy(update={"pictures": stored})
                        group = state.groups.get(task.group)
                        if task_class == TRAIN and (group is None or group.scored is not None or group.attempt != task.attempt):
                            await self._store.free(stored.keys)  # it ended before, when they were freed: nobody frees them again
                            continue
                except (ConfigError, BadMessage) as error:
                    await give_up([_failed(fields, error)])
                    continue
                tasks[f"{task.group}.{task.attempt}"] = task
                size += task.prompt_tokens.nbytes
                if len(tasks) < BATCH and size < BATCH_BYTES and not queue.empty():
                    batch.append(queue.get_nowait())
            await self._publish(self._subjects.task(task_class), tasks, give_up)

    async def ask_function(self) -> None:
        """Publishes what the user's evaluation function is asked for until cancelled."""
        while True:
            asked = await self._by_function.get()
            await self._bus.publish(self._subjects.task(EVAL), asked, msg_id=f"evaluate.{asked.version}", deadline=600)

    async def _publish(self, subject: str, tasks: dict[str, Task], give_up: GiveUp) -> None:
        try:
            await self._bus.publish_all(subject, tasks, deadline=600)
        except MessageTooLarge as error:
            if len(tasks) > 1:
                for name, task in tasks.items():
                    await self._publish(subject, {name: task}, give_up)
            else:
                await give_up([_failed(vars(task), error) for task in tasks.values()])

    async def _stored(self, task: Task, pictures: Sequence[bytes]) -> Payload:
        """Stores what an attempt's prompt shows, once for all of its samples, under keys that follow from the attempt."""
        keys = self._subjects.picture_keys(task.group, task.attempt)
        blobs = dict(zip(keys, pictures, strict=False))
        payload = reference(self._subjects.run, blobs)
        await self._store.write(blobs, deadline=600)
        return payload

    def _task(self, prompt: Prompt | None, group: str, **fields: Any) -> Task:
        if prompt is None:
            raise ConfigError("eval.sets", group, "the run does not have this held-out prompt any more")
        parts = eval_group_parts(group)
        if (longest := self._longest[parts and parts[0]]) is not None:
            sampling = fields["sampling"]
            room = min(sampling.max_new_tokens, longest - len(prompt.tokens))
            fields["sampling"] = sampling.model_copy(update={"max_new_tokens": room, "min_new_tokens": min(sampling.min_new_tokens, room)})
        return Task(
            group=group,
            prompt=prompt.content,
            prompt_tokens=prompt.tokens,
            label=prompt.label,
            label_json=prompt.label_json,
            metadata=prompt.metadata,
            environment=prompt.environment,
            **fields,
        )


def _sampling(rollout: RolloutSection, stop_ids: Sequence[int], skip_special_tokens: bool | None = None, **own: Any) -> Sampling:
    return Sampling(
        skip_special_tokens=rollout.rollout_skip_special_tokens if skip_special_tokens is None else skip_special_tokens,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=sorted({*rollout.rollout_stop_token_ids, *stop_ids}),
        **own,
    )


def _set_fields(view: EvalView, stop_ids: Sequence[int]) -> dict[str, Any]:
    own, rollout = view.own, view.config.rollout
    sampling = _sampling(
        rollout,
        stop_ids,
        min_new_tokens=view.min_new_tokens,
        repetition_penalty=1.0 if own.repetition_penalty is None else own.repetition_penalty,
        skip_special_tokens=own.skip_special_tokens,
        no_stop_trim=own.no_stop_trim,
    )
    return {"n": rollout.n_samples_per_prompt, "sampling": sampling, "generate_function": own.custom_generate_function_path}


def _failed(fields: Mapping[str, Any], error: Exception) -> Failed:
    return Failed(group=fields["group"], attempt=fields["attempt"], reason=str(error), by=BUFFER, fault=TASK)
