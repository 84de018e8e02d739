"""What a CPU's engine needs and no extra of Myxo's can bring: SGLang without the packages that it asks for, which are for CUDA.

They are installed into a directory of their own, which comes last on the path: the environment that Myxo lies in stays as it is.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from myxo.quickstart.bundled_files import pinned
from shared.runtime.errors import MyxoError
from shared.runtime.safe_text import say

ENGINE = ("sglang", "xgrammar")
ENGINE_SITE = ("torchvision",)
"""It goes into a directory that only the engine sees: it would break a trainer's transformers."""

SITE_VARIABLE = "MYXO_ENGINE_SITE"
"""Names that directory to the rollout service; without it, it is ``engine-site`` in the environment's prefix."""

INSTALL_SECONDS = 1800.0
"""The deadline of a download of some 60 MB."""

_DONE = "installed"
_LAST_LINES = 5


class NotPrepared(MyxoError):
    """What `myxo quickstart` needs could not be installed or made."""


def provide(folder: Path) -> None:
    """Installs into ``folder`` whatever of `ENGINE` and `ENGINE_SITE` this environment lacks, and puts it on this process's path and its
    children's. What a finished earlier call has installed is taken as it is. Raises NotPrepared."""
    if any(importlib.util.find_spec(name) is None for name in ENGINE):
        packages = _installed(ENGINE, folder / "packages")
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
    """Returns the beginning of a command that installs packages for this Python. Raises NotPrepared."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise NotPrepared(f"neither pip nor uv is here: install {' '.join(wanted)} without what they ask for (--no-deps)")
