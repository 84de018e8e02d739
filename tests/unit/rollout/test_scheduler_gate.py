"""The gate in a scheduler's loop: it lets nothing through while it is closed, and never stays closed."""

import threading
import time

from services.rollout.engine.receiver.command_session import CLOSED_SECONDS, SchedulerGate
from services.rollout.engine.receiver.loader import calling_scheduler


class Scheduler:
    """What the gate knows of SGLang's."""

    forward_stream = object()

    def __init__(self) -> None:
        self.processed: list[list[object]] = []

    def process_input_requests(self, requests: list[object]) -> int:
        self.processed.append(requests)
        return len(self.processed)

    def loads(self) -> object:
        """As SGLang's does: it calls the loader, some calls down."""
        return Updater().update()


class Updater:
    def update(self) -> object:
        return calling_scheduler()


def test_requests_are_processed_as_before() -> None:
    scheduler, gate = Scheduler(), SchedulerGate()
    assert gate.install(scheduler) and not gate.install(object())
    assert scheduler.process_input_requests(["a"]) == 1 and scheduler.processed == [["a"]]


def test_a_closed_gate_opens_with_its_body_or_by_itself() -> None:
    scheduler, gate, passed = Scheduler(), SchedulerGate(), threading.Event()
    gate.install(scheduler)
    with gate.closed():
        gate._until = time.monotonic() + 60
        thread = threading.Thread(target=lambda: (scheduler.process_input_requests([]), passed.set()), daemon=True)
        thread.start()
        assert not passed.wait(0.2)
    assert passed.wait(60)
    with gate.closed():
        begun = time.monotonic()
        assert scheduler.process_input_requests([]) == 2  # although the body has not ended
        assert time.monotonic() - begun >= CLOSED_SECONDS / 2


def test_the_scheduler_that_calls_the_loader_is_found() -> None:
    scheduler = Scheduler()
    assert scheduler.loads() is scheduler
    assert calling_scheduler() is None
