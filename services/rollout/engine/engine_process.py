"""Starts one engine's processes, proves them ready, and stops them with none left behind.

The engine runs under the watchdog of `shared.runtime.child_process`, since it starts processes of its own. ``/health`` answers 200 before
an engine can generate, so only a real generation proves that it is ready.
"""

import asyncio
import http.client
import json
import os
import secrets
import socket
import tempfile
from pathlib import Path

from services.rollout.engine.curve_sockets import SECRET_VARIABLE
from services.rollout.engine.launch_command import EngineCommand
from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE, SOCKET
from shared.runtime.child_process import ChildProcess

PROBE_SECONDS = 10.0
"""The deadline for one probe of a starting engine: the first request on a busy small machine takes seconds."""

_ONE_TOKEN = json.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}})


class EngineProcess(ChildProcess):
    """An engine that this service has launched.

    SGLang checks for SIGTERM every 5 s and finishes running requests first: abort them before `stop`.

    Args:
        command: from ``engine_command``.
        log_file: the engine's output is appended to it; its directory is made.

    Attributes:
        receiver: the private directory in which its server and its ranks listen; it is removed with the engine.
    """

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        self.receiver = Path(tempfile.mkdtemp(prefix="myxo-engine-"))
        metrics = self.receiver / "metrics"  # SGLang's own temporary directory would stay behind when the engine is killed
        metrics.mkdir()
        private = {DIRECTORY_VARIABLE: str(self.receiver), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        environment = os.environ | {SECRET_VARIABLE: secrets.token_hex(16)} | command.env | private
        super().__init__(f"engine at {self.receiver}", command.argv, log_file, environment, watchdog=True, scratch=self.receiver)

    async def ready(self, deadline: float) -> float:
        """Returns the seconds until the engine has answered a real generation. Raises as `ChildProcess.wait_ready`."""
        return await asyncio.to_thread(self.wait_ready, self._answers, "a first generation", deadline)

    def _answers(self) -> bool:
        connection = UnixConnection(self.receiver / SOCKET, PROBE_SECONDS)
        try:
            connection.request("POST", "/generate", _ONE_TOKEN, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet, or too busy: wait_ready has the deadline
            return False
        finally:
            connection.close()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, for code that blocks. ``timeout``: seconds for each step."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
