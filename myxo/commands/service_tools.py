"""Commands that a service implements: its module is run in a process, like the service itself, since no service is imported here."""

import argparse
import subprocess
import sys

from rich.console import Console

MODULES = {
    "simulate": "services.buffer.simulation",
    "convert": "services.trainer.convert_command",
    "replay": "services.trainer.batch_replay",
}


def declare(command: argparse.ArgumentParser) -> None:
    """Declares that all words behind the command are for the tool."""
    command.add_argument("options", nargs=argparse.REMAINDER)
    command.set_defaults(run_command=run_tool)


def run_tool(parsed: argparse.Namespace, console: Console) -> int:
    """Runs the tool to its end; returns its exit code."""
    process = subprocess.Popen([sys.executable, "-m", MODULES[parsed.command], *parsed.options])
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # a terminal sends it to both: let the work end by itself
            continue
