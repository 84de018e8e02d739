"""Starts Python's own processes by a fork of one that has their modules loaded: nothing is imported again, which takes seconds of CPU.

`install` takes the place of ``subprocess.Popen`` for commands of this interpreter; every other command is started as ever. What is started
is a process like any other: it has its parent, its group, its exit code, and dies of any signal. It starts processes in the same way.
"""

import asyncio
import atexit
import contextlib
import contextvars
import gc
import importlib
import inspect
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import structlog
from setproctitle import setproctitle

from shared.process import parent_watchdog
from shared.process.child_process import WATCHDOG, die_with_parent

_places: Mapping[str, str] = {}
_register: Path | None = None
_name = ""

SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
KILLABLE = "services.gateway"  # it imports anew where `tests.support.kill_points` puts its points in; ranks of the trainer always do
FORKS, FORK_SECONDS = 3, 30.0  # forks of one process, and the time by which it must have begun


class OwnForkServer:
    """A fork server with modules of its own: that of `multiprocessing`, one for all, holds those of whoever was the first to start it.

    ``address``: where one listens that another process has started; this one asks it then. Empty: this one's own.
    """

    def __init__(self, *modules: str, address: str = "") -> None:
        self.address = address
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))

    def listen(self) -> str:
        """Has the server begin to import; returns its address."""
        if self.address:
            return self.address
        with _silenced():  # what modules say as they are imported
            self._server.ensure_running()
        return str(vars(self._server)["_forkserver_address"])

    def start(self, process: BaseProcess) -> None:
        """Starts a process of the context "forkserver"."""
        connect = self._ask if self.address else self._server.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            process.start()

    def _ask(self, descriptors: list[int]) -> tuple[int, int]:
        """Does what ``connect_to_new_process`` does, which would start a tracker of resources for this process."""
        (status, theirs), (read, data), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.address)
            reduction.sendfds(client, [read, theirs, nothing, nothing, *descriptors])
        for descriptor in (read, theirs, nothing):
            os.close(descriptor)
        return status, data


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    kept, nothing = [os.dup(number) for number in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nothing, number)
        yield
    finally:
        for number, end in zip((1, 2), kept, strict=True):
            os.dup2(end, number)
        for end in (*kept, nothing):
            os.close(end)


def python_work(command: Sequence[str]) -> Callable[[], object] | None:
    """Returns what a command line has Python do, to be called in a process of its own; None where it is no line of this interpreter."""
    program, *words = map(str, command)
    if program != sys.executable:
        return None
    if (inner := _unwrapped(command)) != list(command):
        return _dying_with_parent(python_work(inner))
    if words[:2] == ["-I", "-S"] and words[2] == str(WATCHDOG):
        lifeline, scratch, *further = words[3:]
        return lambda: sys.exit(parent_watchdog.main(int(lifeline), scratch, further))
    if words[:1] == ["-m"] and not ("KILL_POINTS" in os.environ and words[1] == KILLABLE):
        return lambda: _run_module(words[1], words[2:])
    if words[-2:-1] == ["-c"]:
        return lambda: _run_code(words[-1])
    if words and words[0] in _places:
        return lambda: _run_module(_places[words[0]], words[1:])
    return None


def _unwrapped(command: Sequence[str]) -> list[str]:
    """Returns the command that one of `with_parent` becomes; any other as it is."""
    return list(command[6:] if command[3:5] == [str(WATCHDOG), parent_watchdog.ALONE] else command)


def _dying_with_parent(work: Callable[[], object] | None) -> Callable[[], object] | None:
    def dying() -> None:
        die_with_parent()
        assert work is not None
        work()

    return dying if work else None


def install(register: Path | None = None, places: Mapping[str, str] | None = None, popen: "type[ForkedPopen] | None" = None) -> None:
    """Has this process, and all that it starts, fork Python's processes.

    Args:
        register: a directory in which each writes its name under its pid.
        places: scripts by whose path a process is started → the module that runs in their place. popen: another class for it.
    """
    global _register, _places
    _register, _places = register, places or {}
    subprocess.Popen = popen or ForkedPopen  # type: ignore[misc]


def named(command: Sequence[str], environment: Mapping[str, str], starter: str) -> str:
    """Returns the name of a process: that of its instance, or of who has started it and what it is (``rollout-0/engine``)."""
    words = _unwrapped(command)
    if str(WATCHDOG) in words:
        return f"{starter}/watchdog"
    module = words[2] if words[1:2] == ["-m"] else _places.get(words[1], "")
    if (instance := environment.get("MYXO_INSTANCE", "")) and not starter:
        return instance
    return "/".join(filter(None, [starter.removesuffix("/watchdog"), module.rpartition(".")[2].removeprefix("scripted_")]))


def settle() -> None:
    """Keeps all that is loaded out of the collectors of the processes to come: they would copy its pages."""
    gc.collect()
    gc.freeze()


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, with a fork in the place of an interpreter's start."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        given = SIGNATURE.bind(self, *arguments, **named).arguments
        command = given["args"]
        work = None if given["shell"] or isinstance(command, str | bytes) else python_work([os.fsdecode(word) for word in command])
        if work is None:
            return super()._execute_child(*arguments, **named)  # type: ignore[misc]
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        sys.stdout.flush()
        sys.stderr.flush()
        for _ in range(FORKS):
            begun, begins = os.pipe()
            self.pid = os.fork()
            if not self.pid:
                os.close(begun)
                os.write(begins, b"!")
                os.close(begins)
                become([os.fsdecode(word) for word in command], work, given, ends, given["pass_fds"])
            os.close(begins)
            came = select.select([begun], [], [], FORK_SECONDS)[0]
            os.close(begun)
            if came:
                break
            os.kill(self.pid, signal.SIGKILL)  # another thread held a lock as this one forked, and nobody releases it there
            os.waitpid(self.pid, 0)
        self._child_created = True
        close_pipes(self, given)
        return None


def close_pipes(process: subprocess.Popen[Any], given: Mapping[str, Any]) -> None:
    """Closes the ends of a started process's pipes that this one does not use. ``given``: arguments of its start."""
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def become(
    command: Sequence[str], work: Callable[[], object], given: Mapping[str, Any], ends: list[int], kept: Sequence[int] = ()
) -> NoReturn:
    """Turns a fresh fork into the process that was asked for, and never returns.

    Args:
        work: what it does. given: arguments of ``subprocess.Popen``. ends: the descriptors that become 0, 1 and 2 (-1: as it is).
        kept: other descriptors that stay open.
    """
    global _name
    code = 1
    try:
        if given["start_new_session"]:
            os.setsid()
        _set_signals()
        _move_descriptors(ends, kept)
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in given["env"].items()})
        command = _unwrapped(command)
        setproctitle(" ".join(command))
        if _register is not None:
            _name = named(command, os.environ, _name)
            (_register / str(os.getpid())).write_text(_name)
        sys.path[:0] = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        importlib.invalidate_caches()
        gc.freeze()  # objects of the parent would close descriptors that are others now
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        random.seed()
        tempfile.tempdir = None  # it is looked up anew, in this process's environment
        structlog.reset_defaults()
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # a module that runs may be one that is loaded
        contextvars.Context().run(work)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _set_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _move_descriptors(ends: list[int], kept: Sequence[int]) -> None:
    """Makes ``ends`` (-1: as it is) the descriptors 0, 1 and 2, and closes all others but ``kept``."""
    high = [os.dup(end) if end != -1 else -1 for end in ends]
    for target, end in enumerate(high):
        if end != -1:
            os.dup2(end, target)
    for path in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(path.name)) > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    sys.stdin, sys.stdout, sys.stderr = (
        open(target, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 (they stay open)
        for target, mode in enumerate(("r", "w", "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _run_code(code: str) -> None:
    main, sys.argv = types.ModuleType("__main__"), ["-c"]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
    atexit._run_exitfuncs()


def _run_module(module: str, words: Sequence[str]) -> None:
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
