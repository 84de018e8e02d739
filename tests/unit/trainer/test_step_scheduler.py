"""What the trainer's side waits for, whom it takes for alive, and what a run that trains nothing reports."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from myxo.launch.launcher import SAVE_SECONDS
from services.trainer import batches, rollout_recorder, torchrun
from services.trainer import rank as trainer_rank
from services.trainer.commands import Leave, Wait
from services.trainer.control_client import still_known
from services.trainer.reference_policy import made_at
from services.trainer.rollout_recorder import RolloutRecorder
from services.trainer.step_scheduler import PUSH_SECONDS, BatchRequester
from services.trainer.torchrun import StoppedProcesses
from services.trainer.weights.push_schedule import PushRecord
from shared.nodes.node_decisions import STOP_SECONDS
from shared.process.child_process import FROZEN_SECONDS, SeenProcess
from shared.runtime import exit_codes, tasks
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Batch, BatchAnswer, BatchGroup, BatchPending, Payload
from shared.schema.service_messages import ServiceStatus
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example


class Pending:
    """A buffer that has no batch yet; at the run's end it needs none."""

    def __init__(self, need: int) -> None:
        self._answer: BatchAnswer = BatchPending(step=3, have=0, need=need, waiting_for="the evaluation of aime")

    def batch(self, step: int, version: int, hold: bool = True) -> BatchAnswer:
        return self._answer

    def report_activity(self, what: str, awaited_from: Sequence[str], next_action: str) -> None:
        assert what in ("the batch of step 3", "the run's end") and list(awaited_from) == ["buffer"] and "the trainer stops" in next_action


def requester(need: int, timeout: float, evaluation: float) -> BatchRequester:
    control: Any = Pending(need)
    return BatchRequester(control, None, timeout, evaluation)


def test_an_evaluation_at_the_end_has_its_own_time_besides() -> None:
    waiting = requester(0, 0.0, 1000.0)
    assert waiting.next(3, 3) == Wait(save=False)
    time.sleep(0.01)
    assert waiting.next(3, 3) == Wait(save=False)


@pytest.mark.parametrize(("need", "evaluation"), [(8, 1000.0), (0, 0.0)])
def test_a_wait_that_is_too_long_names_what_is_awaited(need: int, evaluation: float) -> None:
    waiting = requester(need, 0.0, evaluation)
    waiting.next(3, 3)
    time.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="the evaluation of aime"):
        waiting.next(3, 3)


def test_a_wait_for_what_is_refused_of_a_batch_begins_with_it() -> None:
    waiting = requester(8, 0.0, 0.0)
    control: Any = waiting._control
    assert waiting.next(3, 3) == Wait(save=False)
    pending, control._answer = control._answer, Batch(step=3, version=3, groups=[])
    assert waiting.next(3, 3) == control._answer
    time.sleep(0.01)
    control._answer = pending
    assert waiting.next(3, 3) == Wait(save=False)


def test_a_push_that_holds_up_what_is_awaited_is_named() -> None:
    record = PushRecord(3, ["rollout-0", "rollout-1"], {}, 0.0)
    control: Any = Pending(8)
    waiting = BatchRequester(control, None, 0.0, push=lambda: record.wait(["rollout-1"], PUSH_SECONDS + 1))
    waiting.next(3, 3)
    time.sleep(0.01)
    words = r"the push of version 3 \(prepare\), which the batch of step 3 waits for did not come from rollout-1"
    with pytest.raises(DeadlineExceeded, match=words):
        waiting.next(3, 3)


# --- what the recorder of a run that trains nothing reports, and what it holds samples to


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rollout_recorder, "architecture_of", lambda _: SimpleNamespace(vocab_size=100))
    monkeypatch.setattr(rollout_recorder, "MetricsLogger", MagicMock())
    monkeypatch.setattr(batches, "replayed_choices", lambda _: "the model's", raising=False)
    store: Any = None
    return RolloutRecorder(run_config(tmp_path), store, MagicMock(stopping=False))


def test_samples_are_held_to_what_the_trainer_holds_them_to(recorder: Any) -> None:
    limits = recorder._reader._limits
    assert (limits.vocabulary, limits.choices, limits.pictures is None) == (100, "the model's", False)


def test_a_next_life_reports_the_steps_that_this_one_may_not_have(recorder: Any) -> None:
    recorder._progress.parent.mkdir(parents=True)
    recorder._progress.write_text(json.dumps({"steps": 4}))
    recorder._requests = MagicMock()
    recorder._requests.next.return_value = Leave(done=True)
    recorder.run()
    recorder._control.durable.assert_called_once_with(4)


def test_a_steps_metrics_come_before_it_counts(recorder: Any) -> None:
    calls = MagicMock()
    recorder._control, recorder._metrics, recorder._reader = calls.control, calls.metrics, MagicMock()
    recorder._reader.take.return_value = SimpleNamespace(samples={}, stats=None)
    group = BatchGroup(group="g00000000", payload=Payload(keys=["k"], bytes=1, tokens=(4,)), rewards=[0.0])
    assert recorder._record(Batch(step=3, version=0, groups=[group]))
    assert [name for name, *_ in calls.mock_calls] == ["metrics.recorded", "control.trained", "control.durable"]


# --- a rank that a signal has stopped is known after a while, whichever others continue


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


# --- a trainer that was asked to stop is not done: whoever supervises it, and has not stopped it, starts it again


def ended(work: Callable[[], None]) -> int:
    """Returns the exit code of a process with this work."""
    try:
        work()
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
    return exit_codes.DONE


@pytest.mark.parametrize(("stopping", "torchrun", "code"), [(False, False, 0), (True, False, 143), (True, True, 0)])
def test_a_rank_alone_ends_as_stopped_and_one_of_several_in_order(
    stopping: bool, torchrun: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, worker = MagicMock(stopping=stopping, config=run_config(tmp_path)), MagicMock()
    control.__enter__.return_value = control
    for name, made in (("control_client.ControlClient", control), ("loop.Trainer", worker)):
        monkeypatch.setattr(f"services.trainer.{name}", MagicMock(return_value=made))
    monkeypatch.setattr("shared.store.payload_store.BlockingStore", MagicMock())
    monkeypatch.setattr(tasks, "arm", MagicMock())
    monkeypatch.setattr(os, "environ", {**os.environ, **({"TORCHELASTIC_RUN_ID": "x"} if torchrun else {})})
    assert ended(lambda: trainer_rank.main("actor")) == code
    assert [call for call, *_ in worker.mock_calls] == ["run", "close"]


def test_a_recorder_ends_as_stopped(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    control, made = MagicMock(), MagicMock()
    control.__enter__.return_value = control
    for name, value in (("ControlClient", control), ("RolloutRecorder", made), ("BlockingStore", None)):
        monkeypatch.setattr(rollout_recorder, name, MagicMock(return_value=value))
    for control.stopping, code in ((False, 0), (True, 143)):
        assert ended(rollout_recorder.main) == code
    assert made.close.call_count == 2


def test_torchrun_that_is_asked_to_stop_leaves_its_ranks_the_time_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def asked_to_stop(_: object) -> None:
        given.append(float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
        raise SignalException("asked", signal.SIGTERM)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("torch.distributed.run.run", asked_to_stop)
    monkeypatch.setattr(torchrun, "RankWatch", MagicMock())
    assert ended(lambda: torchrun.run_ranks(2, "module")) == exit_codes.STOPPED == 128 + signal.SIGTERM
    assert min(*given, STOP_SECONDS) > SAVE_SECONDS, "whoever asks has the bound"


# --- whom the trainer takes for alive after the bus was away, which lets statuses expire that nobody could renew


def status(instance: str, incarnation: str = "a.1") -> ServiceStatus:
    return example(ServiceStatus, instance=instance, incarnation=incarnation)


def test_a_bus_that_is_just_back_has_lost_nobody() -> None:
    known, renewed = [status("one"), status("two")], [status("two", "a.2")]
    assert still_known(known, renewed, 1.0, 10.0) == [status("two", "a.2"), status("one")]


def test_who_has_not_come_back_after_a_ttl_is_gone() -> None:
    assert still_known([status("one"), status("two")], [status("two")], 10.0, 10.0) == [status("two")]


# --- when the reference policy was made that a step is trained against


@table(("steps", "interval", "made"), [(0, None, 0), (99, None, 0), (0, 10, 0), (9, 10, 0), (10, 10, 10), (29, 10, 20), (3, 1, 3)])
def test_a_reference_holds_until_the_next(steps: int, interval: int | None, made: int) -> None:
    assert made_at(steps, interval) == made
