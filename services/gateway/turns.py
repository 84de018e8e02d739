"""Draws turns: a prompt is made or carried on, tokens are drawn until the turn ends, and what was drawn is recorded before it is answered.

A turn goes on from its tokens where the engine aborted it, its replica died, or another gateway did. It is known by its request's id:
asked for again, here or at another gateway, it is answered with what was drawn, or goes on from what was recorded.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from services.gateway.chat_tokens import ChatTokens
from services.gateway.conversations import continued, digests
from services.gateway.draw_client import DrawClient, Hear, ReplicaFailed
from services.gateway.live_turn import LiveTurn
from services.gateway.replicas import Replicas
from services.gateway.session_watch import SessionWatch
from services.gateway.stop_edge import StopEdge
from services.gateway.turn_answer import TurnAnswers, stops_of
from services.gateway.turn_sampling import check_tokens, drawn_sampling
from services.gateway.turn_spans import traced_turn
from services.gateway.turn_text import TurnText
from services.gateway.wire.request import (
    ChatTurn,
    RequestedSampling,
    TokenTurn,
    TurnResult,
    assistant_message,
)
from services.gateway.wire.turn_refused import TurnRefused, overlong_prompt
from shared.config.gateway_section import GatewaySection
from shared.runtime.errors import MyxoError
from shared.runtime.traces import Traces
from shared.schema.messages import Sampling
from shared.sessions.session import (
    Drawn,
    DrawRequest,
    Finish,
    PendingTurn,
    SessionLog,
    SessionOver,
    SessionUnknown,
    Turn,
    TurnBegun,
    TurnDrawn,
    TurnEnded,
    TurnHeld,
    joined,
)
from shared.sessions.session_store import SessionStore

LEASE_SECONDS, RENEWALS = 12.0, 4
"""For how long a turn is its gateway's after its last sign of life, and how often it gives one in that time."""

HELD_SECONDS = 0.2
"""The interval at which a turn that another gateway draws is looked at."""

PAUSE_SECONDS = 0.2
"""The pause after a replica failed, or an engine aborted a draw: the push that caused it is still in progress."""


LONG_BYTES = 1 << 15
"""The text from which on a prompt is made in another thread: a millisecond and more of work."""


@dataclass(frozen=True)
class TurnPrompt:
    """What a turn begins with: int32 [P]; ``parent``: the turn that it carries on, of which the first ``shared`` tokens are."""

    tokens: NDArray[np.int32]
    parent: Turn | None

    @property
    def shared(self) -> int:
        return 0 if self.parent is None else len(self.parent.prompt) + len(self.parent.completion)


class Turns:
    """The turns of this gateway. ``holder``: its name in sessions' records. ``watch``: ends those of sessions that have ended.
    ``traces``: take a span of each.
    """

    def __init__(
        self,
        sessions: SessionStore,
        replicas: Replicas,
        door: DrawClient,
        chat: ChatTokens,
        model: str,
        holder: str,
        limits: GatewaySection,
        traces: Traces,
    ) -> None:
        self._sessions, self._replicas, self._door, self._chat_tokens = sessions, replicas, door, chat
        self._holder, self._limits, self._traces = holder, limits, traces
        self._answers = TurnAnswers(chat, model)
        self.watch = SessionWatch(sessions, lambda: replicas.asleep)
        self._log = structlog.get_logger()

    def noted(self, asked: ChatTurn) -> ChatTurn:
        """Returns a request with what has no effect by the model: tools where its chat template shows none."""
        if not asked.tools or self._chat_tokens.shows_tools:
            return asked
        return replace(asked, ignored=(*asked.ignored, "tools"))

    async def chat(self, log: SessionLog, asked: ChatTurn, live: LiveTurn | None = None) -> TurnResult:
        """Returns the next message of a conversation; ``live`` hears its tokens as they are drawn. Raises TurnRefused."""
        turn = log.turns.get(asked.request_id)
        if turn is None:
            await self._check(log, asked)
            prompt = await self._prompt(log, asked)
            turn = await self._turn(log, asked.request_id, prompt, asked.sampling, asked.min_version, asked, live)
        return self._answers.chat(turn, log.session, asked)

    def text(self, log: SessionLog, asked: ChatTurn, live: LiveTurn) -> TurnText:
        """Returns what tells the text of a turn as it is drawn."""
        return TurnText(self._chat_tokens, live.prompt, asked.tools, stops_of(log.session, asked))

    async def tokens(self, log: SessionLog, asked: TokenTurn) -> TurnResult:
        """Returns the tokens that follow a prompt. Raises TurnRefused."""
        turn = log.turns.get(asked.request_id)
        if turn is None:
            await self._check(log, asked)
            check_tokens(int(asked.prompt.max()), self._replicas.vocabulary, asked.place)
            prompt = TurnPrompt(asked.prompt, log.extended(asked.prompt))
            turn = await self._turn(log, asked.request_id, prompt, asked.sampling, asked.min_version, None, None)
        return self._answers.tokens(turn)

    async def count(self, log: SessionLog, asked: ChatTurn) -> int:
        """Returns how many tokens the prompt of a turn would have. Raises TurnRefused."""
        await self._replicas.present(self._limits.gateway_wait)
        return len((await self._prompt(log, asked)).tokens)

    # --- before it is drawn

    async def _check(self, log: SessionLog, asked: ChatTurn | TokenTurn) -> None:
        if log.ended is not None:
            raise _over(log)
        if time.time() > log.deadline:
            raise TurnRefused(410, "the session's deadline has passed", code="session_ended")
        await self._replicas.present(self._limits.gateway_wait)
        self._replicas.check_version(asked.min_version)
        check_tokens(max(asked.sampling.stop_token_ids, default=0), self._replicas.vocabulary, "stop_token_ids")

    async def _prompt(self, log: SessionLog, asked: ChatTurn) -> TurnPrompt:
        """Returns a turn's prompt; other requests do not wait while a long one is made. Raises TurnRefused."""
        length = self._chat_tokens.text_bytes(asked.messages, asked.tools)
        if length > self._replicas.context * self._chat_tokens.tokenizer.longest_token:
            raise overlong_prompt(length, self._replicas.context - 1, asked.place, "bytes of text")
        if length < LONG_BYTES:
            return self._made(log, asked)
        return await asyncio.to_thread(self._made, log, asked)

    def _made(self, log: SessionLog, asked: ChatTurn) -> TurnPrompt:
        """Carries on the turn that the conversation goes on from, where that can be done with its very ids; else renders it anew."""
        found = continued(
            log.turns.values(), asked.messages, asked.tools, lambda turn: self._chat_tokens.parse(turn, asked.tools).reasoning
        )
        if found is not None:
            turn, further = found
            if (bridged := self._chat_tokens.bridge(turn, further, asked.tools)) is not None:
                return TurnPrompt(bridged, turn)
        tokens = self._chat_tokens.render(asked.messages, asked.tools, asked.place, log.turns.values())
        return TurnPrompt(tokens, log.extended(tokens))

    # --- drawing

    async def _turn(
        self,
        log: SessionLog,
        request: str,
        prompt: TurnPrompt,
        asked: RequestedSampling,
        min_version: int,
        chat: ChatTurn | None,
        live: LiveTurn | None,
    ) -> Turn:
        seconds = min(self._limits.gateway_turn_timeout, log.deadline - time.time())
        place = "token_ids" if chat is None else chat.place
        sampling = drawn_sampling(log.session, asked, len(prompt.tokens), self._replicas.context, self._chat_tokens.stop_ids, place)
        try:
            async with self.watch.turn(log, max(seconds, 0.1)):
                begun = await self._begun(log, request, prompt)
                if isinstance(begun, Turn):
                    return begun
                if live is not None:
                    live.begin(begun)
                with traced_turn(self._traces, log, begun) as traced:
                    async with self._held(log, request):
                        turn = await self._drawn(log, begun, sampling, max(min_version, log.session.min_version), chat, live)
                    traced.turn = turn
                return turn
        except TimeoutError:
            if log.ended is not None:
                raise _over(log) from None
            if self.watch.stopped:
                raise TurnRefused(503, "this gateway stops; another goes on", code="gateway_stopping", retry_after_s=1.0) from None
            raise TurnRefused(503, f"the turn did not end within {seconds:.0f} s", code="turn_timeout") from None
        except SessionOver:
            raise _over(log) from None
        except SessionUnknown:
            raise TurnRefused(410, "the session's record is gone", code="session_ended") from None
        except TurnHeld:
            raise TurnRefused(503, "another gateway has taken the turn over", code="turn_held", retry_after_s=1.0) from None

    async def _begun(self, log: SessionLog, request: str, prompt: TurnPrompt) -> PendingTurn | Turn:
        """Begins a turn, or takes it over; waits while another gateway draws it."""
        while True:
            try:
                return await self._sessions.begin(log, self._record(request, prompt))
            except TurnHeld as held:
                self._log.debug("turn_held", request=request, until=held.until)
                await asyncio.sleep(HELD_SECONDS)
                await self._sessions.refresh(log)
                if request in log.turns:
                    return log.turns[request]
                if log.ended is None and time.time() < held.until:
                    await asyncio.sleep(min(held.until - time.time(), LEASE_SECONDS / RENEWALS))

    def _record(self, request: str, prompt: TurnPrompt | None = None, seconds: float = LEASE_SECONDS) -> TurnBegun:
        """Returns the record that begins a turn, or, without a prompt, holds it for further seconds."""
        now = time.time()
        parent, shared = (prompt.parent, prompt.shared) if prompt is not None else (None, 0)
        rest = np.empty(0, np.int32) if prompt is None else prompt.tokens[shared:]
        name = None if parent is None else parent.request
        return TurnBegun(request=request, holder=self._holder, at=now, until=now + seconds, parent=name, shared=shared, rest=rest)

    @asynccontextmanager
    async def _held(self, log: SessionLog, request: str) -> AsyncIterator[None]:
        """Holds a turn while the body runs, and lets go of it at once where it does not end."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_SECONDS / RENEWALS)
                with contextlib.suppress(MyxoError):  # the body will see what has become of the session
                    await self._sessions.begin(log, self._record(request))

        renewing = asyncio.create_task(renew())
        try:
            yield
        except BaseException:
            renewing.cancel()
            released = asyncio.create_task(self._release(log, request))
            await asyncio.shield(released)
            raise
        finally:
            renewing.cancel()

    async def _release(self, log: SessionLog, request: str) -> None:
        with contextlib.suppress(MyxoError):
            await self._sessions.begin(log, self._record(request, seconds=0.0))

    async def _drawn(
        self,
        log: SessionLog,
        pending: PendingTurn,
        sampling: Sampling,
        min_version: int,
        chat: ChatTurn | None,
        live: LiveTurn | None,
    ) -> Turn:
        cached: int | None = None
        while True:
            left = sampling.max_new_tokens - len(pending.completion)
            if left <= 0:
                return await self._ended(log, pending, "length", cached or 0, chat)
            edge = StopEdge(pending.completion, sampling.stop, self._chat_tokens.text)
            most = min(left, self._limits.gateway_checkpoint_tokens)
            hear = None if live is None else edge.hearing(live.hear)
            found, pending.replica = await self._draw(log, pending, sampling, most, min_version, hear)
            drawn = edge.whole(found)
            cached = drawn.cached if cached is None else cached
            offset = len(pending.completion)
            if drawn.finish == "stop" or (drawn.finish == "length" and len(drawn.completion) >= left):
                whole = _extended(pending, drawn)
                return await self._ended(log, whole, drawn.finish, cached, chat)
            if len(drawn.completion):
                pending = await self._sessions.extend(log, self._progress(pending, offset, drawn))
            if drawn.finish == "abort":
                await self._sessions.refresh(log)
                if log.ended is not None:
                    raise _over(log)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _draw(
        self, log: SessionLog, pending: PendingTurn, sampling: Sampling, most: int, min_version: int, hear: Hear | None
    ) -> tuple[Drawn, str]:
        """Returns further tokens of a turn, and which replica has given them."""
        fewest = max(0, sampling.min_new_tokens - len(pending.completion))
        wanted = sampling.model_copy(update={"max_new_tokens": most, "min_new_tokens": min(fewest, most)})
        tokens = np.concatenate([pending.prompt, pending.completion])
        while True:
            async with self._replicas.place(log.session.id, min_version, self._limits.gateway_wait) as (target, limit):
                request = DrawRequest(
                    request=pending.request,
                    input_ids=tokens,
                    sampling=wanted,
                    seed=log.session.seed,
                    min_version=min_version,
                    seconds=self._limits.gateway_turn_timeout,
                    stream=hear is not None,
                )
                try:
                    drawn = await self._door.draw(target.url, request, hear)
                    limit.ended(drawn.retractions, time.monotonic())
                    return drawn, target.instance
                except ReplicaFailed as error:
                    self._log.warning("replica_failed", replica=target.instance, error=str(error))
                    if error.busy:
                        limit.refused(time.monotonic())
                    self._replicas.avoid(target.instance)
            await asyncio.sleep(PAUSE_SECONDS)

    def _progress(self, pending: PendingTurn, start: int, drawn: Drawn) -> TurnDrawn:
        return TurnDrawn(
            request=pending.request,
            holder=self._holder,
            start=start,
            completion=drawn.completion,
            log_probs=drawn.log_probs,
            spans=drawn.spans,
            until=time.time() + LEASE_SECONDS,
            replica=pending.replica,
        )

    async def _ended(self, log: SessionLog, whole: PendingTurn, finish: Finish, cached: int, chat: ChatTurn | None) -> Turn:
        """Records a turn that has ended, with the digest of its conversation, and returns the turn that counts."""
        turn = Turn(
            whole.request,
            whole.parent,
            whole.prompt,
            whole.completion,
            whole.log_probs,
            whole.spans,
            finish,
            cached=cached,
            replica=whole.replica,
        )
        if chat is not None:
            result = self._answers.chat(turn, log.session, chat)
            turn = replace(turn, conversation=digests([*chat.messages, assistant_message(result)], chat.tools)[-1])
        return await self._sessions.append(
            log,
            TurnEnded(
                request=turn.request,
                holder=self._holder,
                completion=turn.completion,
                log_probs=turn.log_probs,
                spans=turn.spans,
                finish=finish,
                conversation=turn.conversation,
                cached=cached,
                replica=turn.replica,
            ),
        )


def _over(log: SessionLog) -> TurnRefused:
    reason = log.ended.reason if log.ended is not None else ""
    return TurnRefused(410, "the session has ended" + (f": {reason}" if reason else ""), code="session_ended")


def _extended(pending: PendingTurn, drawn: Drawn) -> PendingTurn:
    """Returns a turn with what was drawn last; nothing is recorded."""
    return replace(
        pending,
        completion=np.concatenate([pending.completion, drawn.completion]),
        log_probs=np.concatenate([pending.log_probs, drawn.log_probs]),
        spans=joined(pending.spans, drawn.spans, len(pending.completion)),
    )
