"""Checks whether a live environment that steps keeps the protocol: its sessions, its turns, its repeats, its end."""

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.environment.environment import Environment
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed
from shared.environment.stepping import CloseRequest, OpenedSession, ResetRequest, StepRequest, TurnOutcome

MOST_TURNS = 64
"""Turns after which an episode that goes on is left."""

SIDE_BY_SIDE = 8

ODD_MESSAGES = ("", "答えは42です \U0001f9ee one\u2028two", "7 " * 50_000)

Check = tuple[str, Callable[[], Awaitable[str]]]


class SteppingChecks:
    """The checks of episodes in one environment; each returns its report, and raises if it failed.

    Args:
        seconds: returns the deadline of one request. responses: what the model is made to say, one after the other.
    """

    def __init__(
        self,
        environment: Environment,
        run: str,
        prompt: str,
        label: str | None,
        responses: Sequence[str],
        seconds: Callable[[], float],
        closes: bool,
    ) -> None:
        self._environment, self._run, self._prompt, self._label = environment, run, prompt, label
        self._responses, self._seconds, self._closes = responses, seconds, closes

    def checks(self) -> list[Check]:
        """Returns the checks by name, in order. Those of what can go wrong in a turn come first."""
        return [
            ("a reset", self._opens),
            ("the same reset twice", self._reset_twice),
            ("another reset", self._another_session),
            ("a first step", self._first_step),
            ("an episode to its end", self._to_the_end),
            ("the same step twice", self._step_twice),
            ("a turn out of order", self._out_of_order),
            ("an unknown session", self._unknown_session),
            ("odd messages", self._odd_messages),
            (f"{SIDE_BY_SIDE} episodes at once", self._side_by_side),
            ("a step after the end", self._after_the_end),
            *([("close", self._close)] if self._closes else []),
        ]

    async def _opens(self) -> str:
        opened = await self._reset(self._request())
        return f"session {opened.session[:32]}, {len(opened.messages)} messages, {len(opened.tools)} tools"

    async def _reset_twice(self) -> str:
        request = self._request()
        first, second = await self._reset(request), await self._reset(request)
        if first.session != second.session:
            raise self._failed(
                f"opened {first.session!r:.40}, then {second.session!r:.40}; a reset that comes again opens no second session"
            )
        if first != second:
            raise self._failed("gave other messages or tools the second time")
        return "the same session"

    async def _another_session(self) -> str:
        first, second = await self._reset(self._request()), await self._reset(self._request())
        if first.session == second.session:
            raise self._failed(f"opened {first.session!r:.40} for two episodes; each needs a session of its own")
        return "a session of its own"

    async def _first_step(self) -> str:
        return _told(await self._step(await self._reset(self._request()), 0, self._responses[0]))

    async def _step_twice(self) -> str:
        opened = await self._reset(self._request())
        first, second = await self._step(opened, 0, self._responses[0]), await self._step(opened, 0, self._responses[0])
        if first != second:
            raise self._failed(f"gave {_told(first)}, then {_told(second)}; a step that comes again is not taken twice")
        (_, once), (_, repeated), (_, once_more) = await self._played(), await self._played(times=2), await self._played()
        if once == once_more and repeated != once:
            raise self._failed(
                f"ended after {len(repeated)} turns where each step came twice, after {len(once)} otherwise; a step that comes again is "
                "not taken twice"
            )
        return "taken once"

    async def _out_of_order(self) -> str:
        opened = await self._reset(self._request())
        return await self._refused(lambda: self._step(opened, 5, self._responses[0]), "turn 5 of a session that has had none")

    async def _unknown_session(self) -> str:
        unknown = OpenedSession(f"no-such-{uuid.uuid4().hex}", [])
        return await self._refused(lambda: self._step(unknown, 0, self._responses[0]), "a step of a session that nobody opened")

    async def _odd_messages(self) -> str:
        for text in ODD_MESSAGES:
            await self._step(await self._reset(self._request()), 0, text)
        return "empty, beyond ASCII, and 100 kB long: taken"

    async def _side_by_side(self) -> str:
        opened = await asyncio.gather(*(self._reset(self._request(rollout=index)) for index in range(SIDE_BY_SIDE)))
        if len({one.session for one in opened}) < SIDE_BY_SIDE:
            raise self._failed("opened the same session for several episodes")
        await asyncio.gather(*(self._step(one, 0, text) for one, text in zip(opened, itertools.cycle(self._responses), strict=False)))
        return "each went on by itself"

    async def _to_the_end(self) -> str:
        _, outcomes = await self._played()
        if not outcomes[-1].done:
            return f"not over after {MOST_TURNS} turns of this model's"
        rewards = [outcome.reward.reward for outcome in outcomes if outcome.reward is not None]
        if not rewards:
            raise self._failed("done is true and no step had a reward; expected at least one")
        return f"{len(outcomes)} turns, rewards {', '.join(f'{reward:g}' for reward in rewards[:8])}"

    async def _after_the_end(self) -> str:
        opened, outcomes = await self._played()
        if not outcomes[-1].done:
            return "not tried: no episode ended"
        return await self._refused(lambda: self._step(opened, len(outcomes), self._responses[0]), "a step of an episode that is over")

    async def _close(self) -> str:
        opened = await self._reset(self._request())
        request = CloseRequest(run=self._run, session=opened.session, done=False)
        for _ in range(2):  # a close may come twice, too
            await self._environment.end(request, self._seconds())
        return await self._refused(lambda: self._step(opened, 0, self._responses[0]), "a step of a closed session")

    # --- asking

    async def _played(self, times: int = 1) -> tuple[OpenedSession, list[TurnOutcome]]:
        """Plays an episode, each step sent so many times; returns the last answer to each."""
        opened, outcomes = await self._reset(self._request()), list[TurnOutcome]()
        while len(outcomes) < MOST_TURNS and not (outcomes and outcomes[-1].done):
            turn, text = len(outcomes), self._responses[len(outcomes) % len(self._responses)]
            outcomes.append([await self._step(opened, turn, text) for _ in range(times)][-1])
        return opened, outcomes

    def _request(self, rollout: int = 0) -> ResetRequest:
        return ResetRequest(
            run=self._run,
            episode=uuid.uuid4().hex,
            group="conformance",
            attempt=0,
            rollout=rollout,
            prompt=self._prompt,
            label=self._label,
            metadata={},
        )

    async def _reset(self, request: ResetRequest) -> OpenedSession:
        return await self._again(lambda: self._environment.reset(request, self._seconds()))

    async def _step(self, opened: OpenedSession, turn: int, text: str) -> TurnOutcome:
        message = {"role": "assistant", "content": text}
        request = StepRequest(run=self._run, session=opened.session, turn=turn, message=message, finish="stop")
        return await self._again(lambda: self._environment.step(request, self._seconds()))

    @staticmethod
    async def _again(ask: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await ask()
        except EnvironmentAway:  # a server may close an idle connection in the moment when it is used again
            return await ask()

    async def _refused(self, ask: Callable[[], Awaitable[TurnOutcome]], what: str) -> str:
        try:
            answered = await ask()
        except EnvironmentFailed as error:
            if error.own_words:
                return f"refused: {error.own_words}"
            raise self._failed(f"{what} is to be refused with an error in words of its own; {error.reason}") from None
        raise self._failed(f"{what} is to be refused with an error; it was answered with {_told(answered)}")

    def _failed(self, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(self._environment.label, reason)


def _told(outcome: TurnOutcome) -> str:
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward.reward:g}"
    return f"{len(outcome.messages)} messages, {reward}, {'done' if outcome.done else 'not done'}"
