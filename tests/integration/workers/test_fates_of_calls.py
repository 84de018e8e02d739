"""A call that misbehaves costs itself: those beside it in its process continue, or are made once more where it took the process along."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from shared.process.worker_pool import CallBlocked, CallLate, WorkerDied, WorkerFailed, WorkerPool
from tests.support.tables import rare
from tests.support.waiting import until

SOON = 60.0
"""A deadline that a healthy call does not reach on a slow machine."""

Started = Callable[..., Awaitable[WorkerPool]]

extra = pytest.mark.extra


@pytest.fixture
async def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    monkeypatch.setattr("shared.process.worker_pool.LOOP_SECONDS", 0.5)
    pools: list[WorkerPool] = []

    async def start(block_s: float | None = 1.0, size: int = 1) -> WorkerPool:
        setup = {"block_s": block_s, "notes": str(tmp_path)}
        pools.append(WorkerPool("fateful", size, setup, "tests.support.fateful_worker"))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def ask(pool: WorkerPool, what: str, deadline: float = SOON, alone: bool = False) -> object:
    return (await pool.ask({"verb": "act", "what": what}, "an answer", "the worker", deadline, alone=alone))["process"]


def begun(notes: Path) -> dict[str, int]:
    """How many times each call has begun."""
    return dict(Counter(note.name.rpartition("-")[0] for note in notes.glob("*-*")))


OTHERS = ("wait 1.0", "wait 1.1")


@pytest.mark.parametrize(
    ("what", "error", "words", "times"),
    [
        ("sleep", CallBlocked, "it held up its process for 1 s", (1, 1)),
        rare("spin", CallBlocked, "it held up its process for 1 s", (1, 1)),
        rare("spin in a group", CallBlocked, "in _spin: BlockedCall", (1, 1)),
        rare("swallow", WorkerDied, "process was killed: a call held it up for", (1, 2)),
        ("hold the interpreter", WorkerDied, "process was killed: a call held it up for", (1, 2)),
        rare("leave", WorkerFailed, r"CallExit: os\._exit\(3\)", (1, 1)),
        rare("leave in a thread", WorkerFailed, r"CallExit: os\._exit\(3\)", (1, 1)),
        rare("exit", WorkerFailed, "SystemExit: 4", (1, 1)),
        rare("exit in a task", WorkerFailed, "CallExit: SystemExit: 4", (1, 1)),
        rare("crash", WorkerDied, "ended in the middle of a call: Fatal Python error: Segmentation fault, File", (1, 2)),
        rare("crash in a thread", WorkerDied, "ended in the middle of a call: Fatal Python error: Segmentation fault, File", (1, 2)),
        rare("stop the loop", WorkerDied, "process ended in the middle of a call", (2, 2)),
    ],
)
async def test_a_call_that_misbehaves_costs_itself(
    started: Started, tmp_path: Path, what: str, error: type[Exception], words: str, times: tuple[int, int]
) -> None:
    pool = await started()
    bad, *others = await asyncio.gather(ask(pool, what), *(ask(pool, other) for other in OTHERS), return_exceptions=True)
    assert all(isinstance(other, int) for other in others), others
    assert type(bad) is error
    with pytest.raises(error, match=words):
        raise bad
    assert begun(tmp_path) == {what: times[0]} | dict.fromkeys(OTHERS, times[1])
    assert isinstance(await ask(pool, "wait 0"), int)


@pytest.mark.parametrize("what", ["hang", rare("hang in threads")])
async def test_a_call_that_hangs_holds_up_nobody(started: Started, tmp_path: Path, what: str) -> None:
    pool = await started()
    hanging = [asyncio.create_task(ask(pool, what, deadline)) for deadline in (1.0, 1.5, 2.0)]
    waiting = [asyncio.create_task(ask(pool, "wait until told")) for _ in range(2)]
    found = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(late) for late in found] == [CallLate] * 3
    assert isinstance(await ask(pool, "wait 0"), int), "though three processes should be replaced, and one may be"
    (tmp_path / "told").touch()
    assert len({await one for one in waiting}) == 1
    assert begun(tmp_path) == {what: 3, "wait until told": 2, "wait 0": 1}


@extra
async def test_a_process_that_a_call_forks_answers_nothing(started: Started, tmp_path: Path) -> None:
    pool = await started()
    first, other = await asyncio.gather(ask(pool, "fork"), ask(pool, "wait 0.6"))
    assert first == other == await ask(pool, "wait 0")
    assert begun(tmp_path) == {"fork": 1, "wait 0.6": 1, "wait 0": 1}


@extra
async def test_a_late_call_beside_one_that_blocks_does_not_end_the_process(started: Started, tmp_path: Path) -> None:
    pool = await started(block_s=4.0)
    bad, late, other = await asyncio.gather(ask(pool, "sleep"), ask(pool, "hang", 1.0), ask(pool, "wait 0.5"), return_exceptions=True)
    assert [type(bad), type(late), type(other)] == [CallBlocked, CallLate, int]
    assert begun(tmp_path) == {"sleep": 1, "hang": 1, "wait 0.5": 1}


async def test_a_call_alone_has_a_process_for_which_nobody_waits(started: Started, tmp_path: Path) -> None:
    pool = await started()
    waiting = [asyncio.create_task(ask(pool, "wait until told")) for _ in range(2)]
    alone = await ask(pool, "wait 0", alone=True)
    assert alone != await ask(pool, "wait 0")
    (tmp_path / "told").touch()  # nor has it waited for the others
    assert {await one for one in waiting} == {await ask(pool, "wait 0")}
    with pytest.raises(WorkerDied):
        await ask(pool, "crash", alone=True)
    assert len(pool.processes) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, rare(signal.SIGSTOP)])
async def test_a_call_whose_process_somebody_else_ends_is_made_once_more(started: Started, tmp_path: Path, number: signal.Signals) -> None:
    """Twice in a row it is the call's own fate: the kernel kills what takes all memory."""
    pool = await started()
    told = asyncio.create_task(ask(pool, "wait until told"))
    await until(lambda: begun(tmp_path) == {"wait until told": 1}, "the call")
    send(pool, number)
    await until(lambda: begun(tmp_path) == {"wait until told": 2}, "the call in another process")
    (tmp_path / "told").touch()
    assert isinstance(await told, int)
    hanging = asyncio.create_task(ask(pool, "hang"))
    for times in (1, 2):
        await until(lambda times=times: begun(tmp_path).get("hang") == times, "the call")
        send(pool, number)
    with pytest.raises(WorkerDied, match="killed, or stopped by a signal"):
        await hanging
    assert isinstance(await ask(pool, "wait 0"), int)


def send(pool: WorkerPool, number: signal.Signals) -> None:
    """Sends a signal to the workers of a pool, not to their watchdogs."""
    for process in pool.processes:
        for pid in process.members():
            if pid != process.pid:
                os.kill(pid, number)
