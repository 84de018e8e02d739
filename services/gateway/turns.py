"""Samples turns: a prompt is made or carried on, tokens are sampled until the turn ends, and what was sampled is recorded before it is
answered.

A turn continues from its tokens where the engine aborted it, its replica died, or another gateway did. It is known by its request's id:
asked for again, here or at another gateway, it is answered with what was sampled, or continues from what was recorded.
"""

import asyncio
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from services.gateway.chat_tokens import ChatTokens
from services.gateway.replicas import GenerationClient, Hear, ReplicaFailed, Replicas
from services.gateway.turn_decisions import (
    StopStringTracker,
    TurnAnswers,
    TurnText,
    check_tokens,
    continued,
    digests,
    recalled,
    stops_of,
    thought_digest,
    turn_sampling,
    turn_seed,
    unconstrained,
)
from services.gateway.turn_pictures import TurnPictures
from shared.config.service_sections import GatewaySection
from shared.formats.request import ChatTurn, TokenTurn, TurnRefused, TurnResult, overlong_prompt, pictures_in, split
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import put_off
from shared.runtime.traces import Traces, TraceSpan
from shared.schema.messages import Sampling
from shared.sessions.session import (
    RECORDED,
    Finish,
    PendingTurn,
    SampledTokens,
    SessionEnded,
    SessionLog,
    SessionOver,
    SessionUnknown,
    Turn,
    TurnBegun,
    TurnEnded,
    TurnExtended,
    TurnGeneration,
    TurnHeld,
    TurnRecord,
    TurnRequest,
    appended,
)
from shared.sessions.session_store import SessionStore


class LiveTurn:
    """A turn's tokens as they are sampled, for the answer that streams it. ``prompt``: its token ids, once it has begun. ``cached``: of
    them, those that the first request found in the prefix cache."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.cached = 0
        self._heard: list[int] = []
        self._news = asyncio.Event()

    def begin(self, pending: PendingTurn) -> None:
        """Notes the turn's prompt, and what another gateway has sampled of it already."""
        self.prompt = pending.prompt.tolist()
        self._note(pending.completion.tolist())

    def hear(self, generated: TurnGeneration) -> None:
        """Notes further tokens."""
        self.cached = self.cached or generated.cached
        self._note(generated.completion.tolist())

    def _note(self, tokens: list[int]) -> None:
        if tokens:
            self._heard += tokens
            self._news.set()

    def end(self) -> None:
        """Wakes whoever waits: nothing more is heard."""
        self._news.set()

    async def news(self, seconds: float) -> None:
        """Waits until there are tokens that were not taken, the turn has ended, or so many seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def taken(self) -> list[int]:
        """Returns the tokens that were heard since the last call."""
        self._news.clear()
        heard, self._heard = self._heard, []
        return heard


WATCH_SECONDS = 0.5  # The interval at which is seen which sessions have ended: those of all turns in one round trip


class SessionWatch:
    """Ends turns while they are sampled: of sessions that end, and all of them when the gateway stops. No turn's time runs while replicas
    sleep for a trainer. ``asleep``: whether replicas sleep now."""

    def __init__(self, sessions: SessionStore, limits: GatewaySection, asleep: Callable[[], bool]) -> None:
        self._sessions, self._limits, self._asleep, self._stopped = sessions, limits, asleep, False
        self._watched: dict[asyncio.Timeout, SessionLog] = {}

    @asynccontextmanager
    async def turn(self, log: SessionLog) -> AsyncIterator[None]:
        """Runs the body for a turn's time, and not beyond the end of the session and of the gateway. Raises TurnRefused."""
        seconds = min(self._limits.gateway_turn_timeout, log.deadline - time.time())
        try:
            async with asyncio.timeout(0 if self._stopped else max(seconds, 0.1)) as limit:
                self._watched[limit] = log
                try:
                    yield
                finally:
                    del self._watched[limit]
        except TimeoutError:
            if log.ended is not None:
                raise _over(log) from None
            if self._stopped:
                raise TurnRefused(503, "this gateway stops; another continues", code="gateway_stopping", retry_after_s=1.0) from None
            raise TurnRefused(503, f"the turn did not end within {seconds:.0f} s", code="turn_timeout") from None
        except SessionOver:
            raise _over(log) from None
        except SessionUnknown:
            raise TurnRefused(410, "the session's record is gone", code="session_ended") from None
        except TurnHeld:
            raise TurnRefused(503, "another request has taken the turn over", code="turn_held", retry_after_s=1.0) from None

    async def keep(self) -> None:
        """Looks at the sessions again and again. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            elapsed, before = loop.time() - before, loop.time()
            for limit in self._watched if self._asleep() else ():
                put_off(limit, elapsed)
            with suppress(MyxoError):  # the store is away: turns see that where they are recorded
                await self._sessions.refresh_all(self._watched.values())
            for limit, log in self._watched.items():
                if log.ended is not None and not limit.expired():
                    limit.reschedule(loop.time())

    def stop(self) -> None:
        """Ends all turns: what was recorded of them is continued elsewhere."""
        self._stopped, now = True, asyncio.get_running_loop().time()
        for limit in self._watched:
            if not limit.expired():
                limit.reschedule(now)


LONGEST_ANSWER = 1 << 20  # tokens that a frozen model may generate where its client does not say: its context ends them


class UnrecordedSessions(SessionStore):
    """Sessions of frozen models: each request has a log of its own, of which nothing is stored and nothing is trained."""

    async def _append(self, log: SessionLog, record: TurnRecord) -> Turn | PendingTurn:
        log.apply([record])
        if (found := log.turns.get(record.request) or log.pending.get(record.request)) is None:
            raise SessionOver(f"session {log.session.id} has ended")
        return found

    async def refresh(self, log: SessionLog) -> None:
        """Does nothing: there is no other record of the log."""

    async def refresh_all(self, logs: Collection[SessionLog]) -> None:
        """Notes which of the sessions have ended."""
        ended = await self.ended([log.session.id for log in logs])
        for log in logs:
            log.ended = log.ended or (SessionEnded(at=time.time()) if log.session.id in ended else None)

    @staticmethod
    def log_for(log: SessionLog) -> SessionLog:
        """Returns the log of a request that a session's client makes to a frozen model, whose answer it samples as it likes."""
        free: dict[str, Any] = {"evaluation": True, "seed": None, "min_version": 0, "deadline": log.deadline, "kept": 0, "variables": {}}
        sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST_ANSWER)
        return SessionLog(log.session.model_copy(update={**free, "sampling": sampling}), ended=log.ended)


def turn_span(
    log: SessionLog, begun: PendingTurn, turn: Turn | None, times: tuple[float, float], before: int = 0, error: str = ""
) -> TraceSpan:
    """Returns the span of a turn. ``turn``: None where it failed. ``times``: of its begin and end, seconds since the epoch. ``before``:
    tokens that others had sampled of it."""
    session = log.session
    completion, versions = begun.completion if turn is None else turn.completion, [] if turn is None else [span[2] for span in turn.spans]
    return TraceSpan(
        trace=session.group,
        name="turn",
        started=times[0],
        ended=times[1],
        error=error,
        attributes={
            "group": session.group,
            "attempt": session.attempt,
            "rollout": session.rollout,
            "session": session.id,
            "request": begun.request,
            "continues": begun.parent,
            "taken_over": before > 0,
            "prompt_tokens": len(begun.prompt),
            "tokens": len(completion),
            "cached_tokens": None if turn is None else turn.cached,
            "finish": None if turn is None else turn.finish,
            "replica": (begun.replica if turn is None else turn.replica) or None,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
        },
    )


def _why(log: SessionLog, raised: BaseException) -> str:
    if log.ended is not None:
        return "the session has ended" + (f": {log.ended.reason}" if log.ended.reason else "")
    if isinstance(raised, asyncio.CancelledError):
        return "its time was over, or its client is gone"
    return str(raised) or type(raised).__name__


# For how long a turn is its gateway's after its last sign of life, and how often it gives one in that time
LEASE_SECONDS, RENEWALS = 12.0, 4
HELD_SECONDS = 0.2  # The interval at which a turn that another gateway generates is read again
PAUSE_SECONDS = 0.2  # The pause after an engine aborted a request: the push that caused it is still in progress
LONG_BYTES = 1 << 15  # The text from which on a prompt is made in another thread: a millisecond and more of work


@dataclass(frozen=True)
class TurnPrompt:
    """The tokens that a turn begins with: int32 [P]; ``parent``: the turn that it carries on, of which the first ``shared`` tokens are.
    ``continues``: the turn that its conversation continues, with how many messages. ``pictures``: the names of what it shows, in order."""

    tokens: NDArray[np.int32]
    parent: Turn | None
    continues: tuple[Turn, int] | None = None
    pictures: tuple[str, ...] = ()

    @property
    def shared(self) -> int:
        return 0 if self.parent is None else len(self.parent.prompt) + len(self.parent.completion)


class Turns:
    """The turns of this gateway with one ``model``, at its ``replicas``. ``holder``: its name in sessions' records. ``watch``: ends those
    of sessions that have ended. ``traces``: take a span of each.
    """

    def __init__(
        self,
        sessions: SessionStore,
        replicas: Replicas,
        client: GenerationClient,
        chat: ChatTokens,
        model: str,
        holder: str,
        limits: GatewaySection,
        traces: Traces,
        pictures: TurnPictures,
    ) -> None:
        self._sessions, self.replicas, self._client, self._chat, self.model = sessions, replicas, client, chat, model
        self._holder, self._limits, self._traces, self._pictures = holder, limits, traces, pictures
        self._answers = TurnAnswers(chat, model)
        self.watch = SessionWatch(sessions, limits, lambda: replicas.asleep)
        self._log = structlog.get_logger()
        self._reported = set[str]()  # fields whose constraints are ignored, named in the log once

    def noted(self, log: SessionLog, asked: Any) -> Any:
        """Returns a request with what has no effect: constraints that are ignored, tools where the model's chat template shows none. Raises
        TurnRefused for constraints that are not served."""
        if isinstance(asked, TokenTurn):
            return asked
        self._chat.check_variables(asked.variables)
        # a set's are the run's own words, of which the template reads what it knows
        own = {name: value for name, value in log.session.variables.items() if name in self._chat.readable}
        asked = recalled(log, replace(asked, variables={**own, **asked.variables}))
        if asked.tools and not self._chat.shows_tools:
            asked = replace(asked, ignored=(*asked.ignored, "tools"))
        mode, fields = self._limits.constraints, {one.field for one in asked.constraints}
        asked = unconstrained(asked, mode, evaluation=log.session.evaluation, notes=self._chat.shows_system)
        if not asked.constraints and (new := fields - self._reported):
            self._reported |= new
            self._log.warning("constraints_ignored", fields=sorted(new), session=log.session.id)
        return asked

    def results(self, log: SessionLog, asked: Any, lives: Iterable[LiveTurn | None] = repeat(None)) -> "list[asyncio.Task[TurnResult]]":
        """Begins the turns of a request's answers: those of a `ChatTurn` have one prompt, which is made once. Each of ``lives`` hears the
        tokens of one as they are sampled. They raise TurnRefused."""
        ready = functools.cache(lambda: asyncio.create_task(self._ready(log, asked)))
        return [asyncio.create_task(self._result(log, one, live, ready)) for one, live in zip(split(asked), lives, strict=False)]

    def text(self, log: SessionLog, asked: ChatTurn | TokenTurn, live: LiveTurn) -> TurnText:
        """Returns the text of a turn as it is sampled."""
        stops = stops_of(log.session, asked)
        if isinstance(asked, TokenTurn):
            return TurnText(self._chat, live.prompt, (), stops, whole=True)
        return TurnText(self._chat.varied(asked.variables), live.prompt, asked.tools, stops, whole=bool(asked.prefill))

    async def count(self, log: SessionLog, asked: ChatTurn) -> int:
        """Returns how many tokens the prompt of a turn would have. Raises TurnRefused."""
        async with self.watch.turn(log):
            await self.replicas.present(self._limits.gateway_wait)
        return len((await self._of_chat(log, asked))[1].tokens)

    # --- before it is sampled

    async def _ready(self, log: SessionLog, asked: Any) -> tuple[Any, TurnPrompt, Sampling, str]:
        """Returns a request with its prompt, whose pictures are stored, how it is sampled, and its grammar. Raises TurnRefused."""
        if log.ended is not None:
            raise _over(log)
        if time.time() > log.deadline:
            raise TurnRefused(410, "the session's deadline has passed", code="session_ended")
        async with self.watch.turn(log):
            await self.replicas.present(self._limits.gateway_wait)
        self.replicas.check_version(asked.min_version, self.replicas.fleet(log.session.evaluation))
        check_tokens(max(asked.sampling.stop_token_ids, default=0), self.replicas.vocabulary, "stop_token_ids")
        asked, prompt = await (self._of_chat(log, asked) if isinstance(asked, ChatTurn) else self._of_tokens(log, asked))
        context, stop_ids = self.replicas.context, self._chat.stop_ids
        sampling = turn_sampling(log.session, asked.sampling, len(prompt.tokens), context, stop_ids, asked.place)
        grammar = self._chat.varied(asked.variables).grammar(asked, prompt.tokens) if isinstance(asked, ChatTurn) else ""
        async with self.watch.turn(log):
            await self._pictures.store(log, prompt.pictures, asked.shown)
        return asked, prompt, sampling, grammar

    async def _of_chat(self, log: SessionLog, asked: ChatTurn) -> tuple[ChatTurn, TurnPrompt]:
        asked = replace(asked, shown=await self._pictures.of(log, pictures_in(asked.messages), asked.pictures, asked.place))
        prompt = await self._prompt(log, asked)
        if prompt.continues and prompt.continues[0].messages:  # what is stored of a conversation is stored once
            before, further = prompt.continues
            asked = replace(asked, after=before.request, kept=asked.kept[-further:])
        return asked, prompt

    async def _of_tokens(self, log: SessionLog, asked: TokenTurn) -> tuple[TokenTurn, TurnPrompt]:
        prompt = await asyncio.to_thread(self._chat.encode, asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        check_tokens(int(max(prompt, default=0)), self.replicas.vocabulary, asked.place)
        parent = log.extended(prompt)
        names = () if parent is None else parent.pictures
        asked = replace(asked, shown=await self._pictures.of(log, names, {}, asked.place))
        self._pictures.check(prompt, names, asked.shown, asked.place)
        return asked, TurnPrompt(prompt, parent, pictures=names)

    async def _prompt(self, log: SessionLog, asked: ChatTurn) -> TurnPrompt:
        """Returns a turn's prompt; other requests do not wait while a long one is made. Raises TurnRefused."""
        if asked.variables:
            await asyncio.to_thread(self._chat.varied, asked.variables)
        length = self._chat.text_bytes(asked.messages, asked.tools)
        if (fewest := length // self._chat.tokenizer.longest_token) >= self.replicas.context:
            raise overlong_prompt(fewest, self.replicas.context - 1, asked.place)
        if length < LONG_BYTES:
            return self._made(log, asked)
        return await asyncio.to_thread(self._made, log, asked)

    def _made(self, log: SessionLog, asked: ChatTurn) -> TurnPrompt:
        """Carries on the turn that the conversation continues from, where that can be done with its very ids; else renders it anew."""
        chat, place, turns = self._chat.varied(asked.variables), asked.place, log.turns.values()
        names, shows = pictures_in(asked.messages), self._pictures.expanded
        asking = asked.messages[:-1] if asked.prefill else asked.messages
        found = continued(turns, asking, asked.setting)
        continues = None
        if found is not None:
            turn, further = found
            continues = turn, len(further) + bool(asked.prefill)
            if (bridged := chat.bridge(turn, further, asked.tools)) is not None:
                known = len(turn.tokens)
                bridged = np.concatenate([bridged[:known], shows(bridged[known:], further, asked)])
                if not asked.prefill:
                    return TurnPrompt(bridged, turn, continues, names)
                before, begun = (chat.render(messages, asked.tools, place, turns) for messages in (asking, asked.messages))
                if np.array_equal(begun[: len(before)], before):
                    return TurnPrompt(np.concatenate([bridged, begun[len(before) :]]), turn, continues, names)
        tokens = shows(chat.render(asked.messages, asked.tools, place, turns), asked.messages, asked)
        return TurnPrompt(tokens, log.extended(tokens, names), continues, names)

    # --- generating

    async def _result(self, log: SessionLog, one: Any, live: LiveTurn | None, ready: Callable[[], Awaitable[Any]]) -> TurnResult:
        turn: Any = log.turns.get(one.request_id)
        if turn is None:
            asked, prompt, sampling, grammar = await (ready() if isinstance(one, ChatTurn) else self._ready(log, one))
            async with self.watch.turn(log):
                turn = await self._begun(log, one.request_id, prompt)
                if isinstance(turn, PendingTurn):
                    asked = replace(asked, sampling=replace(asked.sampling, seed=turn_seed(log, one)))
                    if live is not None:
                        live.begin(turn)
                    turn = await self._traced(log, turn, self._sampled(log, replace(turn), sampling, asked, live, grammar))
        return (self._answers.chat if isinstance(one, ChatTurn) else self._answers.tokens)(turn, log.session, one)

    async def _traced(self, log: SessionLog, begun: PendingTurn, sampled: Awaitable[Turn]) -> Turn:
        """Returns the turn that is sampled; its span is added whatever ends it."""
        started, turn, error = time.time(), None, ""
        before = len(begun.completion)  # more is added to it as it is sampled
        try:
            async with self._held(log, begun.holder, begun.request):
                turn = await sampled
            return turn
        except BaseException as raised:
            error = _why(log, raised)
            raise
        finally:
            if self._traces.on:
                self._traces.add(turn_span(log, begun, turn, (started, time.time()), before, error))

    async def _begun(self, log: SessionLog, request: str, prompt: TurnPrompt) -> PendingTurn | Turn:
        """Begins a turn, or takes it over; waits while another request samples it, here or at another gateway."""
        holder = f"{self._holder}.{uuid.uuid4().hex[:8]}"
        while True:
            try:
                return await self._sessions.begin(log, self._record(holder, request, prompt))
            except TurnHeld as held:
                self._log.debug("turn_held", request=request, until=held.until)
                await asyncio.sleep(HELD_SECONDS)
                await self._sessions.refresh(log)
                if request in log.turns:
                    return log.turns[request]
                left = log.pending[request].until - time.time() if request in log.pending else 0.0  # who held it may have let go since
                if log.ended is None and left > 0:
                    await asyncio.sleep(min(left, LEASE_SECONDS / RENEWALS))

    def _record(self, holder: str, request: str, prompt: TurnPrompt, seconds: float = LEASE_SECONDS) -> TurnBegun:
        now, shared = time.time(), prompt.shared
        name = None if prompt.parent is None else prompt.parent.request
        held = {"holder": holder, "at": now, "until": now + seconds}
        return TurnBegun(request=request, parent=name, shared=shared, rest=prompt.tokens[shared:], pictures=prompt.pictures, **held)

    @asynccontextmanager
    async def _held(self, log: SessionLog, holder: str, request: str) -> AsyncIterator[None]:
        """Holds a turn while the body runs, and lets go of it at once where it does not end."""

        async def hold(seconds: float) -> None:
            known = TurnPrompt(np.empty(0, np.int32), None)
            with suppress(MyxoError):  # the body will see what has become of the session
                await self._sessions.begin(log, self._record(holder, request, known, seconds))

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_SECONDS / RENEWALS)
                await hold(LEASE_SECONDS)

        renewing = asyncio.create_task(renew())
        try:
            yield
        except BaseException:
            renewing.cancel()
            await asyncio.shield(asyncio.create_task(hold(0.0)))
            raise
        finally:
            renewing.cancel()

    async def _sampled(
        self, log: SessionLog, pending: PendingTurn, sampling: Sampling, asked: ChatTurn | TokenTurn, live: LiveTurn | None, grammar: str
    ) -> Turn:
        """Returns a turn that is sampled to its end. ``grammar``: of a constrained one, which one request to the engine samples as a whole,
        since a grammar begins with a completion."""
        cached, whole = None, any((grammar, sampling.whole))
        while True:
            left = sampling.max_new_tokens - len(pending.completion)
            if left <= 0:
                return await self._ended(log, pending, "length", cached or 0, asked)
            tracker = StopStringTracker(pending.completion, sampling, self._chat.text)
            hear = None if live is None or whole else tracker.hearing(live.hear)
            found, pending.replica = await self._generate(log, pending, sampling, hear, grammar, asked)
            generated = tracker.whole(found)
            cached = generated.cached if cached is None else cached
            if generated.finish == "stop" or (generated.finish == "length" and len(generated.completion) >= left):
                return await self._ended(log, replace(pending, **appended(pending, generated)), generated.finish, cached, asked)
            if len(generated.completion) and not whole:
                held = {"holder": pending.holder, "until": time.time() + LEASE_SECONDS, "replica": pending.replica}
                sampled = {name: getattr(generated, name) for name in SampledTokens.model_fields}
                progress = TurnExtended(request=pending.request, start=len(pending.completion), **held, **sampled)
                pending = replace(await self._sessions.extend(log, progress))  # apart from what others record of it
            if generated.finish == "abort":
                await self._sessions.refresh(log)
                if log.ended is not None:
                    raise _over(log)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _generate(
        self, log: SessionLog, pending: PendingTurn, sampling: Sampling, hear: Hear | None, grammar: str, asked: ChatTurn | TokenTurn
    ) -> tuple[TurnGeneration, str]:
        left, fewest = (max(0, count - len(pending.completion)) for count in (sampling.max_new_tokens, sampling.min_new_tokens))
        most = left if grammar or sampling.whole else min(left, self._limits.gateway_checkpoint_tokens)
        min_version = max(asked.min_version, log.session.min_version)
        wanted = sampling.model_copy(update={"max_new_tokens": most, "min_new_tokens": min(fewest, most)})
        tokens = np.concatenate([pending.prompt, pending.completion])
        while True:
            async with self.replicas.place(log, len(tokens), min_version, self._limits.gateway_wait) as (target, limit, resident):
                request = TurnRequest(
                    request=pending.request,
                    input_ids=tokens,
                    sampling=wanted,
                    seed=asked.sampling.seed,
                    min_version=min_version,
                    seconds=self._limits.gateway_turn_timeout,
                    stream=hear is not None,
                    structural_tag=grammar,
                    top_count=asked.top_logprobs,
                    kept=log.session.kept,
                    pictures=tuple(asked.shown[name].data for name in pending.pictures),
                )
                try:
                    generated = await self._client.generate(target.url, request, hear)
                    limit.ended(generated.retractions, time.monotonic())
                    self.replicas.failed.answered(target.instance)
                    resident.tokens = len(tokens) + len(generated.completion)
                    return generated, target.instance
                except ReplicaFailed as error:
                    self._log.warning("replica_failed", replica=target.instance, error=str(error))
                    if error.busy:
                        limit.ended(1, time.monotonic())  # it had no room
                    self.replicas.failed.avoid(target.instance)

    async def _ended(self, log: SessionLog, whole: PendingTurn, finish: Finish, cached: int, asked: ChatTurn | TokenTurn) -> Turn:
        beside: dict[str, Any] = {"cached": cached, "replica": whole.replica, "top_log_probs": whole.top_log_probs, "kept": whole.kept}
        turn = Turn(whole.request, whole.parent, whole.prompt, whole.completion, whole.log_probs, whole.spans, finish, **beside)
        if isinstance(asked, ChatTurn):
            result = self._answers.chat(turn, log.session, asked)
            whole_conversation = asked.answered(result)
            kept = [*asked.kept[: -1 if asked.prefill else None], whole_conversation[-1]] if asked.kept else []
            turn = replace(
                turn,
                conversation=digests(whole_conversation, asked.setting)[-1],
                thought=thought_digest(result.reasoning),
                messages=json.dumps(kept) if kept else "",
                after=asked.after,
                thread=asked.thread if kept else "",
            )
        return await self._sessions.append(log, TurnEnded(holder=whole.holder, **{name: getattr(turn, name) for name in RECORDED}))


def _over(log: SessionLog) -> TurnRefused:
    reason = log.ended.reason if log.ended is not None else ""
    return TurnRefused(410, "the session has ended" + (f": {reason}" if reason else ""), code="session_ended")
