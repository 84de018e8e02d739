"""The first process of a sandbox: runs one program after the other, measures each and ends it with all that it has started.

Inside bubblewrap, or a container, it has process id 1. The kernel then keeps signals of the programs from it, ends everything with it, and
lets one ``kill`` of it reach everything else, whatever session or process group that is in. It is not dumpable, so that no program reads or
writes its memory.

It speaks over its standard input and output. Out, once: `READY`. In: the length of a request in four bytes, and the request in Python's
marshal format, which is written by `shared.sandbox.sandbox` alone; then the program's standard input, which goes from pipe to pipe and
never through this process's memory, of which each program is a fork. Out: a `HEAD`, and the bytes of standard output, standard error and
report. It ends when its standard input does, which is when the process that started it has ended, or when it was asked nothing for the
lease's seconds.

It imports little, and that of the standard library, since each sandbox starts it anew.

    python program_supervisor.py LEASE WORK USER
"""

import _signal
import atexit
import ctypes
import marshal
import os
import resource
import select
import struct
import sys
import time
import types

FIRST = os.getpid() == 1  # Whether this is process 1 of a sandbox, which sees no others; without bubblewrap it is one of the host's
# What the kernel keeps for a file of any size, and at most for data that no one has read from a local socket
ENTRY_BYTES, SOCKET_BYTES = 2 << 10, 208 << 10
_APART = (b"VmPTE:", b"HugetlbPages:")  # A process's page tables and huge pages, which no other count of its memory has
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processes() -> list[int]:
    """Returns all other processes of the sandbox; without bubblewrap, what the supervisor and its descendants have started."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if FIRST:
        return [pid for pid in pids if pid != 1]
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    found, new = set[int](), {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return list(found)


def kill_all() -> None:
    """Kills every process of the sandbox but this one."""
    if FIRST:
        _kill(-1)
        return
    while living := [pid for pid in processes() if (fields := _stat(pid)) and fields[0] != b"Z"]:
        for pid in living:
            _kill(pid)
        time.sleep(0.001)


def _kill(pid: int) -> None:
    try:  # noqa: SIM105 (contextlib takes long to import)
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def _stat(pid: int) -> list[bytes]:
    """Returns the fields of ``/proc/PID/stat`` from the third on (proc(5)): state, parent, …; none where the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", 0) as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def usage_of(pid: int) -> tuple[int, int, float]:
    """Returns a process's threads, its bytes of memory but for files, and its processor seconds with those of its dead children."""
    fields = _stat(pid)
    if not fields:
        return 0, 0, 0.0
    memory = _sum(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:", *_APART) or 0
    return int(fields[17]), memory, sum(map(int, fields[11:15])) / _TICKS_PER_S


def _sum(path: str, *names: bytes) -> int | None:
    """Returns the sum of a file's lines of these names, which are in kB, in bytes; None where it cannot be read."""
    try:
        with open(path, "rb", 0) as file:
            return sum(int(line.split()[1]) << 10 for line in file.read().splitlines() if line.startswith(names))
    except OSError:  # it has ended, or does not let itself be looked at
        return None


def exact(pids: list[int]) -> int:
    """Returns the bytes of processes' memory, each page once although several share it. It takes the kernel much longer to say."""
    total = 0
    for pid in pids:
        shared = _sum(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")
        total += usage_of(pid)[1] if shared is None else shared + (_sum(f"/proc/{pid}/status", *_APART) or 0)
    return total


def filled(work: str) -> int:
    """Returns the bytes of memory that belong to no process: the two folders with their entries, and what sockets may hold unread."""
    if not FIRST:
        return 0
    found = [os.statvfs(folder) for folder in (work, "/tmp")]
    with open("/proc/net/sockstat", "rb", 0) as file:
        sockets = int(file.readline().split()[2])
    entries = sum(each.f_files - each.f_ffree for each in found)
    return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in found) + entries * ENTRY_BYTES + sockets * SOCKET_BYTES


def refused_memory() -> int:
    """Returns how many processes of its container the kernel has killed for want of memory, by either version of control groups."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control") if FIRST else ():
        try:
            with open(path, "rb", 0) as file:
                return sum(int(line.split()[1]) for line in file.read().splitlines() if line.startswith(b"oom_kill "))
        except OSError:
            continue
    return 0


READY = b"R"
HEAD = struct.Struct("<BiiddQ?III")
"""Number of the status in `shared.sandbox.program.STATUSES`, exit code, signal (-1: none), wall and processor seconds, bytes of memory,
whether output was cut off, lengths of standard output, standard error and report."""

OK, EXIT_CODE, SIGNAL, WALL_TIME, CPU_TIME, MEMORY, PROCESSES, OUTPUT = range(8)

TICK_S = 0.01  # The pause between two looks at what the processes have taken
# What each process may allocate beyond the limit, so that the program is ended for what it uses, and not refused what it reserves
MEMORY_SLACK = 64 << 20
_CHUNK = 1 << 16
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_FILTER = 4, 36, 38, 22, 2
_STDIN, _REPORT = 0, 3
_ASIDE = 100


def main(lease_s: float, work: str, user: int) -> None:
    """Answers requests until no one is there to ask. ``user``: that of the programs; 0: the supervisor's own."""
    libc, own = ctypes.CDLL(None), os.getpid()
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # without bubblewrap, what a program leaves behind comes here all the same
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # the kernel drops it for process 1
    try:
        os.write(1, READY)
        while (request := _request(lease_s)) is not None:
            answer = Run({**request, "user": user}, work, libc).answer()
            while answer:
                answer = answer[os.write(1, answer) :]
    except BrokenPipeError:  # who asked is gone
        pass
    except BaseException:  # its last line is reported by the process that asked
        sys.excepthook(*sys.exc_info())
    finally:
        if os.getpid() == own:  # and no program that failed to start
            leave(work)


def leave(work: str) -> None:
    """Ends the sandbox. Without bubblewrap the work folder lies on the disk, and is removed."""
    kill_all()
    if not FIRST:
        import shutil

        shutil.rmtree(work, ignore_errors=True)
    os._exit(0)


def _request(lease_s: float) -> dict | None:  # type: ignore[type-arg]
    """Returns the next request; None where the lease ran out, or no one is there any more."""
    if not _readable(lease_s):
        return None
    data, size = bytearray(), 4
    while len(data) < size:
        if not (part := os.read(_STDIN, size - len(data))):
            return None
        data += part
        size = 4 + int.from_bytes(data[:4], "big") if len(data) >= 4 else 4
    return marshal.loads(memoryview(data)[4:])


def _readable(seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(_STDIN, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


class Run:
    """One program, from its start to the end of all that it has started."""

    def __init__(self, request: dict, work: str, libc: ctypes.CDLL) -> None:  # type: ignore[type-arg]
        self.request, self.work, self.libc, self.limits = request, work, libc, request["limits"]
        self.stdin = int(request["stdin"])
        self.streams: dict[int, bytearray] = {}
        self.status, self.wait_status, self.truncated = OK, 0, False
        self.cpu_s, self.memory, self.ended, self.refused = 0.0, 0, False, refused_memory()

    def answer(self) -> bytes:
        """Runs the program to its end and returns the answer."""
        self.began = time.monotonic()
        self._start()
        self._watch()
        kill_all()
        self._reap(0)
        for descriptor in list(self.streams):
            while descriptor in self._open and self._read(descriptor):
                pass
            os.close(descriptor)
        if self._input >= 0:
            os.close(self._input)
        if self.stdin:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            while self.stdin and (count := os.splice(_STDIN, nowhere, self.stdin)):
                self.stdin -= count
            os.close(nowhere)
        taken = time.monotonic() - self.began, self.cpu_s, self.memory, self.truncated
        return HEAD.pack(*self._ending(), *taken, *map(len, self.streams.values())) + b"".join(self.streams.values())

    def _ending(self) -> tuple[int, int, int]:
        if self.status != OK or not self.ended:
            return self.status, -1, -1
        if os.WIFSIGNALED(self.wait_status):
            number = os.WTERMSIG(self.wait_status)
            if number == _signal.SIGKILL and refused_memory() > self.refused:
                return MEMORY, -1, number
            return (CPU_TIME if number == _signal.SIGXCPU else SIGNAL), -1, number
        code = os.WEXITSTATUS(self.wait_status)
        return (EXIT_CODE if code else OK), code, -1

    def _start(self) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (stdin, self._input), *outputs = pipes
        ends = [stdin, *(write for _, write in outputs)]
        self.pid = os.fork()
        if self.pid == 0:
            _be_program(self.request, ends, self.work, self.libc)
        for end in ends:
            os.close(end)
        self._poll = select.poll()
        self._open = set[int]()
        for read, _ in outputs:
            os.set_blocking(read, False)
            self.streams[read] = bytearray()
            self._open.add(read)
            self._poll.register(read, select.POLLIN)
        os.set_blocking(self._input, False)
        self._poll.register(self._input, 0)
        self._main = os.pidfd_open(self.pid)
        self._poll.register(self._main, select.POLLIN)
        self._write()

    def _watch(self) -> None:
        """Returns once the program has ended, or is over a limit."""
        looked = self.began
        while self.status == OK and not self.ended:
            for descriptor, event in self._poll.poll(TICK_S * 1000):
                self._attend(descriptor, event)
            self._reap(os.WNOHANG)
            now = time.monotonic()
            if now - looked >= TICK_S and not self.ended:
                looked = now
                self._check_limits()
            if now - self.began > self.limits["wall_s"] and not self.ended:
                self.status = WALL_TIME
        os.close(self._main)

    def _attend(self, descriptor: int, event: int) -> None:
        """Does what an event asks for: it leaves, reads or writes."""
        if descriptor == _STDIN and event & select.POLLHUP:
            leave(self.work)
        if descriptor in self.streams and self._read(descriptor) is False:
            self._poll.unregister(descriptor)
            self._open.discard(descriptor)
        if self._input >= 0 and (descriptor == self._input or (descriptor == _STDIN and event & select.POLLIN)):
            self._write()

    def _read(self, descriptor: int) -> bool | None:
        """Reads what is there, up to the limit. Returns whether there may be more to come; None where nothing is there now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None
        held, most = self.streams[descriptor], self.limits["output_bytes"]
        if len(held) + len(data) > most:
            self.truncated = True
            if self.status == OK:
                self.status = OUTPUT
        held += data[: most - len(held)]
        return bool(data)

    def _write(self) -> None:
        """Hands on as much of the standard input as there is and the program takes, and closes its pipe after the last of it."""
        try:
            while self.stdin:
                if not (count := os.splice(_STDIN, self._input, self.stdin)):
                    leave(self.work)
                self.stdin -= count
        except BlockingIOError:
            full = bool(_readable(0))
            self._poll.register(_STDIN, 0 if full else select.POLLIN)
            self._poll.register(self._input, select.POLLOUT if full else 0)
            return
        except BrokenPipeError:
            pass
        self._poll.register(_STDIN, 0)  # without an event POLLHUP remains: who asked is gone
        self._poll.unregister(self._input)
        os.close(self._input)
        self._input = -1

    def _reap(self, options: int) -> None:
        """Takes note of every process that has ended; without WNOHANG, until none is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.memory = max(self.memory, usage.ru_maxrss << 10)
            if pid == self.pid:
                self.wait_status, self.ended = status, True

    def _check_limits(self) -> None:
        """Compares what the living processes have taken with the limits."""
        count, cpu_s, memory = 0, self.cpu_s, filled(self.work)
        pids = processes()
        if len(pids) > self.limits["processes"]:  # at once: they get more while one looks at each
            self.status = PROCESSES
            return
        for pid in pids:
            threads, used, seconds = usage_of(pid)
            count, memory, cpu_s = count + threads, memory + used, cpu_s + seconds
        if memory > self.limits["memory_bytes"]:
            memory = exact(pids) + filled(self.work)
        self.memory = max(self.memory, memory)
        if count > self.limits["processes"]:
            self.status = PROCESSES
        elif memory > self.limits["memory_bytes"]:
            self.status = MEMORY
        elif cpu_s > self.limits["cpu_s"]:
            self.status = CPU_TIME


def _be_program(request: dict, ends: list[int], work: str, libc: ctypes.CDLL) -> None:  # type: ignore[type-arg]
    """Makes the program of a fork of the supervisor. Never returns."""
    code = 1
    try:
        os.setsid()
        for number, end in enumerate(ends):  # out of the way of the numbers that they are to have
            os.dup2(end, _ASIDE + number)
        for number in range(len(ends)):
            os.dup2(_ASIDE + number, number)
        os.closerange(_REPORT + 1, 1 << 16)
        if user := request["user"]:  # which takes all rights from it for good
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and what it starts would, too
            _signal.signal(number, _signal.SIG_DFL)
        _limit(request["limits"])
        os.chdir(work)
        _filter(request["syscalls"], libc)
        if request["command"]:
            _execute(request["command"])
        code = _python(request["sources"], work)
    finally:
        os._exit(code)


def _filter(syscalls: bytes, libc: ctypes.CDLL) -> None:
    """Takes system calls from the process and all that it starts, where no one has before; seccomp(2)."""
    if not syscalls:
        return
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # of the container's processes the supervisor is the last to be killed for want of memory
    code = ctypes.create_string_buffer(syscalls, len(syscalls))
    program = struct.pack("HxxxxxxP", len(syscalls) // 8, ctypes.addressof(code))
    for option in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_FILTER, program)):
        if libc.prctl(*option, 0, 0):
            raise OSError("the filter of system calls was refused")


def _limit(limits: dict) -> None:  # type: ignore[type-arg]
    """Sets the kernel's own limits of each process. That of memory is for what a process can write to, not for what it maps: runtimes of
    languages and GPUs reserve many times what they use."""
    seconds = int(limits["cpu_s"]) + 1
    wanted = {
        resource.RLIMIT_DATA: limits["memory_bytes"] + MEMORY_SLACK,
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK), 0),
    }
    if FIRST and _kernel() >= (5, 14):
        wanted[resource.RLIMIT_NPROC] = limits["processes"] + 1  # before, the kernel counted the user's processes outside as well
    for number, value in wanted.items():
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first by SIGXCPU, which reports what it was
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # the soft limit is that of the process that started this one


def _kernel() -> tuple[int, ...]:
    parts = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _execute(command: list[str]) -> None:
    os.closerange(_REPORT, _REPORT + 1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _python(sources: list[str | types.CodeType], work: str) -> int:
    """Executes sources as the program ``main.py`` of the work folder. Returns the exit code."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=f"{work}/main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    sys.argv, sys.path[:0] = ["main.py"], [work]
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        for source in sources:
            exec(compile(source, "main.py", "exec") if isinstance(source, str) else source, main_module.__dict__)
        code = 0
    except BaseException as error:
        code = _print_error(error)
    try:
        if threads := sys.modules.get("threading"):
            threads._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120  # what the interpreter itself answers
    return code


def _print_error(error: BaseException) -> int:
    """Prints an uncaught error as the interpreter does, and returns its exit code."""
    if not isinstance(error, SystemExit):
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF
    if error.code is not None:
        print(error.code, file=sys.stderr)
    return int(error.code is not None)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
