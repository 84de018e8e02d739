"""Calls in order on their own thread; one that hangs holds up nobody once it is abandoned."""

from __future__ import annotations

import threading

import pytest

from services.trainer.collective import CollectiveThread

SECONDS = 60


def test_calls_run_in_order_and_give_what_they_return_or_raise() -> None:
    thread, seen = CollectiveThread("test"), []

    def fail() -> None:
        raise RuntimeError("a peer is gone")

    first, second, third = thread.submit(lambda: seen.append(1)), thread.submit(fail), thread.submit(lambda: len(seen))
    assert third.result(SECONDS) == 1
    assert first.result(SECONDS) is None
    with pytest.raises(RuntimeError, match="a peer is gone"):
        second.result(SECONDS)
    thread.abandon()


def test_a_call_that_hangs_is_left_behind() -> None:
    thread, released = CollectiveThread("test"), threading.Event()
    hanging = thread.submit(lambda: released.wait(SECONDS))
    thread.abandon()
    assert thread.submit(lambda: "on").result(SECONDS) == "on"
    assert not hanging.done()
    released.set()
    assert hanging.result(SECONDS) is True
    thread.abandon()
