"""A run without pushes: two trainer ranks write every version to disk, by deltas, and the replica reads them there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from shared.transfer.weight_checkpoint import WeightCheckpoints
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 1200


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_versions_over_a_disk(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The replica dies once: its next life takes the newest version, without a word to the trainer."""
    steps = 12
    flags = [
        *("--update-weight-transport", "disk", "--update-weight-mode", "delta", "--update-weight-full-interval", "4"),
        *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    ]
    config = small_run("disk", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "disk", "disk", flags) as run:
        cards = run.until("a version of the training", serves, RUN_SECONDS)
        assert gauge(cards, "buffer", "trained_steps") < steps, "the run ended before its replica was killed: make it longer"
        run.kill(run.child("services.rollout"))
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    difference = summary["mean_abs_logprob_diff"]
    assert isinstance(difference, float) and difference < 1e-4
    snapshots = WeightCheckpoints(run.root / "weights")
    newest = snapshots.newest()
    assert newest is not None and newest.version == steps
    assert snapshots.chain(newest.version)[0].kind == "full"
    assert any(snapshots.load(version).kind == "delta" for version in snapshots.versions())


def serves(cards: list[ServiceStatus]) -> bool:
    return any(card.service == "rollout" and card.version >= 1 for card in cards)
