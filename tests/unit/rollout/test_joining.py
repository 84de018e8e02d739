"""Where a replica takes weights from, situation by situation."""

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from services.rollout.weight_catch_up import CACHE_VARIABLE, Situation, WeightCatchUp, choose, temporary_directory
from shared.runtime.errors import MyxoError
from shared.transfer.weight_checkpoint import BrokenCheckpoint, WeightCheckpoints
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.shared.weights.test_weight_checkpoints import history

NEW, PUSHES, PULLS = -1, True, False
PEER, DISK = "peer", "disk"

CASES = {
    # join_from, held, live, snapshot, peers, pushes → choice
    "nothing is live yet: the first push comes": ("auto", NEW, -1, -1, (), PUSHES, None),
    "a replica serves what is live": ("auto", NEW, 7, 5, ("a", "b"), PUSHES, PEER),
    "a replica rather than the disk": ("auto", NEW, 7, 7, ("a",), PUSHES, PEER),
    "nobody serves it, but it is on disk": ("auto", NEW, 7, 7, (), PUSHES, DISK),
    "what is on disk is old: a push is as near": ("auto", NEW, 7, 5, (), PUSHES, None),
    "the old one was asked for": ("disk", NEW, 8, 7, ("a",), PUSHES, DISK),
    "only from replicas": ("peer", NEW, 7, 7, (), PUSHES, None),
    "only by pushes": ("trainer", NEW, 7, 7, ("a",), PUSHES, None),
    "who serves an older version gets the next push": ("auto", 5, 7, 7, ("a",), PUSHES, None),
    "without pushes the first version is on disk": ("auto", NEW, -1, 7, (), PULLS, DISK),
    "without pushes every version is": ("auto", 6, 6, 7, (), PULLS, DISK),
    "a replica has read it already": ("auto", NEW, 7, 7, ("a",), PULLS, PEER),
    "replicas serve what is overtaken": ("auto", NEW, 6, 7, ("a",), PULLS, DISK),
    "only from disk": ("disk", NEW, 7, 7, ("a",), PULLS, DISK),
    "for newcomers only": ("peer", 6, 7, 7, ("a",), PULLS, DISK),
    "nobody sends the first one": ("peer", NEW, -1, 7, (), PULLS, DISK),
    "it has the newest": ("auto", 7, 7, 7, ("a",), PULLS, None),
    "versions never fall": ("auto", 8, 7, 7, ("a",), PULLS, None),
}


@table("case", CASES)
def test_where_weights_come_from(case: str) -> None:
    join_from, held, live, snapshot, peers, pushes, choice = CASES[case]
    assert choose(join_from, Situation(held, live, snapshot, peers, pushes)) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize(("trainer", "asked"), [({}, ("rollout-0",)), ({"lora_rank": 8}, ())])
async def test_no_replica_is_asked_for_weights_with_adapters_merged_into_them(
    trainer: dict[str, int], asked: tuple[str, ...], tmp_path: Path
) -> None:
    status = SimpleNamespace(instance="rollout-0", version=7, state="ready", ranks=2)
    registry = SimpleNamespace(alive=AsyncMock(return_value=[status]))
    service = SimpleNamespace(config=run_config(tmp_path, trainer=trainer), instance="rollout-1", ranks=2, registry=registry)
    replica = SimpleNamespace(served=SimpleNamespace(has_weights=False))
    assert await WeightCatchUp(service, replica, lambda: False)._peers(7) == asked  # type: ignore[arg-type]


async def test_a_disk_that_refuses_the_copy_is_named_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, weights={"update_weight_transport": "disk", "update_weight_mode": "delta"})
    history(WeightCheckpoints.of_run(config).directory, "fd")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    service = SimpleNamespace(config=config, instance="rollout-1", run=config.run.name)
    catch_up = WeightCatchUp(service, Mock(), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(MyxoError, match=rf"version 1 cannot be put together in {CACHE_VARIABLE} .*Not a directory") as raised:
        await catch_up._pulled(SimpleNamespace(version=1))  # type: ignore[arg-type]
    assert not isinstance(raised.value, BrokenCheckpoint)


def test_the_copies_of_processes_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = temporary_directory()
    if (child := os.fork()) == 0:
        (temporary_directory() / "model.safetensors").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "myxo-weights-of-nobody").mkdir()
    other = temporary_directory()
    assert set(tmp_path.iterdir()) == {own, other, tmp_path / "myxo-weights-of-nobody"}
