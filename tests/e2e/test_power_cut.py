"""A loss of power takes the last records of the ledger, and leaves a checkpoint that they speak of."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import ROOT, LaunchedRun
from tests.e2e.test_deaths import trained

SECONDS = 600


@pytest.mark.extra
@pytest.mark.timeout(5 * SECONDS)
def test_a_run_goes_on_after_its_servers_were_rolled_back(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, root, steps = small_run("dark", steps=100, staleness=1), tmp_path / "runs" / "dark", 100
    flags = ["--save-interval", "2", "--keep-checkpoints", "100"]

    def torn(after: int) -> int:
        """Kills a run some steps after that one; returns the step of its newest checkpoint."""
        with LaunchedRun(config, root, "dark", flags) as run:
            run.until(f"{after} steps", lambda cards: trained(cards) >= after + 4, SECONDS)
            run.kill(run.process.pid)
            run.process.wait(60)
        (root / "servers.json").unlink()  # of servers that are dead; the next launcher writes its own
        return max(int(path.name.removeprefix("step_")) for path in (root / "checkpoints").glob("step_*"))

    synced = torn(0)
    servers = ("nats", "valkey")
    for name in servers:
        shutil.copytree(root / name, tmp_path / f"synced-{name}")
    assert torn(synced + 2) > synced
    for name in servers:
        shutil.rmtree(root / name)
        shutil.copytree(tmp_path / f"synced-{name}", root / name)
    with LaunchedRun(config, root, "dark", flags) as run:
        assert run.wait(SECONDS) == 3, run.said()
        assert "`myxo repair RUN` says what would be lost" in run.said()

    looked, mended = (myxo("repair", str(root), *words) for words in ((), ("--yes",)))
    assert looked.returncode == 1 and "they are put aside" in looked.stdout, looked.stdout + looked.stderr
    assert mended.returncode == 0, mended.stdout + mended.stderr
    with LaunchedRun(config, root, "dark", flags) as run:
        assert run.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)


def myxo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "myxo.main", *words], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
