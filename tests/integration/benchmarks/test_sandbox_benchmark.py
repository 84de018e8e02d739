"""The benchmark of sandboxes measures what it says, in real ones."""

import pytest

from benchmarks.sandbox import GROUP, checks_per_second, starts, table
from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.sandbox.sandbox_command import bwrap_program


async def test_the_figures_are_there() -> None:
    try:
        with Sandbox(SandboxSettings()) as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        assert bwrap_program() is not None, error
        pytest.skip(str(error))
    found = starts(2)
    assert found["start"]["p50_ms"] > found["program"]["least_ms"] > 0 < found["start_from_pool"]["p50_ms"]
    checks = await checks_per_second(GROUP, 1)
    assert checks > 0
    lines = table(found, 61.7, {"list": 15.9, "threads": 3.0}, 1).splitlines()
    assert lines[-3].startswith("62 checks of three tests a second by 1 workers (at least 50); ")
    assert lines[-1] == "MiB beyond a limit of 128: list 16, threads 3"
