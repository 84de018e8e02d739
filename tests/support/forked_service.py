"""A service process forked from one that has its modules loaded: it starts in a tenth of the time, and dies like any other."""

import multiprocessing
import os
import runpy
import subprocess
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from shared.process.child_process import die_with_parent
from tests.support.service_process import ServiceProcess

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["services.buffer.buffer_service"])


class _Forked:
    """The process, with the methods of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._process.start()
        self.pid, self.kill, self.terminate = process.pid, process.kill, process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


class ForkedService(ServiceProcess):
    """As `ServiceProcess`, for the buffer."""

    def __init__(self, name: str, log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.touch()
        arguments = (name, log, {**os.environ, **environment})
        self.process = _Forked(_CONTEXT.Process(target=_serve, args=arguments, daemon=True))  # type: ignore[assignment]


def _serve(name: str, log: Path, environment: Mapping[str, str]) -> None:
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    runpy.run_module(f"services.{name}", run_name="__main__", alter_sys=True)
