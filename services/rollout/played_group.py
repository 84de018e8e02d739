"""Plays one group's rollouts: by the engine alone, or by a function, an environment or an agent.

By the engine alone (`EngineGroups`), each sample is a request of its own, in a slot of its own (`services.rollout.request_slots`), which it
leaves when it ends: a group does not keep the places of its short samples until its longest one has ended. A sample keeps the tokens,
log-probs and version spans that it already has; to continue it, prompt and tokens are sent to the engine again.

A rollout that is played is generated anew where it fails, a few times; then it is lost, and the group continues without it, as long as
`rollout.min_rollouts` are left. A group may begin more rollouts than it needs (`rollout.surplus_rollouts`; active partial rollouts, APRIL,
Zhou et al. 2025, arXiv 2509.18521, within a group): it is complete when as many as it needs have ended, and the others are aborted. While
there are more than it needs, a rollout that fails is not tried again: a surplus one takes its place.
"""

import asyncio
import functools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest, first_tokens
from services.rollout.engine.transport import EngineError
from services.rollout.in_flight import UNROUTED, InFlight, Partial, Requests, Stopped, restored, samples_of, samples_of_rollout
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from shared.config.eval_views import group_config
from shared.config.rollout_section import RolloutSection
from shared.data.media import MediaRule, ShownPictures
from shared.data.stop_strings import end_across
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed
from shared.hooks.loading import paths
from shared.model.families import replayed_choices
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import cancelled
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.schema.sample import Sample
from shared.service.service_base import Service

RETRY_PAUSE = 0.5
TRIES = 5  # the number of failed calls in a row after which a rollout is lost

# The same for calls that held up or ended their process. All but the first have one of their own, so that they cost no one else.
DISRUPTIVE_TRIES = 2


class RolloutFailures:
    """The failed calls of one rollout in a row, of which ``tries`` lose it. ``count``: how many. ``alone``: its next call gets a process of
    its own."""

    def __init__(self, tries: int = TRIES) -> None:
        self.count, self._disruptive, self._tries = 0, 0, tries

    @property
    def alone(self) -> bool:
        return self._disruptive > 0

    def note(self, error: HookFailed, counts: bool) -> None:
        """Notes a failed call. Raises HookFailed where there should be no other. ``counts``: False where it may not have been the
        function's fault, since the engine had died under it."""
        self.count += counts
        self._disruptive += error.disruptive
        if self.count >= self._tries or self._disruptive >= DISRUPTIVE_TRIES:
            failed = max(self.count, self._disruptive)
            raise HookFailed(error.field, error.path, error.reason + (f"; it failed {failed} times in a row" if failed > 1 else ""))


class GroupProgress:
    """The rollouts of one group: how many are left, and which have ended. ``wanted``: with how many it is complete. ``surplus``: how many
    are begun beyond them. ``fewest``: how many have to be left."""

    def __init__(self, wanted: int, fewest: int, surplus: int = 0) -> None:
        self._left, self._wanted, self._fewest = wanted + surplus, wanted, fewest
        self._ended: list[int] = []

    @classmethod
    def of(cls, task: Task, settings: RolloutSection) -> "GroupProgress":
        """Returns that of a task. A held-out prompt needs all of its rollouts, and has no surplus ones: the shorter would be favoured."""
        if is_evaluation(task.group):
            return cls(task.n, task.n)
        return cls(task.n, min(task.n, settings.fewest_rollouts), settings.surplus_rollouts)

    @property
    def begun(self) -> range:
        """Returns the indices of the rollouts that are begun."""
        return range(self._left)

    @property
    def complete(self) -> bool:
        return len(self._ended) >= self._wanted

    @property
    def kept(self) -> frozenset[int]:
        """Returns the rollouts that make up a complete group: those that ended first."""
        return frozenset(self._ended[: self._wanted])

    @property
    def aborted(self) -> int:
        """Returns how many rollouts a complete group does without, although none of them failed."""
        return self._left - self._wanted if self.complete else 0

    def end(self, index: int) -> None:
        """Notes a rollout that has ended well."""
        self._ended.append(index)

    def check_needed(self, error: MyxoError) -> None:
        """Raises the ``error`` of a rollout that need not be tried again, since a surplus one takes its place."""
        if self._left > self._wanted:
            raise error

    def lose(self, error: MyxoError) -> None:
        """Takes a lost rollout down. Raises ``error``, which is why, where too few are left."""
        self._left -= 1
        if self._left < self._fewest:
            raise error


class PlayedGroup(NamedTuple):
    """The outcome of a group: samples, in the rollouts' order; why they were ``stopped``, if they were; ``aborted``: how many surplus
    rollouts were, since the others had ended."""

    samples: list[Sample]
    stopped: Stopped | None
    aborted: int = 0


class PlayedRollout:
    """One rollout of a task, played until it has ended, is stopped or is lost. Subclasses say how, in `attempt`.

    ``samples``: what an earlier attempt has finished; None: nothing. ``tries``: failures in a row that lose it. Attributes: ``samples``:
    once it has ended. ``stopped``: why it was stopped, once it was. ``requests``: those of it that the engine holds."""

    least_pause = 0.0  # before it is tried again
    places: AbstractAsyncContextManager[None] = nullcontext()  # held besides its slot

    def __init__(
        self,
        task: Task,
        index: int,
        samples: list[Sample] | None,
        replica: Replica,
        slots: GroupSlots,
        progress: GroupProgress,
        tries: int = TRIES,
    ) -> None:
        self.task, self.index, self.samples, self.replica = task, index, samples, replica
        self.slots, self.progress = slots, progress
        self.requests, self.failures = Requests(), RolloutFailures(tries)
        self.stopped: Stopped | None = None

    async def attempt(self, client: EngineClient, version: int, life: int) -> None:
        """Tries once to play it, which sets ``samples``. Raises HookFailed; Stopped; what loses it at once. ``version``, ``life``: that the
        replica serves, and its incarnation."""
        raise NotImplementedError

    def oldest(self, version: int) -> int:
        """Returns the version that its oldest token may be of, where ``version`` is served."""
        return version

    def note(self, error: HookFailed) -> None:
        """Logs a failed attempt."""

    def stored(self) -> list[Sample]:
        """Returns the samples to store; of one that was stopped those that may be continued; of one that is lost none."""
        return self.samples or []

    async def play(self, in_flight: InFlight | None) -> None:
        """Plays to the end, or until it is stopped. Raises what loses it."""
        try:
            while self.samples is None:
                await self.replica.wait_serving(self.task.min_version)
                async with self.slots.slot(self.index), self.places:
                    await self.try_once(in_flight)
                if self.samples is None:  # after an abort, the push that caused it is still in progress
                    await asyncio.sleep(max(self.least_pause, RETRY_PAUSE * self.failures.count))
        except Stopped as stopped:
            self.stopped = stopped

    async def try_once(self, in_flight: InFlight | None) -> None:
        """Makes one attempt, in a slot. Raises what `attempt` does, but of HookFailed only one that is not to be tried again."""
        client = await self.replica.wait_serving(self.task.min_version)
        version, life = self.replica.version, self.replica.incarnation
        tracked = in_flight.tracked(self.task.group, self.requests, self.oldest(version), version) if in_flight else nullcontext()
        try:
            with tracked:
                await self.attempt(client, version, life)
        except HookFailed as error:
            self.note(error)
            self.progress.check_needed(error)
            self.failures.note(error, counts=self.replica.incarnation == life)  # it did not cause the engine's death


class GroupPlayer:
    """Plays groups: one `PlayedRollout` for each rollout. ``lost``: rollouts that were given up. ``losing``: errors by which one is lost;
    others end the group."""

    losing: tuple[type[MyxoError], ...] = (HookFailed,)

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer) -> None:
        self._service, self._config, self.replica, self.tokenizer = service, service.config, replica, tokenizer
        self.seed, self.lost = service.config.sample_seed, 0

    def called(self, task: Task) -> str:
        """Returns what plays a task, for errors: a field and its value."""
        raise NotImplementedError

    def prompt(self, task: Task) -> Any:
        """Returns the rendered text where the chat template is applied, as slime has it, else the prompt as it stands in the file."""
        if not group_config(self._config, task.group).data.apply_chat_template:
            return task.prompt
        return self.tokenizer.decode(task.prompt_tokens, skip_special_tokens=False)

    async def start(self) -> None:
        """Starts the processes that it needs, once. Raises ConfigError where the user's code cannot be imported."""

    async def close(self) -> None:
        """Kills the processes, and closes connections."""

    def rollout(self, task: Task, index: int, earlier: list[Sample], slots: GroupSlots, progress: GroupProgress) -> PlayedRollout:
        """Returns one rollout. ``earlier``: what an earlier attempt left of it."""
        raise NotImplementedError

    async def group(self, task: Task, earlier: Sequence[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        """Returns all samples of the rollouts that ended first, as many as the group needs; of a stopped group those that there are.

        ``earlier``: what an earlier attempt left. ``in_flight``: may stop the group; None for groups that are never stopped. ``slots``: of
        the group; a rollout holds one while it is played. Rollouts that are lost are left out, as far as `rollout.min_rollouts` allows; of
        held-out groups none is. Raises, where too few are left, what they were lost by; DeadlineExceeded where no weights or no gateway is
        there; BadMessage where no token is trained."""
        progress = GroupProgress.of(task, self._config.rollout)
        rollouts = [self.rollout(task, index, samples_of_rollout(earlier, index, task), slots, progress) for index in progress.begun]
        stopped = await self.until_complete(rollouts, progress, in_flight)
        if progress.complete:
            rollouts = [rollout for rollout in rollouts if rollout.index in progress.kept]
        samples = [sample for rollout in rollouts for sample in rollout.stored()]
        for index, sample in enumerate(samples):
            sample.index = index
        if stopped is None and not any(sample.mask.any() for sample in samples) and not is_evaluation(task.group):
            raise BadMessage(f"{self.called(task)}: no token of group {task.group} is trained: the loss mask is 0 on all of them")
        return PlayedGroup(samples, stopped, progress.aborted)

    async def until_complete(
        self, rollouts: Sequence[PlayedRollout], progress: GroupProgress, in_flight: InFlight | None
    ) -> Stopped | None:
        """Plays a group's rollouts until it is complete, or all have come to an end; the others are cancelled. Returns why an incomplete
        one was stopped. Raises what one of them does."""
        running = [asyncio.create_task(self._play(rollout, in_flight)) for rollout in rollouts]
        left = set(running)
        try:
            while left and not progress.complete:
                ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    one.result()
        finally:
            await cancelled(running)
        return None if progress.complete else next((rollout.stopped for rollout in rollouts if rollout.stopped is not None), None)

    async def _play(self, rollout: PlayedRollout, in_flight: InFlight | None) -> None:
        """Plays a rollout. Raises the error that it is lost by, where the group cannot do without it."""
        try:
            await rollout.play(in_flight)
            if rollout.samples is not None:
                rollout.progress.end(rollout.index)
        except self.losing as error:
            self.lost += 1
            self._service.log.error("rollout_lost", group=rollout.task.group, rollout=rollout.index, error=str(error))
            rollout.progress.lose(error)
        finally:
            rollout.slots.end()


ENGINE_TRIES = 5  # the number of engine failures in a row after which a sample, and its group with it, is given up for this delivery


class EngineGroups(GroupPlayer):
    """Generates groups by the engine alone."""

    losing = ()

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer) -> None:
        super().__init__(service, replica, tokenizer)
        self.deadline, self._choices = service.config.rollout.generate_timeout, replayed_choices(service.config)
        self.kept, self._rule = service.config.kept_top_k, MediaRule.of_run(service.config)
        self._hooks = bool(paths(service.config))  # they see the prompt as it was rendered

    async def group(self, task: Task, earlier: Sequence[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        """As `GroupPlayer.group`, but no sample is lost. Raises DeadlineExceeded, for weights or for a sample's time in the engine;
        EngineError when the engine failed `ENGINE_TRIES` times in a row for one of the samples."""
        partials = restored(earlier, task, None if is_evaluation(task.group) else self._choices)
        for index, partial in enumerate(partials):
            partial.seed = self.seed(index)
        progress, requests = GroupProgress(task.n, task.n), Requests()
        pictures = () if task.pictures is None else tuple(await self._service.store.read(task.pictures))
        shown = None if self._rule is None else ShownPictures(self._rule, pictures)
        rollouts = [_EngineRollout(self, task, index, partials, requests, slots, progress, shown) for index in progress.begun]
        stopped = await self.until_complete(rollouts, progress, in_flight)
        samples = samples_of(task, partials, self.tokenizer, pictures)
        rendered = {"prompt": self.prompt(task)} if self._hooks else {}
        for sample in samples:
            if (problem := sample.attributes.get(UNROUTED)) is not None:
                self._service.log.warning("sample_not_trained", sample=sample.name, reason=problem)
            sample.attributes |= rendered
        return PlayedGroup(samples, stopped)


class _EngineRollout(PlayedRollout):
    """One of a group's ``partials``, which grow in place. ``requests``: all of the group's, of which any makes the group too old."""

    def __init__(
        self,
        groups: EngineGroups,
        task: Task,
        index: int,
        partials: list[Partial],
        requests: Requests,
        slots: GroupSlots,
        progress: GroupProgress,
        shown: ShownPictures | None = None,
    ) -> None:
        self._shown = shown
        super().__init__(task, index, None if partials[index].finish is None else [], groups.replica, slots, progress)
        self._partials, self._partial, self.requests = partials, partials[index], requests
        self._deadline, self._spent, self._failed = groups.deadline, 0.0, 0
        self._kept = 0 if is_evaluation(task.group) else groups.kept
        self._decode = functools.partial(groups.tokenizer.decode, skip_special_tokens=False)

    def oldest(self, version: int) -> int:
        return min([version, *(partial.segments[0][2] for partial in self._partials if partial.segments)])

    async def attempt(self, client: EngineClient, version: int, life: int) -> None:
        began, partial, sampling = asyncio.get_running_loop().time(), self._partial, self.task.sampling
        request = GenerationRequest(
            tokens=np.concatenate([self.task.prompt_tokens, partial.tokens]) if len(partial.tokens) else self.task.prompt_tokens,
            max_new_tokens=sampling.max_new_tokens - len(partial.tokens),
            seed=partial.seed,
            routed_from=partial.routed_from,
            kept=self._kept,
            shown=self._shown,
        )
        self.requests.rids.add(request.rid)
        try:
            [generation] = await client.generate_group([request], sampling, deadline=max(self._deadline - self._spent, 1.0))
            if self.replica.incarnation != life:
                raise EngineError(client.url, "its weights became untrusted while it generated this, which is discarded")
        except EngineError:
            self._failed += 1
            if self._failed >= ENGINE_TRIES:
                raise
            self.least_pause = RETRY_PAUSE * self._failed  # it may be restarting: the gate closes as soon as that is seen
            return
        finally:
            self.requests.rids.discard(request.rid)
        self._failed, self.least_pause = 0, 0.0
        self._spent += asyncio.get_running_loop().time() - began
        count = end_across(partial.tokens, generation.tokens, sampling.stop, self._decode)  # a stop string may have begun before
        generation = generation if count is None else first_tokens(generation, count)
        if not (sampling.whole and generation.finish == "abort"):
            partial.extend(generation, sampling.max_new_tokens)
        if partial.finish is not None:
            self.samples = []  # the group makes them of its partials
        elif self._spent >= self._deadline:
            where = f"sample {self.index} of {self.task.group}"
            raise DeadlineExceeded(where, "the engine", self._deadline, "the group goes back to the queue")
