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

ENGINES = "tests/integration/engine/test_"
OWN_ENGINES = ("adapters", "command", "families", "flag_catalogue", "process", "routed_experts")
"""Files of `ENGINES` that start engines for themselves alone, or none."""

OF_WEIGHTS = ("generate", "joining", "proxy", "pushes", "router", "teachers", "trainer_layouts", "weights")
"""Those of one worker's engines. All others of `ENGINES` share those of another worker: an engine takes long to start."""

SHARED = (f"{ENGINES}* of weights", f"{ENGINES}* of rollouts")

OF_RANKS = "tests/unit/trainer/megatron/test_"
COMPARED = ("architecture_flags", "draft", "expert_balance", "export", "family_layouts", "freezing", "layouts", "lora", "megatron_hooks")
COMPARED += ("padded_vocabulary", "pictures", "prefix_sharing", "routing_replay", "runtime", "sharded_saves", "torch_backend")
"""Files of `OF_RANKS` that compare ranks with what one process computes, once for all of them. They are one worker's, the others another's:
a worker takes long to import what ranks are forked with."""

RANKS = (f"{OF_RANKS}* compared with one process", f"{OF_RANKS}* of others")

LONGEST = (
    *SHARED,
    "tests/integration/benchmarks/test_draft_training.py",
    "tests/e2e/test_tinker.py",
    "tests/e2e/test_deaths.py",
    "tests/e2e/test_console.py",
    "tests/integration/myxo/test_page_commands.py",
    "tests/e2e/test_colocate.py",
    "tests/chaos/test_seeds.py",
    "tests/integration/engine/test_process.py",
    *RANKS,
    "tests/integration/environments/test_reward_environments.py",
    "tests/integration/buffer/test_poisoned_batches.py",
)
"""Pieces of work that take longest, and come first: begun last they would be waited for alone."""

MOST_RUNS = 2
"""Workers that begin with files of `WHOLE_RUNS`; the others begin with the rest. Who has none left of its kind helps the others."""


def piece_of(test: str) -> str:
    """Returns the file of a test's id, or the one of `SHARED` or `RANKS` that it is in."""
    file = test.split("::", 1)[0]
    if file.startswith(OF_RANKS):
        return RANKS[file.removeprefix(OF_RANKS).removesuffix(".py") not in COMPARED]
    name = file.removeprefix(ENGINES).removesuffix(".py")
    return file if name == file.removesuffix(".py") or name in OWN_ENGINES else SHARED[name not in OF_WEIGHTS]


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
    return next((piece for piece in LONGEST if piece in wanted), wanted[0])


class FewRunsAtOnce(LoadFileScheduling):
    """xdist's distribution of files, but for which of them a worker is given next."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        whole_runs = node in self.nodes[:MOST_RUNS]
        self.workqueue.move_to_end(next_piece(self.workqueue, whole_runs=whole_runs), last=False)
        super()._assign_work_unit(node)
