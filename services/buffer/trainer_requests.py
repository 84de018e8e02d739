"""The trainer's requests of an active buffer: the batch of a step, and what has become of one."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.outcome_consumer import Decision
from services.buffer.run_failure import RunFailure
from services.buffer.state import BufferState, GroupState
from services.buffer.store_room import StoreRoom, has_lost
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookFailed, HookSample, load
from shared.hooks.hook_sample import FINISHED
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.tasks import error_text
from shared.schema.ledger import group_id
from shared.schema.messages import Accepted, BatchAnswer, BatchPending, BatchRefused, BatchRequest, Durable, RunDone, Trained
from shared.schema.service_messages import BATCH, Doing
from shared.service.service_base import Service

FIELD = "rollout.buffer_filter_path"
FILTER_SECONDS = 60.0  # The deadline for the function; it runs beside the buffer's loop, and the trainer waits for it


class BufferFilter:
    """Calls the user's function for each batch, and never beside itself. Raises ConfigError where there is none. ``choice``: under way."""

    def __init__(self, config: RunConfig, path: str) -> None:
        self._path, self._function, self._arguments = path, load(FIELD, path), Arguments(config)
        self.choice: asyncio.Task[list[str]] | None = None
        self._of = 0  # the choice's step

    async def choose(self, step: int, candidates: list[GroupState], size: int) -> list[str] | None:
        """Returns the ids of the groups that the function wants in the batch; None after a moment, while it is still at it: whoever asks
        then gets what comes of it. Raises HookFailed, DeadlineExceeded."""
        self._of, self.choice = step, self.choice if self._of == step else None  # of an earlier batch, whose answer was lost
        choice = self.choice = self.choice or asyncio.create_task(self._chosen(step, candidates, size))
        if not (await asyncio.wait({choice}, timeout=ANSWER_SECONDS / 2))[0]:
            return None
        self.choice = None if self.choice is choice else self.choice
        return choice.result()

    async def _chosen(self, step: int, candidates: list[GroupState], size: int) -> list[str]:
        buffer = [_hook_samples(group) for group in candidates]
        call = asyncio.to_thread(self._function, self._arguments, step, buffer, size)
        try:
            chosen = await asyncio.wait_for(call, FILTER_SECONDS)
            return [group_id(group[0].group_index) for group in chosen]
        except TimeoutError:
            raise DeadlineExceeded(f"the choice of step {step}'s batch", self._path, FILTER_SECONDS, "the trainer is refused") from None
        except Exception as error:  # it is the user's code: it may raise anything and return anything
            raise HookFailed(FIELD, self._path, f"for step {step}: {error_text(error, self._function)}") from error


def _hook_samples(group: GroupState) -> list[HookSample]:
    scored = group.scored
    assert scored is not None  # only ready groups are candidates
    return [
        HookSample(
            group_index=group.number,
            index=index,
            response_length=meta.tokens,
            reward=reward,
            weight_versions=[meta.oldest, meta.newest],
            remove_sample=index in scored.removed,
            status=FINISHED[meta.finish],
        )
        for index, (meta, reward) in enumerate(zip(scored.samples, scored.rewards, strict=True))
    ]


ANSWER_SECONDS = 1.5  # The time that a batch request is held before it is answered with `BatchPending`


class TrainerRequests:
    """Answers the trainer.

    Args:
        decide: has a decision made and recorded. changed: is notified after each. failure: tells whether the run has failed. room: tells
            whether the store is full. awaited: returns, in words, the reason why the next batch waits. chooser: the user's.
    """

    def __init__(
        self,
        service: Service,
        limits: BufferConfig,
        state: BufferState,
        decide: Callable[[Decision], Awaitable[None]],
        changed: asyncio.Condition,
        failure: RunFailure,
        room: StoreRoom,
        awaited: Callable[[], str],
        chooser: BufferFilter | None,
    ) -> None:
        self._service, self._limits, self._state, self._decide = service, limits, state, decide
        self._changed, self._failure, self._room, self._awaited, self._chooser = changed, failure, room, awaited, chooser
        self._asked: tuple[int, float] | None = None  # the step whose batch was asked for and is not complete, and since when
        service.activities.watch(self._doing)

    async def batch(self, request: BatchRequest) -> BatchAnswer:
        """Returns the batch of a step once it is complete, and after `ANSWER_SECONDS` what it waits for."""
        end = time.monotonic() + (ANSWER_SECONDS if request.hold else 0.0)
        while isinstance(answer := await self._batch(request), BatchPending) and (remaining := end - time.monotonic()) > 0:
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), remaining)
        if not isinstance(answer, BatchPending):
            self._asked = None
        return answer

    async def trained(self, report: Trained) -> Accepted:
        """Records a trained step."""
        step, version, started, ended, attestation = report.step, report.version, report.started, report.ended, report.attestation
        await self._decide(lambda: policy.trained(self._state, step, version, started, ended, time.time(), attestation))
        return Accepted()

    async def refused(self, refusal: BatchRefused) -> Accepted:
        """Records that a sample cannot be trained."""
        group = self._state.groups.get(refusal.group)
        keys = group.scored.keys if group is not None and group.scored is not None and group.step == refusal.step else ()
        lost = await has_lost(self._service, keys)
        await self._decide(lambda: policy.refused(self._state, refusal, time.time(), lost))
        return Accepted()

    async def durable(self, report: Durable) -> Accepted:
        """Records that steps are in a checkpoint."""
        await self._decide(lambda: policy.durable(self._state, report.steps, time.time()))
        return Accepted()

    async def _batch(self, request: BatchRequest) -> BatchAnswer:
        state, limits, step, version = self._state, self._limits, request.step, request.version
        size, steps = limits.rollout.rollout_batch_size, limits.rollout.num_rollout
        if (known := policy.batch(state, step, limits.named_rewards)) is not None:
            return known
        if self._failure.reason:
            return RunDone(reason=self._failure.reason)
        if step >= steps:
            if state.finished_steps < steps:
                return self._pending(step, have=0, need=0)
            return RunDone()
        if step in state.batches:
            await self._lose_missing()
            await self._decide(lambda: policy.amended(self._state, limits, step, time.time()))
            return policy.batch(state, step, limits.named_rewards) or self._pending(step, have=len(state.batches[step].groups), need=size)
        if len(state.ready) >= size:
            await self._lose_missing()
        chosen = None
        if self._chooser is not None:
            candidates = policy.candidates(state, limits, step, version)
            chosen = await self._chooser.choose(step, candidates, size) if len(candidates) >= size else []
            if chosen is None:
                return self._pending(step, have=len(candidates), need=size)
        await self._decide(lambda: [] if step in state.batches else policy.form_batch(state, limits, step, version, time.time(), chosen))
        return policy.batch(state, step, limits.named_rewards) or self._pending(step, have=len(state.ready), need=size)

    def _pending(self, step: int, have: int, need: int) -> BatchPending:
        if self._asked is None or self._asked[0] != step:
            self._asked = step, time.time()
        return BatchPending(step=step, have=have, need=need, waiting_for=self._awaited(), store_full=bool(self._room.reason))

    async def _lose_missing(self) -> None:
        owners = {key: name for name, group in self._state.ready.items() if group.scored for key in group.scored.keys}
        for name in {owners[key] for key in await self._service.store.missing(list(owners))}:
            await self._decide(partial(policy.lost_ready, self._state, name, time.time()))

    def _doing(self) -> Doing | None:
        if self._asked is None:
            return None
        return Doing(part=BATCH, what=f"step {self._asked[0]} waits for {self._awaited()}", since=self._asked[1])
