"""Generates with functions of the user's: ``rollout.custom_generate_function_path``, or that of a task's own. Each rollout is one call.

Calls run in worker processes, many in each: one that raises, blocks or ends its process costs its own rollout, which is generated anew and
lost after a few tries (`services.rollout.rollout_fate`). A call's result is discarded if the replica's weights became untrusted meanwhile
(a push failed, or the engine died).

A group that is stopped (too old, or this replica leaves) has its requests ended in the engine; the function comes back with what it has,
as ABORTED. With ``args.partial_rollout`` it is then called again with this sample, here or at another replica; without, it begins anew.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from services.rollout.generate import RETRY_PAUSE
from services.rollout.in_flight import InFlight, Requests, Stopped
from services.rollout.partial_samples import samples_of_rollout
from services.rollout.played_group import PlayedGroup, kept, until_complete
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from services.rollout.rollout_fate import GroupProgress, RolloutFailures
from services.rollout.sample_check import SampleCheck
from services.rollout.sample_seeds import SampleSeeds
from shared.config.eval_views import eval_view
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed, HookSample, Status, sample_message
from shared.hooks.loading import GENERATE
from shared.hooks.sample_conversion import Served, from_stored, group_index, to_stored
from shared.hooks.slime_attributes import FOLLOWING
from shared.model.replayed_choices import replayed_choices
from shared.process.worker_pool import LOOP_SECONDS, CallBlocked, WorkerDied, WorkerFailed, WorkerPool
from shared.rewards.reference import Reference
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.tasks import cancelled
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Sample, SampleLimits
from shared.service.service_base import Service

STOP_SECONDS = 2.0
"""The time that a function has to come back once its requests were ended; then its call is cancelled."""

GRACE_SECONDS = 2 * LOOP_SECONDS
"""The time beyond its deadline in which a late call is ended."""

_MODULE = "services.rollout.generate_worker"


class CustomGenerate:
    """Generates groups by functions in worker processes, which start with `start` or the first group.

    Attributes:
        field: of the config, that says who generates. check: of the samples. goes_on: an aborted rollout goes on from its tokens.
        seconds: that a rollout has. lost: rollouts that were given up.
        log_probs_reader, choices: as in `SampleLimits`.
    """

    field = GENERATE

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer) -> None:
        self._service, self.replica, self._config, self._tokenizer = service, replica, service.config, tokenizer
        self.goes_on: bool = FOLLOWING["partial_rollout"](service.config)
        self._seeds, self.check = SampleSeeds.of(service.config), SampleCheck(service, tokenizer)
        rollout = service.config.rollout
        setup, variables = {"config": service.config.model_dump_json()}, service.config.reward.worker_environment
        self._pool = WorkerPool("the generate function", rollout.generate_workers, setup, _MODULE, variables)
        self._started: asyncio.Task[None] | None = None
        self.seconds, self.lost = rollout.generate_timeout, 0
        self.log_probs_reader, self.choices = service.config.log_probs_reader, replayed_choices(service.config)

    def path(self, task: Task) -> str | None:
        """Returns the function that generates a task: its own, or the run's; None for the engine alone."""
        return task.generate_function or self._config.rollout.custom_generate_function_path

    async def start(self) -> None:
        """Starts the processes, once. Raises ConfigError where the run's function cannot be imported."""
        if self._started is None:
            self.replica.proxy.answers = self.check.answers
            self._started = asyncio.create_task(self._pool.start())
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Kills the processes."""
        await self._pool.close()

    async def group(self, task: Task, earlier: Sequence[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        """Returns all samples of the task's n rollouts that ended first; with why they were stopped, those that there are.

        Args:
            earlier: what an earlier attempt left. in_flight: may stop the group; None for groups that are never stopped.
            slots: of the group; a rollout holds one while its function runs.

        Rollouts whose function fails are left out, as far as `rollout.min_rollouts` allows; of held-out groups none is.

        Raises, where too few are left: DeadlineExceeded (no weights, or no end within `generate_timeout` of having a slot), HookFailed
        where the function failed too often, BadMessage where it returned samples that do not fit. Raises BadMessage where no token is
        trained.
        """
        await self.start()
        await self.replica.open_proxy()
        await self.replica.wait_serving(task.min_version, self.seconds)
        progress = GroupProgress.of(task, self._config.rollout)
        rollouts = [_Rollout(self, task, index, samples_of_rollout(earlier, index, task), slots, progress) for index in progress.begun]
        await until_complete([self._run(rollout, in_flight) for rollout in rollouts], progress)
        return self._ended(task, rollouts, progress)

    async def _run(self, rollout: "_Rollout", in_flight: InFlight | None) -> None:
        """Generates a rollout. Raises the error that it is lost by, where the group cannot do without it."""
        try:
            await rollout.run(in_flight)
            if rollout.ended is not None:
                rollout.progress.end(rollout.index)
        except (HookFailed, DeadlineExceeded, BadMessage) as error:
            self.lost += 1
            self._service.log.error("rollout_lost", group=rollout.task.group, rollout=rollout.index, error=str(error))
            rollout.progress.lose(error)
        finally:
            rollout.slots.end()

    def _ended(self, task: Task, rollouts: Sequence["_Rollout"], progress: GroupProgress) -> PlayedGroup:
        ended, stopped = kept(rollouts, progress)
        going_on = [rollout for rollout in ended if rollout.stopped is None or self.goes_on]
        samples = _numbered([sample for rollout in going_on for sample in rollout.stored()])
        if stopped is None and not any(sample.mask.any() for sample in samples) and not is_evaluation(task.group):
            nothing = f"no token of group {task.group} is trained: the loss mask is 0 on all of them"
            raise BadMessage(f"{self.field} = {self.path(task)}: {nothing}")
        return PlayedGroup(samples, stopped, progress.aborted)

    async def call(self, task: Task, index: int, sample: HookSample, requests: Requests, seconds: float, alone: bool) -> list[HookSample]:
        """Returns what the function made of the sample of a rollout within ``seconds``. Raises HookFailed, or DeadlineExceeded.

        Args:
            alone: in a process of its own.
        """
        path, token = self.path(task), uuid.uuid4().hex
        assert path is not None and self.replica.proxy.address is not None  # it is open from the engine's start on
        request = {
            "verb": "generate",
            "field": GENERATE,
            "path": path,
            "sample": sample_message.packed(sample),
            "sampling_params": parameters(task.sampling) | self._seeds.parameters(index),
            "evaluation": is_evaluation(task.group),
            "engine": self.replica.proxy.address,
            "token": token,
            "seconds": seconds,
        }
        self.replica.proxy.calls[token] = requests
        try:
            answer = await self._pool.ask(request, "a rollout", f"{GENERATE} = {path}", seconds, alone=alone)
            return [_checked(fields, path) for fields in answer["samples"]]
        except (CallBlocked, WorkerDied) as error:
            raise HookFailed(GENERATE, path, str(error), disruptive=True) from None
        except WorkerFailed as error:
            raise HookFailed(GENERATE, path, str(error)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise HookFailed(GENERATE, path, f"its process gave an answer that cannot be read ({type(error).__name__}: {error})") from None
        finally:
            del self.replica.proxy.calls[token]

    def begun(self, task: Task, index: int) -> HookSample:
        """Returns the sample of a rollout that has generated nothing yet."""
        begun = task.n if is_evaluation(task.group) else task.n + self._config.rollout.surplus_rollouts
        place = group_index(task.group) * begun + index
        return HookSample(
            group_index=group_index(task.group),
            index=place,
            rollout_id=place,
            session_id=f"{task.group}.{task.attempt}.{index}",
            prompt=self.prompt(task),
            tokens=task.prompt_tokens.tolist(),
            label=Reference(task.label, task.label_json).value,
            metadata=task.metadata,
        )

    def prompt(self, task: Task) -> Any:
        """Returns the rendered text where the chat template is applied, as slime has it, else the prompt as it stands in the file."""
        view = eval_view(self._config, task.group)
        data = self._config.data if view is None else view.config.data
        if not data.apply_chat_template:
            return task.prompt
        return self._tokenizer.decode(task.prompt_tokens, skip_special_tokens=False)

    def may_abort(self, begun: int, requests: Requests) -> bool:
        """Returns whether the engine may have aborted requests of a call: it was stopped, or weights came in since version ``begun``."""
        return requests.stopped.is_set() or self.replica.version != begun or not self.replica.serving

    def warn(self, task: Task, rollout: int, error: Exception) -> None:
        """Logs a call that is made again."""
        self._service.log.warning("custom_generate_failed", group=task.group, rollout=rollout, error=str(error), exc_info=error)


class _Rollout:
    """One rollout of a task, called until it has ended, is stopped or is lost.

    Attributes:
        index: in its group. slots, progress: of its group. ended: its samples, once it has. stopped: why it was stopped, once it was.
    """

    def __init__(
        self, functions: CustomGenerate, task: Task, index: int, earlier: Sequence[Sample], slots: GroupSlots, progress: GroupProgress
    ) -> None:
        self._functions, self.task, self.index, self.slots, self.progress = functions, task, index, slots, progress
        self._end: float | None = None
        self._requests = Requests()
        self.ended = list(earlier) if earlier and all(sample.finish != "abort" for sample in earlier) else None
        self._partial = earlier[0] if len(earlier) == 1 and self.ended is None and functions.goes_on else None
        self._sample = None if self._partial is None else _gone_on(self._partial)
        self._failures = RolloutFailures()
        self._aborted: HookSample | None = None
        self._served = Served(0, 0)
        choices = None if is_evaluation(task.group) else functions.choices
        self._limits = SampleLimits(log_probs_reader=functions.log_probs_reader, choices=choices)
        self.stopped: Stopped | None = None

    async def run(self, in_flight: InFlight | None) -> None:
        """Generates. Raises DeadlineExceeded, HookFailed or BadMessage where the rollout is lost."""
        try:
            while self.ended is None and not await self._call_once(in_flight):
                pause = RETRY_PAUSE * max(1, self._failures.count)  # after an abort: the push that caused it is still in progress
                await asyncio.sleep(pause)
        except Stopped as stopped:
            self.stopped = stopped

    async def _call_once(self, in_flight: InFlight | None) -> bool:
        """Makes one call, in a slot. Returns whether the rollout has ended. Raises Stopped, and as `run`."""
        await self._functions.replica.wait_serving(self.task.min_version, self._left_s())
        async with self.slots.slot(self.index):
            if self._end is None:
                self._end = asyncio.get_running_loop().time() + self._functions.seconds
            return await self._call_in_slot(in_flight)

    async def _call_in_slot(self, in_flight: InFlight | None) -> bool:
        task, replica = self.task, self._functions.replica
        client = await replica.wait_serving(task.min_version, self._left_s())
        begun, life = replica.version, replica.incarnation
        oldest = begun if self._sample is None else min([begun, *_versions(self._sample)])
        self._limits = replace(self._limits, vocabulary=client.capabilities.vocab_size)
        try:
            with in_flight.tracked(task.group, self._requests, oldest, begun) if in_flight else nullcontext():
                given = await self._called(self._sample or self._functions.begun(task, self.index), begun)
        except HookFailed as error:
            self._functions.warn(task, self.index, error)
            self.progress.check_needed(error)
            self._failures.note(error, counts=replica.incarnation == life)  # the function did not cause the engine's death
            return False
        trusted, aborted = replica.incarnation == life, any(one.status is Status.ABORTED for one in given)
        if trusted:
            self._served = Served(oldest, replica.version, client.late_versions)
            self._aborted = given[0] if aborted and len(given) == 1 and given[0].response_length else None
        if trusted and not aborted:
            self.ended = self._stored(given)
            return True
        if self._requests.stopped.is_set():
            raise Stopped(task.group, self._requests.stale)
        self._sample = self._aborted if trusted and self._functions.goes_on else None
        return False

    def _given_up(self, given: list[HookSample]) -> list[HookSample]:
        """Returns samples that the function itself calls ABORTED as ended ones, with the reward that it has given them.

        slime trains them as they are; generated anew, until one turns out well, they would leave the failures out. Raises HookFailed for
        one without a reward that cannot be gone on with.
        """
        for sample in given:
            if sample.status is Status.ABORTED and sample.reward is not None:
                sample.status, sample.aborted = Status.COMPLETED, True  # type: ignore[attr-defined]
            elif sample.status is Status.ABORTED and not (self._functions.goes_on and sample.response_length):
                called = self._functions.path(self.task) or ""
                raise HookFailed(GENERATE, called, "gave a sample of status ABORTED without a reward, and nothing was aborted")
        return given

    async def _called(self, sample: HookSample, begun: int) -> list[HookSample]:
        """Returns what the function gives. Raises HookFailed, DeadlineExceeded, or Stopped where it does not come back once stopped.

        Args:
            begun: the version that is served.
        """
        seconds, alone = self._left_s(), self._failures.alone
        call = asyncio.create_task(self._functions.call(self.task, self.index, sample, self._requests, seconds, alone))
        stopping = asyncio.create_task(self._requests.stopped.wait())
        try:
            # a call that comes late into a process has its deadline late, too; the rollout's stays
            done, _ = await asyncio.wait((call, stopping), timeout=seconds + GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise self._late()
            if not call.done():
                await asyncio.wait((call,), timeout=STOP_SECONDS)
            if not call.done():
                raise Stopped(self.task.group, self._requests.stale)
            given = call.result()
            return given if self._functions.may_abort(begun, self._requests) else self._given_up(given)
        finally:
            await cancelled((call, stopping))

    def _left_s(self) -> float:
        """Returns the seconds that it has left, all of them before its first slot. Raises DeadlineExceeded where there are none."""
        if self._end is None:
            return self._functions.seconds
        if (left := self._end - asyncio.get_running_loop().time()) <= 0:
            raise self._late()
        return left

    def _late(self) -> DeadlineExceeded:
        called, seconds = self._functions.path(self.task), self._functions.seconds
        return DeadlineExceeded(f"rollout {self.index} of {self.task.group}", f"{GENERATE} = {called}", seconds, "it is lost")

    def stored(self) -> list[Sample]:
        """Returns its samples as they are stored; of one that was stopped those that may be gone on with; of one that is lost none."""
        if self.ended is not None or self.stopped is None:
            return self.ended or []
        if self._aborted is None:
            return [] if self._partial is None else [self._partial]
        try:
            return self._stored([self._aborted], unfinished=True)
        except BadMessage as error:  # what does not fit begins anew
            self._functions.warn(self.task, self.index, error)
            return []

    def _stored(self, given: Sequence[HookSample], unfinished: bool = False) -> list[Sample]:
        """Returns samples as they are stored. Raises BadMessage."""
        return [self._one_stored(sample, position, unfinished) for position, sample in enumerate(given)]

    def _one_stored(self, given: HookSample, position: int, unfinished: bool) -> Sample:
        task, functions = self.task, self._functions
        stored = to_stored(given, task.group, position, self.index, self._served, self._limits, unfinished)
        called = f"{GENERATE} = {functions.path(task)}" if functions.field == GENERATE else None
        return functions.check.checked(stored, task, functions.prompt(task), called, given.loss_mask)


def parameters(sampling: Sampling) -> dict[str, Any]:
    """Returns ``sampling_params`` as slime passes them, in SGLang's names. Stop strings stay in the text, as do their tokens."""
    text = {
        "skip_special_tokens": sampling.skip_special_tokens is True,
        "no_stop_trim": sampling.no_stop_trim is not False,
        "spaces_between_special_tokens": False,
    }
    drawn = sampling.model_dump(exclude={"skip_special_tokens", "no_stop_trim", "min_new_tokens", "repetition_penalty"})
    if sampling.min_new_tokens:  # slime leaves out what nobody has set
        drawn["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1:
        drawn["repetition_penalty"] = sampling.repetition_penalty
    return {**drawn, **text}


def _checked(fields: Mapping[str, Any], path: str) -> HookSample:
    sample = sample_message.unpacked(dict(fields))
    if sample.status is Status.FAILED:
        raise HookFailed(GENERATE, path, "gave a sample of status FAILED")
    return sample


def _gone_on(partial: Sample) -> HookSample:
    """Returns a partial sample as the function gets it again: ABORTED, with its tokens."""
    sample = from_stored(partial)
    sample.reward = None
    vars(sample).pop("turns", None)  # its own are found once it has ended
    return sample


def _versions(sample: HookSample) -> list[int]:
    return [int(version) for version in sample.weight_versions if isinstance(version, int) or str(version).isdigit()]


def _numbered(samples: list[Sample]) -> list[Sample]:
    for index, sample in enumerate(samples):
        sample.index = index
    return samples
