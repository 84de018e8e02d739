"""Engines on the trainer's GPU, which generate while it waits: a whole run, and one in which each of the two dies."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.disturbed_run import run_seed
from tests.chaos.fast.fast_config import FastShape, write_model
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.schedule import KILL, Fault, Schedule
from tests.support.tables import rare

SHAPE = FastShape(lend=True, steps=8, groups=8, staleness=1)
KILLED = ("rollout-1/engine/scheduler", "trainer-0", "rollout-1", "trainer-0")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [rare((), id="well"), rare(KILLED, id="deaths")])
def test_a_lent_engine_generates_and_nothing_is_lost_or_doubled(
    killed: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is checked as for all disturbed runs: each token has the version that made it, each group is trained once."""
    monkeypatch.setenv("MYXO_CHAOS_TOKEN_SECONDS", "0.03")
    faults = tuple(Fault(KILL, (name,), step=1 + index, delay=0.2) for index, name in enumerate(killed))
    parent = tmp_path_factory.mktemp("l")  # sockets have short paths
    result = asyncio.run(run_seed(Schedule(3, SHAPE, faults), FastVariant(write_model(tmp_path / "model")), parent, keep=True))
    problems = [problem for problem in result.problems if "names nobody" not in problem]  # on a busy machine its start takes long
    assert problems == [] and result.exit_code == 0
    assert sum(fault.reached > 0 for fault in result.faults) == len(killed)
    root = Path(result.directory) / "runs" / "chaos"
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["audit"], summary["steps"], summary["groups"]["trained"]) == ("ok", SHAPE.steps, SHAPE.steps * SHAPE.groups)
    lent, trainer = (lines(root / "logs" / f"{name}.log") for name in ("rollout-1", "trainer-0"))
    assert killed or any(line["event"] == "first_tokens" for line in lent), "the lent engine generated nothing"
    versions = {line["version"] for line in lent if line["event"] == "awake"} - {-1}
    assert len(versions) > 1, f"it was lent with the versions {versions} alone"
    returned = [line["seconds"] for line in trainer if line["event"] == "engines_offloaded"]
    assert returned and max(returned) < 5, f"handing back took {returned}"
    shutil.rmtree(result.directory)


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
