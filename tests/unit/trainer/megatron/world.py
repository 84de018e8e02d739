"""A world of rank processes that outlives a test: starting one costs seconds, a case on tiny models a fraction of one."""

import contextlib
import gc
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from tests.support.forking import OwnForkServer

DEADLINE_SECONDS = 180.0

_server = OwnForkServer("tests.unit.trainer.megatron.rank_steps")  # torch and Megatron are imported once, not once a rank

MOST_THREADS = 150
"""Of a rank whose groups were left. A group that something still holds keeps a thread of gloo's that wakes up a hundred times a second."""


class RankFailed(Exception):
    """A rank raised; the text holds its traceback."""


class World:
    """``size`` processes, each one rank, that run functions of an importable module in step.

    Started at the first case, and again after one that failed (ranks that broke off may stand in different collectives) or left too
    many threads behind.

    Args:
        method: ``spawn`` on GPUs, where a process that has looked for CUDA must not be forked; it imports torch once a rank.
    """

    def __init__(self, size: int, method: Literal["forkserver", "spawn"] = "forkserver") -> None:
        self.size, self._method = size, method
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results by rank. Raises RankFailed with the first rank's traceback, TimeoutError after the deadline."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, args, kwargs))
        ends = time.monotonic() + DEADLINE_SECONDS
        results, most = [], 0
        try:
            for rank, (process, pipe) in enumerate(self._ranks):
                if not pipe.poll(max(0.0, ends - time.monotonic())):
                    raise TimeoutError(f"rank {rank} did not finish {function.__name__} within {DEADLINE_SECONDS:g} s")
                try:
                    failure, result, threads = pipe.recv()
                except EOFError:
                    process.join(10)
                    raise RankFailed(f"rank {rank} died in {function.__name__}, exit code {process.exitcode}") from None
                if failure is not None:
                    raise RankFailed(f"rank {rank} in {function.__name__}:\n{failure}")
                results.append(result)
                most = max(most, threads)
        except BaseException:  # also a test's time that is over: the next one would get these answers
            self.stop()
            raise
        if most > MOST_THREADS:
            self.stop()
        return results

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join(10)
        self._ranks = []

    def _start(self) -> None:
        context = mp.get_context(self._method)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.size, port), daemon=True)
            _server.start(process)
            there.close()
            self._ranks.append((process, here))


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from services.trainer.parallel import runtime

    torch.set_num_threads(1)
    gc.freeze()  # leaving the groups collects twice, and need not look at what was imported
    with contextlib.suppress(EOFError):
        while True:
            function, args, kwargs = pipe.recv()
            try:
                answer = (None, function(*args, **kwargs))
            except BaseException:
                answer = (traceback.format_exc(), None)
            else:
                runtime.leave_groups()
            pipe.send((*answer, len(os.listdir("/proc/self/task"))))
