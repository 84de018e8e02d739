"""A sandbox, as the process sees it that starts it: programs in, results out; and a pool of started ones.

The sandbox ends with the process that holds it, however that ends: its supervisor reads requests from a pipe that the kernel then closes.
"""

import contextlib
import importlib.util
import json
import marshal
import os
import re
import secrets
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Self

from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.host import client_environment, remove_container
from shared.sandbox import program_supervisor
from shared.sandbox.program import STATUSES, Program, ProgramResult, SandboxLimits, SandboxSettings, status_of
from shared.sandbox.sandbox_command import (
    FIRST_USER,
    OUTSIDE,
    PASSWD,
    USER,
    USERS,
    SandboxDescriptors,
    bwrap_command,
    bwrap_program,
    container_command,
    environment,
    interpreter,
    supervisor_command,
    syscall_filter,
)

APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
CLONE = "kernel.unprivileged_userns_clone"
NAMESPACES = "user.max_user_namespaces"

_CONTAINER = (
    "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined (docs/sandbox.md)"
)

Setting = Callable[[str], str | None]  # Name of a kernel setting → its value; None where the kernel has no such


def kernel_setting(name: str) -> str | None:
    """Returns the value of a setting as sysctl shows it."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def remedy(words: str, setting: Setting = kernel_setting, program: str | None = None) -> str:
    """Returns why there is no sandbox, and what helps. ``words``: what bubblewrap said. ``setting``: reads the kernel's settings.
    ``program``: the path of bubblewrap."""
    program = program or bwrap_program()
    if program is None:
        return "bubblewrap is not installed: pip install 'myxo[reward]', or the system's package bubblewrap"
    for name, forbidding, allowed in ((CLONE, "0", "1"), (NAMESPACES, "0", "10000")):
        if setting(name) == forbidding:
            return f"{words}; this kernel forbids user namespaces: sysctl -w {name}={allowed}"
    if setting(APPARMOR) == "1":
        profile = f"profile myxo-bwrap {program} flags=(unconfined) {{ userns, }}"
        return (
            f"{words}; AppArmor restricts user namespaces here (Ubuntu from 23.10 on): load a profile that allows them to bubblewrap, "
            f"/etc/apparmor.d/myxo-bwrap: 'abi <abi/4.0>, {profile}', or for all programs: sysctl -w {APPARMOR}=0"
        )
    if any(part in words for part in ("ermission denied", "ermitted", "No permissions", "mount proc")):
        return f"{words}; {_CONTAINER}"
    return words


START_S = 30.0  # The deadline for the start of a sandbox, which takes some 20 ms
GRACE_S = 10.0  # The seconds beyond a program's own limit that its result may take, on a machine that is busy with other things
_CHUNK = 1 << 16
_NOWHERE = os.open(os.devnull, os.O_RDWR)  # where descriptors may have run out, a sandbox can still be ended
_HINT = re.compile("(Run|See) 'docker ")


class SandboxUnavailable(MyxoError):
    """No sandbox can be started on this machine; the message says why. ``problem``: in the words of what failed."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"no sandbox could be started: {problem}")


class SandboxGone(MyxoError):
    """A sandbox has ended, by its lease or because it was closed, or it answered with what is no result. Nothing of it is left."""


class Sandbox:
    """One sandbox, for one program after the other. Each finds the files of those before it, and none of their processes. It is there some
    20 ms after it was made; the first `run` waits for the rest of them. It may be used by several threads, one at a time. Raises
    SandboxUnavailable. ``separate``: it is not known yet that users cannot be mapped here."""

    separate = True

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._lock, self._child, self._pid, self._ready, self.closed = threading.RLock(), -1, -1, False, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._information = -1
        self._container = ""
        start = {"bwrap": self._isolated, "none": self._bare}.get(settings.kind, self._contained)
        try:
            self._process = start()
        except OSError as error:
            raise SandboxUnavailable(f"{error.filename or settings.kind}: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> Self:
        """Returns once the sandbox has started. Raises SandboxUnavailable."""
        if self._ready:
            return self
        try:
            self._read(len(program_supervisor.READY), time.monotonic() + START_S, "its start")
        except (SandboxGone, DeadlineExceeded) as error:
            words = self._last_words() or str(error)
            raise SandboxUnavailable(f"{self.settings.kind}: {words}" if self._container else remedy(words)) from None
        self._open_pid()
        self._ready = True
        return self

    def run(self, program: Program, limits: SandboxLimits | None = None) -> ProgramResult:
        """Returns what came of a program, once all that it started has ended. ``limits``: in place of the settings' own; ``disk_bytes``
        counts for each single file then. Raises SandboxUnavailable, SandboxGone, and DeadlineExceeded where the sandbox itself hangs; it is
        closed then."""
        with self._lock:
            bounds = limits or self.settings.limits
            try:
                if self.closed:
                    raise SandboxGone("the sandbox is closed")
                self.wait_ready()
                return self._asked(program, bounds)
            except BaseException:  # an answer that is still to come would be taken for the next one's
                self.close()
                raise

    def write_file(self, path: str, content: bytes) -> ProgramResult:
        """Writes a file of the work folder, with the folders that it is in. It is done by a program inside, within its limits."""
        return self.run(Program(sources=(f"path = {path!r}\n{_WRITE}",), stdin=content))

    def read_file(self, path: str) -> ProgramResult:
        """Reads a file, likewise: its content is the result's ``stdout``, up to the limit of output."""
        return self.run(Program(sources=(f"path = {path!r}\n{_READ}",)))

    @property
    def alive(self) -> bool:
        """Returns whether programs can still be run."""
        return not self.closed and self._process.poll() is None

    def kill(self) -> None:
        """Has the sandbox end with all that is in it, and does not wait for that."""
        if self.closed:
            return
        self.closed = True
        for descriptor in (self._requests, self._answers):  # which a thread that waits for a result may still read from
            os.dup2(_NOWHERE, descriptor, inheritable=False)
        self._kill_first()

    def close(self) -> None:
        """Ends the sandbox with all that is in it. Returns when that is gone."""
        self.kill()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            if self._container:
                remove_container(self.settings.kind, self._container)
        with self._lock:  # such a thread knows of the end now
            self._kill_first()
            _close_streams(self._process)
            self._close_information()
        if self._folder is not None:
            self._folder.cleanup()

    def _isolated(self) -> "subprocess.Popen[bytes]":
        program = bwrap_program()
        if program is None:
            raise SandboxUnavailable(remedy(""))
        if may_separate():
            with contextlib.suppress(_NotMapped):
                return self._spawned(program, apart=True)
            Sandbox.separate = False
        return self._spawned(program, apart=False)

    def _spawned(self, program: str, apart: bool) -> "subprocess.Popen[bytes]":
        """Starts bubblewrap. ``apart``: programs are another user than the supervisor. Raises _NotMapped where they cannot be."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as passed:
            self._information, written = os.pipe()
            ours.callback(self._close_information)
            passed.callback(os.close, written)
            hears, says = os.pipe() if apart else (None, None)
            for stack, end in ((passed, hears), (ours, says)):
                if end is not None:
                    stack.callback(os.close, end)
            code, passwd, syscalls = (_filled(data, passed) for data in (supervisor_code(), PASSWD, syscall_filter()))
            given = SandboxDescriptors(code, passwd, syscalls, written, hears)
            inherited = tuple(end for end in vars(given).values() if end is not None)
            process = _started(bwrap_command(program, self.settings, given), None, inherited)
            passed.close()
            if says is None:
                ours.pop_all()
                return process
            try:
                self._map_users(says)
            except BaseException:
                ours.close()
                _close_streams(process)  # bubblewrap ends by itself then; if it were killed, its child would wait for ever
                process.wait()
                raise
        return process

    def _map_users(self, says: int) -> None:
        """Maps root inside to root, and the programs' user to one that owns nothing. Raises _NotMapped."""
        self._open_pid()
        if self._pid < 0:  # it did not start; whoever waits for the supervisor reports its words
            return
        try:
            for kind in ("uid", "gid"):
                Path(f"/proc/{self._child}/{kind}_map").write_text(f"0 0 1\n{USER} {OUTSIDE} 1\n")
        except OSError as error:
            self._kill_first()
            raise _NotMapped from error
        os.write(says, b"1")

    def _open_pid(self) -> None:
        """Opens the sandbox's first process, which bubblewrap has named."""
        if self._information < 0:
            return
        text, end = b"", time.monotonic() + START_S
        while b"}" not in text and _readable(self._information, end - time.monotonic()):
            if not (part := os.read(self._information, _CHUNK)):
                break
            text += part
        self._close_information()
        if b"}" in text:
            self._child = int(json.loads(text)["child-pid"])
            self._pid = os.pidfd_open(self._child)

    def _close_information(self) -> None:
        descriptor, self._information = self._information, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _kill_first(self) -> None:
        """Kills the sandbox's first process, and with it all others."""
        pid, self._pid = self._pid, -1
        if pid >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pid, signal.SIGKILL)
            os.close(pid)

    def _bare(self) -> "subprocess.Popen[bytes]":
        self._folder = tempfile.TemporaryDirectory(prefix="myxo-unsandboxed-", ignore_cleanup_errors=True)
        work, supervisor = Path(self._folder.name, "work"), Path(self._folder.name, "supervisor.pyc")
        work.mkdir()
        supervisor.write_bytes(supervisor_code())
        return _started(supervisor_command(self.settings, str(supervisor), str(work)), environment(self.settings, str(work)), ())

    def _contained(self) -> "subprocess.Popen[bytes]":
        self._container = f"myxo-sandbox-{secrets.token_hex(16)}"
        user = FIRST_USER + secrets.randbelow(USERS)
        return _started(container_command(self.settings, self._container, user, _supervisor_source()), client_environment(), ())

    def _asked(self, program: Program, limits: SandboxLimits) -> ProgramResult:
        sources: list[str | CodeType] = list(program.sources)
        if program.harness:  # an image may have another interpreter, with another bytecode
            text = f"exec(compile({program.harness!r}, {_HARNESS!r}, 'exec', dont_inherit=True))"
            sources[:0] = ["import sys; del sys.path[0]", text if self._container else _compiled(program.harness, _HARNESS)]
        request = {"command": list(program.command), "sources": sources, "stdin": len(program.stdin), "limits": vars(limits)}
        request["syscalls"] = syscall_filter() if self._container else b""  # bubblewrap has set it for all
        data = marshal.dumps(request)
        end = time.monotonic() + limits.wall_s + GRACE_S
        self._write(len(data).to_bytes(4, "big") + data + program.stdin, end)
        head = program_supervisor.HEAD.unpack(self._read(program_supervisor.HEAD.size, end, "its result"))
        number, exit_code, ended_by, wall_s, cpu_s, memory, truncated, *lengths = head
        if number >= len(STATUSES) or max(lengths) > limits.output_bytes:
            raise SandboxGone("the sandbox answered with what is no result; it was closed")
        stdout, stderr, report = (self._read(length, end, "its output") for length in lengths)
        status = status_of(STATUSES[number], stderr)
        code, by = (None if value < 0 else value for value in (exit_code, ended_by))
        return ProgramResult(status, code, by, stdout, stderr, report, truncated, wall_s, cpu_s, memory)

    def _write(self, request: bytes, end: float) -> None:
        data = memoryview(request)
        while data:
            self._wait(self._requests, select.POLLOUT, end, "its attention")
            try:
                data = data[os.write(self._requests, data[:_CHUNK]) :]
            except BrokenPipeError:
                raise self._gone() from None

    def _read(self, size: int, end: float, awaited: str) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._answers, select.POLLIN, end, awaited)
            if not (part := os.read(self._answers, size - len(data))):
                raise self._gone()
            data += part
        return bytes(data)

    def _wait(self, descriptor: int, event: int, end: float, awaited: str) -> None:
        if not _readable(descriptor, end - time.monotonic(), event):
            raise DeadlineExceeded(awaited, "a sandbox", START_S if not self._ready else GRACE_S, "it is ended")

    def _gone(self) -> SandboxGone:
        words = self._last_words() or f"nothing was asked of it for {self.settings.lease_s:g} s, or it was killed"
        return SandboxGone(f"the sandbox has ended: {words}")

    def _last_words(self) -> str:
        """Returns the last line that bubblewrap or the supervisor wrote about its own end."""
        if self._process.stderr is None or not _readable(self._process.stderr.fileno(), 0):
            return ""
        text = os.read(self._process.stderr.fileno(), _CHUNK).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not _HINT.match(line)]
        return lines[-1][:400] if lines else ""


_HARNESS = "tests.py"  # Its file name in errors
_WRITE = """
import os, sys
os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
try:
    with open(path, "wb") as file:
        file.write(sys.stdin.buffer.read())
except OSError as error:
    sys.exit(f"{path}: {error.strerror}")
"""
_READ = """
import sys
try:
    with open(path, "rb") as file:
        while data := file.read(1 << 16):
            sys.stdout.buffer.write(data)
except OSError as error:
    sys.exit(f"{path}: {error.strerror}")
"""


class _NotMapped(Exception):
    """This root may not give programs another user: it is none outside of its own container."""


def may_separate() -> bool:
    """Returns whether programs can be another user than the supervisor: root starts them, and others can read the interpreter."""
    return Sandbox.separate and os.geteuid() == 0 and all(os.stat(path).st_mode & 0o004 for path in (interpreter(), os.__file__))


@cache
def supervisor_code() -> bytes:
    """Returns the supervisor as a ``.pyc``, which is there sooner than its source. Both interpreters are the same."""
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(_compiled(_supervisor_source(), program_supervisor.__name__))


@cache
def _compiled(source: str, file: str) -> CodeType:
    return compile(source, file, "exec", dont_inherit=True)


@cache
def _supervisor_source() -> str:
    """Returns the supervisor's source, for the interpreter of an image, which may be another."""
    return Path(program_supervisor.__file__).read_text()


def _close_streams(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _readable(descriptor: int, seconds: float, event: int = select.POLLIN) -> bool:
    """Returns whether there is something to read within so many seconds, or room to write."""
    waiting = select.poll()  # select takes no descriptors over 1023
    waiting.register(descriptor, event)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


def _filled(data: bytes, closed: contextlib.ExitStack) -> int:
    """Returns a descriptor to read the data from, until ``closed`` is."""
    descriptor = os.memfd_create("myxo-sandbox")
    closed.callback(os.close, descriptor)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _started(command: list[str], variables: dict[str, str] | None, descriptors: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    pipes: dict[str, Any] = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen(command, env=variables or {}, pass_fds=descriptors, start_new_session=True, bufsize=0, **pipes)


class SandboxPool:
    """Keeps sandboxes that no one has used yet. For one thread. ``warm``: how many."""

    def __init__(self, settings: SandboxSettings, warm: int = 1) -> None:
        self._settings, self._warm = settings, warm
        self._waiting, self._ending = deque[Sandbox](), deque[Sandbox]()

    def fill(self) -> None:
        """Starts as many as are missing, and does not wait for them. Raises SandboxUnavailable."""
        while len(self._waiting) < self._warm:
            self._waiting.append(Sandbox(self._settings))

    @contextlib.contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """Opens a sandbox that no one has used; it is ended with the body. Raises SandboxUnavailable."""
        found = self._unused()
        try:
            yield found
        finally:
            found.kill()
            self._ending.append(found)
            with contextlib.suppress(SandboxUnavailable):  # the next caller's, who tries again
                self.fill()  # the next one starts while its caller looks at the results
            while len(self._ending) > self._warm:
                self._ending.popleft().close()

    def close(self) -> None:
        """Ends all of them."""
        for group in (self._waiting, self._ending):
            while group:
                group.popleft().close()

    def _unused(self) -> Sandbox:
        while self._waiting:
            found = self._waiting.popleft()
            if found.alive:
                return found
            found.close()  # its lease ran out
        return Sandbox(self._settings)
