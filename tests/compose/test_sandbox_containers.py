"""Sandboxes that are containers: what is tried in those of bubblewrap is tried in them, too, and what differs is shown here."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.rewards import verifiers
from shared.rewards.reference import Reference
from shared.runtime.errors import ConfigError
from shared.sandbox.program import Program, SandboxLimits, SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxGone, SandboxUnavailable
from tests.compose.conftest import ROOT, run_docker
from tests.integration.sandbox.conftest import LIMITS
from tests.integration.sandbox.test_attacks import (  # noqa: F401 (collected here, over this file's `box`)
    nothing_is_left,
    python,
    shell,
    test_1_gb_of_output_is_cut_off,
    test_daemons_end_with_their_program,
    test_limits_hold_a_program_back,
    test_memory_that_no_limit_counts_is_refused,
    test_neither_the_network_nor_the_loopback_of_the_host_is_there,
    test_other_kinds_of_sockets_are_refused,
    test_signals_do_not_reach_the_supervisor,
    test_the_supervisor_can_be_neither_read_nor_traced_nor_written_to,
    test_the_work_folder_is_limited,
    test_there_are_no_privileges_to_be_had,
    test_what_lies_in_the_work_folder_counts_as_memory,
    test_whoever_waits_or_stops_is_ended_by_the_clock,
)
from tests.support.containers import needs_engine
from tests.support.images import base_image
from tests.support.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def settings() -> SandboxSettings:
    needs_engine()
    return SandboxSettings("docker", base_image("PYTHON_IMAGE"), LIMITS)


@pytest.fixture(scope="module")
def box(settings: SandboxSettings) -> Iterator[Sandbox]:
    with Sandbox(settings) as sandbox:
        yield sandbox.wait_ready()


def containers() -> list[str]:
    return run_docker("ps", "--all", "--quiet", "--filter", "label=myxo.sandbox").stdout.split()


def test_files_of_the_host_cannot_be_reached(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    for path in (
        str(secret),
        f"/proc/1/root{secret}",
        f"../../..{secret}",
        str(ROOT / "SECURITY.md"),
        "/var/run/docker.sock",
        "/etc/shadow",
    ):
        assert python(box, f"print(open({path!r}).read())").status == "exit_code", path


def test_nothing_but_the_folders_in_memory_can_be_written_to(box: Sandbox) -> None:
    found = python(
        box,
        """
import os
for folder, _, _ in os.walk("/"):
    if folder.startswith("/proc/"):
        continue
    try:
        open(folder + "/myxo-was-here", "w").close()
    except OSError:
        continue
    os.unlink(folder + "/myxo-was-here")
    print(folder)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/sysrq-trigger", "/etc/passwd"):
    try:
        open(path, "r+")
        print(path)
    except OSError:
        pass
""",
    )
    assert (found.status, set(found.stdout.decode().split())) == ("ok", {"/sandbox", "/tmp", "/dev/shm"}), found


def test_nothing_of_the_service_is_inside(box: Sandbox) -> None:
    threads = "MKL_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS"
    names = f"HOME LANG {threads} PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONUTF8 TMPDIR"
    found = shell(box, "env | cut -d= -f1 | sort | tr '\\n' ' '; ls /proc/self/fd | wc -l; id -u")
    given, user = found.stdout.decode().split("\n")[:2]
    assert given == f"{names} 4" and 40_000 <= int(user) < 60_000


SHARED = """
import mmap
held = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
for at in range(0, 3 << 30, 4096): held[at] = 1
"""


def test_a_container_over_its_limit_is_told_as_out_of_memory(settings: SandboxSettings) -> None:
    """What the supervisor's looks do not stop in time, the container's own limit does; the supervisor survives it and says so."""
    with Sandbox(settings) as small:
        assert small.run(Program(sources=(SHARED,)), SandboxLimits(memory_bytes=8 << 30, cpu_s=60, wall_s=60)).status == "memory"
        assert python(small, "print(1)").stdout == b"1\n"


def test_tests_of_generated_code_are_run_in_it(settings: SandboxSettings) -> None:
    verifiers.open_sandboxes(settings)
    try:
        label = Reference('["assert add(1, 2) == 3", "assert add(0, 0) == 0"]')
        for body, passed in (("a + b", 1.0), ("a * b", 0.5)):
            code = f"```python\ndef add(a, b):\n    return {body}\n```"
            assert verifiers.unit_tests(code, label) == {"score": float(passed == 1.0), "passed": passed}
        script = Reference("def test_add(): assert add(1, 2) > 2")
        assert verifiers.unit_tests("```python\ndef add(a, b):\n    return a + b\n```", script) == {"score": 1.0, "passed": 1.0}
    finally:
        verifiers.close_sandboxes()


def test_an_image_that_is_not_there_is_named(settings: SandboxSettings) -> None:
    with pytest.raises(SandboxUnavailable, match=r"docker: .*[Nn]o such image"):
        Sandbox(SandboxSettings("docker", "myxo-test-no-such-image:1")).wait_ready()
    with pytest.raises(ConfigError, match=r"sandbox\.sandbox = 'docker'"):
        verifiers.open_sandboxes(SandboxSettings("docker", "myxo-test-no-such-image:1"))


OWNER = """
import sys
from shared.sandbox.program import *
from shared.sandbox.sandbox import Sandbox
box = Sandbox(SandboxSettings("docker", sys.argv[1])).wait_ready()
print("up", flush=True)
box.run(Program(command=("sleep", "600")), SandboxLimits(wall_s=600))
"""


async def test_none_is_left_when_its_owner_is_killed_or_its_lease_runs_out(settings: SandboxSettings) -> None:
    others = set(containers())
    command = [sys.executable, "-c", OWNER, settings.image]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        assert len(set(containers()) - others) == 1
        owner.kill()
    await until(lambda: not set(containers()) - others, "the end of the container")
    Sandbox(settings).close()  # before it has started
    with Sandbox(settings) as busy:
        busy.wait_ready()
        busy._process.kill()  # the runtime's client
        with pytest.raises(SandboxGone):
            busy.run(Program(command=("sleep", "600")))
    await until(lambda: not set(containers()) - others, "the end of the containers")
    with Sandbox(SandboxSettings("docker", settings.image, lease_s=0.2)) as leased:
        leased.wait_ready()
        await until(lambda: not leased.alive, "the lease to run out")
        with pytest.raises(SandboxGone):
            leased.run(Program(sources=("1",)))
    await until(lambda: not set(containers()) - others, "the end of the container")
