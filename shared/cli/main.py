"""``myxo``: parses the command line, runs the command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed (an audit's violation, a service that cannot run), 2 bad input, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from shared import __version__, flags, telemetry
from shared.cli import exits
from shared.errors import ConfigError, MyxoError

LONGEST_ERROR = 1000
"""Characters of an error that are shown: one may hold a whole prompt."""

_UP = """Run a config's run on this machine until it is finished, with live progress.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), the buffer, reward and rollout services and the
trainer, restarts whatever dies, and ends with the audit and the summary. Ctrl-C stops everything in order; the same command goes on
from the last checkpoint."""

_SUBMIT = """Put a config's run on the NATS server of NATS_URL, its payloads to lie in the Redis of REDIS_URL, and exit. The services are
started elsewhere: each needs only NATS_URL and MYXO_RUN."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)", self.prog)
        sys.exit(exits.BAD_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's entry point. Returns the exit code."""
    parsed = parser().parse_args(arguments)
    telemetry.silence_logs()
    console = Console(highlight=False)
    try:
        return _run(parsed, console)
    except MyxoError as error:
        _complain(str(error))
        return exits.BAD_INPUT if isinstance(error, ConfigError) or type(error).__name__ == "NoSuchRun" else exits.FAILED
    except ModuleNotFoundError as error:
        if error.name not in ("tokenizers", "jinja2"):
            raise
        _complain(f"{error.name} is not installed: pip install 'myxo[buffer]'")
        return exits.FAILED
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return exits.DONE
    except KeyboardInterrupt:
        return exits.INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    about = "RL post-training of language models as independent services on a message bus."
    top = _Parser(prog="myxo", description=about, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"myxo {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    up = _with_config(commands, "up", "run a config's run on this machine", _UP)
    up.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")
    up.add_argument("--dry-run", action="store_true", help="check everything, print the resolved config, start nothing")
    _with_config(commands, "submit", "put a config's run on an external bus", _SUBMIT)

    status = _with_run(commands, "status", "how a run stands: services, steps, queues")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    logs = _with_run(commands, "logs", "what the services of a run on this machine logged")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines as they come")
    logs.add_argument("-s", "--service", metavar="S", help="only this service (rollout) or instance (rollout-0)")
    logs.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="lines to begin with (default 50)")
    levels = ("debug", "info", "warning", "error", "critical")
    logs.add_argument("--level", choices=levels, default="debug", help="only lines of at least this level (default debug: all)")
    audit = _with_run(commands, "audit", "replay a run's ledger and check its invariants; exits 1 on a violation")
    audit.add_argument("--json", action="store_true", help="as one JSON object")
    _with_run(commands, "summary", "what a run came to: summary.json, a picture, a table")
    return top


def _with_config(commands: argparse._SubParsersAction[_Parser], name: str, short: str, description: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=short,
        description=description,
        usage=f"myxo {name} CONFIG [options] [flags]",
        epilog="flags, over the config's values:\n" + "\n".join(flags.help_lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("config", metavar="CONFIG", type=Path, help="the run's TOML file")
    command.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    return command


def _with_run(commands: argparse._SubParsersAction[_Parser], name: str, short: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=short, description=short[0].upper() + short[1:] + ".", allow_abbrev=False)
    command.add_argument("run", metavar="RUN", help="the run's id, or its directory")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default runs)")
    return command


def _run(parsed: argparse.Namespace, console: Console) -> int:
    # commands are imported when they run: `myxo --help` answers at once
    match parsed.command:
        case "up":
            from shared.cli.up import up

            words = list(parsed.flags)
            fresh, dry_run = parsed.fresh or "--fresh" in words, parsed.dry_run or "--dry-run" in words
            rest = _without_help(parsed.command, [word for word in words if word not in ("--fresh", "--dry-run")])
            return up(parsed.config, rest, console, fresh=fresh, dry_run=dry_run)
        case "submit":
            from shared.cli.up import submit

            return submit(parsed.config, _without_help(parsed.command, list(parsed.flags)), console)
        case "status":
            from shared.cli.status import status

            return asyncio.run(status(parsed.run, parsed.dir, console, parsed.json))
        case "logs":
            from shared.cli.logs import logs

            return logs(
                parsed.run, parsed.dir, console, follow=parsed.follow, service=parsed.service, count=parsed.lines, level=parsed.level
            )
        case "audit":
            from shared.cli.audit import audit

            return asyncio.run(audit(parsed.run, parsed.dir, console, parsed.json))
        case _:
            from shared.cli.report import summarise

            return asyncio.run(summarise(parsed.run, parsed.dir, console))


def _without_help(command: str, words: list[str]) -> list[str]:
    """The words as they are; asks for help instead where it is among them."""
    if "--help" in words or "-h" in words:
        parser().parse_args([command, "--help"])
    return words


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return count


def _complain(message: str, who: str = "myxo") -> None:
    line = " ".join(message.split())
    print(f"{who}: {line if len(line) <= LONGEST_ERROR else line[:LONGEST_ERROR] + ' …'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
