"""An engine in three processes, as SGLang's is: this one serves HTTP, a scheduler has the weights, a detokenizer passes on what is drawn.

What a process asks of another that is gone is never answered, and the engine ends by itself only after SGLang's wait for core dumps: so
whoever uses it has to look after all of its processes.

    python -m tests.chaos.fast.scripted_engine --model-path MODEL …    (SGLang's flags, of which it reads this one)
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE, SOCKET
from shared.process.child_process import die_with_parent, with_parent

SCHEDULER_SOCKET, DETOKENIZER_SOCKET = "scheduler.sock", "detokenizer.sock"
"""The names of the children's sockets in the engine's private directory."""

CRASH_WAIT_S = float(os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "60"))
"""The time after a child's death for which SGLang's server stays."""

CONNECT_PAUSE_S = 0.02


class EngineServer:
    """The HTTP side. ``directory``: the engine's private one."""

    def __init__(self, directory: Path) -> None:
        sockets = {name: str(directory / name) for name in (SCHEDULER_SOCKET, DETOKENIZER_SOCKET)}
        self._paths = sockets
        self._sessions = {
            name: aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(path, limit=0), timeout=aiohttp.ClientTimeout())
            for name, path in sockets.items()
        }

    async def answer(self, request: web.Request) -> web.Response:
        """Has the scheduler answer; what it has drawn comes by way of the detokenizer."""
        body = await request.read()
        status, found = await self._asked(SCHEDULER_SOCKET, request.method, request.path, body)
        if request.path in ("/generate", "/health_generate"):
            status, found = await self._asked(DETOKENIZER_SOCKET, "POST", "/", found)
        return web.Response(status=status, body=found, content_type="application/json")

    async def _asked(self, name: str, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            async with self._sessions[name].request(method, path, data=body, headers={"Content-Type": "application/json"}) as response:
                return response.status, await response.read()
        except aiohttp.ClientError:  # a process that is gone says nothing
            await asyncio.Event().wait()
            raise AssertionError("never") from None


async def _serve(directory: Path, name: str, answer: Callable[[web.Request], Awaitable[web.Response]]) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(directory / name)).start()


async def _detokenize(directory: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    await _serve(directory, DETOKENIZER_SOCKET, answer)
    await asyncio.Event().wait()


async def _run(model: Path, directory: Path) -> None:
    module = "tests.chaos.fast.scripted_scheduler"
    children = [
        subprocess.Popen(with_parent([sys.executable, "-m", module, str(model)])),
        subprocess.Popen(with_parent([sys.executable, "-m", "tests.chaos.fast.scripted_detokenizer"])),
    ]
    while not all((directory / name).exists() for name in (SCHEDULER_SOCKET, DETOKENIZER_SOCKET)):
        await asyncio.sleep(CONNECT_PAUSE_S)
    await _serve(directory, SOCKET, EngineServer(directory).answer)
    while all(child.poll() is None for child in children):
        await asyncio.sleep(0.2)
    await asyncio.sleep(CRASH_WAIT_S)
    sys.exit(1)


def detokenize() -> None:
    """Is the detokenizer."""
    asyncio.run(_detokenize(Path(os.environ[DIRECTORY_VARIABLE])))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    asyncio.run(_run(parser.parse_known_args()[0].model_path, Path(os.environ[DIRECTORY_VARIABLE])))


if __name__ == "__main__":
    die_with_parent()
    main()
