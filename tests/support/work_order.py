"""Which files of tests run beside which on a small machine: for `make test`, which gives them to several workers."""

from collections.abc import Iterable

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController

WHOLE_RUNS = (
    "tests/chaos/",
    "tests/e2e/",
    "tests/integration/accounts/",
    "tests/integration/benchmarks/",
    "tests/integration/engine/",
    "tests/integration/myxo/",
    "tests/integration/nodes/",
)
"""Their tests start a dozen processes each, which keep more than one core busy and have deadlines: few of them fit beside each other."""

SHARED = ("tests/integration/engine/",)
"""Folders whose files share what takes long to start, and so a worker: each other one would start engines of its own."""

MOST_RUNS = 2
"""Workers that begin with files of `WHOLE_RUNS`; the others begin with the rest. Who has none left of its kind helps the others."""


def piece_of(test: str) -> str:
    """Returns the file of a test's id, or the folder that is one piece of work."""
    return next((folder for folder in SHARED if test.startswith(folder)), test.split("::", 1)[0])


def is_whole_run(piece: str) -> bool:
    """Returns whether a piece of work is of those that few are done of at a time."""
    return piece.startswith(WHOLE_RUNS)


def next_piece(waiting: Iterable[str], *, whole_runs: bool) -> str:
    """Returns the piece that a worker is given.

    Args:
        waiting: the pieces that nobody has been given, at least one. whole_runs: whether the worker begins with those of `WHOLE_RUNS`.
    """
    pieces = list(waiting)
    wanted = [piece for piece in pieces if is_whole_run(piece) == whole_runs] or pieces
    return next((piece for piece in wanted if piece in SHARED), wanted[0])


class FewRunsAtOnce(LoadFileScheduling):
    """xdist's distribution of files, but for which of them a worker is given next."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        whole_runs = node in self.nodes[:MOST_RUNS]
        self.workqueue.move_to_end(next_piece(self.workqueue, whole_runs=whole_runs), last=False)
        super()._assign_work_unit(node)
