"""A sandbox as its users see it: programs, files, limits, several at once, none at all, and machines that allow none."""

import ast
import contextlib
import errno
import io
import json
import os
import pwd
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from shared.rewards.unit_test_cases import ScriptCase
from shared.sandbox import program_supervisor, sandbox_command
from shared.sandbox import sandbox as sandbox_remedy
from shared.sandbox.program import Program, SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxGone, SandboxPool, SandboxUnavailable, may_separate
from shared.sandbox.sandbox_command import syscall_filter
from tests.integration.sandbox.conftest import LIMITS
from tests.support.tables import rare

ROOT = Path(__file__).parents[3]
RETURN = 0x06
SETTINGS = SandboxSettings(limits=LIMITS)


def test_a_command_and_its_result(box: Sandbox) -> None:
    found = box.run(Program(command=("sh", "-c", "cat; echo problem >&2; exit 7"), stdin=b"given"))
    assert (found.status, found.exit_code, found.signal) == ("exit_code", 7, None)
    assert (found.stdout, found.stderr, found.truncated, found.words()) == (b"given", b"problem\n", False, "ended with exit code 7")
    missing = box.run(Program(command=("no-such-program",)))
    assert (missing.exit_code, missing.stderr) == (127, b"no-such-program: No such file or directory\n")


@pytest.mark.parametrize(
    ("sources", "code", "stdout", "stderr"),
    [
        (("print(input())",), 0, b"given\n", b""),
        (("x = 3", "print(x)"), 0, b"3\n", b""),
        rare(("import sys; sys.exit(300)",), 44, b"", b""),
        rare(("import sys; sys.exit('reason')",), 1, b"", b"reason\n"),
        (("def f():\n    1 / 0\nf()",), 1, b"", b'File "main.py", line 2, in f\nZeroDivisionError: division by zero\n'),
        (("def f(:",), 1, b"", b"SyntaxError: invalid syntax\n"),
        rare(("import atexit; atexit.register(print, 'late')",), 0, b"late\n", b""),
        rare(("import threading; threading.Timer(0.05, print, ('thread',)).start()",), 0, b"thread\n", b""),
        (("import sys; print(__name__, sys.argv, sys.path[0], __file__)",), 0, b"__main__ ['main.py'] /sandbox /sandbox/main.py\n", b""),
        rare(("print(hash('a') == hash('a'), len({'a', 'b'}))",), 0, b"True 2\n", b""),
        (("from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as p: print(sum(p.map(abs, [-1, -2])))",), 0, b"3\n", b""),
    ],
)
def test_python_behaves_as_it_does_elsewhere(box: Sandbox, sources: tuple[str, ...], code: int, stdout: bytes, stderr: bytes) -> None:
    found = box.run(Program(sources=sources, stdin=b"given\n"))
    assert (found.exit_code, found.stdout) == (code, stdout), found.stderr
    assert found.stderr.endswith(stderr) and b"supervisor" not in found.stderr


def test_sets_have_the_same_order_in_each_sandbox(box: Sandbox) -> None:
    program = Program(sources=("print(list({chr(number) for number in range(100)}))",))
    with Sandbox(SETTINGS) as other:
        assert box.run(program).stdout == other.run(program).stdout


def test_files_stay_and_processes_go(box: Sandbox) -> None:
    assert box.write_file("folder/a.py", b"print('from a file')").ok
    assert box.run(Program(command=("python3", "folder/a.py"))).stdout == b"from a file\n"
    assert box.read_file("folder/a.py").stdout == b"print('from a file')"
    assert box.read_file("folder").stderr == b"folder: Is a directory\n"
    assert box.write_file("/usr/a", b"").stderr == b"/usr/a: Read-only file system\n"
    assert box.write_file("big", bytes(LIMITS.disk_bytes + 1)).status in ("exit_code", "signal")
    assert box.run(Program(command=("mkfifo", "pipe"))).ok
    held = box.run(Program(sources=("open('pipe').read()",)), replace(LIMITS, wall_s=0.2))
    assert held.status == "wall_time"  # nor does reading a pipe hold up the supervisor
    assert box.run(Program(command=("rm", "-rf", "pipe", "big", "folder"))).ok


def test_a_large_input_is_read_and_may_be_left_unread(box: Sandbox) -> None:
    given = os.urandom(3 << 20)
    assert box.run(Program(sources=("import sys; print(len(sys.stdin.buffer.read()))",), stdin=given)).stdout == b"3145728\n"
    assert box.run(Program(sources=("pass",), stdin=given)).ok


def test_two_sandboxes_share_nothing(box: Sandbox) -> None:
    box.write_file("mine", b"x")
    with Sandbox(SETTINGS) as other:
        assert other.read_file("mine").stderr == b"mine: No such file or directory\n"
        with ThreadPoolExecutor(2) as threads:
            results = threads.map(lambda each: each.run(Program(sources=("import os; print(os.listdir('.'))",))).stdout, [box, other])
        assert list(results) == [b"['mine']\n", b"[]\n"]
    assert box.run(Program(command=("rm", "mine"))).ok


def test_threads_may_share_a_sandbox(box: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: box.run(Program(sources=(f"print({number})",))).stdout, range(12)))
    assert results == [f"{number}\n".encode() for number in range(12)]


def test_a_closed_sandbox_says_so() -> None:
    sandbox = Sandbox(SETTINGS)
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxGone, match="closed"):
        sandbox.run(Program(command=("true",)))


def test_one_that_is_ended_in_the_middle_of_a_call_keeps_its_numbers_until_the_call_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    close, looked_at = sandbox_remedy._close_streams, threading.Event()
    monkeypatch.setattr(sandbox_remedy, "_close_streams", lambda process: looked_at.wait(60) and close(process))
    sandbox = Sandbox(SETTINGS).wait_ready()
    with ThreadPoolExecutor(1) as threads:
        called = threads.submit(sandbox.run, Program(command=("sleep", "60")))
        time.sleep(0.1)
        sandbox.kill()
        for descriptor in (sandbox._requests, sandbox._answers):
            assert os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
        looked_at.set()  # the call may close them now, and another thread have their numbers
        with pytest.raises(SandboxGone):
            called.result(30)
    sandbox.close()
    assert all(stream and stream.closed for stream in (sandbox._process.stdin, sandbox._process.stdout))


def test_one_is_ended_also_where_descriptors_have_run_out() -> None:
    pool, limits, held = SandboxPool(SETTINGS, 0), resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    try:
        with pool.sandbox() as sandbox:
            sandbox.wait_ready()
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)
    assert not sandbox.alive and sandbox._process.returncode is not None


def test_a_pool_gives_each_caller_an_unused_sandbox() -> None:
    pool = SandboxPool(SETTINGS, 1)
    pool.fill()
    seen = []
    for _ in range(3):
        with pool.sandbox() as sandbox:
            seen.append(sandbox)
            assert sandbox.run(Program(sources=("import os; print(os.listdir('.')); open('left', 'w')",))).stdout == b"[]\n"
        assert not sandbox.alive
    pool.close()
    assert len(set(seen)) == 3


def test_packages_and_paths_are_there_where_they_are_asked_for(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shown")
    tmp_path.chmod(0o755)  # what is to be read inside is to be readable for all
    assert b"ModuleNotFoundError" in box.run(Program(sources=("import numpy",))).stderr
    limits = replace(LIMITS, cpu_s=20.0)
    with Sandbox(SandboxSettings(limits=limits, packages=True, paths=(tmp_path,))) as wide:
        assert wide.run(Program(sources=("import numpy; print(numpy.arange(3).sum())",))).stdout == b"3\n"
        assert wide.run(Program(sources=(f"print(open('{tmp_path}/data').read())",))).stdout == b"shown\n"
        assert b"Read-only" in wide.run(Program(sources=(f"open('{tmp_path}/data', 'w')",))).stderr


def test_without_isolation_limits_and_ends_hold_all_the_same() -> None:
    """What bubblewrap would isolate is told by the docs; this is for code that is trusted."""
    with Sandbox(SandboxSettings(kind="none", limits=LIMITS)) as bare:
        folder = bare.run(Program(command=("pwd",))).stdout.decode().strip()
        assert bare.write_file("a", b"x").ok and Path(folder, "a").read_text() == "x"
        assert bare.run(Program(sources=("while True: pass",))).status == "cpu_time"
        assert bare.run(Program(sources=("held = []\nwhile True: held.append(b'x' * (1 << 20))",))).status == "memory"
        assert bare.run(Program(command=("sh", "-c", "setsid sleep 4218 & exit 3"))).exit_code == 3
        assert subprocess.run(["pgrep", "-f", "sleep 4218"], capture_output=True).stdout == b""
    assert not Path(folder).exists()


RUNTIME = f"""#!{sys.executable}
import marshal, os, sys
sys.path.insert(0, {str(ROOT)!r})
from shared.sandbox.program_supervisor import HEAD, READY
os.write(1, READY)
said = repr(marshal.loads(os.read(0, int.from_bytes(os.read(0, 4), "big")))["sources"]).encode()
os.write(1, HEAD.pack(0, 0, -1, 0, 0, 0, False, len(said), 0, 0) + said)
"""


def test_a_container_gets_text_and_no_bytecode_which_is_another_in_another_python(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docker").write_text(RUNTIME)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = ScriptCase("assert f(1)").program("def f(x): return x")
    with Sandbox(SandboxSettings("docker", "an-image")) as contained:
        text = ast.literal_eval(contained.run(program).stdout.decode())
    assert box.run(Program(sources=tuple(text), stdin=program.stdin)).report == b"passed"


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without rights, then")
def test_a_user_without_rights_can_use_it(box: Sandbox) -> None:
    python = "/usr/bin/python3"
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True).stdout
    if version != "True\n" or not ROOT.stat().st_mode & 0o001:
        pytest.skip("nobody can read this checkout, or has a Python for it")
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(sandbox_command.bwrap_program() or "/").parents[2])!r}]
from shared.sandbox.program import *
from shared.sandbox.sandbox import Sandbox
limits = SandboxLimits(processes=20)
with Sandbox(SandboxSettings(limits=limits)) as box:
    print(box.run(Program(sources=("import os; print(os.getuid())",))).stdout)
    bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
    print(box.run(Program(sources=(bomb,)), SandboxLimits(processes=20, wall_s=2)).status)
"""
    nobody = pwd.getpwnam("nobody").pw_uid
    found = subprocess.run([python, "-c", code], user=nobody, group=nobody, extra_groups=(), capture_output=True, text=True, timeout=100)
    assert found.stdout.splitlines()[0] == "b'1000\\n'", found.stderr
    assert found.stdout.splitlines()[1] in ("processes", "wall_time", "cpu_time")  # the kernel refuses the forks beyond the limit


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a check is an exception that may come anywhere."""
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: object, **more: object) -> None:
            super().__init__(*given, **more)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr("shared.sandbox.sandbox.subprocess.Popen", Watched)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(Sandbox, "_open_pid", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with Sandbox(SETTINGS) as sandbox:  # where programs have the supervisor's user, the first wait is the one that is interrupted
            sandbox.wait_ready()
    children = Path(f"/proc/{started[0].pid}/task/{started[0].pid}/children")
    assert started[0].wait(60) is not None and not children.exists()


@pytest.mark.parametrize("call", ["subprocess.Popen", "os.memfd_create"])
def test_a_start_that_fails_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as failing, pytest.raises(SandboxUnavailable, match="bwrap: no more memory"):
        failing.setattr(f"shared.sandbox.sandbox.{call}", Mock(side_effect=OSError(errno.ENOMEM, "no more memory")))
        Sandbox(SETTINGS)
    assert os.listdir("/proc/self/fd") == before


def test_huge_pages_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"status": b"RssAnon:\t4 kB\nHugetlbPages:\t2048 kB\n", "smaps_rollup": b"Pss_Anon:  4 kB\nPss_Shmem:  0 kB\n"}
    monkeypatch.setattr(program_supervisor, "open", lambda path, *_: io.BytesIO(files[Path(path).name]), raising=False)
    monkeypatch.setattr(program_supervisor, "_stat", lambda _: [b"1"] * 20)
    assert program_supervisor.usage_of(2)[1] == program_supervisor.exact([2]) == 2052 << 10


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give programs another user")
def test_a_root_that_may_not_map_users_gives_programs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose root is none outside. What is then not refused by the kernel, the supervisor sees."""
    monkeypatch.setattr("shared.sandbox.sandbox.OUTSIDE", 1 << 40)
    monkeypatch.setattr("shared.sandbox.sandbox.Sandbox.separate", True)
    with Sandbox(SETTINGS) as sandbox:
        assert b"2000000000" not in sandbox.run(Program(command=("cat", "/proc/self/uid_map"))).stdout
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/1/mem", "/usr/bin/env"):
            assert b"Read-only" in sandbox.run(Program(sources=(f"open({path!r}, 'r+b')",))).stderr
    assert not may_separate()


def test_a_machine_that_allows_none_is_told_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr("shared.sandbox.sandbox.bwrap_program", lambda: str(refusing))
    with Sandbox(SETTINGS) as sandbox, pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        sandbox.run(Program(command=("true",)))
    assert not sandbox.alive
    monkeypatch.setattr(sandbox_remedy, "bwrap_program", lambda: None)
    monkeypatch.setattr("shared.sandbox.sandbox.bwrap_program", lambda: None)
    with pytest.raises(SandboxUnavailable, match=r"pip install 'myxo\[reward\]'"):
        Sandbox(SETTINGS)


@pytest.mark.parametrize(
    ("settings", "words", "expected"),
    [
        (
            {"kernel.apparmor_restrict_unprivileged_userns": "1"},
            "bwrap: setting up uid map: Permission denied",
            "profile myxo-bwrap /b flags",
        ),
        ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, "bwrap: x", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        ({"kernel.unprivileged_userns_clone": "0"}, "bwrap: x", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"user.max_user_namespaces": "0"}, "bwrap: x", "sysctl -w user.max_user_namespaces"),
        ({}, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ({}, "bwrap: Can't find source path /nowhere", "Can't find source path /nowhere"),
    ],
)
def test_the_remedy_is_the_one_for_this_kernel(settings: dict[str, str], words: str, expected: str) -> None:
    said = sandbox_remedy.remedy(words, settings.get, "/b")
    assert expected in said and said.startswith(words)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_fits_its_machine(machine: str) -> None:
    """Every jump lands inside the filter, and the last line allows."""
    lines = syscall_filter(machine)
    assert len(lines) % 8 == 0 and len(lines) // 8 < 4096
    for index in range(len(lines) // 8):
        kind, yes, no, _ = bytes_of(lines, index)
        assert kind == RETURN or index + 1 + max(yes, no) < len(lines) // 8
    assert bytes_of(lines, len(lines) // 8 - 1)[3] == 0x7FFF0000


def bytes_of(lines: bytes, index: int) -> tuple[int, int, int, int]:
    line = lines[8 * index : 8 * index + 8]
    return int.from_bytes(line[:2], "little"), line[2], line[3], int.from_bytes(line[4:], "little")


@pytest.mark.skipif(sys.platform != "linux" or not Path("/usr/include/asm-generic/unistd.h").is_file(), reason="needs the kernel's headers")
def test_the_numbers_of_system_calls_are_the_kernels() -> None:
    from shared.sandbox.sandbox_command import REFUSED

    generic = dict(
        (name, int(number))
        for line in Path("/usr/include/asm-generic/unistd.h").read_text().splitlines()
        if line.startswith("#define __NR") and len(parts := line.split()) == 3 and parts[2].isdigit()
        for name, number in [(parts[1].removeprefix("#define ").removeprefix("__NR3264_").removeprefix("__NR_"), parts[2])]
    )
    assert json.dumps({name: number for name, (_, number) in REFUSED.items() if number != generic.get(name)}) == "{}"
