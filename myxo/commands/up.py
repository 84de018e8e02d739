"""``myxo up`` and ``myxo submit``: from a config file to a run."""

import argparse
import asyncio
import os
from pathlib import Path

from rich.console import Console

from myxo.launch import train_only
from myxo.launch.launcher import Launch
from myxo.launch.node_launch import NodeLaunch, settle_node_rank
from myxo.launch.service_plan import SERVICE_MODULES
from myxo.preflight import Source, checked_config, server_checks
from myxo.run import config_toml
from myxo.run.run_access import told_when_lost
from myxo.run.run_directory import RunDirectory
from myxo.run.vocabulary import vocabulary
from shared.bus import runs
from shared.bus.connection import redacted
from shared.config import flags
from shared.config.debug_section import DUMPS
from shared.config.run_config import RunConfig
from shared.runtime import addresses, exit_codes, telemetry
from shared.runtime.addresses import NODE_RANK
from shared.runtime.errors import ConfigError

LAUNCHER = "launcher"
"""The instance under which the launcher's own log lines stand."""

_UP = """Run a config's run on this machine until it is finished, with live progress.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), the buffer, reward and rollout services and the
trainer, restarts whatever dies, and ends with the audit and the summary. Ctrl-C stops everything in order; the same command goes on
from the last checkpoint."""

_SUBMIT = """Put a config's run on the NATS server of NATS_URL, its payloads to lie in the Redis of REDIS_URL, and exit. The services are
started elsewhere: each needs only NATS_URL and MYXO_RUN, and REDIS_URL where accounts have passwords."""


def declare_up(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo up``."""
    _declare(command, _UP)
    command.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")
    command.add_argument("--dry-run", action="store_true", help="check everything, print the resolved config, start nothing")
    several = "which of the trainer's nodes this machine is, where it has several (actor_num_nodes); 0: the first"
    command.add_argument("--node-rank", type=int, metavar="N", help=several)
    command.set_defaults(
        run_command=lambda parsed, console: up(
            Source.of(parsed.config, parsed.flags), console, fresh=parsed.fresh, dry_run=parsed.dry_run, node_rank=parsed.node_rank
        )
    )


def declare_submit(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo submit``."""
    _declare(command, _SUBMIT)
    command.set_defaults(run_command=lambda parsed, console: submit(parsed.config, parsed.flags, console))


def _declare(command: argparse.ArgumentParser, description: str) -> None:
    command.description, command.usage = description, f"{command.prog} CONFIG [options] [flags]"
    command.epilog = "flags, over the config's values:\n" + "\n".join(flags.help_lines())
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("config", metavar="CONFIG", type=Path, help="the run's TOML file")
    command.set_defaults(flags=[], take_rest=take_flags)


def take_flags(parsed: argparse.Namespace, rest: list[str]) -> list[str]:
    """Takes the config's flags, which argparse does not know; nothing is left over."""
    parsed.flags = rest
    return []


def up(source: Source, console: Console, *, fresh: bool = False, dry_run: bool = False, node_rank: int | None = None) -> int:
    """Runs the config's run on this machine until it is finished or stopped. Returns the exit code.

    Args:
        source: where the config comes from. fresh: forget what the run has done. dry_run: show the resolved config only. node_rank: which
            of the trainer's nodes this machine is; on all but the first, its part of the trainer is all that starts.

    Raises ConfigError for bad input, MyxoError for what keeps the run from starting.
    """
    further = node_rank or os.environ.get(NODE_RANK, "0") != "0"  # not all services start there
    config = checked_config(source, starts=not further, fresh=fresh)
    if dry_run:
        console.file.write(config_toml.dump(config.shown()))
        return exit_codes.DONE
    directory = RunDirectory(config.run.root)
    if config.debug.trains_only:
        return train_only.run(config, directory, console, fresh=fresh)
    given = server_checks.given_servers()
    if (rank := settle_node_rank(config, given, node_rank)) > 0:
        return _up_node(config, directory, given, rank, console)
    if fresh:
        directory.refuse_input_in_state(config)
        RunDirectory(config.trained).refuse_input_in_state(config)
    asyncio.run(server_checks.check_servers(given, config.run.name))
    directory.make(config)
    with directory.held():
        if fresh:
            directory.clear()
            RunDirectory(config.trained).clear()
        directory.logs.mkdir(parents=True, exist_ok=True)
        with directory.open_log(LAUNCHER) as log:
            telemetry.configure_logs(config.run.name, LAUNCHER, LAUNCHER, stream=log)
            try:
                return asyncio.run(Launch(config, directory, given, console, fresh=fresh).run())
            finally:
                telemetry.silence_logs()


def _up_node(config: RunConfig, directory: RunDirectory, given: server_checks.GivenServers, rank: int, console: Console) -> int:
    """Runs a further node's part of the trainer. The run's directory, which nodes may share, is the first node's to hold."""
    assert given.nats_url is not None  # or the rank would not be settled
    asyncio.run(server_checks.check_servers(given, config.run.name))
    directory.make(config)
    directory.logs.mkdir(exist_ok=True)
    with directory.open_log(f"node-{rank}") as log:
        telemetry.configure_logs(config.run.name, LAUNCHER, f"node-{rank}", stream=log)
        try:
            return asyncio.run(NodeLaunch(config, directory, given.nats_url, rank, console).run())
        finally:
            telemetry.silence_logs()


def submit(path: Path, arguments: list[str], console: Console) -> int:
    """Makes the run on the bus of ``NATS_URL`` for services that are started elsewhere. Raises ConfigError."""
    config = checked_config(Source.of(path, arguments))
    if config.debug.trains_only:
        raise ConfigError(DUMPS, config.debug.load_debug_rollout_data, "`myxo up`: training on dumps alone takes no bus")
    given = server_checks.given_servers()
    if given.nats_url is None:
        raise ConfigError("NATS_URL", None, "required in the environment: nats://[user:password@]host:port of the bus, or NATS_URL_FILE")
    if given.redis_url is None:
        raise ConfigError("REDIS_URL", None, "required in the environment: redis://[user:password@]host:port, or REDIS_URL_FILE")
    asyncio.run(_submit(config, given.nats_url, given.redis_url, vocabulary(config)))
    what = "NATS_URL"
    if addresses.has_credentials(given.redis_url):
        what = "its own NATS_URL and REDIS_URL (or the files of NATS_URL_FILE and REDIS_URL_FILE)"
    console.print(
        f"Run {config.run.name} is on {redacted(given.nats_url)}. Start its services, each with {what} and MYXO_RUN={config.run.name}: "
        + ", ".join(f"python -m {module}" for module in SERVICE_MODULES.values()),
        soft_wrap=True,
    )
    return exit_codes.DONE


async def _submit(config: RunConfig, nats_url: str, redis_url: str, vocabulary: int) -> None:
    await server_checks.check_store(redis_url)
    bus = await server_checks.connect(nats_url, config.run.name)
    try:
        with told_when_lost():
            await runs.create(bus, config, redis_url, vocabulary)
    finally:
        await bus.close()
