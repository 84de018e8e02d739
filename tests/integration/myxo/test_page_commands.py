"""The commands of the documentation's bash blocks do what they say: they are run page by page, in their order, in one directory.

The directory is a checkout whose ``runs/quickstart`` is a finished run of the quick start's own config (with the stand-ins for rollout and
trainer). docs/command_runs.toml says which commands are served beside the next ones, which are only checked here and trained with ``-m
extra``, and which are not run, for what reason.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from docs.commands import PAGES, block_commands, entry_of
from myxo.main import main
from shared.process.child_process import with_parent
from tests.integration.myxo.command import COMMAND_SECONDS, ROOT

WRITTEN = ("benchmarks",)
"""Directories that commands write to: the checkout has copies of them."""

SELDOM = (
    "docs/pictures.md",
    "docs/precision.md",
    "examples/colours/README.md",
    "docs/environments.md",
    "examples/hooks/README.md",
    "docs/console.md",
    "docs/metrics.md",
    "docs/responses.md",
    "docs/traces.md",
)
"""Pages whose commands take longest."""

IN_CI = ("run", "rewritten", "served", "trained")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
KINDS = {name: {entry_of(name, command)[0] for command in block_commands((ROOT / name).read_text())} for name in NAMES}

TINY = [
    *("--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--sft-steps", "2", "--sft-batch-size", "4"),
    *("--eval-interval", "1", "--eval-prompt-data", "runs/quickstart/data/heldout.jsonl@[0:2]", "--fresh", "--no-console"),
]
"""What makes a run of the quick start's config as small as it can be; flags win that come last."""


FINISHED = "--no-console --rollout-batch-size 7 --n-samples-per-prompt 4 --eval-prompt-data 'runs/quickstart/data/heldout.jsonl@[0:8]'"
"""Flags of the finished run: it has as many steps as the quick start, and as many groups as pages name, but no more."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Path]:
    """A checkout with a finished run, and the model and data that pages speak of."""
    place = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name in WRITTEN:
            shutil.copytree(path, place / path.name)
        elif path.name not in ("runs", "models", "build", "dist", ".git", ".venv"):
            (place / path.name).symlink_to(path)
    (place / ".venv" / "bin").mkdir(parents=True)
    for name, module in (("python", ""), ("myxo", "-m myxo.main")):  # a link to this environment's Python would not be of it
        (place / ".venv" / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (place / ".venv" / "bin" / name).chmod(0o755)
    for name in ("my-model", "Qwen3-4B"):
        (place / "models").mkdir(exist_ok=True)
        (place / "models" / name).symlink_to(tiny_model)
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text('{"prompt": "2+3=", "label": "5"}\n' * 8)
    shell(place, ".venv/bin/python examples/arithmetic/prepare.py runs/quickstart/data")
    up = [sys.executable, "-m", "tests.integration.myxo.standin_myxo", "up", "examples/arithmetic/quickstart.toml", *shlex.split(FINISHED)]
    subprocess.run(up, cwd=place, env=environment(place), stdin=subprocess.DEVNULL, check=True, timeout=COMMAND_SECONDS)
    yield place


def environment(place: Path) -> dict[str, str]:
    own = ("NATS_URL", "REDIS_URL", "MYXO_RUN", "MYXO_INSTANCE")
    given = {name: value for name, value in os.environ.items() if name not in own}
    return given | {"PATH": f"{place / '.venv' / 'bin'}:{given['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_line(place: Path, line: str, *, any_exit: bool = False) -> str:
    """Runs a line in the directory; it must succeed. Returns what it printed.

    A command of ``myxo`` alone runs in this process, for one of its own costs each a second of imports.
    """
    words = shlex.split(line)
    if words[0] != "myxo" or words[1] in ("convert", "replay", "simulate") or {">", "|", "&&"} & set(words):  # others' processes
        return shell(place, line, any_exit=any_exit)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(place),
        mock.patch.dict(os.environ, environment(place), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(words[1:])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    assert any_exit or code == 0, f"{line}\n{out.getvalue()[-2000:]}\n{err.getvalue()[-2000:]}"
    return out.getvalue()


def shell(place: Path, command: str, *, any_exit: bool = False) -> str:
    """Runs a line in a shell of its own, likewise."""
    done = subprocess.run(
        with_parent(["bash", "-euo", "pipefail", "-c", command]),
        cwd=place,
        env=environment(place),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert any_exit or done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


class Page:
    """The commands of one page at work. Servers that it starts end with it."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self._place = name, place
        self._servers: list[subprocess.Popen[bytes]] = []

    def run(self, kinds: tuple[str, ...], *, train: bool = False) -> int:
        """Runs the page's commands of these kinds; returns how many there were."""
        count, before = 0, set(self._place.iterdir())
        try:
            for command in block_commands((ROOT / self.name).read_text()):
                kind, entry = entry_of(self.name, command)
                if kind not in kinds:
                    continue
                count += 1
                if kind == "served":
                    self._serve(command, entry["ready"])
                elif kind == "trained":
                    self._train(command, train=train)
                else:
                    self._run(command, entry)
        finally:
            self.close()
            for path in set(self._place.iterdir()) - before:  # another page may write a file of the same name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return count

    def _run(self, command: str, entry: dict[str, Any]) -> None:
        bare = command.replace(".venv/bin/", "")
        line = re.sub(entry["match"], entry["as"], bare) if "as" in entry else bare
        printed = run_line(self._place, line, any_exit=bool(entry.get("any_exit")))
        quiet = line.startswith(("rm ", "export "))
        assert quiet or printed.strip(), f"{line} prints nothing"

    def _train(self, command: str, *, train: bool) -> None:
        bare = command.replace(".venv/bin/", "")
        # the directory's finished run stays: a run without a name of its own gets one
        named = bare if "--name" in bare else f"{bare} --name tried"
        if train:
            shell(self._place, " ".join([named, *(f"'{word}'" for word in TINY)]))
        else:
            (self._place / "runs" / "details" / "rollout_data").mkdir(parents=True, exist_ok=True)
            printed = run_line(self._place, f"{named} --dry-run")
            assert "problems  none" in printed

    def _serve(self, command: str, ready: str) -> None:
        if answers(ready):
            pytest.skip(f"somebody else listens at {ready}")
        log = (self._place / "served.log").open("ab")
        with log:
            server = subprocess.Popen(
                with_parent(["bash", "-c", f"exec {command}"]),
                cwd=self._place,
                env=environment(self._place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._servers.append(server)
        end = time.monotonic() + COMMAND_SECONDS
        while not answers(ready):
            said = (self._place / "served.log").read_text()[-2000:]
            assert server.poll() is None, f"{command} ended\n{said}"
            assert time.monotonic() < end, f"{command} does not answer at {ready}\n{said}"
            time.sleep(0.1)

    def close(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers = []


def answers(url: str) -> bool:
    """Whether a server answers, if only that it wants a token."""
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extra(each=True) if name in SELDOM else ()) for name in NAMES if KINDS[name] & set(IN_CI)]
)
def test_the_commands_of_a_page_run(name: str, checkout: Path) -> None:
    assert Page(name, checkout).run(IN_CI)


@pytest.mark.extra
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name] & {"extra", "trained"}])
def test_the_long_ones_run_too(name: str, checkout: Path) -> None:
    assert Page(name, checkout).run((*IN_CI, "extra"), train=True)
