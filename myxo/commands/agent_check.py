"""Tries an agent without a model: that it asks the model it is given, ends, gives a reward, and survives what models and gateways do.

The model is a server that speaks as a gateway does, in OpenAI's and Anthropic's formats, and answers by a script. Nothing is sampled or
trained.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from shared.agents import http_agent
from shared.agents.agent_options import CommandFailed, environment_of, run_command
from shared.environment.conformance import Check, CheckSuite, CheckWarned, Example
from shared.formats import anthropic_messages, openai_chat, openai_responses
from shared.formats.request import CalledTool, ChatTurn, TurnEvents, TurnResult, TurnUsage, deltas_of, started
from shared.hooks import reward_values
from shared.hooks.loading import load_agent
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.tasks import called, error_text

# Plays a rollout of (data, base_url, api_key); returns what the agent gave for a reward.
Played = Callable[[Mapping[str, Any], str, str], Awaitable[object]]


def function_agent(path: str) -> Played:
    """Returns the agent at ``package.module:function``. Raises ConfigError."""
    function = load_agent("AGENT", path)

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        return await called(function, dict(data), base_url, api_key)

    return play


def url_agent(url: str) -> Played:
    """Returns the agent that is a service."""

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        options = {**data["options"], "url": url, "start_seconds": 5.0}
        return await http_agent.play({**data, "options": options}, base_url, api_key)

    return play


def command_agent(command: Sequence[str]) -> Played:
    """Returns the agent that is a command."""

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        with tempfile.TemporaryFile() as errors:
            try:
                return await run_command(command, os.environ | environment_of(base_url, api_key), data, errors)
            except CommandFailed as error:
                errors.seek(0)
                said = " ".join(errors.read().decode(errors="replace").split())[-300:]
                raise CommandFailed(f"{error}: {said}" if said else str(error)) from None

    return play


def shown_reward(result: object) -> str:
    """Returns a result in words. Raises ValueError where it is no reward."""
    if result is None:
        return "no reward: the run's own scores it"
    given = reward_values.plain(result)
    reward_values.read(given, None)
    return f"reward {given:g}" if isinstance(given, float) else "rewards " + ", ".join(f"{name} {value:g}" for name, value in given.items())


MODEL = "model-under-check"
ANSWER_ID, CALL_ID = "answer_1", "call_1"
START_SECONDS = 10.0


@dataclass(frozen=True)
class Said:
    """One answer. ``text``; ``tool``: the name and the arguments' text of a call; ``status``: a refusal instead. ``meeting``: where it
    waits for those of other rollouts."""

    text: str = ""
    tool: tuple[str, str] | None = None
    status: int = 200
    meeting: "Meeting | None" = None

    def result(self) -> TurnResult:
        """Returns the result of a turn of one token that gives the answer."""
        calls = [] if self.tool is None else [CalledTool(id=CALL_ID, name=self.tool[0], arguments=self.tool[1])]
        known: dict[str, Any] = {"request_id": ANSWER_ID, "model": MODEL, "created": 1, "versions": (0, 0), "content": self.text}
        usage = TurnUsage(prompt=1, completion=1)
        return TurnResult(**known, usage=usage, finish="tool_calls" if calls else "stop", tool_calls=calls)


class Meeting:
    """Answers that wait until ``count`` are asked for, or one has waited for ``seconds``. ``met``: how many were asked for by then."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds, self._over, self.met = count, seconds, asyncio.Event(), 0

    async def wait(self) -> None:
        """Returns once the meeting is over, at once where it was over before."""
        if self._over.is_set():
            return
        self.met += 1
        if self.met < self._count:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._seconds)
        self._over.set()


@dataclass
class Script:
    """What is said under a key: each answer in turn, then the last one again. ``asked``: how often; ``unread``: paths that are none."""

    answers: Sequence[Said]
    asked: int = 0
    unread: str = ""

    def next(self) -> Said:
        """Returns the answer of this request."""
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


class ScriptedModel:
    """The server, in a thread of its own: an agent that blocks must not block it. ``base_url`` as agents get it. The script of the
    empty key is for all that have none."""

    def __init__(self) -> None:
        self.base_url, self._scripts = "", dict[str, Script]()
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="scripted-model", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise DeadlineExceeded("the server for the check", "this process", START_SECONDS, "given up")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)

    def script(self, key: str, *answers: Said) -> Script:
        """Returns the script of a key, which is new."""
        self._scripts[key] = script = Script(answers)
        return script

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._started())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _started(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        return runner

    def script_of(self, request: web.Request) -> Script | None:
        """Returns the script of a request's key; None where it opens no session."""
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._scripts.get(key) or self._scripts.get("")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (script := self.script_of(request)) is None:
            return web.json_response({"error": {"message": "this key opens no session", "type": "authentication_error"}}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        form = FORMS.get(request.path)
        if form is None or request.method != "POST":
            script.unread = f"{request.method} {request.path}"
            return web.json_response({"error": {"message": f"no {script.unread} here", "type": "not_found_error"}}, status=404)
        asked, said = await request.json(), script.next()
        if said.meeting is not None:
            await said.meeting.wait()
        if said.status != 200:
            error = {"type": "error", "error": {"message": f"a refusal of the check: {said.status}", "type": "check"}}
            return web.json_response(error, status=said.status, headers={"Retry-After": "0"})
        turn, result, (answer, events) = ChatTurn(request_id=ANSWER_ID, model=MODEL, messages=()), said.result(), form
        if not asked.get("stream"):
            return web.json_response(answer(turn, result))
        stream = events(turn, started(result))
        pieces = [stream.begin(), *map(stream.delta, deltas_of(result)), stream.end(result), stream.close([result])]
        return web.Response(body=b"".join(pieces), content_type="text/event-stream")


# By path, of the gateway's: a whole answer, and the events of a streamed one.
FORMS: dict[str, tuple[Callable[..., dict[str, Any]], type[TurnEvents]]] = {
    "/v1/chat/completions": (openai_chat.answer, openai_chat.ChatEvents),
    "/v1/responses": (openai_responses.answer, openai_responses.ResponseEvents),
    "/v1/messages": (anthropic_messages.answer, anthropic_messages.MessageEvents),
}


AT_ONCE = 8

# What models generate before they have learned anything. Calls that are no calls come as text: a gateway never makes tools of them.
NONSENSE = (
    Said(""),
    Said("答えは\U0001f9ee \u202e24 \x00"),
    Said(tool=("no_such_tool", "{}")),
    Said(tool=("calculator", "{}")),
    Said(tool=("calculator", '{"expression": [1, 2]}')),
)


BLOCKED_SECONDS = 5.0  # how long beyond its time an agent may keep its thread to itself, before it is interrupted


class AgentConformance(CheckSuite):
    """The checks of one agent, which ``play`` calls. ``options``: its ``agent_options``. ``seconds``: for one rollout."""

    def __init__(self, play: Played, model: ScriptedModel, example: Example, options: dict[str, Any], seconds: float) -> None:
        self._play, self._model, self._example, self._options, self._seconds = play, model, example, options, seconds
        self._numbers = itertools.count()

    async def checks(self) -> AsyncIterator[Check]:
        """Yields the result of each check."""
        answers = [Said(text) for text in self._example.responses]
        yield await self.one_rollout()
        for said in answers[1:]:
            yield await self.check("another answer", self._one, said)
        for said in NONSENSE:
            shown = f"calls {said.tool[0]} {said.tool[1]}" if said.tool else f"says {said.text!a}"
            yield await self.check(f"the model {shown}", self._nonsense, said)
        yield await self.check("429, then an answer", self._refused, 429)
        yield await self.check("503, then an answer", self._refused, 503)
        yield await self.check("the session has ended (410)", self._ended)
        yield await self.check("no label", self._no_label)
        yield await self.check(f"{AT_ONCE} rollouts at once", self._together)

    async def one_rollout(self) -> Check:
        """Returns the result of the first check: a rollout whose model gives the example's response."""
        return await self.check("one rollout", self._one, Said(self._example.responses[0]))

    # --- checks: what was seen, or an error

    async def _one(self, said: Said) -> str:
        result, script = await self._rollout(said)
        if not script.asked:
            reason = f"it asked for {script.unread}" if script.unread else "it asked nothing; use base_url and api_key as they are given"
            raise _Failed(f"the model was never asked: {reason}")
        return f"{script.asked} requests, {shown_reward(result)}"

    async def _nonsense(self, said: Said) -> str:
        with _warns("it raised {}: each such rollout is begun anew and then lost; catch it and give a reward"):
            return shown_reward((await self._rollout(said, Said(self._example.responses[0])))[0])

    async def _refused(self, status: int) -> str:
        with _warns("it gave up ({}): gateways say so when they are full or start anew; max_retries=8"):
            _, script = await self._rollout(*(Said(status=status) for _ in range(3)), Said(self._example.responses[0]))
        return f"asked {script.asked} times"

    async def _ended(self) -> str:
        key, script = self._script(Said(status=410))
        try:
            await asyncio.wait_for(self._played(key, self._data()), self._seconds)
        except TimeoutError:
            raise _Failed(f"it continued for {self._seconds:g} s and {script.asked} requests after its session had ended") from None
        except Exception as error:
            return f"ended after {script.asked} requests: {_words(error)}"
        return f"ended after {script.asked} requests"

    async def _no_label(self) -> str:
        with _warns("it raised {}; prompts need not have one"):
            result, _ = await self._rollout(Said(self._example.responses[0]), label=None)
        return shown_reward(result)

    async def _together(self) -> str:
        meeting = Meeting(AT_ONCE, self._seconds / 2)
        await asyncio.gather(*(self._rollout(Said(self._example.responses[0], meeting=meeting)) for _ in range(AT_ONCE)))
        measured = f"{meeting.met} of {AT_ONCE} asked the model at once"
        if meeting.met < AT_ONCE / 2:
            raise CheckWarned(f"{measured}: they wait for one another; do not block in an async function")
        return measured

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
        asked, place = self._example.prompt, {"group": "g00000000", "rollout": 0, "evaluation": False}
        row: dict[str, Any] = {
            "messages": [{"role": "user", "content": asked}],
            "prompt": asked,
            "label": self._example.label,
            "metadata": {},
        }
        return {**row, "model": MODEL, "roles": {}, **place, "options": self._options}

    def failure(self, error: Exception) -> str:
        return str(error) if isinstance(error, _Failed) else f"it raised {_words(error)}"


class _Failed(Exception):
    """The check failed, for the reason that it says."""


@contextlib.contextmanager
def _warns(words: str) -> Iterator[None]:
    """Makes an error of the agent's a warning. ``words``: with a place for the error."""
    try:
        yield
    except Exception as error:
        raise CheckWarned(words.format(_words(error))) from None


def _words(error: BaseException) -> str:
    return error_text(error)[:300]


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
