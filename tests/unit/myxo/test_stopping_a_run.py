"""How a launcher stops its services: the trainer may end its step, and another signal ends it at once."""

import asyncio
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from myxo.launch import launcher
from myxo.launch.launcher import Launch


@pytest.mark.parametrize(("signals", "again", "killed"), [(1, False, []), (1, True, ["trainer"]), (0, False, ["trainer"])])
async def test_a_trainer_may_end_its_step_where_somebody_stops_the_run(
    signals: int, again: bool, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "TRAINER_STOP_SECONDS", 0.2)
    monkeypatch.setattr(launcher, "STOP_SECONDS", 0.2)
    running, said = ["trainer"], list[str]()
    run: Any = SimpleNamespace(_signals=[signal.SIGINT] * signals, _say=said.append, _log=SimpleNamespace(warning=lambda *_, **__: None))
    run._wait = partial(Launch._wait, run)

    async def step() -> None:
        while not said and not supervisor.killed:
            await asyncio.sleep(0.01)
        if again:
            run._signals.append(signal.SIGINT)
        else:
            running.clear()

    supervisor: Any = SimpleNamespace(killed=[], terminate=lambda *_: None, running=lambda *_: bool(running))
    supervisor.kill = lambda: supervisor.killed.extend(running)
    async with asyncio.timeout(60):
        await asyncio.gather(Launch._stop(run, supervisor), step())
    assert supervisor.killed == killed and len(said) == signals
