"""When a service that dies of the same again and again is given up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from myxo.commands import serve
from myxo.launch.supervisor import RunProgress, SameDeaths
from tests.support.tables import table


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
    serving: Any = serve.Serving.__new__(serve.Serving)
    trainer = SimpleNamespace(service="trainer", state="ready", engine="", at=0.0, gauges={})
    vars(serving).update(_signals=[], _statuses=[trainer], _progress=RunProgress(), _disk=SimpleNamespace(text=""))
    vars(serving).update(_tick_servers=lambda *_: None, _situation=lambda *_: None, _waits=SimpleNamespace(see=lambda *_: None))
    answered, done = iter((0, 3, 3, 5, 5)), list[int]()

    def tick(now: float, steps: int, hold: bool) -> str | None:
        done.append(steps)
        trainer.gauges = {"client_commands": next(answered, None)}
        return "died" if trainer.gauges["client_commands"] is None else None

    monkeypatch.setattr(serve, "TICK_SECONDS", 0)
    supervisor = SimpleNamespace(note_ready=lambda _: None, statuses=lambda _: [], tick=tick)
    polling, shown = SimpleNamespace(done=lambda: False), SimpleNamespace(close=lambda: None)
    assert asyncio.run(serving._until_end(None, supervisor, polling, shown)) == "died"
    assert done == [0, 0, 1, 1, 2, 2], "the bus is not asked for what was accepted"
