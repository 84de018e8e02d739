"""What the recorder of a run that trains nothing reports, and what it holds samples to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.trainer import batches, rollout_recorder
from services.trainer.commands import Leave
from services.trainer.rollout_recorder import RolloutRecorder
from shared.schema.messages import Batch, BatchGroup, Payload
from tests.support.run_config import run_config


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
