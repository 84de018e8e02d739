"""Runs ranks under torchrun with its static rendezvous: all of one machine, or one node's part of several; and ends them if one is frozen.

torchrun's other rendezvous, ``c10d`` (also behind ``--standalone``), unpickles what anybody writes to its port. And each TCP store that
torch opens by itself listens on all addresses. The static one takes the store that this process has already for its port. What ranks and
torchrun's agents read from it are numbers, JSON, and the raw addresses of gloo and NCCL.

As a program it is a child of a node's agent (`services.trainer.trainer_node`):

    python -m services.trainer.torchrun DIRECTORY NODE NODES RANKS ADDRESS PORT MODULE ARGUMENT...

The first node (NODE 0) opens the meeting point at ADDRESS and writes its port to DIRECTORY/port; DIRECTORY/failure has the reason of the
first rank that failed, if one did.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

from shared.process import child_process
from shared.process.child_process import FROZEN_SECONDS, PROC, STOPPED_STATE, SeenProcess
from shared.runtime import exit_codes
from shared.runtime.addresses import LOOPBACK
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import replace_file

LOOK_SECONDS = 1.0


class RankFrozen(MyxoError):
    """A rank was stopped by a signal, and did not continue."""


class StoppedProcesses:
    """Follows which processes are stopped. Pure."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def look(self, present: Iterable[SeenProcess], now: float) -> SeenProcess | None:
        """Returns one that has been stopped for `FROZEN_SECONDS`. ``now``: monotonic seconds."""
        stopped = {process.identity: process for process in present if process.state == STOPPED_STATE}
        self._since = {identity: self._since.get(identity, now) for identity in stopped}
        return next((stopped[identity] for identity, since in self._since.items() if now - since >= FROZEN_SECONDS), None)


class RankWatch:
    """Watches this process's own children, the ranks. ``frozen``: in words which one was stopped; empty while none was."""

    def __init__(self) -> None:
        self.frozen = ""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _watch(self) -> None:
        stopped = StoppedProcesses()
        while not self.frozen:
            time.sleep(LOOK_SECONDS)
            ranks = [process for process in child_process.descendants(os.getpid()) if process.parent == os.getpid()]
            if (found := stopped.look(ranks, time.monotonic())) is None:
                continue
            self.frozen = f"rank {_rank(found.pid)} was frozen: a signal had stopped its process {found.pid} for {FROZEN_SECONDS:g} s"
            structlog.get_logger().error("rank_frozen", error=self.frozen)
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _rank(pid: int) -> str:
    """Returns the rank that torchrun has given a process, by its environment."""
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return entry[5:].decode()
    return "of unknown number"


PORT_FILE, FAILURE_FILE = "port", "failure"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable for the file in which a rank writes why it fails


def run_ranks(
    ranks: int,
    *module: str,
    node: int = 0,
    nodes: int = 1,
    address: str = LOOPBACK,
    port: int = 0,
    job: str = "",
    opened: Callable[[int], None] = lambda _: None,
    failed: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Runs torchrun; the first failed rank's exit code becomes this process's, or `exit_codes.STOPPED` where it is asked to stop.

    Args:
        ranks: on this node. module: what each rank runs, and its arguments. node, nodes: this one's index, and how many there are.
        address, port: of the meeting point, which node 0 opens at any free port. job: the same on all nodes, and new for each attempt.
        opened: is called with its port. failed: is called with what is known of the first rank that failed.

    Raises RankFrozen where a signal had stopped one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    from shared.transfer.channel_store import BoundStore

    if node == 0:
        store = BoundStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        opened(port := store.port)
    meeting = ["--rdzv-backend", "static", "--master-addr", address, "--master-port", str(port)]
    meeting += ["--rdzv-id", job or secrets.token_hex(16)]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "86400")  # else half a minute for a checkpoint: whoever asks has the bound
    watch = RankWatch()
    share = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    try:
        run(get_args_parser().parse_args([*meeting, *share, "-m", *module]))
    except SignalException:  # torchrun has passed the signal on and waited for the ranks
        sys.exit(exit_codes.STOPPED)
    except ChildFailedError as error:
        if watch.frozen:
            failed({"rank": error.get_first_failure()[0], "code": 1, "reason": watch.frozen, "consequence": False})
            raise RankFrozen(watch.frozen) from error
        rank, failure = error.get_first_failure()
        known = failure.error_file_data if isinstance(failure.error_file_data.get("message"), str) else {}
        words = known.get("message") or (f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}")
        code = failure.exitcode if 0 < failure.exitcode < 128 else 1
        failed({"rank": rank, "code": code, "reason": words, "consequence": bool(known.get("consequence"))})
        sys.exit(code)


def tell_failure(reason: str, consequence: bool) -> None:
    """Writes why this rank fails into the file that torchrun has named for it. ``consequence``: another rank went away."""
    if path := os.environ.get(ERROR_FILE):
        content = {"message": reason, "timestamp": str(int(time.time())), "consequence": consequence}
        Path(path).write_text(json.dumps(content))


def main(arguments: list[str]) -> None:
    """Starts the ranks of one node by the words of a command line."""
    directory, node, nodes, ranks, address, port, *module = arguments
    place = Path(directory)
    run_ranks(
        int(ranks),
        *module,
        node=int(node),
        nodes=int(nodes),
        address=address,
        port=int(port),
        job="nodes",  # each attempt has a meeting point of its own
        opened=lambda port: replace_file(place / PORT_FILE, str(port).encode()),
        failed=lambda failure: replace_file(place / FAILURE_FILE, json.dumps(failure).encode()),
    )


if __name__ == "__main__":
    child_process.die_with_parent()
    main(sys.argv[1:])
