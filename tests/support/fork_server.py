"""``subprocess.Popen`` for services and `myxo`, forked from a server that has their modules loaded (`tests.support.preloaded`), and for
plain engines on a CPU, from another one (`tests.support.preloaded_engine`).

A start takes a tenth of the time. What is started dies like any other process, and starts Python's processes in the same way; its parent
is the server, which ends with this process.
"""

import ctypes
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import connection, context, get_context, process, reduction, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.engine_process import COMMON_VARIABLES, CPU_LAUNCHER, CPU_VARIABLES
from shared.process.child_process import WATCHDOG
from tests.support import forking

FORKED = (
    *("services.buffer", "services.console", "services.gateway", "services.reward", "services.rollout", "shared.", "myxo."),
    *("tests.integration.", "tests.chaos.poisonous"),
)
"""What the modules begin with that are forked; others import what is not loaded."""

PATCHING = ("--enable-deterministic", "--enable-dp", "--ep", "--expert", "--speculative")
"""How flags begin for which an engine's launcher patches modules of SGLang before others take names from them."""

ENGINES = "MYXO_TEST_ENGINES"  # the variable with the address at which services have engines forked

_LEAST_DESCRIPTOR = 400  # above those that a process gets in its place

SHARED = "MYXO_TEST_FORK_SERVERS"  # the variable with the addresses of servers that a run's workers share

_service_address, _engine_address = (os.environ.get(SHARED) or ",").split(",")
_context = get_context("forkserver")
_server = forking.OwnForkServer("tests.support.preloaded", address=_service_address)
_engine_server = forking.OwnForkServer("tests.support.preloaded_engine", address=_engine_address)
_worker_server = forking.OwnForkServer("tests.support.preloaded_worker")


class _Passed:
    """A descriptor of this process, which is a copy of it in the one that unpickles it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (reduction.DupFd(self.number),)


def _copied(duplicate: Any) -> _Passed:
    return _Passed(fcntl.fcntl(duplicate.detach(), fcntl.F_DUPFD, _LEAST_DESCRIPTOR))


class ForkServerPopen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen``; see the module."""

    modules = FORKED
    _forked: context.ForkServerProcess | None = None

    def server(self, given: dict[str, Any]) -> forking.OwnForkServer | None:
        """Returns what forks the process; None where it is started as ever. ``given``: arguments of the start."""
        if (self.modules or _engine_server.address) and is_plain_engine(given["args"], given["env"]):
            return _engine_server
        return _server if is_forked(given["args"], self.modules) else None

    def _execute_child(self, *positional: Any, **named: Any) -> None:
        given = dict(forking.SIGNATURE.bind(self, *positional, **named).arguments)
        server = self.server(given)
        if server is None or given["preexec_fn"] is not None:
            return super()._execute_child(*positional, **named)  # type: ignore[misc]
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        passed = [_Passed(number if end == -1 else end) for number, end in enumerate(ends)]
        kept = {number: _Passed(number) for number in given["pass_fds"]}
        mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        words = {
            "start_new_session": given["start_new_session"],
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": given["cwd"] or os.getcwd(),
        }
        arguments = (list(map(os.fspath, given["args"])), words, passed, kept, _Passed(mounts))
        self._forked = _context.Process(target=_become, args=arguments, daemon=True)
        server.start(self._forked)
        os.close(mounts)
        assert self._forked.pid is not None
        self.pid = self._forked.pid
        self._child_created = True
        forking.close_pipes(self, given)
        return None

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]  # of two threads one would read the code, and the other none: 255
            if self.returncode is None:
                self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        connection.wait([self._forked.sentinel], timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


@pytest.fixture(scope="module", autouse=True)
def forked_python() -> Iterator[None]:
    """Has a module's tests start processes so. A module's own fixture of this name keeps it from that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkServerPopen)
        yield


class WorkerPopen(ForkServerPopen):
    """The same for xdist's workers, which import much that tests need."""

    def server(self, given: dict[str, Any]) -> forking.OwnForkServer | None:
        """Returns what forks a worker, None for anything else."""
        return _worker_server if forking.python_work(given["args"]) is not None and given["args"][-2] == "-c" else None


def fork_workers() -> None:
    """Has this process fork xdist's workers, which share the servers of services and engines."""
    os.environ[SHARED] = f"{_server.listen()},{_engine_server.listen()}"
    _worker_server.listen()
    subprocess.Popen = WorkerPopen  # type: ignore[misc]


class ServicePopen(ForkServerPopen, forking.ForkedPopen):
    """The same in a process that was forked: what it starts are forks of its own, but for engines where a test has `forked_engines`."""

    modules = ()


@pytest.fixture(scope="module")
def forked_engines() -> Iterator[None]:
    """Has services fork their plain engines, too: these are no children of theirs then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINES, _engine_server.listen())
        yield


def is_forked(command: Any, modules: tuple[str, ...] = FORKED) -> bool:
    """Returns whether a command line is one of those that are forked: maybe below a watchdog."""
    words = _watched(command)
    return words[:2] == [sys.executable, "-m"] and words[2].startswith(modules)


def is_plain_engine(command: Any, environment: Mapping[str, str] | None) -> bool:
    """Returns whether a command line is that of an engine on a CPU for which nothing is set or patched before its modules are imported."""
    words = _watched(command)
    if words[:2] != [sys.executable, str(CPU_LAUNCHER)] or "--model-path" not in words:
        return False
    config = Path(words[words.index("--model-path") + 1], "config.json")
    model = json.loads(config.read_text()) if config.is_file() else {}
    imported = {**COMMON_VARIABLES, **CPU_VARIABLES}
    given = {name: value for name, value in (environment or {}).items() if name in imported or name.startswith(("SGLANG_", "MYXO_BATCH"))}
    paths = ((environment or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    changed = any(Path(path, "sitecustomize.py").is_file() for path in paths if path)
    plain = given == imported and not changed and not any(word.startswith(PATCHING) for word in words)
    return plain and model.get("model_type") == "qwen3" and "quantization_config" not in model


def _watched(command: Any) -> list[str]:
    """Returns the words of a command line without a watchdog's before them."""
    words = [command] if isinstance(command, str | bytes) else list(map(str, command))
    return words[words.index(str(WATCHDOG)) + 3 :] if str(WATCHDOG) in words else words


def _become(command: list[str], given: dict[str, Any], ends: list[_Passed], kept: dict[int, _Passed], mounts: _Passed) -> None:
    process.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]  # it may have children
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # the server's is not its own
    if os.fstat(mounts.number).st_ino != os.stat("/proc/self/ns/mnt").st_ino:  # the starter has a disk of its own
        ctypes.CDLL(None, use_errno=True).setns(mounts.number, 0)
    for number, passed in kept.items():
        os.dup2(passed.number, number)
    work = forking.python_work(command)
    if command[-2] == "-c":  # a worker of the tests; only what these start is forked
        assert work is not None
        forking.become(command, work, given, [end.number for end in ends], list(kept))
    _engine_server.address = given["env"].get(ENGINES, "")
    launchers = {str(CPU_LAUNCHER): "tests.support.preloaded_engine"} if is_plain_engine(command, given["env"]) else None
    forking.install(places=launchers, popen=ServicePopen)
    work = forking.python_work(command)
    assert work is not None
    forking.become(command, work, given, [end.number for end in ends], list(kept))
