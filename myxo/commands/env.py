"""``myxo env``: checks a live environment or an agent, writes the skeleton of one, serves one, prints the protocol's schemas."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from myxo.commands import agent_check
from myxo.commands.agent_check import AgentConformance, ScriptedModel
from myxo.commands.command_arguments import add_json, positive
from myxo.run.run_access import connect
from shared.bus.connection import Bus
from shared.bus.subjects import RUN_ID
from shared.config import flags
from shared.environment import environment_url
from shared.environment.conformance import Check, Conformance, Example
from shared.environment.environment_client import open_environment
from shared.environment.environment_url import without_credentials
from shared.environment.protocol import (
    CloseRequest,
    Description,
    Environment,
    ResetAnswer,
    ResetRequest,
    ScoreRequest,
    StepAnswer,
    StepRequest,
)
from shared.environment.serving import SESSION_TTL, ServedEnvironment, serve_on_bus
from shared.hooks.import_names import import_module
from shared.runtime import addresses, exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import Parser
from shared.runtime.safe_text import json_text


@dataclass(frozen=True)
class Skeleton:
    """A kind. ``what`` it is, ``about``: its module's docstring, ``body``: what follows. ``steps``: what for, and the command.

    ``{module}`` and ``{name}`` stand for the file's and the class's name."""

    what: str
    about: str
    body: str
    steps: tuple[tuple[str, str], ...]

    def text(self, module: str, name: str) -> str:
        """Returns the module's text."""
        commands = "\n".join(self.commands(module, name))
        return f'"""{self.about}\n\n{commands}\n"""\n' + _filled(self.body, module, name)

    def commands(self, module: str, name: str) -> Iterator[str]:
        """Yields the commands, one a line."""
        width = max(len(what) for what, _ in self.steps) + 3
        for what, command in self.steps:
            yield f"{what + ':':{width}}{_filled(command, module, name)}"


def _filled(text: str, module: str, name: str) -> str:
    return text.replace("{module}", module).replace("{name}", name)


ENVIRONMENT = Skeleton(
    "an environment that scores and steps",
    "An environment of yours: it scores answers, and plays episodes of several turns. Keep what you need, delete the rest.",
    '''

class {name}:
    def score(self, request):
        """Returns one reward for each of request["samples"], which answer request["prompt"]: a number, or named ones with "reward"."""
        return [float(sample["response"].strip() == sample["label"]) for sample in request["samples"]]

    def reset(self, request):
        """Begins an episode of request["prompt"]. Returns your own state of it, and messages that the model sees behind the prompt."""
        return {"turns": 0, "label": request["label"]}, []

    def step(self, state, message, request):
        """Takes what the model said. Returns messages that it sees next, a reward or None, and whether the episode is over."""
        state["turns"] += 1
        right = message["content"].strip() == state["label"]
        if right or state["turns"] == 3:
            return [], float(right), True
        return [{"role": "user", "content": "Not yet. Try again."}], None, False
''',
    (
        ("Serve it", "myxo env run {module}:{name}"),
        ("Check it", "myxo env check http://127.0.0.1:8080"),
        ("Train on its episodes", "--episode-url http://127.0.0.1:8080"),
        ("Train on its scores", "--rm-type environment --environment-url http://127.0.0.1:8080"),
    ),
)

_PLAY = '''
TURNS = 3


async def play(data, base_url, api_key):
    """Plays one rollout. Returns its reward: a number, or named ones with "reward"."""
    messages = list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=8) as client:
        for turn in range(1, TURNS + 1):
            completion = await client.chat.completions.create(model=data["model"], messages=messages)
            answer = completion.choices[0].message
            if (answer.content or "").strip() == data["label"]:
                return {"reward": 1.0, "turns": turn}
            messages.append(answer.model_dump(exclude_none=True))  # as it came: then the next turn carries its very tokens on
            messages.append({"role": "user", "content": "Not yet. Try again."})
    return {"reward": 0.0, "turns": TURNS}
'''

AGENT = Skeleton(
    "an agent that is a function",
    "An agent of yours: what it has the model write is trained. It runs in the rollout services.",
    f"""
from openai import AsyncOpenAI
{_PLAY}""",
    (("Check it", "myxo env check {module}:play"), ("Train it", "--agent {module}:play")),
)

COMMAND = Skeleton(
    "an agent that is a command",
    "An agent of yours that is a command: data on its standard input, URL and key in the environment, the reward as its last line.",
    f"""
import asyncio
import json
import os
import sys

from openai import AsyncOpenAI
{_PLAY}

if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(asyncio.run(play(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))))
""",
    (("Check it", "myxo env check --agent-command 'python {module}.py'"), ("Train it", "--agent-command 'python {module}.py'")),
)

SERVICE = Skeleton(
    "an agent behind a URL, with packages of its own",
    "An agent of yours behind a URL: it may have a virtual environment, a container or a machine of its own.",
    f"""
import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from openai import AsyncOpenAI
{_PLAY}

app = FastAPI()


@app.post("/")
async def rollout(given: dict = Body()):
    \"\"\"Answers {{"reward": ...}} once a rollout has ended, or {{"error": ...}}, by which it is lost.\"\"\"
    try:
        return {{"reward": await play(given["data"], given["base_url"], given["api_key"])}}
    except Exception as error:
        return JSONResponse({{"error": f"{{type(error).__name__}}: {{error}}"}}, 500)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8090)
""",
    (
        ("Serve it", "python {module}.py"),
        ("Check it", "myxo env check http://127.0.0.1:8090/ --agent"),
        ("Train it", '--agent shared.agents.http_agent:play --agent-options \'{"url": "http://127.0.0.1:8090/"}\''),
        ("And have it started", "--agent-service 'python {module}.py'"),
    ),
)

_SERVERS = '--agent-options \'{"servers": {"{module}": ["python", "{module}.py"]}}\''

TOOLS = Skeleton(
    "tools of an MCP server, for the agent that comes with Myxo",
    "Tools of yours as an MCP server: Myxo's own agent offers them to the model. The run's reward scores its last answer.",
    '''
from mcp.server import MCPServer


def add(a: float, b: float) -> str:
    """Adds two numbers."""
    return f"{a + b:g}"


if __name__ == "__main__":
    server = MCPServer("{module}")
    server.add_tool(add)
    server.run("stdio")
''',
    (
        ("Check it", f"myxo env check shared.agents.mcp_agent:play {_SERVERS}"),
        ("Train it", f"--agent shared.agents.mcp_agent:play {_SERVERS}"),
    ),
)

# By the names that the command line has.
SKELETONS = {"environment": ENVIRONMENT, "agent": AGENT, "command": COMMAND, "service": SERVICE, "tools": TOOLS}


# The maps of the protocol that have a JSON schema.
SCHEMAS: dict[str, type[BaseModel]] = {"describe.answer": Description, "score.request": ScoreRequest, "reset.request": ResetRequest}
SCHEMAS |= {"reset.answer": ResetAnswer, "step.request": StepRequest, "step.answer": StepAnswer, "close.request": CloseRequest}


def declare_new(verb: argparse.ArgumentParser) -> None:
    """Declares ``new``."""
    kinds = "; ".join(f"{kind}: {skeleton.what}" for kind, skeleton in SKELETONS.items())
    verb.add_argument("name", metavar="NAME", help="of its class, such as GuessingGame; the file is called guessing_game.py")
    verb.add_argument("--kind", choices=tuple(SKELETONS), default="environment", help=f"{kinds} (default environment)")
    verb.add_argument("--directory", type=Path, default=Path(), help="where the file goes (default: here)")


def new(parsed: argparse.Namespace, console: Console) -> int:
    """Writes a skeleton that works. Raises ConfigError for a name that is none, and for a file that is there."""
    if not parsed.name.isidentifier() or not parsed.name[0].isupper() or not parsed.name.isascii():
        raise ConfigError("NAME", parsed.name, "expected the name of a Python class, such as GuessingGame")
    module = "".join(f"_{letter.lower()}" if letter.isupper() and at else letter.lower() for at, letter in enumerate(parsed.name))
    path, skeleton = parsed.directory / f"{module}.py", SKELETONS[parsed.kind]
    try:
        with path.open("x") as file:
            file.write(skeleton.text(module, parsed.name))
    except OSError as error:
        raise ConfigError("NAME", str(path), f"cannot be written: {error.strerror}") from None
    for line in (f"{path}: {skeleton.what}", *skeleton.commands(module, parsed.name)):
        console.print(line, markup=False, soft_wrap=True)
    return exit_codes.DONE


def declare_run(verb: argparse.ArgumentParser) -> None:
    """Declares ``run``."""
    verb.add_argument("path", metavar="MODULE:CLASS", help="the class, which is made without arguments; modules here are found")
    verb.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    verb.add_argument("--port", type=int, default=8080, help="port to listen on; 0: any (default 8080)")
    verb.add_argument("--nats", metavar="NAME", help="answer as nats:NAME on the bus of NATS_URL instead")
    verb.add_argument("--run", help="with --nats: the run whose subjects it answers on")
    verb.add_argument("--timeout", type=positive, default=30.0, metavar="S", help="seconds that one call may need, as it is described (30)")
    verb.add_argument("--session-ttl", type=positive, default=SESSION_TTL, metavar="S", help="seconds until a session is forgotten (3600)")


async def run(parsed: argparse.Namespace, console: Console) -> int:
    """Serves until it is interrupted. Raises ConfigError."""
    served = ServedEnvironment(parsed.path.rpartition(":")[2], _made(parsed.path), parsed.timeout, parsed.session_ttl)
    async with contextlib.AsyncExitStack() as stack:
        if parsed.nats is not None:
            if not environment_url.NAME.match(parsed.nats):
                raise ConfigError("--nats", parsed.nats, "use 1 to 63 letters, digits, '-' and '_'")
            bus = await _bus(parsed.run, stack, "with --nats", "the run's id")
            await serve_on_bus(served, bus.connection, parsed.run, parsed.nats)
            where = f"nats:{parsed.nats}"
        else:
            from shared.environment.http_environment import served_over_http  # aiohttp comes with the extra `reward`

            try:
                where = await stack.enter_async_context(served_over_http(served, parsed.host, parsed.port))
            except OSError as error:
                raise ConfigError("--port", parsed.port, f"cannot be listened on: {error.strerror}") from None
        console.print(f"{served.name} serves {', '.join(served.verbs)} at {where}", markup=False, soft_wrap=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return exit_codes.DONE


def _made(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError("MODULE:CLASS", path, "expected a module, a colon and the name of a class in it")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(import_module(module), name)()
        ServedEnvironment(name, made)
    except (Exception, SystemExit) as error:  # importing runs the module: it can raise anything
        raise ConfigError("MODULE:CLASS", path, f"cannot be served: {type(error).__name__}: {error}") from None
    return made


async def _bus(run: str | None, stack: contextlib.AsyncExitStack, reason: str, expected: str) -> Bus:
    """Returns the run's bus, which is closed with the stack. ``reason``: what it is required for."""
    if not run or not RUN_ID.match(run):
        raise ConfigError("--run", run, f"required {reason}: {expected}")
    url = addresses.nats_url()
    if not url:
        raise ConfigError("NATS_URL", url, f"required in the environment {reason}: nats://[user:password@]host:port")
    bus = await connect(url, run, "give nats://[user:password@]host:port of the run's server")
    return await stack.enter_async_context(contextlib.aclosing(bus))


def schemas(parsed: argparse.Namespace, console: Console) -> int:
    """Prints the JSON schemas of the protocol's maps, by name."""
    found = {name: model.model_json_schema() for name, model in SCHEMAS.items()}
    console.file.write(json.dumps(found, indent=2) + "\n")
    return exit_codes.DONE


AGENT_SECONDS = 60.0  # deadline of one rollout of an agent under check
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")
STYLES = {"ok": "green", "warning": "yellow", "FAILED": "bold red"}
_DESCRIPTION = """Ask a live environment all that the protocol promises: its description, scores of one sample and of groups, of empty, odd
and long responses, of eight requests at once; and, where it steps, sessions, turns, repeats and ends. Or have an agent (module:function, a
service's URL with --agent, or --agent-command) play rollouts against a model that follows a script: its reward, nonsense, refusals, an
ended session, eight rollouts at once. One line a check; exits 1 where one failed. Warnings are advice."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the verbs and their arguments."""
    command.description = None
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    verb = verbs.add_parser("check", help="try a live environment, or an agent", description=_DESCRIPTION, allow_abbrev=False)
    what = "of an environment: http://host:port, https://… or nats:NAME; of an agent: module:function, or with --agent its URL"
    verb.add_argument("url", metavar="URL", nargs="?", help=what)
    verb.add_argument("--agent", action="store_true", help="URL is that of an agent (shared.agents.http_agent:play)")
    verb.add_argument("--agent-command", metavar="COMMAND", help="an agent that is a command, split as a shell would")
    verb.add_argument("--agent-options", metavar="JSON", default="{}", help="rollout.agent_options, as one JSON object")
    verb.add_argument("--run", help="the run whose subjects a nats:NAME answers on; the server is that of NATS_URL")
    verb.add_argument("--timeout", type=positive, metavar="S", help="seconds for one score (default: what the environment asks for)")
    verb.add_argument("--prompt", metavar="P", help="a prompt of your task (default a sum)")
    verb.add_argument("--label", metavar="L", help="its label")
    verb.add_argument("--response", action="append", metavar="R", help="a response to it; may be given several times")
    add_json(verb)
    verb.set_defaults(run_command=lambda parsed, console: asyncio.run(check(parsed, console)))
    for name, text, run_command, own in (
        ("new", "write the skeleton of an environment that scores and steps", new, declare_new),
        ("run", "serve a class of yours as an environment", lambda parsed, console: asyncio.run(run(parsed, console)), declare_run),
        ("schemas", "print the JSON schemas of what is asked and answered", schemas, lambda verb: None),
    ):
        verb = verbs.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
        verb.set_defaults(run_command=run_command)
        own(verb)


async def check(parsed: argparse.Namespace, console: Console) -> int:
    """Prints the result of each check; returns the exit code. Raises ConfigError for bad input."""
    results: list[Check] = []
    async with contextlib.AsyncExitStack() as stack:
        shown, checks = await _checks(parsed, stack)
        async for result in checks:
            results.append(result)
            if not parsed.json:
                line = Text.assemble((f"{result.result:8}", STYLES[result.result]), f"{result.name:32} ", (result.detail, "dim"))
                console.print(line, soft_wrap=True)
    failed = sum(result.result == "FAILED" for result in results)
    warned = sum(result.result == "warning" for result in results)
    if parsed.json:
        answer = {"url": shown, "ok": not failed, "checks": [asdict(result) for result in results]}
        console.file.write(json_text(answer) + "\n")
    else:
        verdict = "does not keep the protocol" if failed else "keeps the protocol"
        if _is_agent(parsed):
            verdict = "cannot be trained as it is" if failed else "can be trained"
        counts = f"checks: {len(results)}, failed: {failed}, warnings: {warned}"
        console.print(Text(f"{shown} {verdict} ({counts})"), soft_wrap=True)
    return exit_codes.FAILED if failed else exit_codes.DONE


async def _checks(parsed: argparse.Namespace, stack: contextlib.AsyncExitStack) -> tuple[str, AsyncIterator[Check]]:
    if not _is_agent(parsed):
        if parsed.url is None:
            raise ConfigError("URL", None, "expected an environment's URL, an agent as module:function, or --agent-command")
        environment = await _opened(parsed.url, parsed.run, stack)
        return environment.shown, Conformance(environment, parsed.run or "", _example(parsed), parsed.timeout).checks()
    if parsed.agent_command is not None:
        try:
            words = shlex.split(parsed.agent_command)
        except ValueError as error:
            raise ConfigError("--agent-command", parsed.agent_command, str(error)) from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError("--agent-command", parsed.agent_command, "a program that this machine has")
        shown, play = parsed.agent_command, agent_check.command_agent(words)
    elif parsed.agent:
        shown, play = without_credentials(parsed.url), agent_check.url_agent(parsed.url)
    else:
        sys.path.insert(0, os.getcwd())
        shown, play = parsed.url, agent_check.function_agent(parsed.url)
    model = stack.enter_context(ScriptedModel())
    options = flags.mapping("--agent-options", parsed.agent_options) or {}
    return shown, AgentConformance(play, model, _example(parsed), options, parsed.timeout or AGENT_SECONDS).checks()


def _is_agent(parsed: argparse.Namespace) -> bool:
    """Returns whether an agent is meant: a URL has slashes behind its colon, and an environment on the bus a name of its own."""
    path = parsed.url is not None and _PATH.match(parsed.url) is not None and not parsed.url.startswith("nats:")
    return parsed.agent_command is not None or (parsed.agent and parsed.url is not None) or path


def _example(parsed: argparse.Namespace) -> Example:
    default = Example()
    prompt, label = (default.prompt, parsed.label or default.label) if parsed.prompt is None else (parsed.prompt, parsed.label)
    return Example(prompt, label, parsed.response or default.responses)


async def _opened(url: str, run: str | None, stack: contextlib.AsyncExitStack) -> Environment:
    try:
        found = environment_url.parse(url)
    except ValueError as error:
        raise ConfigError("URL", url.rpartition("@")[2], str(error)) from None
    bus = await _bus(run, stack, "for nats:NAME", "the run's id, lower-case letters, digits, '-' and '_'") if found.responder else None
    environment = open_environment("under check", url, bus, run or "")
    stack.push_async_callback(environment.close)
    return environment
