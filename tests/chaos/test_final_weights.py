"""A run does not end without its final weights, wherever its trainer is killed on the way to them: production's exports, checkpoints and
ledger, with the scripted engine and optimizer step."""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.chaos.fast.fast_config import RUN, FastShape, write_model
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.observer import Observer
from tests.chaos.schedule import Schedule
from tests.chaos.test_kept_checkpoints import launched
from tests.chaos.variant import Start
from tests.support.waiting import until

SECONDS = 300.0
STEPS = 4
SCHEDULE = Schedule(0, FastShape(steps=STEPS, replicas=1, save_interval=2, eval_interval=50), ())
LAST = str(STEPS - 1)
"""The rollout id of the last step, by which its export is named."""


def prepared(directory: Path) -> tuple[FastVariant, Start]:
    """A run that exports its policy at each checkpoint, too."""
    variant = FastVariant(write_model(directory / "model"))
    start, config = variant.prepare(directory, SCHEDULE), directory / "run.toml"
    text = config.read_text()
    assert text.count("[trainer]\n") == 1
    config.write_text(text.replace("[trainer]\n", f'[trainer]\nsave_hf = "{directory}/policy/{{rollout_id}}"\n'))
    return variant, start


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("held", [LAST, pytest.param("hf", marks=pytest.mark.extra)])
async def test_a_trainer_that_is_killed_before_its_final_weights_are_there_writes_them_in_its_next_life(tmp_path: Path, held: str) -> None:
    """The run's end is recorded behind both: a node that leaves with it, or a limit at the end, cuts neither off."""
    variant, start = prepared(tmp_path)
    root = tmp_path / "runs" / RUN
    root.mkdir(parents=True)
    (root / "held").write_text(held)
    async with launched(start, tmp_path) as process, Observer(root, start.addresses) as observer:
        await until(lambda: (root / f"writing-{held}").exists(), f"the export {held}", SECONDS)
        await until(lambda: (root / "checkpoints" / f"step_{STEPS:08d}").exists(), "the last checkpoint", SECONDS)
        assert not observer.finished
        assert variant.processes(tmp_path, process.pid).send(["trainer-0"], signal.SIGKILL)
        (root / "held").unlink()
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), SECONDS) == 0, (tmp_path / "output").read_text()[-4000:]
    for path in (root / "hf", tmp_path / "policy" / LAST):
        assert json.loads((path / "trained.json").read_text()) == {"steps": STEPS, "run": RUN}
        assert (path / "model.safetensors").is_file()
    events = [json.loads(line) for line in (root / "logs" / "launcher.log").read_text().splitlines()]
    died = [(event["died"], event["reason"]) for event in events if event["event"] == "service_died"]
    assert died[0] == ("trainer-0", "signal 9")
    assert died[1:] in ([], [("trainer-0", "exit code 0")]), "where the launcher, on a busy machine, hears late of the end"


@pytest.mark.extra
@pytest.mark.timeout(3 * SECONDS)
async def test_a_finished_run_that_lacks_its_final_weights_gets_them(tmp_path: Path) -> None:
    _, start = prepared(tmp_path)
    root, output = tmp_path / "runs" / RUN, tmp_path / "output"

    async def end() -> str:
        said = output.stat().st_size if output.exists() else 0
        async with launched(start, tmp_path) as process:
            code = await asyncio.wait_for(asyncio.to_thread(process.wait), SECONDS)
        words = output.read_bytes()[said:].decode()
        assert code == 0, words[-4000:]
        return words

    await end()
    expected = (root / "hf" / "model.safetensors").read_bytes()
    shutil.rmtree(root / "hf")
    begun = (root / "logs" / "rollout-0.log").stat().st_size
    words = await end()
    assert f"Run {RUN} is finished without its final weights in {root / 'hf'}" in words.replace("\n", "")
    assert (root / "hf" / "model.safetensors").read_bytes() == expected
    assert f"Run {RUN} is finished: {STEPS} steps." in await end()
    assert (root / "logs" / "rollout-0.log").stat().st_size == begun, "no engine was started for it"
