"""A sandbox for tests, which leave themselves out where this machine's kernel allows none."""

import contextlib

import pytest

from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.sandbox.sandbox_command import bwrap_program


def ready_sandbox(settings: SandboxSettings) -> Sandbox:
    """Returns a sandbox that waits for its program. A machine without bwrap fails the test: an installation mends that."""
    try:
        with contextlib.ExitStack() as closed:
            sandbox = closed.enter_context(Sandbox(settings)).wait_ready()
            closed.pop_all()
            return sandbox
    except SandboxUnavailable as error:
        assert bwrap_program() is not None, error
        pytest.skip(str(error))
