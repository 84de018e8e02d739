"""An engine of ``speculation = "auto"`` speculates while that gives more than it costs, by rates at like load."""

import random
from collections.abc import Callable

from services.rollout.speculation_switch import ENOUGH, TURN_SECONDS, WINDOW_SECONDS, LoadWindows, RateWindow, SpeculationTrial, has_turn
from shared.schema.service_messages import ServiceStatus
from tests.support.tables import table

START, END = 10.0, 6000.0
Rates = Callable[[float, bool], float]
"""Tokens/s at a time, with speculation or without."""


def switches(rates: Rates, load: Callable[[float, bool], int] = lambda now, speculates: 32) -> list[tuple[float, bool, str]]:
    """Returns when an engine is restarted, whether it speculates then, and why; its rates have 5 % of noise."""
    trial, windows, noise = SpeculationTrial(), LoadWindows(), random.Random(1)
    now, tokens, speculates, life, found = 0.0, 0.0, True, 0, list[tuple[float, bool, str]]()
    while now < END:
        now += 1.0
        tokens += rates(now, speculates) * noise.gauss(1.0, 0.05)
        trial.runs(speculates, now)
        if (window := windows.note(now, tokens, load(now, speculates), life)) is not None:
            trial.note(window)
        if not now % 5 and (words := trial.decide(now, START)) is not None:
            speculates, life, now = not speculates, life + 1, now + START
            found.append((now, speculates, words))
    return found


def constant(gain: float) -> Rates:
    return lambda now, speculates: 1000.0 * (gain if speculates else 1.0)


@table(
    ("rates", "speculates", "restarts"),
    [
        (constant(1.6), True, range(2, 3)),  # to measure plain decoding, and back
        (constant(1.08), True, range(2, 3)),
        (constant(0.6), False, range(5, 14)),  # and tries again, ever more seldom
        (constant(1.0), None, range(1, 4)),  # either, and no restart for nothing
        (lambda now, on: 1000.0 if not on else 600.0 if now < 2500 else 1700.0, True, range(4, 10)),  # the draft becomes better
        (lambda now, on: 1000.0 if not on else 1600.0 if now < 2500 else 500.0, False, range(3, 10)),  # the policy leaves it behind
        (lambda now, on: (1000.0 if not on else 1600.0) / (1 + now / 2000), True, range(2, 12)),  # both slow down: contexts grow
        (lambda now, on: 0.0, True, range(1)),
    ],
)
def test_it_ends_with_what_is_faster(rates: Rates, speculates: bool | None, restarts: range) -> None:
    found = switches(rates)
    changed = [speculates for _, speculates, _ in found]
    assert speculates in (None, (changed or [True])[-1]) and len(found) in restarts, found
    assert changed == [bool(index % 2) for index in range(len(changed))]


def test_time_without_its_gain_is_bounded() -> None:
    """Of 6,000 s an engine that is slower with speculation runs few with it, and says why it stopped by its figures."""
    found = switches(constant(0.5))
    ends = [*(at for at, _, _ in found[1:]), END]
    slow = found[0][0] + sum(end - begin for (begin, speculates, _), end in zip(found, ends, strict=True) if speculates)
    assert slow < 0.15 * END
    assert "it costs more than it gives: 5" in found[2][2] and "at about 32 requests" in found[2][2], found


def test_rates_at_other_loads_are_not_compared() -> None:
    found = switches(constant(0.2), lambda now, speculates: 64 if speculates else 4)
    assert all("tokens/s" not in words for _, _, words in found) and [speculates for _, speculates, _ in found][:2] == [False, True]


def test_windows_are_of_one_load_and_one_state() -> None:
    windows, found = LoadWindows(), list[RateWindow | None]()
    for second in range(60):
        running = 0 if 12 <= second < 14 else 8 if second < 30 else 24
        found.append(windows.note(float(second), 100.0 * second, running, state=second > 45))
    ends = [second for second, window in enumerate(found) if window is not None]
    assert ends == [10, 24, 40, 56] and {window for window in found if window is not None} == {RateWindow(6, 100.0), RateWindow(9, 100.0)}
    assert ends[0] == WINDOW_SECONDS and ENOUGH > 2  # a variance is known of them


def replica(number: int, state: str = "ready") -> ServiceStatus:
    return ServiceStatus(service="rollout", instance=f"r{number}", host="h", pid=1, http="", state=state, version=1, at=0.0)


def test_replicas_that_decide_at_the_same_time_restart_one_after_another() -> None:
    all_ready = [replica(number) for number in range(3)]
    turns = [{one.instance for one in all_ready if has_turn(one.instance, all_ready, at)} for at in range(int(3 * TURN_SECONDS))]
    assert set().union(*turns) == {"r0", "r1", "r2"} and max(map(len, turns)) == 1
    assert any(not one for one in turns), "a pause between two, in which the first is seen to be away"
    away = [replica(0, "starting"), *all_ready[1:]]
    assert not any(has_turn(one.instance, away, at) for one in away for at in range(int(3 * TURN_SECONDS)))
    assert has_turn("r0", [], 0.0), "alone"
    lent = [all_ready[0], replica(1, "asleep")]
    assert any(has_turn("r0", lent, at) for at in range(int(TURN_SECONDS))), "an engine on a trainer's GPUs is none of those that serve"
