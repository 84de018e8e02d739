"""Fills groups by agents: opens a session for each rollout, or for each role in it, has the agent play, and makes samples of the records.

The agent draws its turns through the gateway, from whichever replica serves; this replica looks after the rollout. An agent that raises,
hangs, ends its process or makes no model call begins anew in a fresh session, `agent_tries` times at most; then its rollout is lost. A
group is stopped as one of a generate function is: its agents are cancelled, and their sessions end, so that nothing is drawn for them any
more; so are surplus rollouts, once the group is complete. No agent can be resumed in the middle: what had not ended begins anew, here or
elsewhere.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from services.rollout.agents.agent_program import AgentProgram, Rewards, agent_data, agent_program
from services.rollout.agents.agent_runner import AgentDisturbed, AgentRunner
from services.rollout.agents.gateways import Gateways
from services.rollout.agents.session_samples import Conversation, samples_of_sessions
from services.rollout.generate import RETRY_PAUSE
from services.rollout.in_flight import InFlight, Requests, Stopped
from services.rollout.partial_samples import samples_of_rollout
from services.rollout.played_group import PlayedGroup, kept, until_complete
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from services.rollout.rollout_fate import GroupProgress, RolloutFailures
from services.rollout.sample_seeds import SampleSeeds
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed
from shared.runtime.cancellation import cancelled, to_the_end
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.metric_specs import MetricSpec, declare_metrics
from shared.runtime.service_base import Service
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.schema.sample import Sample
from shared.sessions.session import Session, SessionEnded, SessionLog, new_key, trajectories
from shared.sessions.session_store import SessionStore

declare_metrics(
    MetricSpec(
        "agents_failed",
        "",
        "sessions of [agents](agents.md#what-becomes-of-a-rollout-that-fails) that came to nothing: each begins anew, or its "
        "rollout is lost",
        counter=True,
    ),
)

PROLONG_SECONDS = 5.0
"""The interval at which sessions' deadlines are put off while the engine sleeps."""


class AgentGroups:
    """Fills the groups that an agent plays.

    Attributes:
        lost: rollouts that were given up.
    """

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer, gateways: Gateways) -> None:
        self._service, self._config, self.settings = service, service.config, service.config.rollout
        self.replica, self.tokenizer, self.gateways = replica, tokenizer, gateways
        self.runner = AgentRunner(service.config, service.instance, lambda: replica.served.asleep)
        self.model, self._seeds = service.config.model.hf_checkpoint.name, SampleSeeds.of(service.config)
        self.sessions, self.lost = SessionStore(service.store, service.run), 0

    async def start(self) -> None:
        """Starts the processes for agents. Raises ConfigError where one cannot be imported."""
        await self.runner.start()

    async def close(self) -> None:
        """Kills them."""
        await self.runner.close()

    def program(self, task: Task) -> AgentProgram | None:
        """Returns the agent that plays a task's rollouts; None where none does."""
        return None if task.generate_function else agent_program(self._config, task.group)

    async def group(self, task: Task, earlier: Sequence[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        """Returns all samples of the rollouts that have ended first, as many as the group needs, or why the others were stopped.

        Args:
            earlier: what an earlier attempt left; of it whole rollouts count. in_flight: may stop the group; None for groups that are
                never stopped. slots: of the group; a rollout holds one while its agent plays.

        Raises DeadlineExceeded where no replica serves or no gateway is there, HookFailed where too many rollouts are lost, BadMessage
        where no token is left to train.
        """
        program = self.program(task)
        assert program is not None
        progress = GroupProgress.of(task, self.settings)
        rollouts = [
            _AgentRollout(self, program, task, index, samples_of_rollout(earlier, index, task), slots, progress) for index in progress.begun
        ]
        await until_complete([self._play(rollout, in_flight) for rollout in rollouts], progress)
        ended, stopped = kept(rollouts, progress)
        samples = [sample for rollout in ended for sample in rollout.samples or ()]
        for index, sample in enumerate(samples):
            sample.index = index
        if stopped is None and not any(sample.mask.any() for sample in samples) and not is_evaluation(task.group):
            raise BadMessage(f"{program.field} = {program.path}: no token of group {task.group} is trained")
        return PlayedGroup(samples, stopped, progress.aborted)

    def new_session(self, task: Task, rollout: int, seed: int) -> tuple[Session, str]:
        """Returns a session that is not open yet, and its key. ``seed``: by the how many-th one its tokens are drawn."""
        name = f"{task.group}.{task.attempt}.{rollout}.{uuid.uuid4().hex[:12]}"
        key, digest = new_key(name)
        session = Session(
            id=name,
            group=task.group,
            rollout=rollout,
            attempt=task.attempt,
            key_digest=digest,
            deadline=time.time() + self.settings.agent_timeout,
            sampling=task.sampling,
            seed=self._seeds.of_sample(seed),
            min_version=task.min_version,
            evaluation=is_evaluation(task.group),
            opened=time.time(),
            replica=self._service.instance,
        )
        return session, key

    async def prolong(self, sessions: Sequence[Session]) -> None:
        """Puts the deadlines of sessions off by the time for which the engine sleeps for a trainer. Runs until cancelled."""
        slept = 0.0
        while self._config.trainer.colocate:
            if self.replica.served.asleep:
                slept += PROLONG_SECONDS
                for session in sessions:
                    with contextlib.suppress(MyxoError):  # the next time will do
                        await self.sessions.prolong(session.id, session.deadline + slept + PROLONG_SECONDS)
            await asyncio.sleep(PROLONG_SECONDS)

    async def forget(self, session: Session, ended: SessionLog | None) -> None:
        """Ends a session, where that has not been done, and lets go of its record."""
        try:
            if ended is None:
                await self.sessions.end(session.id, SessionEnded(at=time.time(), reason="its rollout was given up"))
            await self.sessions.let_go(session.id)
        except MyxoError as error:  # it goes by itself in time
            self._service.log.warning("session_not_ended", session=session.id, error=str(error))

    def failed(self, task: Task, rollout: int, session: str, error: HookFailed) -> None:
        """Notes a session that came to nothing."""
        self._service.metrics.add("agents_failed")
        self._service.log.warning("agent_failed", group=task.group, rollout=rollout, session=session, error=str(error))

    async def _play(self, rollout: "_AgentRollout", in_flight: InFlight | None) -> None:
        """Plays a rollout. Raises HookFailed, by which it is lost, where the group cannot do without it."""
        try:
            await rollout.play(in_flight)
            if rollout.samples is not None:
                rollout.progress.end(rollout.index)
        except HookFailed as error:
            self.lost += 1
            self._service.log.error("rollout_lost", group=rollout.task.group, rollout=rollout.index, error=str(error))
            rollout.progress.lose(error)
        finally:
            rollout.slots.end()


class _AgentRollout:
    """One rollout of a task, played until it has ended, is stopped or is lost.

    Attributes:
        slots, progress: of its group. samples: once it has ended. stopped: why it was stopped, once it was.
    """

    def __init__(
        self,
        groups: AgentGroups,
        program: AgentProgram,
        task: Task,
        index: int,
        earlier: list[Sample],
        slots: GroupSlots,
        progress: GroupProgress,
    ) -> None:
        self._groups, self._program, self.task, self.index, self.slots, self.progress = groups, program, task, index, slots, progress
        self._requests, self._failures, self._alone = Requests(), RolloutFailures(groups.settings.agent_tries), False
        self.samples = earlier or None
        self.stopped: Stopped | None = None

    async def play(self, in_flight: InFlight | None) -> None:
        """Raises HookFailed where the rollout is lost, and as `AgentGroups.group`."""
        try:
            while self.samples is None:
                if self._failures.count:
                    await asyncio.sleep(RETRY_PAUSE * self._failures.count)
                await self._groups.replica.wait_serving(self.task.min_version, self._groups.settings.generate_timeout)
                async with self.slots.slot(self.index), self._groups.runner.slots:
                    await self._play_once(in_flight)
        except Stopped as stopped:
            self.stopped = stopped

    async def _play_once(self, in_flight: InFlight | None) -> None:
        """Has the agent play the rollout, in fresh sessions. Raises Stopped, and as `play`."""
        task, replica = self.task, self._groups.replica
        await replica.wait_serving(task.min_version, self._groups.settings.generate_timeout)
        version, life = replica.version, replica.incarnation
        roles = self._program.roles
        opened = {role: self._groups.new_session(task, self.index, self.index * len(roles) + of) for of, role in enumerate(roles)}
        try:
            with in_flight.tracked(task.group, self._requests, version, version) if in_flight else contextlib.nullcontext():
                self.samples = await self._played(opened)
        except AgentDisturbed as disturbed:  # it begins anew, and nothing is held against it
            self._alone = disturbed.unknown
        except HookFailed as error:
            self._groups.failed(task, self.index, " ".join(session.id for session, _ in opened.values()), error)
            self.progress.check_needed(error)
            self._failures.note(error, counts=replica.incarnation == life)  # the agent did not cause the engine's death

    async def _played(self, opened: Mapping[str, tuple[Session, str]]) -> list[Sample]:
        """Returns the sessions' samples. Raises Stopped, HookFailed, AgentDisturbed; without gateway or store DeadlineExceeded.

        Args:
            opened: session and key of each role.
        """
        groups, ended = self._groups, dict[str, SessionLog]()
        base_url = await groups.gateways.base_url()
        keys = {role: key for role, (_, key) in opened.items()}
        try:
            for session, _ in opened.values():
                await groups.sessions.open(session)
            data = agent_data(self.task, self.index, groups.model, self._program.options, {role: keys[role] for role in keys if role})
            alone = self._alone or self._failures.alone
            running = groups.runner.run(self._program, data, base_url, next(iter(keys.values())), alone=alone)
            rewards = self._program.rewards(await self._unless_stopped(running, [session for session, _ in opened.values()]))
            for role, (session, _) in opened.items():
                ended[role] = await groups.sessions.end(session.id, SessionEnded(at=time.time(), reward=rewards[role]))
            return self._samples(ended, rewards)
        finally:
            await to_the_end(self._forgotten(opened, ended))

    async def _forgotten(self, opened: Mapping[str, tuple[Session, str]], ended: Mapping[str, SessionLog]) -> None:
        for role, (session, _) in opened.items():
            await self._groups.forget(session, ended.get(role))

    async def _unless_stopped(self, running: Coroutine[Any, Any, object], sessions: Sequence[Session]) -> object:
        """Returns what an agent gives. Raises Stopped once the rollout is stopped, and ends the agent then."""
        playing, prolonging = asyncio.create_task(running), asyncio.create_task(self._groups.prolong(sessions))
        stopping = asyncio.create_task(self._requests.stopped.wait())
        try:
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise Stopped(self.task.group, self._requests.stale)
            return playing.result()
        finally:
            await cancelled((playing, stopping, prolonging))

    def _samples(self, ended: Mapping[str, SessionLog], rewards: Mapping[str, Rewards | None]) -> list[Sample]:
        """Returns the sessions' samples, each with the reward of whoever ended its session first. Raises HookFailed."""
        played = []
        for role, log in ended.items():
            first = rewards[role] if log.ended is None or log.ended.reward is None else self._program.reward(log.ended.reward)
            reward = self._program.named(first, role)
            played += [Conversation(trajectory, log.session.id, role, reward) for trajectory in trajectories(log.turns.values())]
        try:
            return samples_of_sessions(self.task, self.index, played, self._groups.tokenizer)
        except BadMessage as error:
            raise self._program.failed(str(error)) from None
