"""What a program may try in a sandbox: it is held back, the status says how, and the sandbox serves the next one."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.sandbox.program import Program, ProgramResult, SandboxSettings, Status
from shared.sandbox.program_supervisor import ENTRY_BYTES
from shared.sandbox.sandbox import Sandbox
from tests.integration.sandbox.conftest import LIMITS
from tests.support.tables import rare
from tests.support.waiting import until

BEYOND = 512 << 20
"""What programs may take over the limit before the sandbox looks, on a machine that gives it no turn for long. See `benchmarks.sandbox`."""

ROOT = Path(__file__).parents[3]

MANY_THREADS = """
import threading, time
threading.stack_size(65536)
for _ in range(100): threading.Thread(target=time.sleep, args=(100,)).start()
"""
SPARSE = """
import mmap
while True:  # pages that are read and not written cost a page table each, and nothing else
    held = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    for at in range(0, 1 << 40, 1 << 21): held[at]
"""
UNREAD = """
import os, socket, time
for _ in range(12):  # of the 24 processes that are allowed
    if not os.fork(): break
held = []
for _ in range(120):
    pair = socket.socketpair()
    pair[0].setblocking(False)
    try:
        while True: pair[0].send(bytes(4096))
    except BlockingIOError:
        held.append(pair)
time.sleep(60)
"""
HOPPING = """
import os, time
if os.fork(): time.sleep(100)
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError:  # those that have just ended still count
        pass
"""
DEAF = "import signal\nfor number in {*range(1, 32)} - {9, 19}: signal.signal(number, signal.SIG_IGN)"


def python(box: Sandbox, source: str) -> ProgramResult:
    return box.run(Program(sources=(source,)))


def shell(box: Sandbox, line: str) -> ProgramResult:
    return box.run(Program(command=("sh", "-c", line)))


@pytest.fixture(autouse=True)
def nothing_is_left(box: Sandbox) -> Iterator[None]:
    """After every attack the sandbox has no process but its supervisor and the one that looks, and answers as before."""
    yield
    assert box.run(Program(command=("find", ".", "-mindepth", "1", "-delete")), replace(LIMITS, cpu_s=20.0, memory_bytes=1 << 30)).ok
    found = python(box, "import os; print(sorted(int(pid) for pid in os.listdir('/proc') if pid.isdigit()) == [1, os.getpid()])")
    assert (found.status, found.stdout) == ("ok", b"True\n")


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes"),
        rare(MANY_THREADS, "processes"),
        (HOPPING, "cpu_time"),
        ("held = []\nwhile True: held.append(b'x' * (1 << 20))", "memory"),
        rare("bytearray(1 << 40)", "memory"),
        rare("import mmap\nheld = mmap.mmap(-1, 1 << 30)\nfor at in range(0, 1 << 30, 4096): held[at] = 1", "memory"),
        rare("import os\nfor _ in range(4): os.fork()\nheld = b'x' * (30 << 20)\nwhile True: pass", "memory"),
        rare("import itertools\nfor number in itertools.count(): open(f'file{number}', 'w').close()", "memory"),
        rare(SPARSE, "memory"),
        (UNREAD, "memory"),
        rare("while True: pass", "cpu_time"),
        rare("import os\nfor _ in range(2): os.fork()\nwhile True: pass", "cpu_time"),
        (f"{DEAF}\nwhile True: pass", "cpu_time"),
        ("while True: print('x' * 1000)", "output"),
        rare("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
        rare("import os\nwhile True: os.write(3, b'x' * 1000)", "output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal"),
    ],
)
def test_limits_hold_a_program_back(box: Sandbox, source: str, status: Status) -> None:
    limits = replace(LIMITS, cpu_s=20.0) if status == "memory" else LIMITS  # by which nothing else is reached before
    found = box.run(Program(sources=(source,)), limits)
    assert found.status == status, found
    assert found.memory_bytes < LIMITS.memory_bytes + BEYOND
    assert max(map(len, (found.stdout, found.stderr, found.report))) <= LIMITS.output_bytes
    assert found.truncated == (status == "output")


@pytest.mark.parametrize(
    "source",
    [
        rare("import time; time.sleep(1000)"),
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        rare("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(100)"),
    ],
)
def test_whoever_waits_or_stops_is_ended_by_the_clock(box: Sandbox, source: str) -> None:
    found = box.run(Program(sources=(source,)), replace(LIMITS, wall_s=0.3))
    assert found.status == "wall_time" and found.wall_s >= 0.3


@pytest.mark.extra
def test_1_gb_of_output_is_cut_off(box: Sandbox) -> None:
    found = shell(box, "head -c 1000000000 /dev/zero")
    assert (found.status, found.truncated, found.stdout) == ("output", True, bytes(LIMITS.output_bytes))


@pytest.mark.parametrize(
    "line",
    [
        rare("setsid sleep 1000 & exit 3"),
        "(setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000' &) ; exit 3",
        rare("for i in 1 2 3; do (sleep 1000 &) & done; exit 3"),
        "sleep 1000 & kill -STOP $!; exit 3",
    ],
)
def test_daemons_end_with_their_program(box: Sandbox, line: str) -> None:
    found = shell(box, line)
    assert (found.status, found.exit_code) == ("exit_code", 3)


@pytest.mark.parametrize("number", [9, 15, *(rare(number) for number in (2, 19))])
def test_signals_do_not_reach_the_supervisor(box: Sandbox, number: int) -> None:
    found = python(box, f"import os; os.kill(1, {number})")
    assert found.ok or b"PermissionError" in found.stderr


def test_the_supervisor_can_be_neither_read_nor_traced_nor_written_to(box: Sandbox) -> None:
    for path, mode in (("mem", "rb"), ("environ", "rb"), ("maps", "rb")):
        found = python(box, f"open('/proc/1/{path}', '{mode}').read(1)")
        assert found.status == "exit_code" and b"PermissionError" in found.stderr, path
    traced = python(box, "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())")
    assert traced.stdout == b"-1 1\n"


def test_neither_the_network_nor_the_loopback_of_the_host_is_there(box: Sandbox) -> None:
    """Twice over: there are no sockets for it, and no interface but a loopback of the sandbox's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (("127.0.0.1", server.getsockname()[1]), ("192.0.2.1", 80), ("::1", 80)):
            found = python(box, f"import socket; socket.create_connection({address!r}, 5)")
            assert found.status == "exit_code" and b"OSError: [Errno 97]" in found.stderr, address
    devices = python(box, "print([line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]])")
    assert devices.stdout == b"['lo']\n"
    local = "import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))"
    assert python(box, local).stdout == b"b'x'\n"


@pytest.mark.parametrize("family", [2, 10, 16, 17, 38, 40])  # the last: netlink, packets, cryptography, the host of a virtual machine
def test_other_kinds_of_sockets_are_refused(box: Sandbox, family: int) -> None:
    assert b"OSError: [Errno 97]" in python(box, f"import socket; socket.socket({family}, socket.SOCK_DGRAM)").stderr


def test_files_of_the_host_cannot_be_reached(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    home = Path.home()
    tries = [
        str(secret),
        f"/proc/self/root{secret}",
        f"/proc/1/root{secret}",
        f"../../../..{secret}",
        "/etc/shadow",
        str(ROOT / "SECURITY.md"),
    ]
    for path in tries:
        assert python(box, f"print(open({path!r}).read())").status == "exit_code", path
        assert python(box, f"import os; os.symlink({path!r}, 'link'); print(open('link').read())").status == "exit_code", path
        python(box, "import os; os.unlink('link')")
    for folder in ("/run", "/var", "/home", "/sys", "/mnt", "/opt", str(tmp_path), str(home / ".ssh")):
        assert python(box, f"import os; os.listdir({folder!r})").status == "exit_code", folder


def test_nothing_but_the_two_folders_can_be_written_to(box: Sandbox) -> None:
    source = """
import os
for path in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc/sys/vm", os.path.dirname(os.__file__)):
    try:
        open(path + "/myxo-was-here", "w")
    except OSError as error:
        assert error.errno in (13, 2, 30, 1), (path, error)
    else:
        raise AssertionError(path)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/supervisor.pyc", "/etc/passwd", "/proc/self/oom_score_adj"):
    try:
        open(path, "r+")
    except OSError as error:
        assert error.errno in (13, 30), (path, error)
    else:
        raise AssertionError(path)
for path in ("/sandbox/a", "/tmp/a", "/dev/shm/b"):
    open(path, "w").write("x")
    os.unlink(path)
"""
    assert python(box, source).words() == "ended with exit code 0"


def test_the_work_folder_is_limited(box: Sandbox) -> None:
    source = "import os\nfor number in range(40): open(f'part{number}', 'wb').write(bytes(1 << 20))"
    assert b"No space left on device" in python(box, source).stderr
    assert shell(box, "rm -f part*").ok


@pytest.mark.extra
def test_what_lies_in_the_work_folder_counts_as_memory(box: Sandbox) -> None:
    filled = python(box, "open('part', 'wb').write(bytes(15 << 20))\nheld = b'x' * (118 << 20)\nimport time; time.sleep(20)")
    assert filled.status == "memory"
    assert shell(box, "rm part").ok


def test_entries_of_folders_are_bounded_however_small_their_files_are(box: Sandbox) -> None:
    """Each costs the kernel memory that no process owns: they count as memory, and what an earlier program left does, too."""
    with contextlib.closing(Sandbox(box.settings).wait_ready()) as own:
        source = "import os\nfor number in range(1 << 20): os.mkdir(f'{number}-' + os.urandom(3).hex())"
        assert "memory" in [python(own, source).status for _ in range(4)]
        counted = python(own, "import os; found = os.statvfs('.'); print(found.f_files - found.f_ffree)")
        assert counted.status == "memory" or int(counted.stdout) * ENTRY_BYTES <= 2 * LIMITS.memory_bytes


def test_there_are_no_privileges_to_be_had(box: Sandbox) -> None:
    found = shell(
        box,
        "grep -E '^(Cap(Prm|Eff|Amb)|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t\\n'; unshare -Ur true; mount -t tmpfs none /tmp",
    )
    assert found.stdout == b"CapPrm:0000000000000000CapEff:0000000000000000CapAmb:0000000000000000NoNewPrivs:1Seccomp:2"
    assert found.stderr.count(b"not permitted") + found.stderr.count(b"ermission denied") + found.stderr.count(b"must be superuser") >= 2


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of the system calls")
def test_memory_that_no_limit_counts_is_refused(box: Sandbox) -> None:
    calls = "import ctypes; libc = ctypes.CDLL(None); print([libc.syscall(n, 0, 1 << 30, 0x3B6) for n in (29, 64, 319, 425, 323, 272)])"
    assert python(box, calls).stdout == b"[-1, -1, -1, -1, -1, -1]\n"


def test_nothing_of_the_service_is_inside(box: Sandbox) -> None:
    """Neither its environment nor its descriptors: the sandbox was started by this process, which has both."""
    assert "PYTEST_CURRENT_TEST" in os.environ
    mentions = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | grep -ac 'PY[T]EST\\|py[t]est'"
    found = shell(box, f"env | cut -d= -f1 | sort | tr '\\n' ' '; echo; ls /proc/self/fd | wc -l; {mentions}")
    variables, descriptors, count = found.stdout.decode().splitlines()
    threads = "MKL_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS"
    expected = f"HOME LANG {threads} PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONUTF8 TMPDIR "
    assert (variables, descriptors, count) == (expected, "4", "0")


async def test_a_sandbox_ends_with_the_process_that_holds_it() -> None:
    """Even while a program runs, and however the owner ends."""
    owner = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from shared.sandbox.program import *
from shared.sandbox.sandbox import Sandbox
box = Sandbox(SandboxSettings()).wait_ready()
print("up", flush=True)
box.run(Program(command=("sleep", "4217")), SandboxLimits(wall_s=600))
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        await until(lambda: _runs("4217"), "the program to start")
        process.kill()
        await until(lambda: not _runs("4217"), "the program to end")


def _runs(argument: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-1:] == [argument.encode()]:
                return True
        except OSError:
            continue
    return False


async def test_a_lease_that_nobody_renews_ends() -> None:
    with Sandbox(SandboxSettings(limits=LIMITS, lease_s=0.2)) as leased:
        leased.wait_ready()
        begin = time.monotonic()
        await until(lambda: not leased.alive, "the lease to run out")
        assert time.monotonic() - begin >= 0.1
