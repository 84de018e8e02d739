"""How a run is shown: pace, plain lines, the panel."""

import io

import pytest
from rich.console import Console

from myxo.display.progress_display import Display, Pace, panel
from shared.runtime.safe_text import duration
from shared.view.run_view import EvaluationLine, InstanceLine, RunView
from tests.support.tables import table

VIEW = RunView(
    run="tiny",
    steps=3,
    of=10,
    bound=1,
    reward=0.5,
    evaluations={"gsm8k": EvaluationLine(0.25, 2), "math": EvaluationLine(-1.0, 0, newest=1, lag=2, missing=3, prompts=8)},
    staleness_mean=0.75,
    staleness_max=1,
    generated_per_s=12_345,
    trained_per_s=800,
    computed_per_s=1100,
    live_version=3,
    in_flight=8,
    queues={"task": (3, 4)},
    services=(InstanceLine("rollout", "rollout-0", "ready", 3, 2, "4 groups"),),
    restarts=2,
)


def test_pace_needs_two_finished_steps() -> None:
    pace = Pace()
    pace.note(0, 5)
    assert pace.left(10) is None, "what was finished before this launch says nothing"
    pace.note(100, 6)
    assert pace.left(10) is None
    pace.note(102, 7)
    assert pace.left(10) == pytest.approx(6.0)
    pace.note(109, 7)
    assert pace.left(10) == pytest.approx(6.0)
    pace.note(110, 1)
    assert pace.left(10) is None, "the run was begun anew"


def test_pace_counts_steps_that_were_not_seen_one_by_one() -> None:
    pace = Pace()
    for now, steps in ((0, 0), (1, 1), (5, 9)):
        pace.note(now, steps)
    assert pace.left(19) == pytest.approx(5.0)


def test_pace_is_of_late() -> None:
    pace = Pace()
    for step in range(100):
        pace.note(step * 10.0, step)
    for step in range(100, 140):
        pace.note(1000.0 + step, step)
    assert pace.left(150) == pytest.approx(11.0)


@table(("seconds", "text"), [(0, "0s"), (59.9, "59s"), (130, "2m10s"), (3600 * 3 + 300, "3h05m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def lines(*shown: tuple[RunView, float]) -> list[str]:
    out = io.StringIO()
    plain = Display(Console(file=out), started=0.0)
    for view, now in shown:
        plain.show(view, now)
    return out.getvalue().splitlines()


def test_a_plain_line_says_it_all() -> None:
    (line,) = lines((VIEW, 61.0))
    for part in (
        "step 3/10",
        "reward 0.500",
        "eval/gsm8k 0.250 (v2)",
        "eval/math -1.000 (v0 to v1, 2 behind, 5 of 8 prompts)",
        "staleness 0.75 mean 1 max",
        "v3",
        "replicas 1/1",
        "restarts 2",
    ):
        assert part in line
    for part in ("gen 12.3k tokens/s", "train 800 tokens/s", "queues task 3+4", "1m01s"):
        assert part in line


def test_no_new_line_where_nothing_happened() -> None:
    busy = RunView(run="tiny", steps=3, of=10, bound=1, generated_per_s=1.0)
    busier = RunView(run="tiny", steps=3, of=10, bound=1, generated_per_s=2.0)
    assert len(lines((busy, 0.0), (busier, 60.0))) == 1


def test_seconds_that_pass_are_nothing_that_happened() -> None:
    waiting = [RunView(run="tiny", steps=0, of=10, bound=1, waiting_for=f"rollout-0 to start ({s} s so far)") for s in (1, 60)]
    assert len(lines((waiting[0], 0.0), (waiting[1], 60.0))) == 1


def test_plain_lines_keep_their_distance_but_the_end_is_told() -> None:
    views = [RunView(run="tiny", steps=step, of=10, bound=1) for step in range(11)]
    said = lines(*((view, view.steps * 1.0) for view in views))
    assert [line.split()[1] for line in said] == ["0/10", "5/10", "10/10"]


def test_the_panel_shows_figures_and_services() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(panel(VIEW, 70.0, 30.0))
    text = out.getvalue()
    for part in (
        "3/10",
        "0.500",
        "eval/gsm8k",
        "0.250 (v2)",
        "-1.000 (v0 to v1,",
        "800 tokens/s, 1100 computing",
        "0.75 mean, 1 max of 1",
        "rollout-0",
        "4 groups",
        "restarted 2×",
        "1m10s, about 30s left",
    ):
        assert part in text, part


def test_an_empty_panel_says_what_it_waits_for() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(panel(RunView(run="tiny", steps=0, of=10, bound=1, waiting_for="SFT step 3/10")))
    assert "waiting for SFT step 3/10" in out.getvalue()


def test_a_terminal_gets_the_live_panel_and_a_file_plain_lines() -> None:
    out = io.StringIO()
    shown = Display(Console(file=out, force_terminal=True, width=100), started=0.0)
    shown.show(VIEW, 1.0)
    shown.show(VIEW, 2.0)
    shown.close()
    assert "\x1b[1A" in out.getvalue(), "the second panel is drawn over the first"
    (line,) = lines((VIEW, 1.0), (VIEW, 2.0))
    assert "\x1b" not in line
