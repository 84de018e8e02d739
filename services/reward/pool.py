"""Verifier processes that answer within a deadline or are killed and replaced."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from asyncio.subprocess import PIPE, Process

from shared.errors import DeadlineExceeded, MyxoError

START_SECONDS = 120.0
"""How long a fresh process may take to load its libraries; a call's deadline runs only once it has."""

_LINE_BYTES = 64 << 20


class VerifierFailed(MyxoError):
    """The verifier could not score this; the text says why."""


class VerifierPool:
    """``size`` worker processes for one verifier.

    Args:
        name: the verifier, a key of `services.reward.verifiers.VERIFIERS`.
        module: what the processes run; it speaks as `services.reward.worker` does.
    """

    def __init__(self, name: str, size: int, module: str = "services.reward.worker") -> None:
        self._name, self._size, self._module = name, size, module
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(None)  # a process still to be started
        self._running: set[Process] = set()

    async def start(self) -> None:
        """Starts the workers, so that the first call does not wait for imports. Raises DeadlineExceeded or VerifierFailed."""
        for _ in range(self._size):
            self._idle.get_nowait()
        for worker in await asyncio.gather(*(self._spawn() for _ in range(self._size))):
            self._idle.put_nowait(worker)

    async def score(self, responses: list[str], label: str, deadline: float) -> list[float]:
        """One finite reward a response.

        Raises DeadlineExceeded (the worker is killed and replaced) or VerifierFailed.
        """
        worker = await self._idle.get()
        answer: dict[str, object] | None = None
        try:
            worker = worker or await self._spawn()
            answer = await asyncio.wait_for(self._ask(worker, responses, label), deadline)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(responses)} rewards", f"verifier {self._name}", deadline, "its process was killed, the group is given up"
            ) from None
        finally:
            if answer is None and worker is not None:
                await self._kill(worker)
                worker = None
            self._idle.put_nowait(worker)
        if "error" in answer:
            raise VerifierFailed(f"verifier {self._name}: {answer['error']}")
        rewards = answer.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(responses):
            raise VerifierFailed(f"verifier {self._name} gave {rewards!r} for {len(responses)} responses")
        for reward in rewards:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise VerifierFailed(f"verifier {self._name} gave reward {reward!r}; expected a finite number")
        return [float(reward) for reward in rewards]

    async def close(self) -> None:
        """Kills every worker."""
        for worker in list(self._running):
            await self._kill(worker)

    async def _spawn(self) -> Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, self._name, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
        )
        self._running.add(worker)
        ready = b""
        try:
            assert worker.stdout is not None  # it is a pipe
            ready = await asyncio.wait_for(worker.stdout.readline(), START_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded("its first line", f"verifier {self._name}", START_SECONDS, "its process was killed") from None
        finally:
            if not ready:
                await self._kill(worker)
        if not ready:
            raise VerifierFailed(f"verifier {self._name}'s process ended before it was ready; its last words are in the service's log")
        return worker

    async def _ask(self, worker: Process, responses: list[str], label: str) -> dict[str, object]:
        assert worker.stdin is not None and worker.stdout is not None  # both are pipes
        try:
            worker.stdin.write(json.dumps({"responses": responses, "label": label}).encode() + b"\n")
            await worker.stdin.drain()
            line = await worker.stdout.readline()
        except (ConnectionError, ValueError) as error:
            raise VerifierFailed(f"verifier {self._name}'s process broke off: {error}") from error
        if not line:
            raise VerifierFailed(f"verifier {self._name}'s process ended in the middle of a call")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise VerifierFailed(f"verifier {self._name}'s process answered {line[:80]!r}") from error
        assert isinstance(answer, dict)  # our own worker's answer
        return answer

    async def _kill(self, worker: Process) -> None:
        self._running.discard(worker)
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
