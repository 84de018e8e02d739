"""Agent frameworks as they are, each from its own packages, ask a real gateway whose replica plays a script: what is recorded is what was
sampled, and what the client shows is what was sampled, too.

    python -m docs.frameworks_page --run      # plays all of them, and writes what came of it into docs/frameworks.md

Each client has a virtual environment of its own in `.venv/clients`, made where there is none. What came of its features is compared with
`benchmarks/results/frameworks.json`, or written into the directory that MYXO_FRAMEWORKS names.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from docs.frameworks_page import CLIENTS, RESULTS, Client
from shared.bus.registry import Registry
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Sampling
from shared.sessions.session import Turn, trajectories
from shared.sessions.session_store import SessionStore
from tests.clients.play import AGAIN, ASK, SUM
from tests.integration.buffer.conftest import NewRun, new_run
from tests.support.gateways import Played, ready_gateway, started_gateway
from tests.support.http_server import served
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.scripted_replica import ScriptedReplica, scripted_replica
from tests.support.service_process import ROOT

__all__ = ["new_run"]

pytestmark = [pytest.mark.extra(each=True), pytest.mark.timeout(1800)]

ENVIRONMENTS = ROOT / ".venv" / "clients"
INSTALL_SECONDS, PLAY_SECONDS = 900, 600
INSTALLERS = ("LANG", "OPENBLAS_", "PIP_", "SSL_", "UV_")
"""Of this process's variables those that clients get: a harness may install packages."""

SECOND, THOUGHT = "It is 7.", "I have to add the two."


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


ADD, ADD_TOO = call("add", a=1, b=2), call("add", a=3, b=4)
SCRIPT = {
    "chat": [SUM],
    "stream": [SUM],
    "tools": [ADD, SUM],
    "parallel": [f"{ADD}\n{ADD_TOO}", SUM],
    "structured": ['{"sum": 3}'],
    "required": [ADD, SUM],
    "reasoning": [f"<think>\n{THOUGHT}\n</think>\n\n{ADD}", SUM],
    "turns": [SUM],
}
"""What the model answers to each feature's question, turn by turn. Where a client asks for a form by a tool of its own, it is
called; clients with tools of their own have scripts of their own."""


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command by which mini-swe-agent's model ends its work."""


def bash(name: str, argument: str, end: str = "") -> dict[str, list[str]]:
    """The script for a client with a shell. ``end``: the command that ends it, if one does."""
    first, other = call(name, **{argument: "echo 3"}), call(name, **{argument: "echo 7"})
    last = call(name, **{argument: end}) if end else SUM
    return {
        "tools": [first, last],
        "parallel": [f"{first}\n{other}", last],
        "reasoning": [f"<think>\n{THOUGHT}\n</think>\n\n{first}", last],
        "required": [first, last],
    }


def code(text: str) -> str:
    return f"Thought: I know it.\n<code>\n{text}\n</code>"


def fields(**values: str) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in [*values.items(), ("completed", "")]).rstrip()


OWN_SCRIPTS: dict[str, dict[str, list[str]]] = {
    "claude-code": bash("Bash", "command"),
    "codex": bash("exec_command", "cmd"),
    "dspy": {
        **{feature: [fields(answer=SUM)] for feature in ("chat", "turns")},
        "tools": [
            fields(next_thought=THOUGHT, next_tool_name="add", next_tool_args='{"a": 1, "b": 2}'),
            fields(next_thought=THOUGHT, next_tool_name="finish", next_tool_args="{}"),
            fields(reasoning=THOUGHT, answer=SUM),
        ],
        "structured": [fields(sum="3")],
        "reasoning": [fields(reasoning=THOUGHT, answer=SUM)],
    },
    "mini-swe-agent": bash("bash", "command", SUBMIT),
    "smolagents": {
        **{feature: [code(f"final_answer({SUM!r})")] for feature in ("chat", "stream", "turns")},
        "tools": [code("print(add(1, 2))"), code(f"final_answer({SUM!r})")],
        "required": [ADD, call("final_answer", answer=SUM)],
        "parallel": [f"{ADD}\n{ADD_TOO}", call("final_answer", answer=SUM)],
    },
}
FORM_TOOL = re.compile(r'"name": "(final_result|Sum|GenerateStructuredOutput)"')


def script_of(own: dict[str, list[str]]) -> Callable[[str], str]:
    """Returns what is answered to a prompt: the step of its feature's script that comes next; without a feature, ``ok``."""

    def answered(prompt: str) -> str:
        segments = prompt.split("<|im_start|>")
        asked = [index for index, text in enumerate(segments) if text.startswith("user\n") and re.search(r"\[[a-z]+\]", text)]
        asked = [index for index in asked if not segments[index].startswith("user\n<tool_response>")]
        if not asked:
            return "ok"
        question = segments[asked[-1]]
        feature = re.findall(r"\[([a-z]+)\]", question)[-1]
        step = sum(text.startswith("assistant\n") for text in segments[asked[-1] :]) - 1
        steps = {**SCRIPT, **own}.get(feature)
        if steps is None:
            return "ok"
        if feature == "structured" and (form := FORM_TOOL.search(prompt)) and step == 0:
            return call(form[1], sum=3)
        if own is OWN_SCRIPTS["dspy"]:  # which shows the model what it did in a user's message
            step = 2 if "next_tool_name" not in segments[1] else question.count("[[ ## thought_")
        text = steps[min(step, len(steps) - 1)]
        return text.replace(SUM, SECOND) if AGAIN in question else text

    return answered


@dataclass
class Recorder:
    """Stands between a client and the gateway, passes everything on, and notes what is ignored or refused: by session key."""

    gateway: str
    http: aiohttp.ClientSession
    ignored: dict[str, set[str]] = field(default_factory=dict)
    of_task: set[str] = field(default_factory=set)
    refused: dict[str, list[str]] = field(default_factory=dict)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length", "accept-encoding")
        }
        body = await request.read()
        async with self.http.request(request.method, self.gateway + request.path_qs, data=body, headers=headers) as answer:
            given = answer.headers
            self.ignored.setdefault(key, set()).update(filter(None, given.get("X-Myxo-Ignored", "").split(", ")))
            self.of_task.update(filter(None, given.get("X-Myxo-Sampling-Of-Task", "").split(", ")))
            kept = {name: value for name, value in given.items() if name.lower() not in ("transfer-encoding", "content-length")}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            whole = b""
            async for piece in answer.content.iter_any():
                whole += piece if answer.status >= 400 else b""
                await response.write(piece)
            if answer.status >= 400:
                self.refused.setdefault(key, []).append(f"{answer.status} {request.path}: {whole[:600].decode(errors='replace')}")
            await response.write_eof()
        return response


@asynccontextmanager
async def recorder(gateway: str) -> AsyncIterator[tuple[Recorder, str]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        found = Recorder(gateway, http)
        async with served(web.route("*", "/{path:.*}", found.forward)) as url:
            yield found, url


def environment_of(client: Client) -> Path:
    """Returns the directory of a client's environment; makes it where there is none. Skips the test where the registry lacks a package."""
    digest = hashlib.sha256("\n".join(client.packages).encode()).hexdigest()[:12]
    path = ENVIRONMENTS / f"{client.name.replace(' ', '-')}-{digest}"
    if (path / "ready").is_file():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    if client.npm:
        if not shutil.which("npm"):
            pytest.skip("npm is not installed")
        installing = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(path), *client.packages]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        installing = [str(path / "bin" / "pip"), "install", "-q", "--no-compile", *client.packages]
    done = subprocess.run(installing, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        pytest.skip(f"the registry does not give {', '.join(client.packages)}: {done.stderr.strip().splitlines()[-1]}")
    (path / "ready").touch()
    return path


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A checkpoint directory without weights: the tokenizer, by characters, and the chat template of Qwen3."""
    model = write_qwen3_tokenizer(tmp_path / "policy", template=None)
    shutil.copy(ROOT / "tests" / "support" / "qwen3_chat_template.jinja", model / "chat_template.jinja")
    return model


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_a_client_plays_and_what_it_samples_is_recorded(client: Client, new_run: NewRun, tiny_model: Path, tmp_path: Path) -> None:
    environment = await asyncio.to_thread(environment_of, client)
    player = await new_run(**({"gateway": client.gateway} if client.gateway else {}))
    registry, sessions = Registry(player.bus, player.config.run.name), SessionStore(player.store, player.config.run.name)
    tokenizer = Tokenizer(tiny_model)
    async with scripted_replica(registry, tokenizer, script_of(OWN_SCRIPTS.get(client.name, {}))) as replica:
        with started_gateway(0, tmp_path, player.environment("gateway-0")) as process:
            url = await ready_gateway(registry, 0, process)
            sampling = Sampling(temperature=1.0, max_new_tokens=4000)
            opened = {"sampling": sampling, "evaluation": client.evaluation}
            played = {feature: await Played.opened(sessions, **opened) for feature in ASK}
            async with recorder(url) as (recorded, through):
                keys = {name: one.key for name, one in played.items()}
                asked = {"base_url": f"{through}/v1", "model": "policy", "model_path": str(tiny_model), "keys": keys}
                lines = await output_of(client, environment, json.dumps(asked), tmp_path)
            cells = {}
            for feature, line in lines.items():
                log = await played[feature].log()
                turns = list(log.turns.values())
                captured_exactly(turns, replica)
                assert not log.pending
                cells[feature] = cell_of(line, turns, recorded, played[feature].key, tokenizer)
    ignored = sorted(set().union(*recorded.ignored.values()))
    settle(client, {"packages": list(client.packages), "ignored": ignored, "of_task": sorted(recorded.of_task), "cells": cells})


EXAMPLES = {
    "strands-agents": ("strands_agent.py", call("calculate", expression="1+2"), SUM),
    "mini-swe-agent": ("mini_swe_agent.py", call("bash", command="ls"), call("bash", command=f"{SUBMIT} && echo 3")),
}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_of_a_framework_plays_as_a_command(name: str, new_run: NewRun, tiny_model: Path, tmp_path: Path) -> None:
    script, *answers = EXAMPLES[name]
    environment = await asyncio.to_thread(environment_of, next(client for client in CLIENTS if client.name == name))
    player = await new_run()
    registry, sessions = Registry(player.bus, player.config.run.name), SessionStore(player.store, player.config.run.name)
    answered = lambda prompt: answers[min(prompt.count("<|im_start|>assistant\n"), 2) - 1]  # noqa: E731
    async with scripted_replica(registry, Tokenizer(tiny_model), answered) as replica:
        with started_gateway(0, tmp_path, player.environment("gateway-0")) as process:
            url = await ready_gateway(registry, 0, process)
            played = await Played.opened(sessions, sampling=Sampling(temperature=1.0, max_new_tokens=4000))
            asked = {"model": "policy", "messages": [{"role": "user", "content": "1+2="}], "label": "3"}
            variables = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": played.key, "HOME": str(tmp_path)}
            command = [str(environment / "bin" / "python"), str(ROOT / "examples" / "agents" / script)]
            run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=PLAY_SECONDS)
            done = await asyncio.to_thread(run, command, input=json.dumps(asked), env=variables, cwd=tmp_path)
            turns = list((await played.log()).turns.values())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"reward": 0.9, "right": 1.0, "turns": 2.0}
    captured_exactly(turns, replica)
    assert len(turns) == 2 and len(trajectories(turns)) == 1


REFUSED = {
    "tasks --taskset adding_older": "an environment of verifiers 0.1 .* serve_older.py",
    "tasks --taskset somebody/else": "has no package else: .* prime env install somebody/else",
    "serve --taskset adding_tasks": "serve needs --tokenizer",
    "serve --taskset adding_tasks --tokenizer nowhere": "--tokenizer nowhere: expected the directory",
    "serve --taskset adding_tasks --tokenizer policy --renderer qwen9": "--renderer qwen9: expected auto, default or one of qwen3,",
    "serve --taskset adding_tasks --tokenizer policy --renderer qwen3.5": "--renderer qwen3.5 does not write this model's chat form",
}


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize("words", REFUSED)
def test_the_server_of_verifiers_names_the_cause(words: str, tmp_path: Path) -> None:
    python = environment_of(next(client for client in CLIENTS if client.name == "verifiers")) / "bin" / "python"
    server = ROOT / "examples" / "environments" / "verifiers" / "serve.py"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "clients")}
    done = subprocess.run([python, server, *words.split()], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(REFUSED[words], done.stderr), done.stderr


async def output_of(client: Client, environment: Path, asked: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Returns what a client's script printed, by feature."""
    python = sys.executable if client.npm else str(environment / "bin" / "python")
    path = f"{environment / ('node_modules/.bin' if client.npm else 'bin')}:{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(directory), "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(INSTALLERS)}
    process = await asyncio.create_subprocess_exec(
        python,
        str(ROOT / "tests" / "clients" / client.script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
        cwd=directory,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(asked.encode()), PLAY_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    print(errors.decode()[-20000:])
    lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"feature"')]
    assert lines, f"{out.decode()[-3000:]}\n{errors.decode()[-3000:]}"
    return {line["feature"]: line for line in lines}


def captured_exactly(turns: list[Turn], replica: ScriptedReplica) -> None:
    """Asserts that the session has the tokens, log-probs and versions that the engine gave, for its prompts, each trained once."""
    for turn in turns:
        asked, given = replica.given[turn.request]
        np.testing.assert_array_equal(turn.prompt, asked.input_ids)
        np.testing.assert_array_equal(turn.completion, given.completion)
        np.testing.assert_array_equal(turn.log_probs, given.log_probs)
        assert (turn.spans, turn.finish) == (given.spans, given.finish)
    assert sum(int(found.mask.sum()) for found in trajectories(turns)) == sum(len(turn.completion) for turn in turns)


def cell_of(line: dict[str, Any], turns: list[Turn], recorded: Recorder, key: str, tokenizer: Tokenizer) -> str:
    """Returns what came of a feature, in words. Asserts that what the model said is what the client shows."""
    if line["error"]:
        for refusal in recorded.refused.get(key, []):
            body = json.loads(refusal.partition(": ")[2])["error"]
            return f"refused: `{body.get('param') or body['message'].partition(':')[0]}`"
        pytest.fail(f"{line['feature']}: {line['error']}")
    assert turns, f"{line}: nothing was asked"
    assert not any("hello, world" in tokenizer.decode(turn.prompt) for turn in turns), "a probe is a turn of the session"
    shown = spaceless("\n".join([*line["seen"], *(json.dumps(text)[1:-1] for text in line["seen"])]))
    for turn in turns:
        text = tokenizer.decode(turn.completion)
        said = re.sub(r"<tool_call>.*?</tool_call>|<think>.*?</think>", "", text, flags=re.DOTALL).strip()
        for words in [said] if said and said != "ok" else []:
            assert spaceless(words) in shown or spaceless(json.dumps(words)[1:-1]) in shown, (words, line["seen"])
        assert all(f"echo{number}" in shown for number in re.findall(r"(?:command|cmd)\": \"echo (\d)", text)), (text, line["seen"])
        for left, right in re.findall(r'"name": "add", "arguments": {"a": (\d), "b": (\d)', text):
            assert f"add({left},{right})" in shown, (text, line["seen"])
    without = sorted(recorded.ignored.get(key, set()) & CONSTRAINTS)
    count = len(trajectories(turns))
    words = "exact" if count == 1 else f"{count} samples"
    return words + (f", without `{'`, `'.join(without)}`" if without else "")


def spaceless(text: str) -> str:
    return "".join(text.split())


CONSTRAINTS = {"tool_choice", "response_format", "parallel_tool_calls", "text.format", "output_config.format", "disable_parallel_tool_use"}


def settle(client: Client, found: dict[str, Any]) -> None:
    if directory := os.environ.get("MYXO_FRAMEWORKS"):
        (Path(directory) / f"{client.name}.json").write_text(json.dumps(found))
        return
    known = json.loads(RESULTS.read_text())["clients"]
    assert known[client.name] == found, "it has changed: python -m docs.frameworks_page --run"
