"""One sandbox for the tests of a file. They are left out where this machine allows none, with the reason."""

from collections.abc import Iterator

import pytest

from shared.sandbox.program import SandboxLimits, SandboxSettings
from shared.sandbox.sandbox import Sandbox
from tests.support.sandboxes import ready_sandbox

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=0.4, memory_bytes=128 << 20, processes=24, output_bytes=64 << 10, disk_bytes=16 << 20)
"""Little of everything but of the clock's time, of which a busy machine takes more than the program."""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with ready_sandbox(SandboxSettings(limits=LIMITS)) as sandbox:
        yield sandbox
