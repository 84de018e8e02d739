"""Checks whether a live environment keeps the protocol. Each check sends real requests and reports its result in one line."""

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from shared.environment import protocol
from shared.environment.protocol import (
    Description,
    Environment,
    EnvironmentAway,
    EnvironmentFailed,
    OpenedSession,
    ScoreRequest,
    TurnOutcome,
)
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.sample import Score

DESCRIBE_SECONDS = 5.0
SCORE_SECONDS = 30.0  # where neither the environment nor the caller names a deadline: the default of `reward_timeout`
CONCURRENT = 8  # requests, or episodes
LONG = 100_000  # characters of the long response
BEYOND_ASCII = ("答えは42です", "\U0001f9ee ∑ = 42", "one\u2028two\x00three", "\u202e24")
ODD_MESSAGES = ("", "答えは42です \U0001f9ee one\u2028two", "7 " * 50_000)
MOST_TURNS = 64  # after which an episode that has not ended is left

# what a program raises by accident on an unexpected null, instead of an answer of its own
_CRASH = re.compile(
    r"NoneType|Traceback|\b(Attribute|Type|Key|Index|Name)Error\b|of (null|undefined)\b|null ?pointer|nil pointer", re.IGNORECASE
)

Result = Literal["ok", "warning", "FAILED"]
Checks = list[tuple[str, Callable[[], Awaitable[str]]]]


@dataclass(frozen=True)
class Check:
    """The result of one check. ``seconds``: its duration."""

    name: str
    result: Result
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Example:
    """The content of a request: a prompt, its label, responses to it."""

    prompt: str = "12+30="
    label: str | None = "42"
    responses: Sequence[str] = ("42", "(02 04)42", "41", "I do not know")


class CheckWarned(Exception):
    """What a check found is allowed, and costs something."""


class CheckSuite:
    """Runs checks, each a coroutine function that returns its report, and raises where it failed or warns."""

    def failure(self, error: Exception) -> str:
        """Returns why a check failed. Raises the error where it is a bug of the suite."""
        raise error

    async def check(self, name: str, check: Callable[..., Awaitable[str]], *given: object) -> Check:
        """Returns the result of one check, which is called with ``given``."""
        started = time.monotonic()
        result: Result = "ok"
        try:
            detail = await check(*given)
        except CheckWarned as warned:
            result, detail = "warning", str(warned)
        except Exception as error:
            result, detail = "FAILED", self.failure(error)
        return Check(name, result, detail, time.monotonic() - started)


class Conformance(CheckSuite):
    """The checks of one environment. ``timeout``: seconds for one answer; ``None``: what the environment asks for."""

    def __init__(self, environment: Environment, run: str, example: Example, timeout: float | None = None) -> None:
        self._environment, self._run, self._timeout = environment, run or "conformance", timeout
        self._example, self._responses = example, list(example.responses)
        asked = {"run": self._run, "group": "conformance", "attempt": 0, "metadata": {}}
        self._asked: dict[str, Any] = {**asked, "prompt": example.prompt, "label": example.label}
        self._deadline = timeout or SCORE_SECONDS
        self._slowest, self._unanswered = 0.0, False
        self._described: Description | None = None

    async def checks(self) -> AsyncIterator[Check]:
        """Yields all checks, each as it is done. Where describe fails, or no answer comes at all, the others are not tried."""
        yield await self.check("describe", self._describe)
        if self._described is None:
            return
        if self._environment.content_type is not None:
            yield await self.check("content type", self._content_type)
        must = self._of_scoring() if self._described.scores else []
        twice = partial(self._twice, [self._responses[0], self._responses[-1]])
        advised: Checks = [("a prompt of chat messages", self._chat), ("the same request twice", twice)] if must else []
        if self._described.steps:
            must += self._of_stepping(closes=protocol.CLOSE in self._described.verbs)
        for name, check in must:
            yield await self.check(name, check)
            if self._unanswered:
                yield Check("the other checks", "FAILED", "not tried: it does not answer")
                return
        for name, check in advised:
            done = await self.check(name, check)
            yield replace(done, result="warning") if done.result == "FAILED" else done
        yield Check("time", "ok", f"the slowest answer took {self._slowest:.2f} s of {self._deadline:g} s", self._slowest)

    def _of_scoring(self) -> Checks:
        responses = self._responses
        four = [responses[index % len(responses)] for index in range(4)]
        return [
            ("one sample", partial(self._scored, responses[:1])),
            ("a group of 4", partial(self._scored, four)),
            *([(f"the {len(responses)} responses", partial(self._scored, responses))] if len(responses) > 1 and responses != four else []),
            ("an empty response", partial(self._scored, [""])),
            ("responses beyond ASCII", partial(self._scored, list(BEYOND_ASCII))),
            ("a response of 100 kB", partial(self._scored, ["7 " * (LONG // 2)])),
            ("unknown fields in the request", self._unknown_fields),
            (f"{CONCURRENT} requests at once", self._concurrent),
            ("no label", self._no_label),
        ]

    def _of_stepping(self, closes: bool) -> Checks:
        """Returns the checks of episodes. Those of what can go wrong in a turn come first."""
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
            (f"{CONCURRENT} episodes at once", self._side_by_side),
            ("a step after the end", self._after_the_end),
            *([("close", self._close)] if closes else []),
        ]

    # --- one check each

    async def _describe(self) -> str:
        description = await self._environment.describe(DESCRIBE_SECONDS)
        self._deadline = self._timeout or description.timeout or SCORE_SECONDS
        self._described = description
        timeout = "no timeout named" if description.timeout is None else f"at most {description.timeout:g} s a score"
        return f"protocol {protocol.PROTOCOL}, {json.dumps(description.name)}, verbs {', '.join(description.verbs)}, {timeout}"

    async def _content_type(self) -> str:
        found = self._environment.content_type or ""
        if found.partition(";")[0].strip().lower() != "application/json":
            raise self._failed(f"Content-Type is {found!r}; expected application/json")
        return found

    async def _scored(self, responses: list[str]) -> str:
        return _rewards(await self._score(self._request(responses)))

    async def _unknown_fields(self) -> str:
        question = self._request(self._responses[:1]).model_dump() | {"x_unknown": {"a": [1, None]}, "protocol_minor": 7}
        question["samples"] = [{**sample, "x_unknown": 1.5} for sample in question["samples"]]
        await self._ask(question, 1)
        return "ignored"

    async def _concurrent(self) -> str:
        responses = itertools.islice(itertools.cycle(self._responses), CONCURRENT)
        requests = [self._request([response] * (1 + index % 3), group=f"concurrent-{index}") for index, response in enumerate(responses)]
        await asyncio.gather(*map(self._score, requests))
        return "each got its own answer"

    async def _chat(self) -> str:
        await self._score(self._request(self._responses[:1], prompt=[{"role": "user", "content": self._example.prompt}]))
        return "taken"

    async def _no_label(self) -> str:
        try:
            return _rewards(await self._score(self._request(self._responses[:1], label=None)))
        except EnvironmentFailed as error:
            if error.own_words and not _CRASH.search(error.own_words):
                return f"refused, and why: {error.own_words}"
            raise EnvironmentFailed(error.environment, f"a prompt may have none: score it, or say why not; {error.reason}") from None

    async def _twice(self, responses: list[str]) -> str:
        request = self._request(responses)
        first, second = await self._score(request), await self._score(request)
        if first != second:
            raise self._failed(f"gave {_rewards(first)}, then {_rewards(second)}")
        return "the same rewards"

    async def _opens(self) -> str:
        opened = await self._reset()
        return f"session {opened.session[:32]}, {len(opened.messages)} messages, {len(opened.tools)} tools"

    async def _reset_twice(self) -> str:
        episode = uuid.uuid4().hex
        first, second = await self._reset(episode), await self._reset(episode)
        if first.session != second.session:
            raise self._failed(
                f"opened {first.session!r:.40}, then {second.session!r:.40}; a reset that comes again opens no second session"
            )
        if first != second:
            raise self._failed("gave other messages or tools the second time")
        return "the same session"

    async def _another_session(self) -> str:
        first, second = await self._reset(), await self._reset()
        if first.session == second.session:
            raise self._failed(f"opened {first.session!r:.40} for two episodes; each needs a session of its own")
        return "a session of its own"

    async def _first_step(self) -> str:
        return _outcome(await self._step(await self._reset(), 0))

    async def _step_twice(self) -> str:
        opened = await self._reset()
        first, second = await self._step(opened, 0), await self._step(opened, 0)
        if first != second:
            raise self._failed(f"gave {_outcome(first)}, then {_outcome(second)}; a step that comes again is not taken twice")
        (_, once), (_, repeated), (_, once_more) = await self._played(), await self._played(times=2), await self._played()
        if once == once_more and repeated != once:
            raise self._failed(
                f"ended after {len(repeated)} turns where each step came twice, after {len(once)} otherwise; a step that comes again is "
                "not taken twice"
            )
        return "taken once"

    async def _out_of_order(self) -> str:
        return await self._refused(self._step(await self._reset(), 5), "turn 5 of a session that has had none")

    async def _unknown_session(self) -> str:
        unknown = OpenedSession(f"no-such-{uuid.uuid4().hex}", [])
        return await self._refused(self._step(unknown, 0), "a step of a session that was never opened")

    async def _odd_messages(self) -> str:
        for text in ODD_MESSAGES:
            await self._step(await self._reset(), 0, text)
        return "empty, beyond ASCII, and 100 kB long: taken"

    async def _side_by_side(self) -> str:
        opened = await asyncio.gather(*(self._reset(rollout=index) for index in range(CONCURRENT)))
        if len({one.session for one in opened}) < CONCURRENT:
            raise self._failed("opened the same session for several episodes")
        await asyncio.gather(*(self._step(one, 0, text) for one, text in zip(opened, itertools.cycle(self._responses), strict=False)))
        return "each continued by itself"

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
        return await self._refused(self._step(opened, len(outcomes)), "a step of an episode that is over")

    async def _close(self) -> str:
        opened = await self._reset()
        for _ in range(2):  # a close may come twice, too
            await self._environment.end(protocol.CloseRequest(run=self._run, session=opened.session, done=False), self._deadline)
        return await self._refused(self._step(opened, 0), "a step of a closed session")

    # --- asking

    def _request(self, responses: list[str], **other: Any) -> ScoreRequest:
        samples = [{"index": index, "response": text, "tokens": len(text), "finish": "stop"} for index, text in enumerate(responses)]
        return ScoreRequest(**{**self._asked, "samples": samples, **other})

    async def _score(self, request: ScoreRequest) -> list[Score]:
        return await self._ask(request.model_dump(), len(request.samples))

    async def _ask(self, question: dict[str, Any], count: int) -> list[Score]:
        started = time.monotonic()
        try:
            answer = await _again(lambda: self._environment.ask(protocol.SCORE, question, self._deadline))
        finally:
            self._slowest = max(self._slowest, time.monotonic() - started)
        return protocol.read_scores(answer, count, self._environment.label)

    async def _played(self, times: int = 1) -> tuple[OpenedSession, list[TurnOutcome]]:
        """Plays an episode, each step sent so many times; returns the last answer to each."""
        opened, outcomes = await self._reset(), list[TurnOutcome]()
        while len(outcomes) < MOST_TURNS and not (outcomes and outcomes[-1].done):
            turn, text = len(outcomes), self._responses[len(outcomes) % len(self._responses)]
            outcomes.append([await self._step(opened, turn, text) for _ in range(times)][-1])
        return opened, outcomes

    async def _reset(self, episode: str = "", rollout: int = 0) -> OpenedSession:
        request = protocol.ResetRequest(**self._asked, episode=episode or uuid.uuid4().hex, rollout=rollout)
        return await _again(lambda: self._environment.reset(request, self._deadline))

    async def _step(self, opened: OpenedSession, turn: int, text: str | None = None) -> TurnOutcome:
        message = {"role": "assistant", "content": self._responses[0] if text is None else text}
        request = protocol.StepRequest(run=self._run, session=opened.session, turn=turn, message=message, finish="stop")
        return await _again(lambda: self._environment.step(request, self._deadline))

    async def _refused(self, step: Awaitable[TurnOutcome], what: str) -> str:
        try:
            answered = await step
        except EnvironmentFailed as error:
            if error.own_words:
                return f"refused: {error.own_words}"
            raise self._failed(f"{what} is to be refused with an error in words of its own; {error.reason}") from None
        raise self._failed(f"{what} is to be refused with an error; it was answered with {_outcome(answered)}")

    def _failed(self, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(self._environment.label, reason)

    def failure(self, error: Exception) -> str:
        self._unanswered = isinstance(error, EnvironmentAway | DeadlineExceeded)
        if isinstance(error, EnvironmentFailed | EnvironmentAway):
            return ("cannot be reached: " if self._unanswered else "") + error.reason
        if isinstance(error, DeadlineExceeded):
            return f"late: {error.awaited} did not come within {error.seconds:g} s"
        return str(error) if isinstance(error, MyxoError) else super().failure(error)


async def _again(ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await ask()
    except EnvironmentAway:  # a server may close an idle connection in the moment when it is used again
        return await ask()


def _outcome(outcome: TurnOutcome) -> str:
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward.reward:g}"
    return f"{len(outcome.messages)} messages, {reward}, {'done' if outcome.done else 'not done'}"


def _rewards(scores: list[Score]) -> str:
    rewards = ", ".join(f"{score.reward:g}" for score in scores[:8]) + (", …" if len(scores) > 8 else "")
    names = sorted({name for score in scores for name in score.parts})
    return f"rewards {rewards}" + (f"; parts {', '.join(names)}" if names else "")
