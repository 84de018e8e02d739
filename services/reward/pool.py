"""Worker processes that answer within a deadline or are killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from services.reward import frames
from shared.errors import BadMessage, ConfigError, DeadlineExceeded, MyxoError

START_SECONDS = 120.0
"""How long a fresh process may take to load its libraries; a call's deadline runs only once it has."""

_CREDENTIALS = ("NATS_URL", "REDIS_URL")
"""Beginnings of variables that no worker needs, and that what it starts (code of a model's, say) should not inherit."""


class WorkerFailed(MyxoError):
    """A worker could not answer this; the text says why."""


class WorkerPool:
    """``size`` processes, each of which answers one request at a time.

    Args:
        whom: what they are, for errors. module: what they run; arguments: of it. It reads and writes `services.reward.frames`.
        setup: the first request, answered when the process is ready: ``{"ready": True}`` or ``{"refused": [field, value, expected]}``.
    """

    def __init__(self, whom: str, size: int, module: str, arguments: list[str], setup: object) -> None:
        self._whom, self._size, self._command = whom, size, ["-m", module, *arguments]
        self._setup = setup
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(None)  # a process still to be started
        self._running: set[Process] = set()

    async def start(self) -> None:
        """Starts the workers, so that the first call does not wait for imports. Raises as `ask` does."""
        for _ in range(self._size):
            self._idle.get_nowait()
        for worker in await asyncio.gather(*(self._spawn() for _ in range(self._size))):
            self._idle.put_nowait(worker)

    async def ask(self, request: object, what: str, whom: str, deadline: float) -> dict[str, object]:
        """The answer of a worker, without an error in it.

        Args:
            what: is awaited. whom: from whom. deadline: seconds from when a worker has the request.

        Raises DeadlineExceeded (the worker is killed and replaced), WorkerFailed, BadMessage for a request that is too long, or
        ConfigError where a fresh worker refuses the run.
        """
        data = frames.frame(request)
        worker = await self._idle.get()
        answer: dict[str, object] | None = None
        try:
            worker = worker or await self._spawn()
            answer = await asyncio.wait_for(self._exchange(worker, data), deadline)
        except TimeoutError:
            raise DeadlineExceeded(what, whom, deadline, "its process was killed, the group is given up") from None
        finally:
            if answer is None and worker is not None:
                await self._kill(worker)
                worker = None
            self._idle.put_nowait(worker)
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        return answer

    async def close(self) -> None:
        """Kills every worker."""
        for worker in list(self._running):
            await self._kill(worker)

    async def _spawn(self) -> Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_CREDENTIALS)}
        # in a process group of its own: what a function starts is killed with it
        worker = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, stdin=PIPE, stdout=PIPE, env=environment, process_group=0
        )
        self._running.add(worker)
        answer: dict[str, object] = {}
        try:
            answer = await asyncio.wait_for(self._exchange(worker, frames.frame(self._setup)), START_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded("its first answer", self._whom, START_SECONDS, "its process was killed") from None
        except WorkerFailed as error:
            words = "process ended before it was ready; its last words are in the service's log"
            raise WorkerFailed(f"{self._whom}'s {words} ({error})") from error
        finally:
            if "ready" not in answer:
                await self._kill(worker)
        if isinstance(refused := answer.get("refused"), list):
            raise ConfigError(*refused)
        return worker

    async def _exchange(self, worker: Process, data: bytes) -> dict[str, object]:
        assert worker.stdin is not None and worker.stdout is not None  # both are pipes
        try:
            worker.stdin.write(data)
            await worker.stdin.drain()
            answer = await frames.read(worker.stdout)
        except EOFError:
            raise WorkerFailed(f"{self._whom}'s process ended in the middle of a call") from None
        except BadMessage as error:
            raise WorkerFailed(f"{self._whom}'s process answered {error}") from error
        except ConnectionError as error:
            raise WorkerFailed(f"{self._whom}'s process broke off: {error}") from error
        if not isinstance(answer, dict):
            raise WorkerFailed(f"{self._whom}'s process answered {str(answer)[:80]!r}")
        return answer

    async def _kill(self, worker: Process) -> None:
        self._running.discard(worker)
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()


class VerifierPool(WorkerPool):
    """Worker processes for one verifier.

    Args:
        name: the verifier, a key of `services.reward.verifiers.VERIFIERS`.
    """

    def __init__(self, name: str, size: int, module: str = "services.reward.worker") -> None:
        super().__init__(f"verifier {name}", size, module, [name], {})

    async def score(self, responses: list[str], label: str, deadline: float) -> list[float]:
        """One finite reward a response. Raises DeadlineExceeded (the worker is killed and replaced) or WorkerFailed."""
        request = {"responses": responses, "label": label}
        rewards = (await self.ask(request, f"{len(responses)} rewards", self._whom, deadline)).get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(responses):
            raise WorkerFailed(f"{self._whom} gave {rewards!r} for {len(responses)} responses")
        for reward in rewards:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise WorkerFailed(f"{self._whom} gave reward {reward!r}; expected a finite number")
        return [float(reward) for reward in rewards]
