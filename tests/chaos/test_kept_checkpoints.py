"""A run continues from an older checkpoint where its newest one is torn, or gone: production's checkpoints and ledger, with the
scripted engine and optimizer step."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.process.child_process import with_parent
from tests.chaos.fast.fast_config import RUN, FastShape, write_model
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.observer import Observer
from tests.chaos.schedule import Schedule
from tests.chaos.variant import Start
from tests.e2e.test_continuing import myxo
from tests.support.waiting import until

SECONDS = 300.0
SCHEDULE = Schedule(0, FastShape(steps=12, replicas=1, save_interval=3, eval_interval=50), ())


@contextlib.asynccontextmanager
async def launched(start: Start, directory: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The run's launcher; its output is appended to ``output``."""
    for link in start.links.values():
        await link.open()
    with (directory / "output").open("ab") as output:
        process = subprocess.Popen(
            with_parent(start.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **start.environment},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for link in start.links.values():
                link.close()


@pytest.mark.extra
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("fault", ["truncated", "gone"])
async def test_a_run_goes_on_from_the_oldest_kept_checkpoint(tmp_path: Path, fault: str) -> None:
    variant, root = FastVariant(write_model(tmp_path / "model")), tmp_path / "runs" / RUN
    start = variant.prepare(tmp_path, SCHEDULE)
    async with launched(start, tmp_path), Observer(root, start.addresses) as observer:
        await until(lambda: observer.steps >= 8 and len(checkpoints(root)) >= 2, "8 steps", SECONDS)
    (root / "servers.json").unlink()
    oldest, newest = checkpoints(root)[-2:]
    if fault == "gone":
        shutil.rmtree(newest)
    else:
        largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    log = root / "logs" / "trainer-0.log"
    before = log.stat().st_size
    async with launched(start, tmp_path) as process:
        code = await asyncio.wait_for(asyncio.to_thread(process.wait), SECONDS)
    said = log.read_bytes()[before:].decode()
    assert code == 0, (tmp_path / "output").read_text()[-4000:] + said[-4000:]
    assert ("checkpoint_damaged" in said) is (fault == "truncated"), said
    assert oldest.name.removeprefix("step_").lstrip("0") in said
    audit = myxo("audit", str(root))
    assert audit.returncode == 0, audit.stdout + audit.stderr


def checkpoints(root: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(path.parent for path in (root / "checkpoints").glob("step_*/checkpoint.json"))
