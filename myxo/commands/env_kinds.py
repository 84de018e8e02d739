"""``myxo env new NAME``, ``myxo env run MODULE:CLASS`` and ``myxo env schemas``: an environment of one's own, from nothing to served."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.command_arguments import seconds
from myxo.commands.env_skeletons import SKELETONS
from myxo.preflight.server_checks import connect
from shared.bus.subjects import RUN_ID
from shared.environment import environment_url
from shared.environment.bus_serving import serve_on_bus
from shared.environment.protocol import Description, ScoreRequest
from shared.environment.serving import SESSION_TTL, ServedEnvironment
from shared.environment.stepping import CloseRequest, ResetAnswer, ResetRequest, StepAnswer, StepRequest
from shared.hooks.layout_names import import_module
from shared.runtime import addresses, exit_codes
from shared.runtime.errors import ConfigError

SCHEMAS: dict[str, type] = {
    "describe.answer": Description,
    "score.request": ScoreRequest,
    "reset.request": ResetRequest,
    "reset.answer": ResetAnswer,
    "step.request": StepRequest,
    "step.answer": StepAnswer,
    "close.request": CloseRequest,
}
"""The maps of the protocol that have a JSON schema."""


def declare_new(verb: argparse.ArgumentParser) -> None:
    """Declares ``new``."""
    kinds = "; ".join(f"{kind}: {skeleton.what}" for kind, skeleton in SKELETONS.items())
    verb.add_argument("name", metavar="NAME", help="of its class, such as GuessingGame; the file is called guessing_game.py")
    verb.add_argument("--kind", choices=tuple(SKELETONS), default="environment", help=f"{kinds} (default environment)")
    verb.add_argument("--directory", type=Path, default=Path(), help="where the file goes (default: here)")
    verb.set_defaults(run_command=new)


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
    verb.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="seconds that one call may need, as it is described (30)")
    verb.add_argument("--session-ttl", type=seconds, default=SESSION_TTL, metavar="S", help="seconds until a session is forgotten (3600)")
    verb.set_defaults(run_command=lambda parsed, console: asyncio.run(run(parsed, console)))


async def run(parsed: argparse.Namespace, console: Console) -> int:
    """Serves until it is interrupted. Raises ConfigError."""
    served = ServedEnvironment(parsed.path.rpartition(":")[2], _made(parsed.path), parsed.timeout, parsed.session_ttl)
    async with contextlib.AsyncExitStack() as stack:
        if parsed.nats is not None:
            where = await _on_bus(served, parsed, stack)
        else:
            from shared.environment.http_serving import served_over_http  # aiohttp comes with the extra `reward`

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


async def _on_bus(served: ServedEnvironment, parsed: argparse.Namespace, stack: contextlib.AsyncExitStack) -> str:
    if not environment_url.NAME.match(parsed.nats):
        raise ConfigError("--nats", parsed.nats, "use 1 to 63 letters, digits, '-' and '_'")
    if not parsed.run or not RUN_ID.match(parsed.run):
        raise ConfigError("--run", parsed.run, "required with --nats: the run's id")
    url = addresses.nats_url()
    if not url:
        raise ConfigError("NATS_URL", url, "required in the environment with --nats: nats://[user:password@]host:port")
    bus = await connect(url, parsed.run, "give nats://[user:password@]host:port of the run's server")
    stack.push_async_callback(bus.close)
    await serve_on_bus(served, bus.connection, parsed.run, parsed.nats)
    return f"nats:{parsed.nats}"


def declare_schemas(verb: argparse.ArgumentParser) -> None:
    """Declares ``schemas``."""
    verb.set_defaults(run_command=schemas)


def schemas(parsed: argparse.Namespace, console: Console) -> int:
    """Prints the JSON schemas of the protocol's maps, by name."""
    found = {name: model.model_json_schema() for name, model in SCHEMAS.items()}  # type: ignore[attr-defined]
    console.file.write(json.dumps(found, indent=2) + "\n")
    return exit_codes.DONE
