"""What becomes of rollouts: tried again, lost, or stopped as stale."""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.rollout import custom_generate, rollout_service
from services.rollout.in_flight import InFlight, Requests
from services.rollout.played_group import DISRUPTIVE_TRIES, TRIES, GroupProgress, RolloutFailures
from services.rollout.replica import Replica
from services.rollout.rollout_service import Rollout
from services.rollout.task_outcomes import TaskOutcomes
from shared.bus.bus_errors import NotPermitted
from shared.config.rollout_section import RolloutSection
from shared.hooks import HookFailed, HookSample, Status
from shared.runtime.errors import DeadlineExceeded, MyxoError, PayloadMissing
from shared.schema.messages import Failed, Payload, Sampling, Task
from shared.store.payload_store import StoreRefused
from tests.support.run_config import run_config
from tests.support.valid_messages import example

RAISED = HookFailed("field", "a:b", "ValueError: no")
BLOCKED = HookFailed("field", "a:b", "it held up its process", disruptive=True)


def test_a_rollout_is_lost_after_so_many_failures_in_a_row() -> None:
    failures = RolloutFailures()
    for _ in range(TRIES - 1):
        failures.note(RAISED, counts=True)
    assert not failures.alone
    with pytest.raises(HookFailed, match=rf"ValueError: no; it failed {TRIES} times in a row"):
        failures.note(RAISED, counts=True)


def test_what_may_not_be_its_fault_does_not_count() -> None:
    failures = RolloutFailures()
    for _ in range(3 * TRIES):
        failures.note(RAISED, counts=False)
    assert failures.count == 0


def test_what_cost_others_their_process_is_tried_alone_and_less_often() -> None:
    failures = RolloutFailures()
    failures.note(RAISED, counts=True)
    for _ in range(DISRUPTIVE_TRIES - 1):
        failures.note(BLOCKED, counts=True)
        assert failures.alone
    failures.note(RAISED, counts=True)
    assert failures.alone, "an ordinary failure since does not make it harmless"
    with pytest.raises(HookFailed, match="it held up its process"):
        failures.note(BLOCKED, counts=True)


def test_a_group_does_without_rollouts_down_to_the_fewest() -> None:
    late, progress = DeadlineExceeded("it", "them", 1.0, "it is lost"), GroupProgress(5, 3)
    progress.lose(RAISED)
    progress.lose(late)
    with pytest.raises(DeadlineExceeded):
        progress.lose(late)
    with pytest.raises(HookFailed):
        GroupProgress(1, 1).lose(RAISED)


def test_a_group_is_complete_with_those_that_end_first() -> None:
    progress = GroupProgress(2, 1, surplus=2)
    assert list(progress.begun) == [0, 1, 2, 3]
    progress.end(3)
    assert not progress.complete and progress.aborted == 0
    progress.end(1)
    assert progress.complete and progress.kept == {1, 3} and progress.aborted == 2
    progress.end(0)
    assert progress.kept == {1, 3} and progress.aborted == 2, "what ended too late is aborted as well"


def test_failures_are_replaced_by_surplus_rollouts_before_they_are_tried_again() -> None:
    progress = GroupProgress(2, 1, surplus=1)
    with pytest.raises(HookFailed):
        progress.check_needed(RAISED)
    progress.lose(RAISED)
    progress.check_needed(RAISED)
    progress.end(0)
    progress.end(1)
    assert progress.complete and progress.aborted == 0, "a failure is none of the aborted ones"


def task_of(group: str) -> Task:
    return example(Task, group=group, n=3, min_version=0)


@pytest.mark.parametrize(("group", "begun"), [("g00000001", 5), ("eval.heldout.0.1", 3)])
def test_held_out_prompts_have_no_surplus(group: str, begun: int) -> None:
    settings = RolloutSection(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=3, surplus_rollouts=2)
    task = task_of(group)
    progress = GroupProgress.of(task, settings)
    assert len(progress.begun) == begun
    if begun == task.n:
        with pytest.raises(HookFailed):
            progress.lose(RAISED)


@pytest.mark.parametrize("asleep", [True, False])
async def test_the_time_of_a_function_s_call_does_not_run_while_the_engine_sleeps(asleep: bool) -> None:
    """A call that ends after more seconds than its rollout has: a trainer computed on the engine's GPUs meanwhile."""

    async def call(*_: object) -> tuple[list[HookSample], tuple[int, bool]]:
        await asyncio.sleep(0.1)
        return [HookSample(status=Status.COMPLETED)], (-1, False)

    def late(task: Task, index: int) -> DeadlineExceeded:
        return DeadlineExceeded("it", "them", 0.05, "it is lost")

    parts: Any = {"choices": None, "kept": False, "log_probs_reader": None, "goes_on": False}
    replica = SimpleNamespace(version=0, serving=True, incarnation=1)
    functions = SimpleNamespace(replica=replica, seconds=0.05, asleep=lambda: asleep, call=call, late=late, **parts)
    rollout = custom_generate._Rollout(functions, task_of("g00000001"), 0, [], None, GroupProgress(1, 1))  # type: ignore[arg-type]
    [given], _ = await rollout._called(HookSample(), 0)
    assert given.status is Status.COMPLETED
    if not asleep:
        with pytest.raises(DeadlineExceeded):
            await rollout._called(HookSample(), 0)
    assert (rollout._left > 0) == asleep


async def test_work_waits_for_an_engine_as_long_as_one_may_start_however_long_a_response_may_take(tmp_path: Path) -> None:
    sections: list[dict[str, Any]] = [{}, {"engine_start_timeout": 60}, {"engine_start_timeout": 900}, {"generate_timeout": 0.05}]
    *others, rollout = [run_config(tmp_path, rollout=given).rollout for given in sections]
    assert [one.patience for one in others] == [600, 600, 900]
    parts: Any = {"serving": False, "version": 0, "client": None, "_external": False, "_shown": asyncio.Event()}
    replica: Any = SimpleNamespace(
        _rollout=rollout, served=SimpleNamespace(asleep=False), _service=SimpleNamespace(state="waiting"), **parts
    )
    with pytest.raises(DeadlineExceeded, match="within 0.05 s"):
        await Replica.wait_serving(replica, 1)


PICTURES = Payload(keys=["pictures"], bytes=1)
PROMPT: dict[str, Any] = {"prompt": "1+1=", "prompt_tokens": np.zeros(1, np.int32), "sampling": Sampling(temperature=1.0, max_new_tokens=8)}
SHOWN = Task(group="g0", n=1, environment="math", min_version=0, pictures=PICTURES, **PROMPT)


class Lease:
    """A task's, delivered for the first time; ``ends``: how it ended."""

    message, exhausted, ends = SHOWN, False, ""

    held = contextlib.nullcontext

    async def ack(self) -> None:
        self.ends += "acked"

    async def hand_back(self, delay: float = 0.0) -> None:
        self.ends += "handed back"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PayloadMissing("the store holds no blob pictures"), "the store holds no blob pictures"),
        (MyxoError("an error that nobody names"), "an error that nobody names"),
        (StoreRefused("NOPERM"), None),
        (NotPermitted("no permission"), None),
    ],
)
async def test_a_group_is_generated_once_whatever_it_fails_of(
    error: MyxoError, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that no clause named cost its generation three times, and its reason: "given up after 3 deliveries"."""
    published, fatal = list[Failed](), list[BaseException]()

    async def fails(*_: object) -> None:
        raise error

    async def publish(task: Task, message: Failed, started: float) -> None:
        published.append(message)

    async def spooled(lease: object) -> None:
        return None

    log: Any = SimpleNamespace(error=lambda *_, **__: None)
    log.bind = lambda **_: log
    service: Any = SimpleNamespace(log=log, instance="rollout-0")
    outcomes: Any = SimpleNamespace(publish=publish, spooled=spooled, forget=lambda _: None)
    outcomes.failed = lambda *given: TaskOutcomes.failed(SimpleNamespace(_service=service), *given)  # type: ignore[arg-type]
    rollout: Any = SimpleNamespace(_service=service, _outcomes=outcomes, _generate_in_time=fails, _pace=None, running={}, _taken={})
    monkeypatch.setattr(rollout_service, "fatal", lambda _, error: fatal.append(error))
    lease, slots = Lease(), SimpleNamespace(close=lambda: None)
    handling = asyncio.create_task(Rollout._handle(rollout, lease, slots))  # type: ignore[arg-type]
    rollout.running[handling], rollout._taken[handling] = SHOWN, (0.0, slots)
    await asyncio.wait([handling])
    Rollout._handled(rollout, handling)
    if reason is None:
        assert (lease.ends, fatal, published) == ("handed back", [error], []), "the service says what the account may not do, and ends"
        return
    [failed] = published
    assert (lease.ends, fatal, failed.reason, failed.fault) == ("acked", [], reason, error.fault)
    lost = PICTURES if isinstance(error, PayloadMissing) else None
    assert failed.payload == lost, "the buffer has the group generated anew where these are gone"


# --- two attempts at one group in one replica: the first, whose lease ran out, and its successor


class Aborted(list[str]):
    """Of an engine's client: what it was asked to abort."""

    async def abort(self, rids: Sequence[str]) -> None:
        self.extend(rids)


async def test_either_may_end_first_and_both_are_stopped(tmp_path: Path) -> None:
    in_flight = InFlight(run_config(tmp_path, rollout={"max_staleness": 0, "staleness_policy": "drop"}))
    client: Any = Aborted()
    attempts = [ExitStack(), ExitStack()]
    for name, attempt in zip("ab", attempts, strict=True):
        attempt.enter_context(in_flight.tracked("g00000001", Requests({name}), 0, 0))
    await in_flight.stop_stale(client, 1)
    assert sorted(client) == ["a", "b"]
    attempts[0].close()
    client.clear()
    await in_flight.stop_stale(client, 1)
    assert client == ["b"]
    attempts[1].close()
    client.clear()
    await in_flight.stop_stale(client, 1)
    assert not client
