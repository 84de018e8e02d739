"""``myxo console RUN``: the console of a run, also when it is over, or when only its directory is left."""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from myxo.commands.command_arguments import add_run, count
from myxo.launch.run_servers import ConsoleProcess
from myxo.run.run_access import given_servers, payload_url, reach, settled
from myxo.run.run_directory import RunDirectory, ServerUrls, find, no_such_run
from shared.bus import runs
from shared.config.service_sections import ConsoleSection
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError

TICK_SECONDS = 0.2
LOG = "console"  # name of the log in a run's directory


@dataclass(frozen=True)
class ConsoleOrigin:
    """What a console is to show. ``environment``: what tells it of the run; ``url``: of the console that a live run has already.

    ``serves``: the servers that this command serves for the moment, for other commands to find; None where it serves none.
    """

    section: ConsoleSection
    files: RunDirectory
    environment: dict[str, str]
    url: str = ""
    serves: ServerUrls | None = None


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("--host", help="where it listens (default: console_host of the run)")
    command.add_argument("--port", type=count, help="its port, or the next free one; 0: any (default: console_port of the run)")
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(show(parsed, console)))


async def show(parsed: argparse.Namespace, console: Console) -> int:
    """Serves until Ctrl-C, or names the console that is there already. Raises ConfigError where there is no such run."""
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    async with _origin(parsed.run, parsed.dir) as origin:
        if origin.url and parsed.host is None and parsed.port is None:
            console.print(f"Console: {origin.url}", soft_wrap=True)
            return exit_codes.DONE
        process = ConsoleProcess(_section(origin.section, parsed.host, parsed.port), origin.files.log(LOG), origin.environment)
        try:
            if origin.serves is not None:  # `myxo samples` and others would find the directory held, and nothing else
                origin.files.write_servers(replace(origin.serves, console=process.url))
            if process.url:
                console.print(f"Console: {process.url}\nCtrl-C ends it.", soft_wrap=True)
            while not stopping.is_set() and not process.given_up:
                process.tick(time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await stopping.wait()
        finally:
            process.stop()
            if origin.serves is not None:
                origin.files.remove_servers()
    return exit_codes.DONE if stopping.is_set() else exit_codes.FAILED


def _section(section: ConsoleSection, host: str | None, port: int | None) -> ConsoleSection:
    try:
        return ConsoleSection(
            console_host=section.console_host if host is None else host,
            console_port=section.console_port if port is None else port,
            console_hosts=section.console_hosts,
        )
    except ValueError:
        raise ConfigError("--host, --port", f"{host}:{port}", "a name or an address, and a port up to 65535") from None


@contextlib.asynccontextmanager
async def _origin(run: str, directory: Path) -> AsyncIterator[ConsoleOrigin]:
    """Finds the run: on its bus, live or served from its directory for the moment; else its directory alone."""
    files = None
    if given_servers().nats_url is None and (files := find(run, directory)[1]) is None:
        raise no_such_run(run, directory)
    if files is not None and await settled(files) is None and files.at_rest_without_streams():
        environment = {"MYXO_RUN": files.root.name, "MYXO_RUN_DIRECTORY": str(files.root)}
        yield ConsoleOrigin(config.console if (config := runs.frozen(files.root)) else ConsoleSection(), files, environment)
        return
    async with reach(run, directory) as access, contextlib.AsyncExitStack() as stack:
        servers = access.directory.servers() if access.live else None
        environment = {"MYXO_RUN": access.run, "NATS_URL": access.guest_url, "MYXO_RUN_DIRECTORY": str(access.directory.root)}
        with contextlib.suppress(ConfigError):  # without the store its payloads are missing, and nothing else is
            environment["REDIS_URL"] = await stack.enter_async_context(payload_url(access))
        serves, url = None, "" if servers is None else servers.console
        if not access.live:
            environment["MYXO_RUN_AT_REST"] = "1"
            if "REDIS_URL" in environment:
                serves = ServerUrls(access.bus.url, environment["REDIS_URL"], os.getpid())
        yield ConsoleOrigin(access.config.console, access.directory, environment, url, serves)
