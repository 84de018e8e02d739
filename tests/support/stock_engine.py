"""A stock SGLang server, as somebody else would run it: on a port, without any of Myxo's flags."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from services.rollout.engine.engine_process import engine_command
from shared.config.devices import VISIBLE
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port

START_SECONDS = 280.0


class StockEngine:
    """It listens at ``url``, also after `start` has followed a `kill`. model: its checkpoint. flags: further ones of SGLang's. gpu: on
    which it runs, as CUDA_VISIBLE_DEVICES names it; None: on a CPU."""

    def __init__(self, model: Path, log: Path, *flags: str, gpu: str | None = None) -> None:
        self.model, self._log, self._flags, self._gpu, self.port = model, log, flags, gpu, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: ChildProcess | None = None

    def start(self) -> None:
        words, environment = self._on_cpu() if self._gpu is None else self._on_gpu(self._gpu)
        self._process = ChildProcess("stock engine", [*words, *self._flags], self._log, os.environ | environment, watchdog=True)

    def _on_gpu(self, gpu: str) -> tuple[list[str], dict[str, str]]:
        place = ("--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port), "--enable-metrics")
        return [sys.executable, "-m", "sglang.launch_server", *place], {VISIBLE: gpu}

    def _on_cpu(self) -> tuple[list[str], dict[str, str]]:
        command = engine_command(self.model, self.port, device="cpu", flags={"disable-radix-cache": False})
        words = list(command.argv)
        for own in ("--custom-weight-loader", "--weight-version"):
            at = words.index(own)
            del words[at : at + 2]
        return words, command.env

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
