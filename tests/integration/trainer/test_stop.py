"""A trainer that is asked to stop while the buffer is away."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer import control_client
from services.trainer.commands import Leave
from services.trainer.step_scheduler import BatchRequester
from shared.schema.messages import Trained
from tests.support.pushing import Replicated


@pytest.fixture
def signals() -> Iterator[None]:
    """A link takes the process's signals; the tests after this one want theirs."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_it_leaves_without_waiting_for_the_buffers_deadline(signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "STOP_SECONDS", 1.0)
    with Replicated(tmp_path, tmp_path, replicas=0) as run:
        asker = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
        asker.start()
        assert BatchRequester(run.link, None, 600).next(0, 0) == Leave(done=False)
        with pytest.raises(control_client.StopAsked, match="did not come from the buffer within 1 s; the trainer was asked to stop"):
            run.link.trained(Trained(step=0, version=0, started=0.0, ended=0.0))
        asker.join()
