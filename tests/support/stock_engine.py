"""A stock SGLang server on a CPU, as somebody else would run it: on a port, without any of Myxo's flags."""

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

from services.rollout.engine.engine_process import engine_command
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port

START_SECONDS = 280.0


class StockEngine:
    """It listens at ``url``, also after `start` has followed a `kill`. model: its checkpoint. flags: further ones of SGLang's."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.model, self._log, self._flags, self.port = model, log, flags, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: ChildProcess | None = None

    def start(self) -> None:
        command = engine_command(self.model, self.port, device="cpu", flags={"disable-radix-cache": False})
        words = list(command.argv)
        for own in ("--custom-weight-loader", "--weight-version"):
            at = words.index(own)
            del words[at : at + 2]
        self._process = ChildProcess("stock engine", [*words, *self._flags], self._log, os.environ | command.env, watchdog=True)

    def wait_ready(self) -> None:
        assert self._process is not None
        self._process.wait_ready(self._answers, "an answer", START_SECONDS)

    def kill(self) -> None:
        """As by SIGKILL, all of its processes."""
        if self._process is not None:
            self._process.stop(0)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health_generate", timeout=10):
                return True
        except OSError:
            time.sleep(0.2)
            return False

    def __enter__(self) -> "StockEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
