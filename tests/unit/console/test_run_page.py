"""What the page *Run* is answered: its charts, curves of several runs, and the marks of what happened."""

import math

from services.console.pages.run import MOST_MARKS_SHOWN, MOST_SERIES, PANELS, curves, marks, panel_series, panels
from shared.schema.service_messages import ServiceEvent
from shared.schema.weight_messages import ReplicaPush, WeightsPushed
from shared.view.metric_history import MetricHistory, PushHistory, RunMarks


def history(**series: list[float]) -> MetricHistory:
    """Returns metrics (``train__loss`` is ``train/loss``) whose step k was written at 100 + 10 k."""
    found = MetricHistory()
    for tag, values in series.items():
        for step, value in enumerate(values):
            found.put(tag.replace("__", "/"), step, value, 100.0 + 10 * step)
    return found


def event(what: str, at: float, instance: str = "trainer-0", detail: str = "") -> ServiceEvent:
    return ServiceEvent(service=instance.partition("-")[0], instance=instance, what=what, detail=detail, at=at)


def told(*events: ServiceEvent) -> list[tuple[float, str, str]]:
    services = RunMarks()
    for one in events:
        services.take(one)
    return [(mark.at, mark.what, mark.text) for mark in services.marks]


def test_a_run_without_values_has_no_charts() -> None:
    found = panels("r", [MetricHistory()], {})
    assert found.panels == [] and found.further == [] and found.steps is None and found.hours is None


def test_charts_are_those_that_some_run_has_values_for() -> None:
    own = history(rollout__raw_reward=[0.0, 1.0], custom__score=[1.0], rollout__rollout_log_probs=[-2.0])
    other = history(train__loss=[1.0], rewards__a__b__mean=[0.5])
    own.put("eval/held out", 4, 0.5, 120.0)
    own.put("eval/held out/version", 4, 4.0, 120.0)
    own.put("eval/held out-pass@1", 4, 0.5, 120.0)
    found = panels("r", [own, other], {})
    assert {panel.panel: [item.label for item in panel.series] for panel in found.panels} == {
        "reward": ["raw_reward"],
        "held_out": ["held out"],
        "parts": ["a/b"],
        "loss": ["loss"],
        "entropy": ["estimate"],
    }
    assert found.further == ["custom/score", "eval/held out-pass@1", "eval/held out/version"]
    assert found.steps == (0, 1) and found.hours == 10 / 3600


def test_a_panel_has_no_more_series_than_can_be_told_apart() -> None:
    parts = next(panel for panel in PANELS if panel.panel == "parts")
    drawn, left_out = panel_series(parts, [f"rewards/{index}/mean" for index in range(50)], [])
    assert len(drawn) == MOST_SERIES and left_out == 50 - MOST_SERIES


def test_curves_of_two_runs_and_of_a_negative() -> None:
    runs = {"own": history(a=[1.0, 2.0]), "other": history(b=[3.0])}
    found = curves(runs, ["a", "-a", "b", "a", "nothing"], "step", -math.inf, math.inf, 100, 1).curves
    assert [(item.run, item.tag, item.values) for item in found] == [
        ("own", "a", [1.0, 2.0]),
        ("own", "-a", [-1.0, -2.0]),
        ("other", "b", [3.0]),
    ]
    hours = curves(runs, ["a"], "hours", 0.001, math.inf, 100, 1).curves[0]
    assert hours.steps == [1] and hours.x == [10 / 3600]


def test_marks_of_a_failure_and_the_launcher_that_says_more_of_it() -> None:
    assert told(
        event("joined", 1), event("failed", 2, detail="boom"), event("restarted", 3, detail="killed by signal 9"), event("joined", 4)
    ) == [(3.0, "restarted", "killed by signal 9")]
    assert told(event("joined", 1), event("failed", 2, detail="boom"), event("restarted", 3), event("joined", 4)) == [
        (3.0, "restarted", "boom")
    ]
    assert told(event("joined", 1), event("restarted", 3, detail="a"), event("joined", 4), event("restarted", 5, detail="b")) == [
        (3.0, "restarted", "a"),
        (5.0, "restarted", "b"),
    ]


def test_marks_of_a_service_that_nobody_saw_die() -> None:
    assert told(event("joined", 1), event("joined", 5)) == [(5.0, "restarted", "started again")]
    assert told(event("joined", 1), event("left", 2), event("joined", 5), event("fenced", 6)) == []
    assert told(event("joined", 1), event("failed", 2), event("left", 2), event("joined", 5)) == [(2.0, "failed", "")]
    assert told(event("joined", 1), event("joined", 2, "trainer-1")) == []
    took_over = (event("joined", 1), event("took_over", 2), event("joined", 5))
    assert told(*took_over) == [(2.0, "took_over", ""), (5.0, "restarted", "started again")], "which ends nobody's life"


def test_marks_lie_on_the_axis_that_is_asked_for() -> None:
    metrics, pushes, services = history(train__loss=[1.0, 1.0, 1.0]), PushHistory(), RunMarks()
    services.take(event("failed", 115.0, detail="boom"))
    pushes.push(WeightsPushed(version=1, replicas=[ReplicaPush(replica="a"), ReplicaPush(replica="b", failure="commit: late")], at=105.0))
    pushes.push(WeightsPushed(version=2, replicas=[ReplicaPush(replica="a")], at=110.0))
    by_step = marks(metrics, pushes, services, "step", -math.inf, math.inf)
    assert [(mark.x, mark.kind, mark.text) for mark in by_step.marks] == [
        (0.5, "push failed", "version 1 b: commit: late"),
        (1.0, "push", "version 2"),
        (1.5, "failed", "boom"),
    ]
    assert [mark.x for mark in marks(metrics, pushes, services, "hours", 8 / 3600, math.inf).marks] == [10 / 3600, 15 / 3600]
    assert marks(MetricHistory(), PushHistory(), RunMarks(), "step", -math.inf, math.inf).marks == []


def test_of_very_many_marks_the_newest_of_each_kind_are_told() -> None:
    metrics, pushes, services = history(train__loss=[1.0, 1.0]), PushHistory(), RunMarks()
    services.take(event("failed", 1.0))
    for version in range(MOST_MARKS_SHOWN + 10):
        pushes.push(WeightsPushed(version=version, replicas=[], at=50.0 + version))
    found = marks(metrics, pushes, services, "step", -math.inf, math.inf)
    assert found.left_out == 10 and found.marks[0].kind == "failed" and found.marks[-1].text == f"version {MOST_MARKS_SHOWN + 9}"
