"""Whoever changes parameters waits for those who read them, and knows for how long."""

import threading

import pytest

from services.trainer.parallel.trained_model import WeightReadLock
from shared.runtime.errors import DeadlineExceeded

SECONDS = 60


def test_nobody_waits_for_a_reading_that_is_over() -> None:
    readers = WeightReadLock()
    readers.wait("optimizer step")
    readers.begin("a push", SECONDS)
    readers.over()
    readers.wait("optimizer step")
    assert readers.stall == 0.0


def test_a_change_waits_for_the_end_of_a_reading() -> None:
    readers, changed = WeightReadLock(), threading.Event()
    readers.begin("a push", SECONDS)

    def change() -> None:
        readers.wait("optimizer step")
        changed.set()

    changing = threading.Thread(target=change)
    changing.start()
    while readers.waiting_since is None:
        threading.Event().wait(0.001)
    assert not changed.is_set()
    readers.over()
    changing.join(SECONDS)
    assert changed.is_set() and readers.stall > 0


def test_a_reading_without_an_end_is_an_error_that_names_it() -> None:
    readers = WeightReadLock()
    readers.begin("the push of version 7", 0.01)
    with pytest.raises(DeadlineExceeded, match="the push of version 7.*no optimizer step"):
        readers.wait("optimizer step")
