"""``myxo try``: calls a config's own functions on two prompts (`myxo.preflight.function_trial`), and says what is wrong with them."""

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path
from urllib.request import urlopen

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json, positive
from myxo.commands.env import STYLES
from myxo.commands.up import with_flags
from myxo.preflight import Source, checked
from myxo.preflight.function_trial import SECONDS, tried
from shared.environment.conformance import Check
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import json_text, printable_line

_ABOUT = """Call a config's own reward, generate function, agent, filters, data source and objective on two prompts, as a run calls them.

A canned engine answers with the prompt's label, with the label in a sentence, and wrongly. One line for each: what it gave, or what is
wrong, where, and how a run calls it; exits 2 where one failed. breakpoint() opens the debugger on this terminal."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _ABOUT, "CONFIG [options]", _run)
    command.add_argument("config", metavar="CONFIG", type=Path, help="the run's TOML file")
    command.add_argument("--engine", metavar="URL", help="a running SGLang server that answers in the place of the canned engine")
    command.add_argument("--timeout", type=positive, default=SECONDS, metavar="S", help=f"seconds for one call (default {SECONDS:g})")
    add_json(command)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    try:
        if parsed.engine is not None:
            urlopen(f"{parsed.engine.rstrip('/')}/health", timeout=SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError("--engine", parsed.engine, f"http://host:port of a running SGLang server; no reply: {error}") from None

    def report(result: Check) -> None:
        if not parsed.json:
            detail = (printable_line(result.detail, exit_codes.LONGEST_ERROR), "dim")
            console.print(Text.assemble((f"{result.result:8}", STYLES[result.result]), f"{result.name}: ", detail), soft_wrap=True)

    inspection = checked(Source.of(parsed.config, parsed.flags))
    results = asyncio.run(tried(inspection, report, seconds=parsed.timeout, url=parsed.engine, verifiers=True))
    failed = any(result.result == "FAILED" for result in results)
    if parsed.json:
        answer = {"config": str(parsed.config), "ok": not failed, "checks": [asdict(result) for result in results]}
        console.file.write(json_text(answer) + "\n")
    elif not results:
        named = f"reward.rm_type = {inspection.config.reward.rm_type}"
        console.print(f"This config names no function of yours, and no verifier that can be tried here ({named}).", soft_wrap=True)
    return exit_codes.BAD_INPUT if failed else exit_codes.DONE
