"""Fills groups by agents: opens a session for each rollout, or for each role in it, has the agent play, and makes samples of the records.

The agent samples its turns through the gateway, from whichever replica serves; this replica looks after the rollout. An agent that raises,
hangs, ends its process or makes no model call begins anew in a fresh session, `agent_tries` times at most; then its rollout is lost. A
group is stopped as one of a generate function is: its agents are cancelled, and their sessions end, so that nothing is generated for them
any more; so are surplus rollouts, once the group is complete. No agent can be resumed in the middle: what had not ended begins anew, here
or elsewhere.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from services.rollout.agent_program import AgentProgram, Rewards, agent_data, agent_program
from services.rollout.agent_runner import AgentDisturbed, AgentRunner
from services.rollout.engine.engine_client import EngineClient
from services.rollout.in_flight import Stopped
from services.rollout.played_group import GroupPlayer, GroupProgress, PlayedRollout
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import cancelled, to_the_end
from shared.runtime.telemetry import declare_metrics
from shared.schema.ledger import is_evaluation
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Task
from shared.schema.sample import Sample, turns_of
from shared.service.service_base import Service
from shared.sessions.session import Session, SessionEnded, SessionLog, Trajectory, new_key, trajectories
from shared.sessions.session_store import SessionStore

GATEWAY = "gateway"
WAIT_SECONDS = 60.0  # the time that a session waits for a gateway: one that died is being restarted
POLL_INTERVAL_S = 0.5
KNOWN_SECONDS = 2.0  # the time for which what the registry said is taken for true: hundreds of sessions may begin at once


class Gateways:
    """The gateways of a run."""

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, asyncio.Lock()
        self._known: Sequence[str] = ()
        self._known_until, self._given = 0.0, 0

    async def base_url(self) -> str:
        """Returns the base URL for the next session, as OpenAI's clients take it. Raises DeadlineExceeded without a gateway."""
        async with self._lock:
            end = asyncio.get_running_loop().time() + WAIT_SECONDS
            while not (urls := await self._urls()):
                if asyncio.get_running_loop().time() > end:
                    raise DeadlineExceeded("a gateway", "the registry", WAIT_SECONDS, "the group goes back to the queue")
                await asyncio.sleep(POLL_INTERVAL_S)
        self._given += 1
        return f"{urls[self._given % len(urls)]}/v1"

    async def _urls(self) -> Sequence[str]:
        now = asyncio.get_running_loop().time()
        if not self._known or now > self._known_until:
            statuses = await self._service.registry.alive(GATEWAY)
            self._known = [status.engine for status in statuses if status.engine and status.state == "ready"]
            self._known_until = now + KNOWN_SECONDS
        return self._known


ROUND_NUMBER = "round_number"  # the metadata's key with the number of turns, which the trainer makes a metric of


declare_metrics("""
    agents_failed_total | | sessions of [agents](agents.md#what-becomes-of-a-rollout-that-fails) that came to nothing: each begins anew, or
        its rollout is lost
""")

PROLONG_SECONDS = 5.0  # the interval at which sessions' deadlines are put off while the engine sleeps


class AgentGroups(GroupPlayer):
    """Fills the groups that an agent plays."""

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer, gateways: Gateways) -> None:
        super().__init__(service, replica, tokenizer)
        self.settings, self.gateways = service.config.rollout, gateways
        self.runner = AgentRunner(service.config, service.instance, lambda: replica.served.asleep)
        self.model = service.config.model.hf_checkpoint.name
        self.sessions = SessionStore(service.store, service.run)

    async def start(self) -> None:
        await self.runner.start()

    async def close(self) -> None:
        await self.runner.close()

    def program(self, task: Task) -> AgentProgram | None:
        """Returns the agent that plays a task's rollouts; None where none does."""
        return None if task.generate_function else agent_program(self._config, task.group)

    def called(self, task: Task) -> str:
        program = self.program(task)
        assert program is not None
        return f"{program.field} = {program.path}"

    def rollout(self, task: Task, index: int, earlier: list[Sample], slots: GroupSlots, progress: GroupProgress) -> PlayedRollout:
        return _AgentRollout(self, task, index, earlier, slots, progress)

    def new_session(self, task: Task, rollout: int, seed: int) -> tuple[Session, str]:
        """Returns a session that is not open yet, and its key. ``seed``: the index that the seed of its tokens is derived from."""
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
            seed=self.seeds.of_sample(seed),
            min_version=task.min_version,
            evaluation=is_evaluation(task.group),
            kept=0 if is_evaluation(task.group) else self._config.kept_top_k,
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
        self._service.log.error("agent_failed", group=task.group, rollout=rollout, session=session, error=str(error))


class _AgentRollout(PlayedRollout):
    """One rollout of a task, in fresh sessions at each attempt. Of an earlier attempt whole rollouts count."""

    def __init__(
        self, groups: AgentGroups, task: Task, index: int, earlier: list[Sample], slots: GroupSlots, progress: GroupProgress
    ) -> None:
        super().__init__(task, index, earlier or None, groups.replica, slots, progress, groups.settings.agent_tries)
        program = groups.program(task)
        assert program is not None
        self._groups, self._program, self._alone = groups, program, False
        self.places, self._sessions = groups.runner.slots, ""

    def patience_s(self) -> float:
        return self._groups.settings.generate_timeout

    def note(self, error: HookFailed) -> None:
        self._groups.failed(self.task, self.index, self._sessions, error)

    async def attempt(self, client: EngineClient, version: int, life: int) -> None:
        roles, groups = self._program.roles, self._groups
        opened = {role: groups.new_session(self.task, self.index, self.index * len(roles) + of) for of, role in enumerate(roles)}
        self._sessions = " ".join(session.id for session, _ in opened.values())
        try:
            self.samples = await self._played(opened)
        except AgentDisturbed as disturbed:  # it begins anew, and nothing is held against it
            self._alone = disturbed.unknown

    async def _played(self, opened: Mapping[str, tuple[Session, str]]) -> list[Sample]:
        """Returns the sessions' samples. Raises Stopped, HookFailed, AgentDisturbed; without gateway or store DeadlineExceeded. ``opened``:
        session and key of each role."""
        groups, ended = self._groups, dict[str, SessionLog]()
        base_url = await groups.gateways.base_url()
        keys = {role: key for role, (_, key) in opened.items()}
        try:
            for session, _ in opened.values():
                await groups.sessions.open(session)
            data = agent_data(self.task, self.index, groups.model, self._program.options, {role: keys[role] for role in keys if role})
            alone = self._alone or self.failures.alone
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
        stopping = asyncio.create_task(self.requests.stopped.wait())
        try:
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise Stopped(self.task.group, self.requests.stale)
            return playing.result()
        finally:
            await cancelled((playing, stopping, prolonging))

    def _samples(self, ended: Mapping[str, SessionLog], rewards: Mapping[str, Rewards | None]) -> list[Sample]:
        """Returns one sample for each conversation of the sessions; they share the rollout, and those of a role the reward of whoever ended
        its session first. Their ``index`` is their place here; the group numbers them anew. Raises HookFailed."""
        samples: list[Sample] = []
        for role, log in ended.items():
            first = rewards[role] if log.ended is None or log.ended.reward is None else self._program.reward(log.ended.reward)
            reward = self._program.named(first, role)
            played = trajectories(log.turns.values())
            samples += [self._sample(len(samples) + index, one, log, role, reward) for index, one in enumerate(played)]
        if not samples:
            raise self._program.failed("it made no model call")
        if len(samples) > (most := MAX_SAMPLES // self.task.n):
            raise self._program.failed(f"it made {len(samples)} conversations; a rollout has room for {most}")
        try:
            for sample in samples:
                sample.check()
        except BadMessage as error:
            raise self._program.failed(str(error)) from None
        return samples

    def _sample(self, index: int, conversation: Trajectory, log: SessionLog, role: str, reward: Rewards | None) -> Sample:
        task = self.task
        decode = partial(self._groups.tokenizer.decode, skip_special_tokens=task.sampling.skip_special_tokens is not False)
        return Sample(
            group=task.group,
            index=index,
            prompt=conversation.prompt,
            response=conversation.response,
            log_probs=conversation.log_probs,
            kept=conversation.kept,
            mask=conversation.mask,
            segments=conversation.segments,
            finish="length" if conversation.finish == "length" else "stop",
            text=decode(conversation.response),
            prompt_text=task.prompt,
            label=task.label,
            label_json=task.label_json,
            metadata={ROUND_NUMBER: len(conversation.turns), **task.metadata},
            rollout=self.index,
            given_reward=reward,
            role=role,
            attributes={"session_id": log.session.id} | ({"role": role} if role else {}),
            turns=turns_of(conversation.sampled, conversation.response, decode),
            turn_rewards=[(*span, log.rewards.get(turn, 0.0)) for turn, span in zip(conversation.turns, conversation.spans, strict=True)],
        )
