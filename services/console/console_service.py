"""The console service: from its environment to an app that serves until it is asked to stop.

Environment: ``MYXO_RUN``; ``NATS_URL`` and ``REDIS_URL`` (or their files) of a run on a bus; ``MYXO_RUN_DIRECTORY``, where the run's files
lie; ``MYXO_RUN_AT_REST``, where no services are to be expected; ``MYXO_CONSOLE``, host:port (default: any free port of loopback);
``MYXO_CONSOLE_TOKEN`` or the file of ``MYXO_CONSOLE_TOKEN_FILE`` (default: a new one); ``MYXO_CONSOLE_HOSTS``, further names of its host,
separated by commas; ``MYXO_CONSOLE_URL``, by which browsers reach it, where that is not its address; ``MYXO_HTTP`` for its health check.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from services.console.access_token import LEAST_TOKEN
from services.console.console_app import console_app
from services.console.run_source import RunSource
from shared.bus.subjects import RUN_ID
from shared.runtime import http_address, http_endpoints, server_urls, telemetry
from shared.runtime.errors import ConfigError
from shared.runtime.failures import background
from shared.runtime.http_address import HTTP_VARIABLE, HttpAddress

ADDRESS, HOSTS, DIRECTORY, AT_REST = "MYXO_CONSOLE", "MYXO_CONSOLE_HOSTS", "MYXO_RUN_DIRECTORY", "MYXO_RUN_AT_REST"

URL = "MYXO_CONSOLE_URL"

NICENESS = 5
"""How far it stands back, on a machine that has little time, behind the services that it looks at."""

LOOPBACK = HttpAddress("127.0.0.1", 0)


async def serve() -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError for an environment that cannot be used."""
    os.nice(NICENESS)
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    source, given_token = source_of_environment(), server_urls.console_token()
    token = given_token or server_urls.new_console_token()
    if len(token) < LEAST_TOKEN:
        raise ConfigError(server_urls.CONSOLE_TOKEN, "…", f"at least {LEAST_TOKEN} characters that nobody can guess")
    given = os.environ.get(ADDRESS)
    address = http_address.parsed(given, ADDRESS) if given else LOOPBACK
    names = [name for name in os.environ.get(HOSTS, "").split(",") if name]
    if not address.wildcard:
        names.append(address.host)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(background(source.keep()))
        if HTTP_VARIABLE in os.environ:
            await stack.enter_async_context(_health(source))
        at = await stack.enter_async_context(http_endpoints.serving(console_app(source, token, names), address))
        # a token that was made here is known to nobody else
        structlog.get_logger().info(telemetry.CONSOLE_SERVES, at=at, **({} if given_token else {"url": f"http://{at}/?token={token}"}))
        await stopping.wait()


def print_address() -> None:
    """Prints the address of the console of this environment, with its token. Raises ConfigError where the token is not in it."""
    token = server_urls.console_token()
    if token is None:
        raise ConfigError(server_urls.CONSOLE_TOKEN, None, "required in the environment, or its file; `myxo up` has printed the address")
    print(f"{os.environ.get(URL) or 'http://' + os.environ.get(ADDRESS, str(LOOPBACK))}/?token={token}")


def source_of_environment() -> RunSource:
    """Returns the run that the environment names. Raises ConfigError."""
    run, directory = os.environ.get("MYXO_RUN", ""), os.environ.get(DIRECTORY)
    if not RUN_ID.match(run):
        raise ConfigError("MYXO_RUN", run, "required in the environment: the run's id, lower-case letters, digits, '-' and '_'")
    nats_url = server_urls.nats_url()
    if nats_url is None and directory is None:
        raise ConfigError("NATS_URL", None, f"required in the environment, or {DIRECTORY} with the directory of a run that is over")
    where = None if directory is None else Path(directory)
    return RunSource(run, nats_url, server_urls.redis_url(), where, at_rest=bool(os.environ.get(AT_REST)))


def _health(source: RunSource) -> contextlib.AbstractAsyncContextManager[str]:
    """Serves ``/healthz`` and ``/metrics`` for the health check of a container; a console is well whatever is away."""
    app = http_endpoints.health_app(lambda: {"ok": True, "service": "console", "away": sorted(source.away)}, CollectorRegistry())
    return http_endpoints.serving(app, http_address.http_address("127.0.0.1"))
