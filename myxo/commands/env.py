"""``myxo env``: ``check`` tells line by line whether a live environment, or an agent, does what it should; others make and serve one."""

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from myxo.agent_check import agents
from myxo.agent_check.agent_conformance import AgentConformance
from myxo.agent_check.scripted_model import ScriptedModel
from myxo.commands import env_kinds
from myxo.commands.command_arguments import add_json, seconds
from myxo.preflight.server_checks import connect
from shared.bus.connection import Bus
from shared.bus.subjects import RUN_ID
from shared.environment import environment_url
from shared.environment.conformance import Check, Conformance, Example
from shared.environment.environment import Environment
from shared.environment.environment_client import open_environment
from shared.environment.environment_url import without_credentials
from shared.runtime import addresses, exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import Parser
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import json_text

AGENT_SECONDS = 60.0
"""The deadline of one rollout of an agent under check."""

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")

_STYLES = {"ok": "green", "warning": "yellow", "FAILED": "bold red"}

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
    verb.add_argument("--timeout", type=seconds, metavar="S", help="seconds for one score (default: what the environment asks for)")
    verb.add_argument("--prompt", metavar="P", help="a prompt of your task (default a sum)")
    verb.add_argument("--label", metavar="L", help="its label")
    verb.add_argument("--response", action="append", metavar="R", help="a response to it; may be given several times")
    add_json(verb)
    verb.set_defaults(run_command=lambda parsed, console: asyncio.run(check(parsed, console)))
    for name, text, own in (
        ("new", "write the skeleton of an environment that scores and steps", env_kinds.declare_new),
        ("run", "serve a class of yours as an environment", env_kinds.declare_run),
        ("schemas", "print the JSON schemas of what is asked and answered", env_kinds.declare_schemas),
    ):
        own(verbs.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False))


async def check(parsed: argparse.Namespace, console: Console) -> int:
    """Prints the result of each check; returns the exit code. Raises ConfigError for bad input."""
    results: list[Check] = []
    async with contextlib.AsyncExitStack() as stack:
        shown, checks = await _checks(parsed, stack)
        async for result in checks:
            results.append(result)
            if not parsed.json:
                line = Text.assemble((f"{result.result:8}", _STYLES[result.result]), f"{result.name:32} ", (result.detail, "dim"))
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
    """Returns what is tried, as it is shown, and its checks. Raises ConfigError."""
    if not _is_agent(parsed):
        if parsed.url is None:
            raise ConfigError("URL", None, "expected an environment's URL, an agent as module:function, or --agent-command")
        environment = await _opened(parsed.url, parsed.run, stack)
        return environment.shown, Conformance(environment, parsed.run or "", _example(parsed), parsed.timeout).checks()
    if parsed.agent_command is not None:
        shown, play = parsed.agent_command, agents.command_agent(_split(parsed.agent_command))
    elif parsed.agent:
        shown, play = without_credentials(parsed.url), agents.url_agent(parsed.url)
    else:
        sys.path.insert(0, os.getcwd())
        shown, play = parsed.url, agents.function_agent(parsed.url)
    model = stack.enter_context(ScriptedModel())
    return shown, AgentConformance(play, model, _example(parsed), _options(parsed.agent_options), parsed.timeout or AGENT_SECONDS).checks()


def _is_agent(parsed: argparse.Namespace) -> bool:
    """Returns whether an agent is meant: a URL has slashes behind its colon, and an environment on the bus a name of its own."""
    path = parsed.url is not None and _PATH.match(parsed.url) is not None and not parsed.url.startswith("nats:")
    return parsed.agent_command is not None or (parsed.agent and parsed.url is not None) or path


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError("--agent-command", command, str(error)) from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError("--agent-command", command, "a program that this machine has")
    return words


def _options(text: str) -> dict[str, Any]:
    try:
        options = parse_json(text)
    except ValueError as error:
        raise ConfigError("--agent-options", text, f"one JSON object: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError("--agent-options", text, "one JSON object")
    return options


def _example(parsed: argparse.Namespace) -> Example:
    default = Example()
    responses = parsed.response or default.responses
    if parsed.prompt is None:
        return Example(default.prompt, parsed.label or default.label, responses)
    return Example(parsed.prompt, parsed.label, responses)


async def _opened(url: str, run: str | None, stack: contextlib.AsyncExitStack) -> Environment:
    """Returns the environment, which is closed with the stack, and so is the bus that it may answer on."""
    try:
        found = environment_url.parse(url)
    except ValueError as error:
        raise ConfigError("URL", url.rpartition("@")[2], str(error)) from None
    bus = None
    if found.responder:
        bus = await _bus(run)
        stack.push_async_callback(bus.close)
    environment = open_environment("under check", url, bus, run or "")
    stack.push_async_callback(environment.close)
    return environment


async def _bus(run: str | None) -> Bus:
    if not run or not RUN_ID.match(run):
        raise ConfigError("--run", run, "required for nats:NAME: the run's id, lower-case letters, digits, '-' and '_'")
    url = addresses.nats_url()
    if not url:
        raise ConfigError("NATS_URL", url, "required in the environment for nats:NAME: nats://[user:password@]host:port")
    return await connect(url, run, "give nats://[user:password@]host:port of the run's server")
