"""What a launcher decides: the waits between a dying process's lives, when it is given up, a full disk, and how services are stopped."""

import asyncio
import contextlib
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.commands import up
from myxo.launch import launcher
from myxo.launch.launcher import Launch
from myxo.launch.run_servers import DiskFull, DiskWatch
from myxo.launch.supervisor import BackOff, RunProgress, SameDeaths
from myxo.run.run_directory import RunDirectory
from tests.support.small_disk import small_disk
from tests.support.tables import table


def test_waits_double_up_to_the_longest() -> None:
    backoff = BackOff()
    waits = [backoff.died(lived=1.0, ready=True) for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_healthy_life_forgives() -> None:
    backoff = BackOff()
    for _ in range(5):
        backoff.died(lived=1.0, ready=True)
    assert backoff.died(lived=BackOff.healthy, ready=True) == BackOff.first
    assert backoff.died(lived=1.0, ready=True) == 2 * BackOff.first


def test_gives_up_on_what_never_gets_ready() -> None:
    backoff = BackOff()
    waits = [backoff.died(lived=1.0, ready=False) for _ in range(BackOff.most)]
    assert None not in waits[:-1]
    assert waits[-1] is None


def test_one_ready_life_starts_the_count_anew() -> None:
    backoff = BackOff()
    for _ in range(BackOff.most - 1):
        backoff.died(lived=1.0, ready=False)
    assert backoff.died(lived=1.0, ready=True) is not None
    assert backoff.deaths_unready == 0


def test_long_lives_that_never_get_ready_are_given_up_too() -> None:
    """An engine that fails after minutes of loading is as hopeless as one that fails at once."""
    backoff = BackOff()
    waits = [backoff.died(lived=10 * BackOff.healthy, ready=False) for _ in range(BackOff.most)]
    assert waits == [BackOff.first] * (BackOff.most - 1) + [None]


def test_servers_come_back_at_once_the_first_time() -> None:
    backoff = BackOff(at_once=True)
    assert [backoff.died(lived=1.0, ready=True) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=60))
def test_waits_stay_within_their_bounds(deaths: list[tuple[float, bool]]) -> None:
    backoff, unready = BackOff(), 0
    for lived, ready in deaths:
        wait = backoff.died(lived, ready)
        unready = 0 if ready else unready + 1
        assert (wait is None) == (unready >= BackOff.most)
        if wait is not None:
            assert BackOff.first <= wait <= BackOff.longest
            if lived >= BackOff.healthy:
                assert wait == BackOff.first


def given_up(*deaths: tuple[int, str, int]) -> list[bool]:
    same = SameDeaths()
    return [same.died(*death) for death in deaths]


def test_three_of_one_kind_without_a_step_in_between_are_enough() -> None:
    assert given_up((1, "block 3 of 0x7f", 5), (1, "block 4 of 0x7e", 5), (1, "block 5 of 0x7d", 5)) == [False, False, True]


@table(
    "deaths",
    [
        [(1, "a", 0), (1, "b", 0), (1, "a", 0), (1, "b", 0), (1, "c", 0)],
        [(1, "a", 3), (1, "a", 3), (1, "a", 4), (1, "a", 4)],
        [(1, "a", 0), (1, "a", 1), (1, "a", 2), (1, "a", 3)],
        [(1, "a", 0), (2, "a", 0), (1, "a", 0)],
        [(-9, "a", 0)] * 5,
        [(-15, "", 0)] * 5,
        [(143, "", 0)] * 5,
        [(1, "rank 1 ended (exitcode: -9)", 0)] * 5,
    ],
)
def test_others_are_not(deaths: list[tuple[int, str, int]]) -> None:
    assert True not in given_up(*deaths)


def test_a_death_from_outside_neither_counts_nor_forgives() -> None:
    assert given_up((1, "a", 0), (-9, "", 0), (1, "a", 0), (-15, "", 0), (1, "a", 0))[-1]


def test_errors_that_take_turns_are_counted_each() -> None:
    """Of several ranks now the one that failed is heard, now one that lost it."""
    assert given_up((1, "bad index", 5), (1, "a rank went away", 5), (1, "bad index", 5), (1, "bad index", 5)) == [False] * 3 + [True]


@pytest.mark.parametrize(
    "deaths", [[(-9, "", 5)] * 10, [(1, letter, 5) for letter in "abcdefghij"], [(-15, "", 5)] * 8 + [(1, "a", 5)] * 2]
)
def test_whatever_it_dies_of_there_is_an_end(deaths: list[tuple[int, str, int]]) -> None:
    assert given_up(*deaths) == [False] * 9 + [True]
    assert not any(given_up(*deaths[:9], (-9, "", 6), *deaths[:8])), "a finished step begins the count anew"


def test_a_crash_is_of_its_own_making() -> None:
    assert given_up(*[(-11, "", 0)] * 3)[-1]


def test_a_service_that_says_nothing_dies_of_its_exit_code() -> None:
    assert given_up(*[(1, "", 0)] * 3)[-1]


def test_a_training_endpoint_gets_on_by_its_answers() -> None:
    progress, same = RunProgress(), SameDeaths()
    for answered in (0, 3, 5, 5, 0, 1):  # of two lives of its trainer
        gauges = {"client_commands": answered + 2.0, "client_commands_replayed": 2.0}
        deaths = [same.died(-9, "", progress.seen(0, gauges)) for _ in range(3)]
        assert True not in deaths, answered
    assert progress.seen(7, {}) == 7 + 3


def test_what_a_server_accepts_without_an_answer_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    serving: Any = up.Serving.__new__(up.Serving)
    trainer = SimpleNamespace(service="trainer", state="ready", engine="", at=0.0, gauges={})
    vars(serving).update(_signals=[], _statuses=[trainer], _progress=RunProgress(), _disk=SimpleNamespace(text=""))
    vars(serving).update(_tick_servers=lambda *_: None, _situation=lambda *_: None, _waits=SimpleNamespace(see=lambda *_: None))
    answered, done = iter((0, 3, 3, 5, 5)), list[int]()

    def tick(now: float, steps: int, hold: bool) -> str | None:
        done.append(steps)
        trainer.gauges = {"client_commands": next(answered, None)}
        return "died" if trainer.gauges["client_commands"] is None else None

    monkeypatch.setattr(up, "TICK_SECONDS", 0)
    supervisor = SimpleNamespace(note_ready=lambda _: None, statuses=lambda _: [], tick=tick)
    polling, shown = SimpleNamespace(done=lambda: False), SimpleNamespace(close=lambda: None)
    assert asyncio.run(serving._until_end(None, supervisor, polling, shown)) == "died"
    assert done == [0, 0, 1, 1, 2, 2], "the bus is not asked for what was accepted"


def test_a_full_disk_is_told_and_then_over(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        watch = DiskWatch(disk.path, 100.0)
        assert not watch.look(0.0) and not watch.text
        disk.fill()
        assert not watch.look(1.0) and "No space left on device" in watch.text
        assert not watch.look(31.0) and "for 30 s now, given up after 100 s" in watch.text
        disk.clear()
        assert watch.look(32.0) and not watch.text
        assert not watch.look(33.0), "once"
        disk.fill()
        watch.look(200.0)
        watch.look(299.0)
        with pytest.raises(DiskFull, match="for 101 s; the run stops, `myxo up` with the same config continues once there is room"):
            watch.look(301.0)


def test_nothing_that_has_no_room_is_an_error_at_the_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "1m") as disk:
        directory = RunDirectory(disk.path)
        directory.logs.mkdir()
        disk.fill()
        with directory.held(), directory.open_log("launcher") as log:
            with contextlib.suppress(OSError):
                log.write("a line for which there is no room\n" * 4096)
            assert directory.is_held()
        assert not directory.is_held()


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
