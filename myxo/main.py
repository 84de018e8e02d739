"""``myxo``: parses the command line, runs the command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed (an audit's violation, a service that cannot run), 2 bad input, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from myxo.commands import service_tools
from shared import __version__
from shared.config import flags
from shared.runtime import exit_codes, telemetry
from shared.runtime.command_line import Parser, complain, ended
from shared.runtime.errors import ConfigError

_UP = """Run a config's run on this machine until it is finished, with live progress.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), the buffer, reward and rollout services and the
trainer, restarts whatever dies, and ends with the audit and the summary. Ctrl-C stops everything in order; the same command goes on
from the last checkpoint."""

_SUBMIT = """Put a config's run on the NATS server of NATS_URL, its payloads to lie in the Redis of REDIS_URL, and exit. The services are
started elsewhere: each needs only NATS_URL and MYXO_RUN, and REDIS_URL where accounts have passwords."""

_ACCOUNTS = """Make the accounts of a run on NATS and Redis: passwords (kept where there are some already), the servers' configs and, with
--tls, certificates. DIR/nats and DIR/redis are for the servers, DIR/buffer, rollout, reward, trainer, operator and environment each hold
the nats_url and redis_url of one account. docs/accounts.md tells who may do what."""


_ENV_CHECK = """Ask a live environment all that the protocol promises: its description, scores of one sample and of groups, of empty, odd
and long responses, of eight requests at once. One line a check; exits 1 where one failed. Warnings are advice."""

# what a command may lack → the extra that brings it
_EXTRAS = {"tokenizers": "buffer", "jinja2": "buffer", "aiohttp": "reward"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's entry point. Returns the exit code."""
    parsed = _parsed(arguments)
    telemetry.silence_logs()
    console = Console(highlight=False)
    try:
        return ended("myxo", lambda: _run(parsed, console))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        complain(f"{error.name} is not installed: pip install 'myxo[{_EXTRAS[error.name]}]'", "myxo")
        return exit_codes.FAILED


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. A GROUP may stand behind options: argparse takes an optional word only right behind the one before it."""
    top = parser()
    parsed, rest = top.parse_known_args(arguments)
    if rest and parsed.command == "samples" and parsed.group is None and not rest[0].startswith("-"):
        parsed.group, rest = rest[0], rest[1:]
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    about = "RL post-training of language models as independent services on a message bus."
    top = Parser(prog="myxo", description=about, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"myxo {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

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
    _with_samples(commands)
    _with_run(commands, "watch", "the progress of a run whose services were started elsewhere, to its end, then its summary")
    _with_environment(commands)
    _with_accounts(commands)
    _with_tools(commands)
    short = "the flags of Megatron's that a run takes, and what became of the others"
    listed = commands.add_parser("flags", help=short, description=short[0].upper() + short[1:] + ".", allow_abbrev=False)
    listed.add_argument("pattern", metavar="PATTERN", nargs="?", help="part of a flag's name: look among the config's own flags, too")
    _with_run(commands, "summary", "what a run came to: summary.json, a picture, a table")
    return top


def _with_config(commands: argparse._SubParsersAction[Parser], name: str, short: str, description: str) -> argparse.ArgumentParser:
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


def _with_run(commands: argparse._SubParsersAction[Parser], name: str, short: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=short, description=short[0].upper() + short[1:] + ".", allow_abbrev=False)
    command.add_argument("run", metavar="RUN", help="the run's id, or its directory")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default runs)")
    return command


def _with_samples(commands: argparse._SubParsersAction[Parser]) -> None:
    command = _with_run(commands, "samples", "the groups of a run, what became of them, and their samples")
    command.add_argument("group", metavar="GROUP", nargs="?", help="show this group; GROUP/INDEX: one sample of it in full")
    statuses = ("outstanding", "requeued", "ready", "batched", "trained", "dropped", "dead", "evaluated", "failed")
    command.add_argument("--status", choices=statuses, help="only groups that are there now")
    command.add_argument("--step", type=_count, metavar="K", help="only the batch of step K, with prompts and responses")
    command.add_argument("--eval", action="store_true", help="held-out prompts that came back, with their responses; not training groups")
    command.add_argument("--dataset", metavar="NAME", help="only the held-out set of that name; means --eval")
    command.add_argument("--responses", action="store_true", help="prompts and responses of the listed groups")
    command.add_argument("--min-reward", type=_number, metavar="R", help="only groups whose samples' mean reward is at least R")
    command.add_argument("--max-reward", type=_number, metavar="R", help="… at most R")
    command.add_argument("--group", dest="only", metavar="G", help="only this group, as a line of the list")
    command.add_argument("--version", type=_count, metavar="V", help="only groups with tokens of weight version V; --eval: its evaluation")
    command.add_argument("--limit", type=_count, metavar="N", help="the last N in order (default 20; 0: all)")
    command.add_argument("--sort", choices=("age", "reward", "tokens"), help="what stands last: the newest (default), best, longest")
    command.add_argument("--json", action="store_true", help="one JSON object a line, with all arrays")


def _with_environment(commands: argparse._SubParsersAction[Parser]) -> None:
    env = commands.add_parser("env", help="environments: check that one keeps the protocol", allow_abbrev=False)
    verbs = env.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    check = verbs.add_parser("check", help="try a live environment", description=_ENV_CHECK, allow_abbrev=False)
    check.add_argument("url", metavar="URL", help="http://host:port, https://… or nats:NAME")
    check.add_argument("--run", help="the run whose subjects a nats:NAME answers on; the server is that of NATS_URL")
    check.add_argument("--timeout", type=_seconds, metavar="S", help="seconds for one score (default: what the environment asks for)")
    check.add_argument("--prompt", metavar="P", help="a prompt of your task (default a sum)")
    check.add_argument("--label", metavar="L", help="its label")
    check.add_argument("--response", action="append", metavar="R", help="a response to it; may be given several times")
    check.add_argument("--json", action="store_true", help="as one JSON object")


def _with_accounts(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "make the accounts of a run on NATS and Redis"
    command = commands.add_parser("accounts", help=short, description=_ACCOUNTS, allow_abbrev=False)
    command.add_argument("directory", metavar="DIR", type=Path, help="where the files go")
    command.add_argument("--run", metavar="NAME", required=True, help="the run's id")
    command.add_argument("--nats", metavar="HOST:PORT", default="nats:4222", help="where services reach NATS (default nats:4222)")
    command.add_argument("--redis", metavar="HOST:PORT", default="redis:6379", help="where services reach Redis (default redis:6379)")
    command.add_argument("--tls", action="store_true", help="encrypt both, with certificates of an authority made for this")
    command.add_argument(
        "--mounted", metavar="PATH", default="/credentials", help="where each server finds its own directory (default /credentials)"
    )


def _with_tools(commands: argparse._SubParsersAction[Parser]) -> None:
    # no word is an option here, --help neither: all of them are for the tool
    for name, (_, short) in service_tools.TOOLS.items():
        command = commands.add_parser(name, help=short, add_help=False, prefix_chars="\0")
        command.add_argument("options", nargs=argparse.REMAINDER)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    # commands are imported when they run: `myxo --help` answers at once
    match parsed.command:
        case "up":
            from myxo.commands.up import up

            words = list(parsed.flags)
            fresh, dry_run = parsed.fresh or "--fresh" in words, parsed.dry_run or "--dry-run" in words
            rest = _without_help(parsed.command, [word for word in words if word not in ("--fresh", "--dry-run")])
            return up(parsed.config, rest, console, fresh=fresh, dry_run=dry_run)
        case "submit":
            from myxo.commands.up import submit

            return submit(parsed.config, _without_help(parsed.command, list(parsed.flags)), console)
        case "status":
            from myxo.commands.status import status

            return asyncio.run(status(parsed.run, parsed.dir, console, parsed.json))
        case "logs":
            from myxo.commands.logs import logs

            return logs(
                parsed.run, parsed.dir, console, follow=parsed.follow, service=parsed.service, count=parsed.lines, level=parsed.level
            )
        case "audit":
            from myxo.commands.audit import audit

            return asyncio.run(audit(parsed.run, parsed.dir, console, parsed.json))
        case "env":
            from myxo.commands.env import check

            given = (parsed.prompt, parsed.label, parsed.response)
            return asyncio.run(check(parsed.url, console, run=parsed.run, given=given, timeout=parsed.timeout, as_json=parsed.json))
        case "accounts":
            from myxo.commands.accounts import accounts

            return accounts(
                parsed.directory, parsed.run, parsed.nats, parsed.redis, tls=parsed.tls, mounted=parsed.mounted, console=console
            )
        case "samples":
            return _samples(parsed, console)
        case command if command in service_tools.TOOLS:
            return service_tools.run_tool(command, parsed.options)
        case "flags":
            from myxo.display.flag_list import flag_list

            return flag_list(parsed.pattern, console)
        case "watch":
            from myxo.commands.watch import watch

            return asyncio.run(watch(parsed.run, parsed.dir, console))
        case _:
            from myxo.launch.exit_report import summarise

            return asyncio.run(summarise(parsed.run, parsed.dir, console))


def _samples(parsed: argparse.Namespace, console: Console) -> int:
    from myxo.commands.samples import browse, group_named, show, target
    from myxo.display.sample_list import SampleList, Wanted
    from shared.data.rollout_files import EVALUATED, FAILED

    options = {"--group": parsed.only, "--limit": parsed.limit, "--sort": parsed.sort}
    fields = ("status", "step", "min_reward", "max_reward", "version", "dataset")
    options |= {f"--{name.replace('_', '-')}": getattr(parsed, name) for name in fields}
    given = [name for name, value in options.items() if value is not None]
    given += [f"--{name}" for name in ("eval", "responses") if getattr(parsed, name)]
    if parsed.group is not None:
        if given:
            raise ConfigError("GROUP", parsed.group, f"{', '.join(given)} is for the list; leave it out, or leave GROUP out")
        group, index = target(parsed.group)
        return asyncio.run(show(parsed.run, parsed.dir, console, group, index, parsed.json))
    only = None if parsed.only is None else group_named(parsed.only)
    evaluation = parsed.eval or parsed.dataset is not None or parsed.status in (EVALUATED, FAILED) or (only or "").startswith("eval.")
    bounds = (parsed.min_reward, parsed.max_reward)
    wanted = Wanted(parsed.status, parsed.step, *bounds, only, parsed.version, evaluation, parsed.dataset)
    listing = SampleList(wanted, parsed.sort or "age", 20 if parsed.limit is None else parsed.limit)
    with_texts = parsed.responses or parsed.step is not None or evaluation
    return asyncio.run(browse(parsed.run, parsed.dir, console, listing, parsed.json, with_texts))


def _without_help(command: str, words: list[str]) -> list[str]:
    """The words as they are; asks for help instead where it is among them."""
    if "--help" in words or "-h" in words:
        parser().parse_args([command, "--help"])
    return words


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0 seconds")
    return seconds


def _number(text: str) -> float:
    number = float(text)
    if number != number:
        raise argparse.ArgumentTypeError(f"{text}: a number")
    return number


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return count


if __name__ == "__main__":
    sys.exit(main())
