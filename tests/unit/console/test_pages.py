"""What the pages *Run*, *Weights* and *Clients* are answered, and curves that keep spikes, gaps and the newest of what is written twice."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.pages.clients import MOST_LOSSES, ClientHistory
from services.console.pages.run import MOST_MARKS_SHOWN, MOST_SERIES, PANELS, curve, curves, extremes, marks, panel_series, panels
from services.console.pages.weights import pace, version_rows, weight_events, weights_now
from services.console.run_histories import MetricFiles
from services.console.run_source import RunSource
from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.data.metric_files import METRIC_LINES
from shared.schema.messages import Command, CommandOutcome
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsLive, WeightsPushed
from shared.view.metric_history import MOST, MOST_TAGS, MetricHistory, MetricSeries, PushHistory, RunMarks, moving_mean


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


def series(values: dict[int, float], at: dict[int, float] | None = None) -> MetricSeries:
    found = MetricSeries()
    for step, value in values.items():
        found.put(step, value, (at or {}).get(step, float(step)))
    return found


def test_a_spike_of_one_step_among_many_is_seen() -> None:
    long = series({step: 1000.0 if step == 77_777 else step % 7 for step in range(100_000)})
    found = curve("r", "t", long, points=200)
    assert len(found.x) <= 202 and found.total == 100_000 and max(value for value in found.values if value is not None) == 1000.0
    assert found.steps[0] == 0 and found.steps[-1] == 99_999 and found.steps == sorted(found.steps)
    near = curve("r", "t", long, first=77_770, last=77_790, points=200)
    assert near.steps == list(range(77_770, 77_791)), "a part of it has every step"


def test_values_that_are_no_numbers_leave_gaps_and_are_told() -> None:
    found = curve("r", "t", series({0: 1.0, 1: math.nan, 2: math.inf, 3: -math.inf, 4: 3.0}), window=2)
    assert found.values == [1.0, None, None, None, 3.0] and found.smoothed == [1.0, 1.0, None, None, 3.0]
    assert [(item.step, item.value) for item in found.unusual] == [(1, "nan"), (2, "inf"), (3, "-inf")] and found.unusual_total == 3
    assert found.newest == 3.0 and curve("r", "t", series({0: math.nan})).newest is None


def test_a_step_that_was_trained_again_counts_as_it_was_written_last() -> None:
    found = series({step: 1.0 for step in range(5)})
    assert found.put(3, 2.0, 10.0) and found.put(4, 2.0, 11.0)
    assert not found.put(4, 9.0, 3.5), "an older file is read after a newer event"
    assert found.values.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0] and found.steps.tolist() == [0, 1, 2, 3, 4]


def test_hours_since_the_run_began_ascend_even_if_early_steps_were_made_again() -> None:
    found = curve("r", "t", series({0: 0.0, 1: 1.0, 2: 2.0}, at={0: 3600.0, 1: 14400.0, 2: 7200.0}), began=0.0, first=1.5)
    assert found.x == [2.0, 4.0] and found.steps == [2, 1] and found.values == [2.0, 1.0]


def test_a_huge_value_spoils_no_mean_but_those_that_it_is_in() -> None:
    assert moving_mean(np.array([1e300, 1.0, 2.0, 3.0]), 2).tolist()[2:] == [1.5, 2.5]
    assert moving_mean(np.array([1.0]), 50).tolist() == [1.0] and moving_mean(np.array([]), 5).tolist() == []


@given(st.lists(st.floats(), max_size=300), st.integers(10, 50))
def test_extremes_are_few_ascending_and_hold_the_ends_and_the_greatest(values: list[float], points: int) -> None:
    array = np.array(values, dtype=np.float64)
    chosen = extremes(array, points)
    assert len(chosen) <= points + 4 and np.all(np.diff(chosen) > 0)
    if values:
        assert chosen[0] == 0 and chosen[-1] == len(values) - 1
    finite = array[np.isfinite(array)]
    if len(finite):
        kept = array[chosen]
        assert np.nanmax(kept[np.isfinite(kept)]) == finite.max() and np.nanmin(kept[np.isfinite(kept)]) == finite.min()


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60), st.integers(2, 80))
def test_the_moving_mean_is_that_of_the_numbers_in_its_window(values: list[float], window: int) -> None:
    for index, mean in enumerate(moving_mean(np.array(values), window)):
        part = [value for value in values[max(0, index + 1 - window) : index + 1] if not math.isnan(value)]
        assert mean == pytest.approx(np.mean(part), rel=1e-9, abs=1e-6) if part else math.isnan(mean)


def test_a_history_keeps_so_many_metrics_and_says_how_many_more_there_were() -> None:
    history = MetricHistory()
    for index in range(MOST_TAGS + 3):
        history.put(f"rewards/{index}/mean", 0, 1.0, 0.0)
    assert len(history.series) == MOST_TAGS and history.left_out == 3
    assert not history.put("rewards/0/mean", -1, 1.0, 0.0) and not history.put("rewards/0/mean", 2**40, 1.0, 0.0)


def test_times_lie_between_the_steps_that_were_written_around_them() -> None:
    history = MetricHistory()
    assert history.step_at(np.array([5.0])).tolist() == [0.0]
    for step in range(4):
        history.put("train/loss", step, 0.0, 100.0 + 10 * step)
    assert history.step_at(np.array([0.0, 105.0, 120.0, 999.0])).tolist() == [0.0, 0.5, 2.0, 3.0]


def status(instance: str, version: int, service: str = "rollout", state: str = "ready") -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="", state=state, version=version, at=0.0)


def pushed(version: int, at: float, replicas: list[ReplicaPush], failure: str = "", **figures: float) -> WeightsPushed:
    return WeightsPushed.model_validate({"version": version, "at": at, "replicas": replicas, "failure": failure, **figures})


def push_history() -> PushHistory:
    """Version 1 came at the second try, and to one of two; 2 failed; 3 was read from disk."""
    history = PushHistory()
    history.push(pushed(1, 10.0, [ReplicaPush(replica="a", failure="receive: cut off")], failure="cut off"))
    figures = {"joining": 1.0, "transfer": 2.0, "activation": 0.5, "seconds": 3.5, "stall": 0.25, "bytes": 4_000_000_000}
    figures["check"] = 0.25
    parts = [
        ReplicaPush(replica="a", paused=2.5, pausing=0.125, loading=1.5, activating=0.0625),
        ReplicaPush(replica="b", loading=1.75, failure="commit: late"),
    ]
    history.push(pushed(1, 20.0, parts, **figures))
    history.live(WeightsLive(version=1, replicas=["a"], seconds=3.5, bytes=4_000_000_000, at=20.0))
    history.push(pushed(2, 30.0, [ReplicaPush(replica="b", failure="offer: busy")], failure="every replica declined the offer"))
    history.live(WeightsLive(version=3, replicas=["a", "b"], seconds=7.0, bytes=10, at=40.0))
    history.take(ServiceEvent(service="rollout", instance="b", what="caught_up", detail="version 1 from a in 1.0 s", at=25.0))
    history.take(ServiceEvent(service="rollout", instance="b", what="fenced", detail="x", at=21.0))
    assert not history.take(ServiceEvent(service="rollout", instance="b", what="joined", at=1.0))
    return history


def test_versions_newest_first_with_who_has_them() -> None:
    found = version_rows(push_history(), [status("a", 3), status("b", 1), status("trainer-0", 4, "trainer")], lambda version: 2 * version)
    three, two, one = found.versions
    assert (three.version, three.step, three.served, three.seconds, three.transfer, three.at) == (3, 6, True, 7.0, None, 40.0)
    assert [(part.replica, part.now) for part in three.replicas] == [("a", True), ("b", False)]
    assert not two.served and two.failure == "every replica declined the offer" and two.seconds is None and two.at == 30.0
    assert one.served and one.attempts == 2 and one.at == 20.0 and one.failure == "cut off"
    assert (one.joining, one.pausing, one.transfer, one.check, one.activation) == (1.0, 0.125, 2.0, 0.25, 0.5)
    assert (one.seconds, one.stall) == (3.5, 0.25)
    assert (one.replicas[0].activating, one.replicas[1].activating) == (0.0625, None)
    assert one.paused == 2.5 and one.gb_per_s == 2.0
    assert [(part.replica, part.now, part.failure) for part in one.replicas] == [("a", False, ""), ("b", True, "commit: late")]


def test_a_version_whose_push_failed_and_that_a_replica_has_all_the_same() -> None:
    (row,) = version_rows(push_history(), [status("b", 2)], int, below=3, limit=1).versions
    assert row.served and row.failure and [(part.replica, part.now) for part in row.replicas] == [("b", True)]


def test_versions_come_in_pages() -> None:
    history = PushHistory()
    for version in range(5):
        history.push(pushed(version, version, [ReplicaPush(replica="a")]))
    first = version_rows(history, [], int, None, 2)
    assert [row.version for row in first.versions] == [4, 3] and first.next == 3 and first.total == 5
    second = version_rows(history, [], int, first.next, 3)
    assert [row.version for row in second.versions] == [2, 1, 0] and second.next is None
    assert version_rows(PushHistory(), [], int).versions == []


def test_who_serves_what_now() -> None:
    now = weights_now([status("b", -1, state="fenced"), status("a", 3), status("trainer-0", 4, "trainer")], push_history())
    assert (now.live, now.trained) == (3, 4)
    assert [(part.replica, part.version, part.behind, part.state) for part in now.replicas] == [
        ("a", 3, 0, "ready"),
        ("b", -1, 4, "fenced"),
    ]
    repaired = weights_now([status("a", 0), status("trainer-0", 0, "trainer")], push_history())
    assert (repaired.live, repaired.trained, repaired.replicas[0].behind) == (0, 0, 0), "the cut versions are past"
    nothing = weights_now([], PushHistory())
    assert (nothing.live, nothing.trained, nothing.replicas) == (-1, -1, [])


def test_pace_is_of_the_pushes_that_came_through() -> None:
    found = pace(push_history())
    assert found.versions == [1]
    assert {series.name: series.values for series in found.series} == {
        "transfer": [2.0],
        "joining": [1.0],
        "pausing": [0.125],
        "check": [0.25],
        "activation": [0.5],
        "longest pause": [2.5],
        "stall of the trainer": [0.25],
        "speed": [2.0],
    }


def test_failures_have_names_and_the_newest_come_first() -> None:
    found = weight_events(push_history(), 3)
    assert [(event.at, event.who, event.what, event.bad) for event in found.events] == [
        (30.0, "b", "push of version 2 failed", True),
        (25.0, "b", "caught up", False),
        (21.0, "b", "fenced", True),
    ]
    assert found.left_out == 2


def test_what_is_kept_is_bounded() -> None:
    history = PushHistory()
    for version in range(MOST + 5):
        history.live(WeightsLive(version=version, replicas=[], seconds=0.0, bytes=0, at=1.0))
    assert len(history.versions) == MOST and min(history.versions) == 5


TRAINED, SAMPLED = "a-0123456789abcdef:train:0", "a-0123456789abcdef:sample:0"


async def test_steps_losses_samples_and_failures() -> None:
    history = ClientHistory(RunSource("run", None, None, None))
    for number in range(MOST_LOSSES + 2):
        history.take(Command(client=TRAINED, number=number, at=1.0, verb="forward_backward"))
        history.take(CommandOutcome(client=TRAINED, number=number, at=2.0, figures={"loss:sum": float(number), "tokens": 2.0}))
    history.take(Command(client=TRAINED, number=900, at=3.0, verb="optim_step"))
    history.take(CommandOutcome(client=TRAINED, number=900, at=4.0, figures={"updates": 1.0}))
    history.take(Command(client=TRAINED, number=901, at=5.0, verb="save_weights"))
    history.take(CommandOutcome(client=TRAINED, number=901, at=6.0, error="the name is taken", category="user"))
    history.take(Command(client=SAMPLED, number=1, at=7.0, verb="sample"))
    sampled, trained = await history.newest(10)
    assert (sampled.client, sampled.waiting, sampled.losses) == (SAMPLED, 1, [])
    assert (trained.steps, trained.waiting, trained.failed, trained.error) == (1, 0, 1, "the name is taken")
    assert (len(trained.losses), trained.losses[-1], trained.tokens) == (MOST_LOSSES, (MOST_LOSSES + 1) / 2, 2 * (MOST_LOSSES + 2))
    history.take(CommandOutcome(client=TRAINED, number=902, at=6.5, figures={"loss:sum": math.nan, "tokens": 2.0}))
    [_, trained] = await history.newest(10)
    assert len(trained.losses) == MOST_LOSSES and trained.losses[-2:] == [(MOST_LOSSES + 1) / 2, None]
    history.take(CommandOutcome(client=SAMPLED, number=1, at=8.0, figures={"tokens": 5.0, "sequences": 2.0}))
    [first] = await history.newest(1)
    assert (first.sequences, first.waiting, first.losses) == (2, 0, [])


async def test_the_metrics_of_a_copied_run_are_the_copys(tmp_path: Path, run_config: RunConfig) -> None:
    root, copy, found = run_config.run.root, tmp_path / "backup" / run_config.run.name, MetricHistory()
    (root / "tensorboard").mkdir(parents=True)
    (root / "tensorboard" / METRIC_LINES).write_text('[1.0, 0, {"train/loss": 1.0}]\n')
    runs.freeze(root, run_config)
    shutil.copytree(root, copy)
    (root / "tensorboard" / METRIC_LINES).write_text('[1.0, 0, {"train/loss": 2.0}]\n')
    await MetricFiles(copy).read(found)
    assert found.series["train/loss"].values.tolist() == [1.0]
