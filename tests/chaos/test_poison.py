"""A part of all groups is bad in every way that there is, and services are killed: the run reaches its end and the ledger holds."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.run.run_directory import RunDirectory
from shared.process.child_process import with_parent
from tests.chaos import poisonous_rollout
from tests.chaos.poisonous_rollout import KINDS, REFERENCES, kind_of
from tests.integration.myxo.command import COMMAND_SECONDS, ROOT, Myxo, children, kill_child, wait_for
from tests.integration.myxo.conftest import config_file, myxo
from tests.support.fork_server import ForkServerPopen
from tests.support.poison import POISON

__all__ = ["config_file", "myxo"]

GROUPS_A_STEP = 12
VICTIMS = ("services.reward", "services.buffer", "poisonous_rollout")


@pytest.mark.extra
@pytest.mark.timeout(2 * COMMAND_SECONDS)
@pytest.mark.parametrize(("every", "steps"), [(4, 14), (10, 28)])
def test_a_run_with_poison_and_deaths_reaches_its_end(
    every: int, steps: int, myxo: Myxo, config_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group in ``every`` is bad, so that each kind comes within so many steps."""
    monkeypatch.setattr(poisonous_rollout, "EVERY", every)
    rollout = {"num_rollout": steps, "rollout_batch_size": GROUPS_A_STEP, "max_staleness": 1}
    config = config_file(rollout=rollout, reward={"rm_type": "math_verify"}, trainer={"save_interval": 2})
    root, output = tmp_path / "runs" / "test", tmp_path / "output"
    with output.open("wb") as out:
        launcher = ForkServerPopen(
            with_parent([sys.executable, "-m", "tests.chaos.poisonous_myxo", "up", str(config)]),
            cwd=ROOT,
            env={**myxo.environment, "POISON_EVERY": str(every)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    myxo.started.append(launcher)  # type: ignore[arg-type]
    trained = root / "checkpoints" / "steps"
    for number, victim in enumerate(VICTIMS):
        goal = 2 + steps // 5 * number
        wait_for(f"step {goal}", lambda goal=goal: launcher.poll() is not None or (trained.is_file() and int(trained.read_text()) >= goal))
        assert launcher.poll() is None, output.read_text()
        dead = kill_child(launcher.pid, victim)
        wait_for(
            f"another {victim}",
            lambda victim=victim, dead=dead: any(victim in line and pid != dead for pid, line in children(launcher.pid).items()),
        )
    assert launcher.wait(COMMAND_SECONDS) == 0, output.read_text()

    summary = json.loads((root / "summary.json").read_text())
    assert (summary["steps"], summary["audit"]) == (steps, "ok")
    assert summary["groups"]["trained"] == steps * GROUPS_A_STEP
    reasons = dead_groups(myxo, root)
    bad = {f"g{number:08d}" for number in range(summary["groups"]["admitted"]) if kind_of(f"g{number:08d}")}
    assert set(reasons) == bad
    assert {kind_of(group) for group in reasons} == set(KINDS), "every kind was tried"
    for group, reason in reasons.items():
        kind = kind_of(group)
        assert kind is not None
        _, pattern = {**POISON, **REFERENCES}[kind]
        assert re.search(pattern, reason), f"{kind}: {reason}"
    said = (RunDirectory(root).log("reward-0")).read_text()
    assert "Traceback" not in said and "12 12 12" not in said


def dead_groups(myxo: Myxo, root: Path) -> dict[str, str]:
    """The dead groups of a run that has ended, and why they died."""
    code, out, err = myxo.run("samples", root, "--status", "dead", "--limit", "0", "--json")
    assert (code, err) == (0, "")
    return {row["group"]: row["reason"] for row in map(json.loads, out.splitlines())}
