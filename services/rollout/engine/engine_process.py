"""Starts one engine's processes, proves them ready, and stops them with none left behind.

The engine runs under the watchdog of `shared.runtime.child_process`, since it starts processes of its own. ``/health`` answers 200 before
an engine can generate, so only a real generation proves that it is ready.
"""

import asyncio
import http.client
import json
import os
import socket
import tempfile
from pathlib import Path

from services.rollout.engine.launch_command import EngineCommand
from shared.runtime.child_process import ChildProcess
from shared.runtime.errors import MyxoError

RECEIVER_VARIABLE = "MYXO_RECEIVER"
"""The variable that tells an engine's schedulers where to listen."""

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
        receiver: the private directory in which its ranks listen for commands about weights; it is removed with the engine.

    Raises MyxoError where another process listens on its port, since that would answer in its place.
    """

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        self.url, self._port = command.url, command.port
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise MyxoError(f"the engine cannot be started at {self.url}: somebody listens there; give it another port")
        self.receiver = Path(tempfile.mkdtemp(prefix="myxo-engine-"))
        metrics = self.receiver / "metrics"  # SGLang's own temporary directory would stay behind when the engine is killed
        metrics.mkdir()
        environment = os.environ | command.env | {RECEIVER_VARIABLE: str(self.receiver), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        super().__init__(f"engine at {self.url}", command.argv, log_file, environment, watchdog=True, scratch=self.receiver)

    async def ready(self, deadline: float) -> float:
        """Returns the seconds until the engine has answered a real generation. Raises as `ChildProcess.wait_ready`."""
        return await asyncio.to_thread(self.wait_ready, self._answers, "a first generation", deadline)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PROBE_SECONDS)
        try:
            connection.request("POST", "/generate", _ONE_TOKEN, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet, or too busy: wait_ready has the deadline
            return False
        finally:
            connection.close()
