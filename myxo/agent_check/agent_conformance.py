"""What an agent is tried for: that it asks the model it is given, ends, gives a reward, and lives through what models and gateways do.

The model is a script (`myxo.agent_check.scripted_model`): nothing is drawn, and nothing is trained.
"""

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from myxo.agent_check.agents import Played, shown_reward
from myxo.agent_check.scripted_model import MODEL, Said, Script, ScriptedModel
from shared.environment.conformance import Check, Example

AT_ONCE = 8
SLOW_SECONDS = 0.3
"""How long an answer takes where several rollouts run at once."""

NONSENSE = (
    Said(""),
    Said("答えは\U0001f9ee \u202e24 \x00"),
    Said(tool=("no_such_tool", "{}")),
    Said(tool=("calculator", "{}")),
    Said(tool=("calculator", '{"expression": [1, 2]}')),
)
"""What models draw before they have learned anything. Calls that are no calls come as text: a gateway never makes tools of them."""


BLOCKED_SECONDS = 5.0
"""How long beyond its time an agent may keep its thread to itself, before it is interrupted."""


class AgentConformance:
    """The checks of one agent.

    Args:
        play: calls it. example: prompt, label and answers of the model. options: its ``agent_options``. seconds: for one rollout.
    """

    def __init__(self, play: Played, model: ScriptedModel, example: Example, options: dict[str, Any], seconds: float) -> None:
        self._play, self._model, self._example, self._options, self._seconds = play, model, example, options, seconds
        self._numbers = itertools.count()

    async def checks(self) -> AsyncIterator[Check]:
        """Yields the result of each check."""
        answers = [Said(text) for text in self._example.responses]
        yield await self._timed("one rollout", self._one, answers[0])
        for said in answers[1:]:
            yield await self._timed("another answer", self._one, said)
        for said in NONSENSE:
            shown = f"calls {said.tool[0]} {said.tool[1]}" if said.tool else f"says {said.text!a}"
            yield await self._timed(f"the model {shown}", self._nonsense, said)
        yield await self._timed("429, then an answer", self._refused, 429)
        yield await self._timed("503, then an answer", self._refused, 503)
        yield await self._timed("the session has ended (410)", self._ended)
        yield await self._timed("no label", self._no_label)
        yield await self._timed(f"{AT_ONCE} rollouts at once", self._together)

    # --- checks: what was seen, or an error

    async def _one(self, said: Said) -> str:
        result, script = await self._rollout(said)
        if not script.asked:
            reason = f"it asked for {script.unread}" if script.unread else "it asked nothing; use base_url and api_key as they are given"
            raise _Failed(f"the model was never asked: {reason}")
        return f"{script.asked} requests, {shown_reward(result)}"

    async def _nonsense(self, said: Said) -> str:
        try:
            return shown_reward((await self._rollout(said, Said(self._example.responses[0])))[0])
        except Exception as error:
            raise _Warned(f"it raised {_words(error)}: each such rollout is begun anew and then lost; catch it and give a reward") from None

    async def _refused(self, status: int) -> str:
        try:
            _, script = await self._rollout(*(Said(status=status) for _ in range(3)), Said(self._example.responses[0]))
        except Exception as error:
            raise _Warned(f"it gave up ({_words(error)}): gateways say so when they are full or start anew; max_retries=8") from None
        return f"asked {script.asked} times"

    async def _ended(self) -> str:
        script = self._script(Said(status=410))
        try:
            await asyncio.wait_for(self._played(script[0], self._data()), self._seconds)
        except TimeoutError:
            raise _Failed(f"it went on for {self._seconds:g} s and {script[1].asked} requests after its session had ended") from None
        except Exception as error:
            return f"ended after {script[1].asked} requests: {_words(error)}"
        return f"ended after {script[1].asked} requests"

    async def _no_label(self) -> str:
        try:
            result, _ = await self._rollout(Said(self._example.responses[0]), label=None)
        except Exception as error:
            raise _Warned(f"it raised {_words(error)}; prompts need not have one") from None
        return shown_reward(result)

    async def _together(self) -> str:
        alone = await self._seconds_of(1)
        together = await self._seconds_of(AT_ONCE)
        if together > AT_ONCE / 2 * alone + 1:
            raise _Warned(f"{together:.1f} s, one alone takes {alone:.1f} s: they wait for one another; do not block in an async function")
        return f"{together:.1f} s, one alone takes {alone:.1f} s"

    async def _seconds_of(self, count: int) -> float:
        begun = time.monotonic()
        await asyncio.gather(*(self._rollout(Said(self._example.responses[0], seconds=SLOW_SECONDS)) for _ in range(count)))
        return time.monotonic() - begun

    # --- rollouts

    async def _rollout(self, *answers: Said, label: str | None = "") -> tuple[object, Script]:
        key, script = self._script(*answers)
        data = self._data() if label == "" else {**self._data(), "label": label}
        try:
            return await asyncio.wait_for(self._played(key, data), self._seconds), script
        except TimeoutError:
            raise _Failed(f"it did not end within {self._seconds:g} s, and asked the model {script.asked} times") from None

    async def _played(self, key: str, data: dict[str, Any]) -> object:
        with interrupted_after(self._seconds + BLOCKED_SECONDS):
            return await self._play(data, self._model.base_url, key)

    def _script(self, *answers: Said) -> tuple[str, Script]:
        key = f"sk-myxo-check-{next(self._numbers)}"
        return key, self._model.script(key, *answers)

    def _data(self) -> dict[str, Any]:
        prompt = self._example.prompt
        return {
            "messages": [{"role": "user", "content": prompt}],
            "prompt": prompt,
            "label": self._example.label,
            "metadata": {},
            "model": MODEL,
            "roles": {},
            "group": "g00000000",
            "rollout": 0,
            "evaluation": False,
            "options": self._options,
        }

    async def _timed(self, name: str, check: Callable[..., Awaitable[str]], *given: object) -> Check:
        begun = time.monotonic()
        try:
            detail, result = await check(*given), "ok"
        except _Warned as warned:
            detail, result = str(warned), "warning"
        except Exception as error:
            detail, result = str(error) if isinstance(error, _Failed) else f"it raised {_words(error)}", "FAILED"
        return Check(name, result, detail, time.monotonic() - begun)  # type: ignore[arg-type]


class _Failed(Exception):
    """The check failed, for the reason that it says."""


class _Warned(Exception):
    """What is seen is allowed, and costs something."""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises in the main thread, if this is it, what interrupts code that keeps it for so long: no deadline of the loop's would."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _Failed(f"it blocked its thread for {seconds:g} s; what blocks belongs into a plain function, or a thread")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
