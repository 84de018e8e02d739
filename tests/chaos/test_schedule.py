"""Schedules are their seeds', and a failing one is made as small as it can be."""

from dataclasses import replace

import pytest

from tests.chaos.command import main, minimised
from tests.chaos.fast.fast_config import FastShape
from tests.chaos.schedule import KILL, KINDS, PHASES, PROCESSES, TARGETS, Fault, Schedule, drawn


def test_a_seed_has_one_schedule():
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert Schedule.from_json(drawn(7).as_json()) == drawn(7)


def test_every_kind_target_and_phase_comes_within_two_hundred_seeds():
    faults = [fault for seed in range(200) for fault in drawn(seed).faults]
    assert {(fault.kind, target) for fault in faults for target in fault.targets} == {
        (kind, target) for kind in KINDS for target in TARGETS[kind]
    }
    assert {fault.phase for fault in faults} == set(PHASES)
    assert any(len(fault.targets) == 2 for fault in faults)
    assert {fault.kind for seed in range(20) for fault in drawn(seed, (KILL,)).faults} == {KILL}


def test_deterministic_schedules_are_synchronous():
    assert {drawn(seed, deterministic=True).shape.staleness for seed in range(20)} == {0}


def test_what_is_needed_to_fail_is_kept():
    faults = tuple(Fault(KILL, (target,), step=index) for index, target in enumerate(PROCESSES))
    schedule = Schedule(1, FastShape(), faults)
    needed = {PROCESSES[2], PROCESSES[5]}

    def fails(tried: Schedule) -> bool:
        return needed <= {target for fault in tried.faults for target in fault.targets}

    least = minimised(schedule, fails)
    assert least == replace(schedule, faults=(faults[2], faults[5]))
    assert minimised(schedule, lambda _: False) is None


def test_the_command_prints_schedules_and_refuses_unknown_kinds(capsys: pytest.CaptureFixture[str]):
    assert main(["--seeds", "3:5", "--print"]) == 0
    said = capsys.readouterr().out
    assert str(drawn(3)) in said and str(drawn(4)) in said
    with pytest.raises(SystemExit):
        main(["--faults", "earthquake"])
    assert "'earthquake' is none of kill -9" in capsys.readouterr().err
