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
from collections import ChainMap
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
import numpy as np
import orjson

from services.rollout.agent_runner import AgentDisturbed, AgentProgram, AgentRunner, Rewards, agent_data, agent_program, with_pictures
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.public_requests import GenerateRequest
from services.rollout.in_flight import Stopped
from services.rollout.played_group import GroupPlayer, GroupProgress, PlayedRollout
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots
from shared.config.eval_views import eval_view
from shared.data.tokenizer import Tokenizer
from shared.formats.request import TASK_HEADER
from shared.hooks import HookFailed, HookSample
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import cancelled, to_the_end
from shared.runtime.telemetry import declare_metrics
from shared.schema.ledger import is_evaluation
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Task
from shared.schema.sample import Sample, turns_of
from shared.service.engine_load_balancer import probed_connector
from shared.service.service_base import Service
from shared.sessions.session import Session, SessionEnded, SessionLog, Trajectory, new_key, trajectories
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import HOLDING_SECONDS

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

LATE_SECONDS = 1.0  # the wait before an agent begins from which on its sessions' deadlines are put off
PROLONG_SECONDS = 5.0  # the interval at which sessions' deadlines are put off while the engine sleeps


class AgentGroups(GroupPlayer):
    """Fills the groups that an agent plays."""

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer, gateways: Gateways) -> None:
        super().__init__(service, replica, tokenizer)
        self.settings, self.gateways = service.config.rollout, gateways
        self.runner = AgentRunner(service.config, service.instance, lambda: replica.served.asleep)
        self.model = service.config.model.hf_checkpoint.name
        self.store, self.sessions = service.store, SessionStore(service.store, service.run, HOLDING_SECONDS)
        self._hasty = SessionStore(service.store, service.run)  # for what can be left out
        self.shows = service.config.data.multimodal_keys is not None

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

    def new_session(self, task: Task, rollout: int, seed: int, seconds: float | None = None) -> tuple[Session, str]:
        """Returns a session that is not open yet, and its key. ``seed``: the index that the seed of its tokens is derived from.
        ``seconds``: for its turns; None: an agent's."""
        name = f"{task.group}.{task.attempt}.{rollout}.{uuid.uuid4().hex[:12]}"
        (key, digest), view = new_key(name), eval_view(self._config, task.group)
        session = Session(
            id=name,
            group=task.group,
            rollout=rollout,
            attempt=task.attempt,
            key_digest=digest,
            deadline=time.time() + (self.settings.agent_timeout if seconds is None else seconds),
            sampling=task.sampling,
            seed=self.seed(seed),
            min_version=task.min_version,
            evaluation=is_evaluation(task.group),
            kept=0 if is_evaluation(task.group) else self._config.kept_top_k,
            variables={} if view is None else view.template_variables,
            environment=task.environment,
            opened=time.time(),
            replica=self._service.instance,
        )
        return session, key

    async def prolong(self, sessions: Sequence[Session]) -> None:
        """Puts the deadlines of sessions off by the time for which the engine sleeps for a colocated trainer."""
        while self._config.trainer.colocate:
            for session in sessions if self.replica.served.asleep else ():
                session.deadline += PROLONG_SECONDS
                with contextlib.suppress(MyxoError):  # the next time will do
                    await self._hasty.prolong(session.id, session.deadline + PROLONG_SECONDS)
            await asyncio.sleep(PROLONG_SECONDS)

    async def forget(self, session: Session, ended: SessionLog | None) -> None:
        """Ends a session, where that has not been done, and lets go of its record."""
        try:
            if ended is None:
                await self._hasty.end(session.id, SessionEnded(at=time.time(), reason="its rollout was given up"))
            await self._hasty.let_go(session.id)
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
        groups, ended, began = self._groups, dict[str, SessionLog](), time.time()
        base_url = await groups.gateways.base_url()
        keys = {role: key for role, (_, key) in opened.items()}
        task, shows = self.task, groups.shows
        try:
            for session, _ in opened.values():
                await groups.sessions.open(session, shows)
            if task.pictures is not None:
                pictures = await groups.store.read(task.pictures)
                task = task.model_copy(update={"prompt": with_pictures(task.prompt, pictures)})
            if (waited := time.time() - began) > LATE_SECONDS:  # for gateway or store: it is not the agent's time
                for session, _ in opened.values():
                    session.deadline += waited
                    await groups.sessions.prolong(session.id, session.deadline)
            data = agent_data(task, self.index, groups.model, self._program.options, {role: keys[role] for role in keys if role})
            alone = self._alone or self.failures.alone
            running = groups.runner.run(self._program, data, base_url, next(iter(keys.values())), alone=alone)
            rewards = self._program.rewards(await self._unless_stopped(running, [session for session, _ in opened.values()]))
            for role, (session, _) in opened.items():
                ended[role] = await groups.sessions.end(session.id, SessionEnded(at=time.time(), reward=rewards[role]))
            names = [session.id for session, _ in opened.values()] if shows else []
            shown = [await groups.sessions.pictures(name) for name in names]
            return self._samples(ended, rewards, dict(ChainMap(*shown)))
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

    def _samples(
        self, ended: Mapping[str, SessionLog], rewards: Mapping[str, Rewards | None], pictures: Mapping[str, bytes]
    ) -> list[Sample]:
        """Returns one sample for each conversation of the sessions; they share the rollout, and those of a role the reward of whoever ended
        its session first. Their ``index`` is their place here; the group numbers them anew. Raises HookFailed."""
        samples: list[Sample] = []
        for role, log in ended.items():
            first = rewards[role] if log.ended is None or log.ended.reward is None else self._program.reward(log.ended.reward)
            reward = self._program.named(first, role)
            played = trajectories(log.turns.values())
            made = [self._sample(len(samples) + index, one, log, role, reward) for index, one in enumerate(played)]
            samples += [replace(one, pictures=tuple(map(pictures.__getitem__, of.pictures))) for one, of in zip(made, played, strict=True)]
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
            attributes={"session_id": log.session.id},
            turns=turns_of(conversation.sampled, conversation.response, decode),
            turn_rewards=[(*span, log.rewards.get(turn, 0.0)) for turn, span in zip(conversation.turns, conversation.spans, strict=True)],
        )


# Answers of a gateway that another one, or the same one later, may give otherwise.
PASSING = {*map(int, (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY)), 500, 503, 504}
RETRY_S = 0.5
PASSED_ON = {"repetition_penalty": "repetition_penalty", "min_new_tokens": "min_tokens"}  # Where a request gives them; gateways' names

UNRECORDED = -1, False  # what `CallSession.recorded` returns of what it has not sampled


class CallSession:
    """The session of one call of a generate function, for requests that its own adapters send in the name of its sample (``slime.agent``'s
    do). They become turns of gateways: any replica generates them, they continue where an engine or a gateway dies, and the record has
    each token's version and log-prob. The first opens it.

    ``seconds``: for all of its turns."""

    def __init__(self, groups: AgentGroups, task: Task, rollout: int, seconds: float) -> None:
        self._prolonging: asyncio.Task[None] | None = None  # once it is open
        self._groups, self._lock = groups, asyncio.Lock()
        self._record: SessionLog | None = None
        self._session, self._key = groups.new_session(task, rollout, rollout, seconds)

    async def answer(self, asked: GenerateRequest) -> tuple[int, bytes, str]:
        """Returns status and body of the answer to a request that can be a turn, in SGLang's form, and the names of the parameters that
        stand as the task has them. Raises DeadlineExceeded."""
        async with self._lock:
            if self._prolonging is None:
                await self._groups.sessions.open(self._session)
                self._prolonging = asyncio.create_task(self._groups.prolong([self._session]))
        drawn = asked.sampling[0].model_dump()
        wanted = {"temperature": drawn["temperature"], "top_p": drawn["top_p"], "top_k": drawn["top_k"], "stop": drawn["stop"]}
        wanted |= {"stop_token_ids": drawn["stop_token_ids"], "max_tokens": drawn["max_new_tokens"]}
        wanted |= {own: drawn[name] for name, own in PASSED_ON.items() if name in asked.sampling[0].model_fields_set}
        body = orjson.dumps({"token_ids": asked.input_ids, "sampling_params": wanted})
        headers = {"Authorization": f"Bearer {self._key}", "X-Request-Id": uuid.uuid4().hex, "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=probed_connector(), headers=headers) as client:
            while (left := self._session.deadline - time.time()) > 0:
                url = (await self._groups.gateways.base_url()).removesuffix("/v1") + "/inference/v1/generate"
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it died: the same request continues at another
                    async with client.post(url, data=body, timeout=aiohttp.ClientTimeout(total=left)) as given:
                        whole = await given.read()
                        if given.status == HTTPStatus.OK:
                            fixed = given.headers.get(TASK_HEADER, "").replace("min_tokens", "min_new_tokens")
                            return given.status, self._converted(asked, orjson.loads(whole)), fixed
                        if given.status not in PASSING:
                            return given.status, whole, ""
                await asyncio.sleep(RETRY_S)
        raise DeadlineExceeded(f"a turn of {self._session.id}", "the gateways", self._session.deadline - (self._session.opened or 0), "")

    def _converted(self, asked: GenerateRequest, given: Mapping[str, Any]) -> bytes:
        [choice], usage = given["choices"], given["usage"]
        ids, plain = choice["token_ids"], bool(asked.sampling[0].skip_special_tokens)
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        meta = {
            "id": given["request_id"],
            "finish_reason": {"type": choice["finish_reason"]},
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": len(ids),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            "weight_version": str(given["weight_versions"]["oldest"]),
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)],
        }
        stops, trimmed = asked.sampling[0].stop, choice["finish_reason"] == "stop" and not asked.sampling[0].no_stop_trim
        tokenizer = self._groups.tokenizer
        ended = trimmed and not {*tokenizer.stop_ids, *asked.sampling[0].stop_token_ids}.isdisjoint(ids[-1:])
        text = tokenizer.decode(np.asarray(ids[:-1] if ended else ids, np.int32), skip_special_tokens=plain)
        ends = [text.find(one) for one in stops if trimmed and one in text]
        return orjson.dumps({"text": text[: min(ends, default=len(text))], "output_ids": ids, "meta_info": meta})

    async def recorded(self, samples: Sequence[HookSample]) -> tuple[int, bool]:
        """Ends it, and gives the call's samples what it recorded of them. Returns the newest version in them, -1 for none, and whether it
        has sampled all that is trained."""
        if self._prolonging is None:
            return UNRECORDED
        self._record = await self._groups.sessions.end(self._session.id, SessionEnded(at=time.time()))
        newest = [of_record(sample, self._record) for sample in samples]
        return max((version for version in newest if version is not None), default=-1), None not in newest

    async def forget(self) -> None:
        """Lets go of it, and ends it where that was not done."""
        if self._prolonging is not None:
            self._prolonging.cancel()
            await self._groups.forget(self._session, self._record)


def of_record(sample: HookSample, log: SessionLog) -> int | None:
    """Gives a function's sample the versions and log-probs that a session recorded of its tokens. Returns the newest version; None where
    the session has not sampled all that is trained."""
    try:
        tokens, length = np.asarray(sample.tokens), int(sample.response_length)
        mask = np.asarray([1] * length if sample.loss_mask is None else sample.loss_mask)
    except (TypeError, ValueError):  # what it is instead is refused with its name, as every sample's
        return None
    if tokens.ndim != 1 or not 0 < length <= len(tokens):
        return None
    start, versions, log_probs = len(tokens) - length, np.full(len(tokens), -1), np.zeros(len(tokens))
    for turn in log.turns.values():
        whole, first = turn.tokens, len(turn.prompt)
        end = min(len(whole), len(tokens))  # a sample may be cut
        if end > first and np.array_equal(tokens[:end], whole[:end]):
            log_probs[first:end] = turn.log_probs[: end - first]
            for begin, last, version in turn.spans:
                versions[first + begin : min(first + last, end)] = version
    known = versions[start:] >= 0
    if mask.shape != known.shape or not (known | (mask == 0) | bool(sample.remove_sample)).all():
        return None
    sample.weight_versions = [int(version) if version >= 0 else None for version in versions[start:]]
    if sample.rollout_log_probs is not None and len(sample.rollout_log_probs) == length:
        sample.rollout_log_probs = np.where(known, log_probs[start:], sample.rollout_log_probs).tolist()
    return int(versions.max())
