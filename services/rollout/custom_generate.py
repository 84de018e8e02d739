"""Generates with functions of the user's: ``rollout.custom_generate_function_path``, or that of a task's own. Each rollout is one call.

Calls run in worker processes, many in each: one that raises, blocks or ends its process costs its own rollout, which is generated anew and
lost after a few tries (`services.rollout.played_group`). A call's result is discarded if the replica's weights became untrusted meanwhile
(a push failed, or the engine died).

A group that is stopped (too old, or this replica leaves) has its requests ended in the engine; the function comes back with what it has,
as ABORTED. With ``args.partial_rollout`` it is then called again with this sample, here or at another replica; without, it begins anew.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.rollout.agent_groups import UNRECORDED, AgentGroups, CallSession
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine_proxy import SampleCheck
from services.rollout.in_flight import InFlight, Requests, Stopped
from services.rollout.played_group import RETRY_PAUSE, GroupPlayer, GroupProgress, PlayedGroup, PlayedRollout
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed, HookSample, Status
from shared.hooks import sample_conversion as sample_message
from shared.hooks.arguments import FOLLOWING
from shared.hooks.loading import GENERATE, PLAIN
from shared.hooks.sample_conversion import Served, from_stored, group_index, to_stored
from shared.hooks.slime.http_requests import LONGEST_S
from shared.model.families import replayed_choices
from shared.process.worker_pool import LOOP_SECONDS, CallBlocked, WorkerDied, WorkerFailed, WorkerPool
from shared.rewards.reference import Reference
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.tasks import awake_timeout, cancelled, to_the_end
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Sample, SampleLimits
from shared.service.service_base import Service

STOP_SECONDS = 2.0  # the time that a function has to come back once its requests were ended; then its call is cancelled
GRACE_SECONDS = 2 * LOOP_SECONDS  # the time beyond its deadline in which a late call is ended
_MODULE = "services.rollout.function_worker"


class CustomGenerate(GroupPlayer):
    """Generates groups by functions in worker processes, which start with `start` or the first group.

    ``field``: of the config, that says who generates. ``check``: of the samples. ``goes_on``: an aborted rollout continues from its tokens.
    ``seconds``: that a rollout has. ``log_probs_reader``, ``choices``, ``kept``: as in `SampleLimits`. ``agents``: opens sessions at
    gateways, for functions whose adapters name their sample."""

    field = GENERATE
    losing = (HookFailed, DeadlineExceeded, BadMessage)

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer, agents: AgentGroups | None = None) -> None:
        super().__init__(service, replica, tokenizer)
        self._agents = agents if service.config.gateways else None
        self.goes_on: bool = FOLLOWING["partial_rollout"](service.config)
        self.check = SampleCheck(service, tokenizer)
        rollout = service.config.rollout
        setup, variables = {"config": service.config.model_dump_json(), "verb": "generate"}, service.config.reward.worker_environment
        self.asleep = (lambda: replica.served.asleep) if service.config.trainer.colocate else None
        self._pool = WorkerPool("the generate function", rollout.generate_workers, setup, _MODULE, variables, self.asleep)
        self.seconds = rollout.generate_timeout
        self.log_probs_reader, self.choices = service.config.log_probs_reader, replayed_choices(service.config)
        self.kept = service.config.kept_top_k > 0

    def path(self, task: Task) -> str | None:
        """Returns the function that generates a task: its own, the run's, or slime's where others see what it gives; None: the engine."""
        rollout = self._config.rollout
        return task.generate_function or rollout.custom_generate_function_path or (PLAIN if rollout.rollout_sample_hook_path else None)

    def called(self, task: Task) -> str:
        return f"{self.field} = {self.path(task)}"

    async def start(self) -> None:
        self.replica.proxy.answers = self.check.answers
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def group(self, task: Task, earlier: Sequence[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        await self.start()
        await self.replica.open_proxy()
        await self.replica.wait_serving(task.min_version)
        return await super().group(task, earlier, in_flight, slots)

    def rollout(self, task: Task, index: int, earlier: list[Sample], slots: GroupSlots, progress: GroupProgress) -> PlayedRollout:
        return _Rollout(self, task, index, earlier, slots, progress)

    async def call(
        self, task: Task, index: int, sample: HookSample, requests: Requests, seconds: float, alone: bool
    ) -> tuple[list[HookSample], tuple[int, bool]]:
        """Returns what the function made of the sample of a rollout within ``seconds``, and what `CallSession.recorded` says of it. Raises
        HookFailed, or DeadlineExceeded. ``alone``: in a process of its own."""
        path, token = self.path(task), uuid.uuid4().hex
        assert path is not None and self.replica.proxy.address is not None  # it is open from the engine's start on
        request = {
            "verb": "generate",
            "field": GENERATE,
            "path": path,
            "sample": sample_message.packed(sample),
            "sampling_params": parameters(task.sampling, self.kept and not is_evaluation(task.group), self.seed(index)),
            "evaluation": is_evaluation(task.group),
            "engine": self.replica.proxy.address,
            "token": token,
            "seconds": seconds if self.asleep is None else seconds + LONGEST_S,  # the process does not see for how long the engine sleeps
        }
        session = None if self._agents is None else CallSession(self._agents, task, index, seconds + GRACE_SECONDS)
        proxy, name = self.replica.proxy, str(sample.session_id)
        proxy.calls[token] = requests
        if session is not None:
            proxy.sessions[name] = session.answer
        try:
            # a call that comes late into a process has its deadline late, too; the rollout's stays
            async with awake_timeout(seconds + GRACE_SECONDS, self.asleep):
                answer = await self._pool.ask(request, "a rollout", f"{GENERATE} = {path}", seconds, alone=alone)
            given = [_checked(fields, path) for fields in answer["samples"]]
            return given, UNRECORDED if session is None else await session.recorded(given)
        except TimeoutError:
            raise self.late(task, index) from None
        except WorkerFailed as error:
            raise HookFailed(GENERATE, path, str(error), disruptive=isinstance(error, CallBlocked | WorkerDied)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise HookFailed(GENERATE, path, f"its process gave an answer that cannot be read ({type(error).__name__}: {error})") from None
        finally:
            del proxy.calls[token]
            if session is not None:
                del proxy.sessions[name]
                await to_the_end(session.forget())

    def begun(self, task: Task, index: int) -> HookSample:
        """Returns the sample of a rollout that has generated nothing yet."""
        begun = task.n if is_evaluation(task.group) else task.n + self._config.rollout.surplus_rollouts
        place = group_index(task.group) * begun + index
        return HookSample(
            group_index=group_index(task.group),
            index=place,
            rollout_id=place,
            session_id=f"{task.group}.{task.attempt}.{index}.{uuid.uuid4().hex[:8]}",  # slime's adapters take no name twice
            prompt=self.prompt(task),
            tokens=task.prompt_tokens.tolist(),
            label=Reference(task.label, task.label_json).value,
            metadata=task.metadata,
        )

    def late(self, task: Task, rollout: int) -> DeadlineExceeded:
        return DeadlineExceeded(f"rollout {rollout} of {task.group}", self.called(task), self.seconds, "it is lost")

    def warn(self, task: Task, rollout: int, error: Exception) -> None:
        """Logs a call that is made again."""
        self._service.log.error("custom_generate_failed", group=task.group, rollout=rollout, error=str(error))


class _Rollout(PlayedRollout):
    least_pause = RETRY_PAUSE

    def __init__(
        self, functions: CustomGenerate, task: Task, index: int, earlier: list[Sample], slots: GroupSlots, progress: GroupProgress
    ) -> None:
        ended = earlier if earlier and all(sample.finish != "abort" for sample in earlier) else None
        super().__init__(task, index, ended, functions.replica, slots, progress)
        self._functions = functions
        self._left = functions.seconds  # of its time: that of its calls
        self._goes_on = functions.goes_on and not (task.sampling.whole and functions.field == GENERATE)  # an episode's turns are whole
        self._partial = earlier[0] if len(earlier) == 1 and ended is None and self._goes_on else None
        self._sample = None if self._partial is None else _gone_on(self._partial)
        self._aborted: HookSample | None = None
        self._served = Served(0, 0)
        choices, kept = (None, False) if is_evaluation(task.group) else (functions.choices, functions.kept)
        self._limits = SampleLimits(log_probs_reader=functions.log_probs_reader, choices=choices, kept=kept)

    def oldest(self, version: int) -> int:
        known = [] if self._sample is None else self._sample.weight_versions
        return min([version, *(int(one) for one in known if isinstance(one, int) or str(one).isdigit())])

    def note(self, error: HookFailed) -> None:
        self._functions.warn(self.task, self.index, error)
        if self._functions.field != GENERATE:  # an episode plays in this process, and may have changed it
            self._sample = None

    async def attempt(self, client: EngineClient, version: int, life: int) -> None:
        replica, oldest = self.replica, self.oldest(version)
        self._limits = replace(self._limits, vocabulary=client.capabilities.vocab_size)
        given, (newest, recorded) = await self._called(self._sample or self._functions.begun(self.task, self.index), version)
        trusted, aborted = recorded or replica.incarnation == life, any(one.status is Status.ABORTED for one in given)
        if trusted:
            late = frozenset() if recorded else client.late_versions  # a record has the version of each token
            self._served = Served(oldest, max(replica.version, newest), late)
            self._aborted = given[0] if aborted and self._goes_on and len(given) == 1 and given[0].response_length else None
        if trusted and not aborted:
            self.samples = self._stored(given)
        elif self.requests.stopped.is_set():
            raise Stopped(self.task.group, self.requests.stale)
        else:
            self._sample = self._aborted if trusted else None

    def _given_up(self, given: list[HookSample]) -> list[HookSample]:
        """Returns samples that the function itself calls ABORTED as ended ones, with the reward that it has given them.

        slime trains them as they are; generated anew, until one turns out well, they would leave the failures out. Raises HookFailed for
        one without a reward that cannot be continued with."""
        for sample in given:
            if sample.status is Status.ABORTED and sample.reward is not None:
                sample.status, sample.aborted = Status.COMPLETED, True  # type: ignore[attr-defined]
            elif sample.status is Status.ABORTED and not (self._functions.goes_on and sample.response_length):
                called = self._functions.path(self.task) or ""
                raise HookFailed(GENERATE, called, "gave a sample of status ABORTED without a reward, and nothing was aborted")
        return given

    async def _called(self, sample: HookSample, begun: int) -> tuple[list[HookSample], tuple[int, bool]]:
        """Returns what `CustomGenerate.call` does. Raises HookFailed, DeadlineExceeded; Stopped where it does not come back once stopped.
        ``begun``: the version that is served."""
        if self._left <= 0:
            raise self._functions.late(self.task, self.index)
        seconds, alone, loop = self._left, self.failures.alone, asyncio.get_running_loop()
        call = asyncio.create_task(self._functions.call(self.task, self.index, sample, self.requests, seconds, alone))
        stopping = asyncio.create_task(self.requests.stopped.wait())
        try:
            async with awake_timeout(seconds + LONGEST_S, self._functions.asleep) as clock:  # the call has a deadline of its own
                await asyncio.wait((call, stopping), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((call,), timeout=STOP_SECONDS)
            if not call.done():
                raise Stopped(self.task.group, self.requests.stale)
            given, recorded = call.result()
            # the engine may have aborted requests of a call that was stopped, or since weights came
            may_abort = self.requests.stopped.is_set() or self.replica.version != begun or not self.replica.serving
            return (given if may_abort else self._given_up(given)), recorded
        finally:
            self._left = (clock.when() or 0.0) - LONGEST_S - loop.time()
            await cancelled((call, stopping))

    def stored(self) -> list[Sample]:
        if self.samples is not None or self.stopped is None:
            return self.samples or []
        if self._aborted is None:
            return [] if self._partial is None else [self._partial]
        try:
            return self._stored([self._aborted], unfinished=True)
        except BadMessage as error:  # what does not fit begins anew
            self._functions.warn(self.task, self.index, error)
            return []

    def _stored(self, given: Sequence[HookSample], unfinished: bool = False) -> list[Sample]:
        task, functions, stored = self.task, self._functions, []
        called = functions.called(task) if functions.field == GENERATE else None
        for position, one in enumerate(given):
            sample = to_stored(one, task.group, position, self.index, self._served, self._limits, unfinished)
            stored.append(functions.check.checked(sample, task, functions.prompt(task), called, one.loss_mask))
        return stored


def parameters(sampling: Sampling, kept: bool = False, seed: int | None = None) -> dict[str, Any]:
    """Returns ``sampling_params`` as slime passes them, in SGLang's names. Stop strings stay in the text, as do their tokens.
    ``kept``: they ask for the tokens that the sampler keeps. ``seed``: None: there is none."""
    text = {
        "skip_special_tokens": sampling.skip_special_tokens is True,
        "no_stop_trim": sampling.no_stop_trim is not False,
        "spaces_between_special_tokens": False,
    }
    values = sampling.model_dump(exclude={"skip_special_tokens", "no_stop_trim", "min_new_tokens", "repetition_penalty"})
    if sampling.min_new_tokens:  # slime leaves out what no one has set
        values["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1:
        values["repetition_penalty"] = sampling.repetition_penalty
    if seed is not None:
        values["sampling_seed"] = seed
    if kept:
        values["custom_params"] = {"return_top_p_token_ids": True}
    return {**values, **text}


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
