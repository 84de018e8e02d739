"""A rank that a signal has stopped is known after a while, whichever others continue."""

from services.trainer.torchrun import StoppedProcesses
from shared.process.child_process import FROZEN_SECONDS, SeenProcess


def rank(pid: int, state: str, started: int = 1) -> SeenProcess:
    return SeenProcess(pid, 1, started, state, "python")


def test_a_process_is_frozen_once_it_was_stopped_all_the_time() -> None:
    watch = StoppedProcesses()
    assert watch.look([rank(5, "S"), rank(6, "T")], 0.0) is None
    assert watch.look([rank(5, "T"), rank(6, "S")], FROZEN_SECONDS) is None, "6 ran again, 5 was stopped only now"
    assert watch.look([rank(5, "T"), rank(6, "R")], 2 * FROZEN_SECONDS - 0.1) is None
    found = watch.look([rank(5, "T"), rank(6, "R")], 2 * FROZEN_SECONDS)
    assert found is not None and found.pid == 5


def test_another_process_with_the_same_number_is_another_one() -> None:
    watch = StoppedProcesses()
    watch.look([rank(5, "T", started=1)], 0.0)
    assert watch.look([rank(5, "T", started=2)], FROZEN_SECONDS) is None
