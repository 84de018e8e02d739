"""``myxo env``: ``check URL`` tells line by line whether a live environment keeps the protocol; the others make and serve one."""

import argparse
import asyncio
import contextlib
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from myxo.commands import env_kinds
from myxo.commands.command_arguments import add_json, seconds
from myxo.display.text import json_text
from myxo.preflight.server_checks import connect
from shared.bus.connection import Bus
from shared.bus.subjects import RUN_ID
from shared.environment import environment_url
from shared.environment.conformance import Check, Conformance, Example
from shared.environment.environment import Environment
from shared.environment.environment_client import open_environment
from shared.runtime import exit_codes, server_urls
from shared.runtime.command_line import Parser
from shared.runtime.errors import ConfigError

_STYLES = {"ok": "green", "warning": "yellow", "FAILED": "bold red"}

_DESCRIPTION = """Ask a live environment all that the protocol promises: its description, scores of one sample and of groups, of empty, odd
and long responses, of eight requests at once; and, where it steps, sessions, turns, repeats and ends. One line a check; exits 1 where one
failed. Warnings are advice."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the verbs and their arguments."""
    command.description = None
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    verb = verbs.add_parser("check", help="try a live environment", description=_DESCRIPTION, allow_abbrev=False)
    verb.add_argument("url", metavar="URL", help="http://host:port, https://… or nats:NAME")
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
        environment = await _opened(parsed.url, parsed.run, stack)
        async for result in Conformance(environment, parsed.run or "", _example(parsed), parsed.timeout).checks():
            results.append(result)
            if not parsed.json:
                line = Text.assemble((f"{result.result:8}", _STYLES[result.result]), f"{result.name:32}", (result.detail, "dim"))
                console.print(line, soft_wrap=True)
    failed = sum(result.result == "FAILED" for result in results)
    warned = sum(result.result == "warning" for result in results)
    if parsed.json:
        answer = {"url": environment.shown, "ok": not failed, "checks": [asdict(result) for result in results]}
        console.file.write(json_text(answer) + "\n")
    else:
        verdict = "does not keep the protocol" if failed else "keeps the protocol"
        counts = f"checks: {len(results)}, failed: {failed}, warnings: {warned}"
        console.print(Text(f"{environment.shown} {verdict} ({counts})"), soft_wrap=True)
    return exit_codes.FAILED if failed else exit_codes.DONE


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
    url = server_urls.nats_url()
    if not url:
        raise ConfigError("NATS_URL", url, "required in the environment for nats:NAME: nats://[user:password@]host:port")
    return await connect(url, run, "give nats://[user:password@]host:port of the run's server")
