"""Real environments: the examples as processes of their own, and a server that breaks the protocol in whichever way its URL says."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from shared.process.child_process import with_parent

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "environments"

DESCRIPTION = {"protocol": 1, "name": "odd", "verbs": ["score"], "timeout": 20}


class EnvironmentProcess:
    """An environment as a process; use as a context manager, and it is killed at the end of the body."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log, self._command, self._environment = log, command, environment
        self.start()

    def start(self) -> None:
        """Starts it (again)."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                with_parent(self._command), env={**os.environ, **self._environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> "EnvironmentProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def python_example(port: int, log: Path) -> EnvironmentProcess:
    folder = str(EXAMPLES / "python-fastapi")
    return EnvironmentProcess([sys.executable, "-m", "uvicorn", "--app-dir", folder, "environment:app", "--port", str(port)], log, {})


def node_example(port: int, log: Path) -> EnvironmentProcess:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the Node example was not run")
    return EnvironmentProcess([node, str(EXAMPLES / "node" / "environment.mjs")], log, {"PORT": str(port), "HOST": "127.0.0.1"})


def page_example(nats_url: str, run: str, folder: Path) -> EnvironmentProcess:
    """The responder of docs/environments.md, as it stands there. Its name is grader."""
    page = (ROOT / "docs" / "environments.md").read_text()
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = folder / "grader.py"
    script.write_text(source)
    return EnvironmentProcess([sys.executable, str(script)], folder / "grader.log", {"NATS_URL": nats_url, "MYXO_RUN": run})


def odd_app() -> FastAPI:
    """``/{fault}/describe`` and ``/{fault}/score``: each fault is one way not to keep the protocol; ``/right`` keeps it."""
    app = FastAPI()
    calls: dict[str, int] = {}

    @app.get("/{fault}/describe")
    async def describe(fault: str) -> Response:
        match fault:
            case "other-version":
                return JSONResponse({**DESCRIPTION, "protocol": 2})
            case "redirected-describe":
                return RedirectResponse("/right/describe")
            case "late-describe":
                await asyncio.sleep(3600)
            case "late":
                return JSONResponse({**DESCRIPTION, "timeout": 1})
        return JSONResponse(DESCRIPTION)

    @app.post("/{fault}/score")
    async def score(fault: str, request: Request) -> Response:
        group = await request.json()
        calls[fault] = calls.get(fault, 0) + 1
        rewards: list[Any] = [{"reward": 1.0, "length": len(sample["response"])} for sample in group["samples"]]
        match fault:
            case "wrong-count":
                rewards.append(1.0)
            case "nan":
                rewards[-1] = float("nan")
            case "dice":
                rewards[0] = calls[fault]
            case "late":
                await asyncio.sleep(3600)
            case "error-500":
                return JSONResponse({"error": "the judge\nis ill"}, 500)
            case "error-in-200":
                return JSONResponse({"error": "no such task"})
            case "bare-500":
                return Response("Internal Server Error", 500)
            case "redirect":
                return RedirectResponse("/right/score", 307)
            case "non-json":
                return Response("<html>sorry</html>", media_type="text/html")
            case "too-large":
                return JSONResponse({"rewards": rewards, "log": "x" * (5 << 20)})
            case "label-needed" if group["label"] is None:
                return Response("Internal Server Error", 500)  # what a server says of an exception
            case "label-needed-in-words" if group["label"] is None:
                return JSONResponse({"error": "AttributeError: 'NoneType' object has no attribute 'strip'"})
            case "strict" if {key for key in group if key.startswith("x_")}:
                return JSONResponse({"error": "unknown field"}, 422)
        return Response(json.dumps({"rewards": rewards}), media_type="application/json")

    return app


@asynccontextmanager
async def mute_server(port: int = 0, posted: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Takes connections, reads, and never says a word; yields its URL. At the end everybody is cut off.

    Args:
        posted: set when a score is asked for.
    """
    callers: set[asyncio.StreamWriter] = set()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.add(writer)
        try:
            while words := await reader.read(1 << 16):
                if posted is not None and words.startswith(b"POST"):
                    posted.set()
        finally:
            callers.discard(writer)
            writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(callers):
            writer.transport.abort()
