"""Environments that step: the conformance suite finds what breaks the protocol, and what is served keeps it."""

import asyncio
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from examples.environments.guessing.guessing import GuessingGame
from shared.bus.connection import Bus
from shared.environment.conformance import Check, Conformance, Example
from shared.environment.environment_client import open_environment
from shared.environment.http_environment import served_over_http
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed, ResetRequest, ScoreRequest, StepRequest
from shared.environment.serving import EpisodeRefused, ServedEnvironment, serve_on_bus
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from tests.integration.environments.live import ROOT
from tests.support.http_server import served

EXAMPLE = Example("guess:", "5", ["5", "3", "9"])

Answer = Callable[[str, dict[str, Any]], Any]


class Both(GuessingGame):
    """Scores, too."""

    def score(self, request: dict[str, Any]) -> list[float]:
        return [float((sample["response"], sample["metadata"]) == (sample["label"], request["metadata"])) for sample in request["samples"]]


async def checks_of(url: str, timeout: float = 2.0, bus: Bus | None = None, run: str = "") -> dict[str, Check]:
    environment = open_environment("under check", url, bus, run)
    try:
        return {check.name: check async for check in Conformance(environment, run, EXAMPLE, timeout).checks()}
    finally:
        await environment.close()


class Broken(ServedEnvironment):
    """A good environment that breaks the protocol in one way. ``kind``: a method of this class."""

    def __init__(self, kind: str) -> None:
        super().__init__("broken", Both(), timeout=2.0)
        self._kind, self._asked = kind, 0

    async def answer(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        self._asked += 1
        found: dict[str, Any] = await getattr(self, self._kind)(verb, request)
        return found

    async def whole(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(await super().answer(verb, request))

    async def late(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "step":
            await asyncio.sleep(60)
        return await self.whole(verb, request)

    async def wrong_type(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return await self.whole(verb, request) | ({"done": "no"} if verb == "step" else {})

    async def silent(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return await self.whole(verb, request) | ({"messages": [], "done": False} if verb == "step" else {})

    async def speaks_as_the_model(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        said = {"messages": [{"role": "assistant", "content": "5"}]}
        return await self.whole(verb, request) | (said if verb == "reset" else {})

    async def not_a_number(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return await self.whole(verb, request) | ({"reward": math.nan} if verb == "step" else {})

    async def wrong_count(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        found = await self.whole(verb, request)
        return {"rewards": found["rewards"][:3]} if verb == "score" else found

    async def forgets_sessions(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "step":
            self._sessions.clear()
        return await self.whole(verb, request)

    async def another_id_each_time(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "reset":
            self._opening.clear()
        return await self.whole(verb, request)

    async def one_session_for_all(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return await self.whole(verb, {**request, "episode": "the same"} if verb == "reset" else request)

    async def takes_a_step_twice(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "step" and (session := self._sessions.get(request["session"])) is not None and not session.done:
            return await self.whole(verb, {**request, "turn": session.turns})
        return await self.whole(verb, request)

    async def steps_after_the_end(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.whole(verb, request)
        except EpisodeRefused as error:
            if "is done" not in str(error):
                raise
            return {"messages": [], "reward": 0.0, "done": True}

    async def huge(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        large = {"messages": [{"role": "user", "content": "7" * (5 << 20)}]}
        return await self.whole(verb, request) | (large if verb == "step" else {})

    async def never_rewards(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        found = await self.whole(verb, request)
        found.pop("reward", None)
        return found


@pytest.mark.parametrize(
    ("kind", "check", "words"),
    [
        pytest.param("late", "a first step", "late: the answer to step did not come within 2 s", marks=pytest.mark.extra),
        pytest.param("wrong_type", "a first step", "done is 'no'; expected true or false", marks=pytest.mark.extra),
        pytest.param("silent", "a first step", "messages is empty and done is false", marks=pytest.mark.extra),
        ("speaks_as_the_model", "a reset", "messages[0].role is 'assistant'; expected one of system, user, tool"),
        ("not_a_number", "a first step", "HTTP 400"),
        ("wrong_count", "a group of 4", "rewards has 3 entries; expected 4"),
        pytest.param("forgets_sessions", "a first step", "no session", marks=pytest.mark.extra),
        ("another_id_each_time", "the same reset twice", "a reset that comes again opens no second session"),
        ("one_session_for_all", "another reset", "each needs a session of its own"),
        ("takes_a_step_twice", "the same step twice", "a step that comes again is not taken twice"),
        ("steps_after_the_end", "a step after the end", "is to be refused with an error; it was answered"),
        pytest.param("huge", "a first step", "more than 4194304 bytes", marks=pytest.mark.extra),
        pytest.param("never_rewards", "an episode to its end", "no step had a reward", marks=pytest.mark.extra),
    ],
)
async def test_what_breaks_the_protocol_is_found_by_its_check(kind: str, check: str, words: str) -> None:
    async with served_over_http(Broken(kind), "127.0.0.1", 0) as url:
        found = await checks_of(url)
    assert found[check].result == "FAILED" and words in found[check].detail, found
    before = list(found)[: list(found).index(check)]
    assert all(found[name].result == "ok" for name in before), "and not before"


def raw(respond: Callable[[str], web.Response]) -> AbstractAsyncContextManager[str]:
    async def on_request(request: web.Request) -> web.Response:
        return respond(request.path.strip("/"))

    return served(web.route("*", "/{verb}", on_request), shutdown_timeout=1.0)


DESCRIPTION = {"protocol": 1, "name": "raw", "verbs": ["reset", "step"]}


async def test_what_is_no_json_is_found() -> None:
    async with raw(lambda _: web.Response(text=json.dumps(DESCRIPTION), content_type="text/html")) as url:
        found = await checks_of(url)
    assert (
        found["content type"].result == "FAILED" and "'text/html; charset=utf-8'; expected application/json" in found["content type"].detail
    )
    nan = '{"messages": [], "done": true, "reward": NaN}'
    opened = '{"session": "s"}'
    texts = {"close": "{}", "describe": json.dumps(DESCRIPTION), "reset": opened, "step": nan}
    async with raw(lambda verb: web.Response(text=texts[verb], content_type="application/json")) as url:
        found = await checks_of(url)
    assert found["a first step"].result == "FAILED" and "reward is nan; expected a finite number" in found["a first step"].detail
    assert found["another reset"].result == "FAILED"


async def test_an_environment_that_dies_in_an_episode_is_found(tmp_path: Path) -> None:
    """Once in the middle of a step, with the connection open."""
    (tmp_path / "dying.py").write_text(
        "import os\n"
        "from examples.environments.guessing.guessing import GuessingGame\n\n\n"
        "class Dying(GuessingGame):\n"
        "    def step(self, state, message, request):\n"
        "        if request['turn'] == 2:\n"
        "            os._exit(1)\n"
        "        return super().step(state, {'content': 'none'}, request)\n"
    )
    port = free_port()
    command = [sys.executable, "-m", "myxo.main", "env", "run", "dying:Dying", "--port", str(port)]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 120)
        assert line == f"Dying serves reset, step, close at http://127.0.0.1:{port}\n"
        found = await checks_of(f"http://127.0.0.1:{port}", timeout=20)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
    assert found["a first step"].result == "ok"
    assert found["an episode to its end"].result == "FAILED" and "cannot be reached" in found["an episode to its end"].detail


async def test_what_is_served_keeps_the_protocol_over_http_and_nats(bus: Bus, run_name: str) -> None:
    served = ServedEnvironment("game", Both())
    await serve_on_bus(served, bus.connection, run_name, "game")
    async with served_over_http(served, "127.0.0.1", 0) as url:
        over_http = await checks_of(url)
    over_nats = await checks_of("nats:game", bus=bus, run=run_name)
    for found in (over_http, over_nats):
        assert {check.result for check in found.values()} == {"ok"}, found
    assert set(over_http) - set(over_nats) == {"content type"} and "an episode to its end" in over_nats and "a group of 4" in over_nats


async def test_a_second_instance_that_steps_is_refused_on_the_bus_since_sessions_are_in_one_process(bus: Bus, run_name: str) -> None:
    for _ in range(2):
        await serve_on_bus(ServedEnvironment("scores", Odd()), bus.connection, run_name, "scores")
    await serve_on_bus(ServedEnvironment("game", Both()), bus.connection, run_name, "game")
    with pytest.raises(ConfigError, match="--nats = 'game': is there already"):
        await serve_on_bus(ServedEnvironment("game", Both()), bus.connection, run_name, "game")


class Odd:
    """Answers what may not travel."""

    def score(self, request: dict[str, Any]) -> Any:
        if request["samples"][0]["response"] == "array":
            return np.array([0.5])
        if request["samples"][0]["response"] == "named":
            return [{"reward": np.array([0.5]), "format": np.ones(1)}]
        return [{"much": "x" * (2 << 20), "set": {1}}.get(sample["response"], np.float32(0.5)) for sample in request["samples"]]


async def test_numbers_of_numpy_are_taken_and_an_answer_that_does_not_travel_is_an_error(bus: Bus, run_name: str) -> None:
    def asked(response: str) -> ScoreRequest:
        samples = [{"index": 0, "response": response, "tokens": 1, "finish": "stop"}]
        group = {"run": "r", "group": "g", "attempt": 0, "prompt": "p", "label": None, "metadata": {}, "samples": samples}
        return ScoreRequest.model_validate(group)

    served = ServedEnvironment("odd", Odd())
    await serve_on_bus(served, bus.connection, run_name, "odd")
    async with served_over_http(served, "127.0.0.1", 0) as url:
        for environment in (open_environment("odd", url), open_environment("odd", "nats:odd", bus, run_name)):
            for response in ("fine", "array"):
                [score] = await environment.score(asked(response), 30)
                assert score.reward == 0.5
            [score] = await environment.score(asked("named"), 30)
            assert (score.reward, score.parts) == (0.5, {"format": 1.0})
            for response, words in (("much", "odd"), ("set", r"rewards\[0\] is '\{1\}'")):
                with pytest.raises(EnvironmentFailed, match=words):
                    await environment.score(asked(response), 30)
            await environment.close()


async def test_a_sample_has_its_own_label_and_metadata() -> None:
    one = {"tokens": 1, "finish": "stop"}
    samples = [{"index": 0, "response": "5", **one}, {"index": 1, "response": "7", "label": "7", **one}]
    samples.append({"index": 2, "response": "5", "metadata": {"level": 2}, **one})
    group = {"run": "r", "group": "g", "attempt": 0, "prompt": "guess:", "label": "5", "metadata": {}, "samples": samples}
    question = ScoreRequest.model_validate(group).model_dump()
    assert question == {"protocol": 1, **group}, "a sample's fields are absent where they are the group's"
    assert await ServedEnvironment("game", Both()).answer("score", question) == {"rewards": [1.0, 1.0, 0.0]}


async def test_sessions_end_by_themselves() -> None:
    served = ServedEnvironment("game", GuessingGame(), session_ttl=0.05)
    question = {"run": "r", "episode": "e", "group": "g", "attempt": 0, "rollout": 0, "prompt": "guess:", "label": None, "metadata": {}}
    async with served_over_http(served, "127.0.0.1", 0) as url:
        environment = open_environment("game", url)
        opened = await environment.reset(ResetRequest.model_validate(question), 5)
        await asyncio.sleep(0.1)
        step = StepRequest(run="r", session=opened.session, turn=0, message={"role": "assistant", "content": "5"}, finish="stop")
        with pytest.raises(EnvironmentFailed, match=r"forgotten after 0\.05 s"):
            await environment.step(step, 5)
        again = await environment.reset(ResetRequest.model_validate(question), 5)
        assert again.session != opened.session, "a session that is gone is not handed out again"
        await environment.close()


async def test_two_repeats_at_once_are_taken_once() -> None:
    class Slow(GuessingGame):
        steps = 0

        async def step(self, state: Any, message: Any, request: Any) -> Any:  # type: ignore[override]
            Slow.steps += 1
            await asyncio.sleep(0.05)
            return super().step(state, message, request)

    served = ServedEnvironment("game", Slow())
    question = {"episode": "e", "group": "g", "metadata": {"number": 9}}
    first, second = await asyncio.gather(served.answer("reset", question), served.answer("reset", question))
    assert first == second
    step = {"session": first["session"], "turn": 0, "message": {"content": "5"}}
    answers = await asyncio.gather(*(served.answer("step", step) for _ in range(5)))
    assert Slow.steps == 1 and all(answer == answers[0] for answer in answers)


async def test_the_skeleton_works(tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "myxo.main", "env", *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )

    made = await asyncio.to_thread(command, "new", "WordGame")
    assert made.returncode == 0 and "myxo env run word_game:WordGame" in made.stdout, made
    again = await asyncio.to_thread(command, "new", "WordGame")
    assert again.returncode == 2 and "cannot be written: File exists" in again.stderr
    wrong = await asyncio.to_thread(command, "run", "word_game:Nothing")
    assert wrong.returncode == 2 and "has no attribute 'Nothing'" in wrong.stderr
    namespace: dict[str, Any] = {}
    exec((tmp_path / "word_game.py").read_text(), namespace)
    async with served_over_http(ServedEnvironment("word game", namespace["WordGame"]()), "127.0.0.1", 0) as url:
        found = await checks_of(url)
    assert {check.result for check in found.values()} == {"ok"} and len(found) > 20
    schemas = json.loads((await asyncio.to_thread(command, "schemas")).stdout)
    assert schemas["step.answer"]["required"] == ["done"] and "episode" in schemas["reset.request"]["properties"]


async def test_an_environment_that_is_away_is_away() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    request = StepRequest(run="r", session="s", turn=0, message={}, finish="stop")
    async with await asyncio.start_server(hang_up, "127.0.0.1") as server:
        for port, broke in ((free_port(), False), (server.sockets[0].getsockname()[1], True)):
            environment = open_environment("game", f"http://127.0.0.1:{port}")
            with pytest.raises(EnvironmentAway) as raised:
                await environment.step(request, 5)
            assert raised.value.broke == broke
            await environment.close()
