"""What Myxo adds to SGLang's scheduler: a gate, the ends of aborted requests, the hash of seeded samples."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from services.rollout.engine.murmur_hash import murmur_hash32
from services.rollout.engine.receiver.command_session import CLOSED_SECONDS, SchedulerGate
from services.rollout.engine.receiver.loader import calling_scheduler, find_ends_of_aborted, leave_draft, report_token_versions
from shared.schema.versions import TOKEN_VERSIONS
from tests.support.tables import table


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


@pytest.mark.parametrize("own", [True, False])
def test_a_draft_that_is_not_the_checkpoints_own_is_not_loaded_from_disk(own: bool) -> None:
    asked = list[object]()
    worker = SimpleNamespace(update_weights_from_disk=lambda request: (not asked.append(request), "loaded"))
    for scheduler in (SimpleNamespace(draft_worker=worker), SimpleNamespace(draft_worker=None), None):
        leave_draft(scheduler, own)
    assert worker.update_weights_from_disk("version 1")[0] and asked == ["version 1"] * own


# --- the end of a request that is aborted in the very step that ends it, and the versions of its tokens; the class is SGLang's in its
# order of questions

END = 7


def request_class() -> type:
    class Request:
        def __init__(self, tokens: list[int], abort: str | None) -> None:
            self.output_ids, self.to_finish, self.reason = tokens, abort, ""

        def finished(self) -> bool:
            return bool(self.reason)

        def update_finish_state(self, new: int = 1) -> None:
            if self.finished():
                return
            if self.to_finish is not None:
                self.reason, self.to_finish = self.to_finish, None
            elif END in self.output_ids[-new:]:
                self.reason = "stop"

    return Request


@table(
    ("tokens", "abort", "reason"),
    [([1, END], "abort", "stop"), ([1, 2], "abort", "abort"), ([], "abort", "abort"), ([1, END], None, "stop"), ([1, 2], None, "")],
)
def test_an_end_is_an_end(tokens: list[int], abort: str | None, reason: str) -> None:
    kind = request_class()
    assert find_ends_of_aborted(kind)
    request = kind(tokens, abort)
    request.update_finish_state(1)
    assert request.reason == reason
    request.update_finish_state(1)
    assert request.reason == reason, "what has ended stays as it is"


def test_a_class_without_such_a_check_is_left_alone() -> None:
    assert not find_ends_of_aborted(object)


def test_each_token_is_noted_with_the_version_that_is_held_when_it_is_appended() -> None:
    kind, held = request_class(), [-1]
    assert find_ends_of_aborted(kind) and report_token_versions(kind, lambda: held[0])
    request = kind([], None)
    for version, token in ((-1, 1), (3, 2), (3, 3), (4, END)):
        held[0] = version
        request.output_ids.append(token)
        request.update_finish_state(1)
    assert request.customized_info == {TOKEN_VERSIONS: [None, 3, 3, 4]} and request.reason == "stop"
    assert not report_token_versions(type("Unlike", (), {}), lambda: 0)


# --- the hash that seeded samples are drawn by: the values of the published algorithm

PUBLISHED = [
    # (seed, position, column), and what mmh3.hash(struct.pack("<QII", ...), 0, signed=False) gives
    ((0, 0, 0), 2167721464),
    ((42, 0, 0), 1868632036),
    ((42, 7, 95), 2125376897),
    ((2**31 - 1, 1_000_000, 150_000), 3145061007),
    ((2**40 + 3, 12, 5), 1677208435),
]


def test_it_is_murmur_hash_3() -> None:
    seeds, positions, columns = (np.array([key[at] for key, _ in PUBLISHED], np.int64) for at in range(3))
    hashes = murmur_hash32(seeds, positions, columns)
    assert hashes.dtype == np.uint32
    assert hashes.diagonal().tolist() == [value for _, value in PUBLISHED]
