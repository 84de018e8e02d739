"""Groups from outside are all that a whole run trains; its engine plays the held-out prompts alone."""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shared.config.service_sections import KEY_VARIABLE
from shared.data.rollout_files import DIRECTORY
from tests.e2e.launched import LaunchedRun
from tests.support.rollout_reader import RolloutReader

RUN_SECONDS = 900
KEY = "the key of this test's producer"
SCORES = [0.125, 0.25, 0.5, 0.875]
"""No other reward of the run has these values."""


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_groups_from_outside_alone_are_trained(small_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    steps, root = 3, tmp_path / "runs" / "outside"
    with LaunchedRun(small_run("outside", steps=steps, staleness=1), root, "outside", ["--ingest-groups", "alone"]) as run:
        cards = run.until("a gateway", lambda cards: any(one.service == "gateway" and one.engine for one in cards), RUN_SECONDS)
        produce(next(one.engine for one in cards if one.service == "gateway" and one.engine), run)
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    records = list(RolloutReader(root / DIRECTORY).records())
    trained = [record for record in records if record.step is not None]
    assert len(trained) == 4 * steps and {tuple(one.reward for one in record.samples) for record in trained} == {tuple(SCORES)}
    assert {record.version for record in records if record.dataset} >= {0, steps}, "held-out prompts are generated here"
    assert not any(record.samples for record in records if record.dataset is None and record.step is None and record.status != "dropped")


def produce(url: str, run: LaunchedRun) -> None:
    """Hands in groups, as there is room for them, until the run ends: one that has become too old is dropped."""
    end = time.monotonic() + RUN_SECONDS
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
    with client, contextlib.suppress(httpx.TransportError):
        for number in itertools.count():
            if run.process.poll() is not None:
                return
            assert time.monotonic() < end, run.said()
            known = client.get("/groups")
            if known.status_code != 200:  # before the first weights, and at the end
                time.sleep(0.2)
                continue
            answer = client.post("/groups", json=group(number, known.json()["version"], known.json()["rollouts"]))
            assert answer.status_code in (200, 409, 410, 429, 503), f"{answer.text}\n{run.said()}"


def group(number: int, version: int, rollouts: int) -> dict[str, object]:
    """A prompt of three tokens and an answer of two."""
    tokens = [[4, 5, 6, 7 + sample, 1] for sample in range(rollouts)]
    columns = {"masks": [[0, 0, 0, 1, 1]] * rollouts, "log_probs": [[0.0, 0.0, 0.0, -4.0, -4.0]] * rollouts}
    return {"id": f"outside-{number}", "tokens": tokens, "versions": version, "scores": SCORES, **columns}
