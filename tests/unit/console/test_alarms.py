"""Each alarm by what raises it, and by what just does not; which services are away, by what the registry shows; and what cannot be read."""

import math
import os
import re
import shlex
import sqlite3
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from myxo.main import parse
from services.console import run_histories, run_source
from services.console.run_histories import EventHistory, OtherRuns, RunIndex, RunPipeline
from services.console.run_source import FILE, LEDGER, SAMPLES, AbsentServices, ChangeFeed, RunSource
from shared.bus import runs
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.config.service_sections import MonitoringSection
from shared.data.metric_files import METRIC_LINES
from shared.runtime.errors import BadMessage
from shared.schema.ledger import GroupDead, GroupsAdmitted, GroupsDropped, RunFinished
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import WeightsPushed
from shared.view.alarms import (
    COMPARED_STEPS,
    DISK_BYTES,
    DISK_SHARE,
    ENTROPY_LEFT,
    ENTROPY_LOW,
    EQUAL_SHARE,
    FIRST_STEPS,
    LATELY_S,
    LATELY_STEPS,
    LEAST_STEPS,
    MEMORY_SHARE,
    PUSH_GROWTH,
    PUSH_SECONDS,
    SPECULATION_LENGTH,
    STALE_SHARE,
    TRUNCATED_SHARE,
    UNREAD_SHARE,
    AlarmKind,
    Room,
    Symptoms,
    alarms,
    health_view,
    standing,
    symptoms,
)
from shared.view.flow_history import REWARD, DeadGroup, FlowHistory, StepRecord
from shared.view.group_index import GroupIndex, GroupQuery
from shared.view.metric_history import PUSH_METRICS, MetricHistory
from tests.support.run_config import SERVED, run_config
from tests.support.tables import table


def step(number: int, **given: Any) -> StepRecord:
    return StepRecord(number, 0, None, 0.0, 1.0, None, {0: 10}, **{"groups": 8, "samples": 32, **given})


def metrics(count: int, **values: Any) -> dict[int, dict[str, float]]:
    """Values by step; a function is called with the step."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {index: {name: value(index) if callable(value) else value for name, value in named.items()} for index in range(count)}


def status(**given: Any) -> ServiceStatus:
    return ServiceStatus(service="buffer", instance="buffer-0", host="h", pid=1, http="", state="ready", at=1.0, **given)


def agreement(difference: float, tokens: float = 100.0) -> dict[str, float]:
    return {"train__agreement_abs_diff": difference * tokens, "train__agreement_tokens": tokens}


def rewarded(*rewards: float) -> list[StepRecord]:
    """Steps with these mean rewards, each of both right and wrong samples."""
    return [step(index, reward=reward, lowest=0.0, highest=1.0) for index, reward in enumerate(rewards)]


RAISED: list[tuple[AlarmKind, Symptoms]] = [
    (AlarmKind.AWAY, Symptoms(away={"NATS": "no answer"})),
    (AlarmKind.RESTARTS, Symptoms(restarts={"rollout-0": (2, "after signal 9")})),
    (AlarmKind.HELD_BACK, Symptoms(statuses=[status(held_back="the store is full")])),
    (AlarmKind.NOT_FINITE, Symptoms(metrics=metrics(3, train__loss=math.nan))),
    (AlarmKind.NOT_FINITE, Symptoms(metrics=metrics(9, train__grad_norm=lambda index: math.inf if index == 6 else 1.0))),
    (AlarmKind.LOGPROBS, Symptoms(metrics=metrics(3, **agreement(0.11)))),
    (AlarmKind.LOGPROBS, Symptoms(metrics=metrics(3, **agreement(math.nan)))),
    (AlarmKind.ENTROPY, Symptoms(metrics=metrics(30, train__entropy_loss=lambda index: 2.0 if index < 20 else 0.1))),
    (AlarmKind.ENTROPY, Symptoms(metrics=metrics(30, rollout__rollout_log_probs=lambda index: -1.0 if index < 20 else -0.05))),
    (AlarmKind.SAME_REWARD, Symptoms(steps=[step(index, equal_rewards=8, reward=0.0, lowest=0.0, highest=0.0) for index in range(3)])),
    (AlarmKind.NOT_RISEN, Symptoms(steps=rewarded(0.5, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.5), finished=True)),
    (AlarmKind.NOT_RISEN, Symptoms(steps=[step(900)], rewards=dict.fromkeys(range(901), 0.5), finished=True)),
    (AlarmKind.NO_SIGNAL, Symptoms(steps=[step(index, equal_rewards=6) for index in range(5)])),
    (AlarmKind.TRUNCATION, Symptoms(steps=[step(index, truncated=12) for index in range(5)])),
    (AlarmKind.UNREAD, Symptoms(steps=[step(index, unread=12) for index in range(5)])),
    (AlarmKind.DEAD, Symptoms(dead=[DeadGroup("g1", "too old", 1.0)])),
    (AlarmKind.DROPPED, Symptoms(stale_share=0.3)),
    (AlarmKind.PUSH_GROWS, Symptoms(push_seconds=[1.0] * 15 + [3.0] * 5)),
    (AlarmKind.SPECULATION, Symptoms(speculation_off={"rollout-0": "it costs more than it gives"})),
    (AlarmKind.SPECULATION, Symptoms(metrics=metrics(3, rollout__spec_accept_length=1.02))),
    (AlarmKind.DISK, Symptoms(disk=Room(1 << 30, 1 << 40))),
    (AlarmKind.MEMORY, Symptoms(memory=Room(1 << 30, 64 << 30))),
]


BOUNDS: dict[AlarmKind, list[str]] = {
    AlarmKind.RESTARTS: [f"{LATELY_S / 60:g} minutes"],
    AlarmKind.NOT_FINITE: [f"last {LATELY_STEPS} steps"],
    AlarmKind.LOGPROBS: [f"last {LATELY_STEPS} steps", f"({MonitoringSection().logprob_alarm:g}) nats"],
    AlarmKind.ENTROPY: [f"last {LATELY_STEPS} steps", f"first {FIRST_STEPS}", f"{ENTROPY_LEFT:.0%}", f"{ENTROPY_LOW:g} nats"],
    AlarmKind.SAME_REWARD: [f"{LEAST_STEPS} steps"],
    AlarmKind.NOT_RISEN: [f"{COMPARED_STEPS} steps"],
    AlarmKind.NO_SIGNAL: [f"{EQUAL_SHARE:.0%}", f"last {LATELY_STEPS} batches"],
    AlarmKind.TRUNCATION: [f"{TRUNCATED_SHARE:.0%}", f"last {LATELY_STEPS} batches"],
    AlarmKind.UNREAD: [f"{UNREAD_SHARE:.0%}", f"last {LATELY_STEPS} batches"],
    AlarmKind.DEAD: [f"{LATELY_S / 60:g} minutes"],
    AlarmKind.DROPPED: [f"{STALE_SHARE:.0%}", f"{LATELY_S / 60:g} minutes"],
    AlarmKind.PUSH_GROWS: [f"last {LATELY_STEPS}", f"first {FIRST_STEPS}", f"{PUSH_GROWTH:g} times", f"{PUSH_SECONDS:g} s"],
    AlarmKind.SPECULATION: [f"{SPECULATION_LENGTH:g} tokens", f"last {LATELY_STEPS} steps"],
    AlarmKind.DISK: [f"{DISK_SHARE:.0%}", f"{DISK_BYTES >> 30} GiB"],
    AlarmKind.MEMORY: [f"{MEMORY_SHARE:.0%}"],
}
"""What the page says of each alarm that has a bound."""


def test_the_page_lists_every_alarm_with_its_bounds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bottlenecks.md").read_text().split("\n## Alarms\n")[1]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE))
    assert list(rows)[1:] == [kind.value for kind in AlarmKind]
    for kind, figures in BOUNDS.items():
        told = rows[kind.value].replace(" %", "%")
        assert [figure for figure in figures if figure not in told] == [], kind


@table(("kind", "found"), RAISED)
def test_an_alarm_is_raised_by_its_symptom_alone(kind: AlarmKind, found: Symptoms, run_config: RunConfig) -> None:
    raised = alarms(found, run_config)
    assert [alarm.kind for alarm in raised] == [kind]
    assert raised[0].title and raised[0].meaning.endswith(".") and raised[0].remedy.endswith(".")
    if raised[0].shown_by:
        assert parse(shlex.split(raised[0].shown_by)[1:]).run == run_config.run.name


@table(
    ("kind", "changes"),
    [
        (AlarmKind.NO_SIGNAL, {"use_opd": True}),
        (AlarmKind.SAME_REWARD, {"use_opd": True}),
        (AlarmKind.NO_SIGNAL, {"advantage_estimator": "ppo"}),
        (AlarmKind.NO_SIGNAL, {"turn_advantage_coef": 0.5}),
        (AlarmKind.SAME_REWARD, {"loss_type": "sft_loss"}),
        (AlarmKind.SAME_REWARD, {"turn_advantage_coef": 0.5}),
        (AlarmKind.SAME_REWARD, {"custom_advantage_function_path": "own:advantages"}),
    ],
)
def test_equal_rewards_are_no_trouble_where_something_else_teaches(kind: AlarmKind, changes: dict[str, Any], run_config: RunConfig) -> None:
    algorithm = run_config.algorithm.model_copy(update=changes)
    assert alarms(dict(RAISED)[kind], run_config.model_copy(update={"algorithm": algorithm})) == []


def test_equal_rewards_are_as_the_trainer_compares_them(run_config: RunConfig) -> None:
    """Within a role, which the ledger does not tell; steps whose metrics are lost say nothing."""
    found = Symptoms(steps=[step(index) for index in range(5)], metrics=metrics(2, rollout__zero_std_groups=0.7))
    assert [alarm.kind for alarm in alarms(found, run_config)] == [AlarmKind.NO_SIGNAL]


def test_groups_dropped_for_their_age_under_mask_are_not_answered_with_mask(run_config: RunConfig) -> None:
    rollout = run_config.rollout.model_copy(update={"staleness_policy": "mask"})
    [alarm] = alarms(Symptoms(stale_share=0.3), run_config.model_copy(update={"rollout": rollout}))
    assert "mask" not in alarm.remedy and "append_response_tokens" in alarm.remedy


def test_every_kind_of_alarm_can_be_raised() -> None:
    assert {kind for kind, _ in RAISED} == set(AlarmKind)


def test_every_kind_of_alarm_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bottlenecks.md").read_text()
    assert [kind.value for kind in AlarmKind if f"\n| {kind.value} |" not in page] == []


@table(
    "found",
    [
        Symptoms(),
        Symptoms(metrics=metrics(3, train__loss=1.0, train__grad_norm=1.0, **agreement(0.09))),
        Symptoms(metrics=metrics(3, **agreement(5.0, tokens=0.0))),
        Symptoms(metrics=metrics(9, train__loss=lambda index: math.nan if index == 0 else 1.0)),
        Symptoms(metrics=metrics(12, train__entropy_loss=lambda index: 2.0 if index < 7 else 0.1)),
        Symptoms(metrics=metrics(30, train__entropy_loss=0.1)),
        Symptoms(metrics=metrics(30, train__entropy_loss=lambda index: 4.0 if index < 20 else 0.5)),
        Symptoms(steps=[step(0, equal_rewards=8, truncated=32)] + [step(index, equal_rewards=4, truncated=3) for index in range(1, 6)]),
        Symptoms(steps=[step(0, groups=0, samples=0)] * 3),
        Symptoms(steps=[step(index, equal_rewards=8, truncated=32, unread=32) for index in range(2)]),
        Symptoms(steps=[step(index, reward=0.0, lowest=0.0, highest=0.0) for index in range(2)]),
        Symptoms(steps=rewarded(0.1, 0.2, 0.1, 0.3, 0.4, 0.3, 0.5, 0.6, 0.5), finished=True),
        Symptoms(steps=rewarded(*[0.5] * 8), finished=True),
        Symptoms(steps=rewarded(*[0.5] * 9)),
        Symptoms(steps=rewarded(*[0.5] * 10)[1:], finished=True),
        Symptoms(push_seconds=[0.01] * 15 + [0.05] * 5),
        Symptoms(push_seconds=[1.0, 9.0]),
        Symptoms(disk=Room(40 << 30, 1 << 40), memory=Room(10 << 30, 64 << 30)),
        Symptoms(disk=Room(1 << 30, 8 << 30), memory=Room(0, 0)),
    ],
)
def test_what_is_no_reason_raises_none(found: Symptoms, run_config: RunConfig) -> None:
    assert alarms(found, run_config) == []


def event(what: str, at: float, detail: str = "") -> ServiceEvent:
    return ServiceEvent(service="rollout", instance="rollout-0", what=what, detail=detail, at=at)


def test_symptoms_are_of_lately(run_config: RunConfig) -> None:
    history, now = FlowHistory(), 10_000.0
    for at, detail in ((100.0, "old"), (9_900.0, "after signal 9"), (9_950.0, "after exit 1")):
        history.service_event(event("restarted", at, detail))
    history.apply(GroupDead(group="g00000001", reason="old", at=100.0))
    history.apply(GroupsDropped(groups=["g00000004"] * 98, reason="stale", at=200.0))
    history.apply(GroupsDropped(groups=["g00000005", "g00000006"], reason="equal rewards", at=9_990.0))
    assert symptoms(history, [status()], now, {}, None, None).stale_share == 0.0, "lately none was dropped for its age"
    history.apply(GroupsDropped(groups=["g00000002", "g00000003"], reason="stale", at=9_990.0))
    found = symptoms(history, [status()], now, {}, None, None)
    assert found.restarts == {"rollout-0": (2, "after exit 1")} and found.dead == [] and found.stale_share == 0.5
    view = health_view(history, run_config, [status(gauges={"dead": 7})], found)
    gone = next(line for line in view.services if line.instance == "rollout-0")
    assert (gone.state, gone.restarts, gone.error) == ("", 3, "after exit 1"), "all restarts count, since the run began"
    assert view.dead == 7 and view.reasons[0].reason == "old"
    assert [line.at for line in view.events] == [9_950.0, 9_900.0, 100.0]


def test_steps_of_a_warm_start_and_of_pushes_hide_no_trouble_of_the_training(run_config: RunConfig) -> None:
    history = FlowHistory()
    broken = {"train/loss": math.nan, "rollout/raw_reward": 1.0, "perf/train_push_time": 1.0}
    warm = [(number, {"sft/loss": 1.0}) for number in range(1, 2501)]
    pushes = [(number, {"perf/update_weights_time": 1.0, "eval/held_out": 0.5}) for number in range(1, 9)]
    for number, values in [*warm, *((number, broken) for number in range(3)), *pushes]:
        history.metric(MetricsWritten(role="actor", step=number, values=values, at=1.0))
    assert list(history.metrics) == [0, 1, 2] and history.metrics[0] == broken
    assert [alarm.kind for alarm in alarms(symptoms(history, [], 1.0, {}, None, None), run_config)] == [AlarmKind.NOT_FINITE]


@table(
    ("told", "times"),
    [
        (["joined", "joined", "failed", "left", "joined"], 2),
        (["joined", "left", "joined"], 0),
        (["joined", "failed", "left", "restarted", "joined", "restarted", "joined"], 2),
    ],
)
def test_restarts_count_where_no_launcher_tells_of_them(told: list[str], times: int) -> None:
    history = FlowHistory()
    for index, what in enumerate(told):
        history.service_event(event(what, 9_900.0 + index, "OSError" * (what == "failed")))
    assert history.failures.restarts["rollout-0"] == times
    agent, one = FlowHistory(), {"service": "node", "instance": "trainer-node-0", "detail": "", "at": 9_900.0}
    for what in told:
        agent.service_event(ServiceEvent(what=what, **one))
    assert agent.failures.restarts["trainer-node-0"] == told.count("restarted"), "its trainer tells"
    reason = "OSError" if "failed" in told else ""
    assert symptoms(history, [], 9_950.0, {}, None, None).restarts == ({"rollout-0": (times, reason)} if times else {})


def test_a_run_that_is_not_at_work_is_judged_at_its_last_record(tmp_path: Path) -> None:
    history = FlowHistory()
    history.service_event(event("restarted", 90.0))
    history.apply(GroupDead(group="g00000001", reason="old", at=100.0))
    found = standing(history, [], {}, tmp_path, live=False)
    assert len(found.dead) == 1 and (found.restarts, found.disk, found.memory) == ({}, None, None)
    found = standing(history, [], {}, tmp_path, live=True)
    assert found.dead == [] and found.disk is not None and found.memory is not None


def test_foreign_text_and_times_are_made_fit(run_config: RunConfig) -> None:
    history = FlowHistory()
    history.service_event(event("failed", math.nan, "\x1b[2J<script>\u202e\n" + "x" * 5000))
    view = health_view(history, run_config, [], symptoms(history, [], 1.0, {"a\x07": "b\u202e"}, None, None))
    line = view.events[0]
    assert (
        line.at == 0.0 and "\x1b" not in line.what and "\u202e" not in line.detail and len(line.detail) < 200 and "\n" not in line.instance
    )
    assert "\x07" not in view.alarms[0].title


KINDS = ("buffer", "reward", "rollout", "trainer")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, bus={"registry_ttl": 10})


def statuses(at: float, *without: str, **states: str) -> list[ServiceStatus]:
    """A status of each kind, renewed at ``at`` by a clock that is a day ahead."""
    return [
        ServiceStatus(service=kind, instance=f"{kind}-0", host="h", pid=1, http="", state=states.get(kind, "ready"), at=at + 86400)
        for kind in KINDS
        if kind not in without
    ]


def test_all_is_well_while_all_renew(config: RunConfig) -> None:
    services = AbsentServices()
    for second in range(0, 60, 2):
        assert services.look(config, statuses(second), second, second) == {}


def test_what_has_not_started_yet_is_told_as_such(config: RunConfig) -> None:
    absent = AbsentServices().look(config, statuses(0, "trainer"), 0, 0)
    assert {name: away.why for name, away in absent.items()} == {"trainer": "not started yet"}
    services = AbsentServices()
    assert services.look(config, statuses(0, trainer="starting"), 0, 0) == {}, "the first start is no trouble"


def test_one_that_falls_silent_is_away_from_its_last_sign_on_until_it_speaks(config: RunConfig) -> None:
    services = AbsentServices()
    services.look(config, statuses(0), 0, 100)
    silent = [*statuses(4, "buffer"), *[status for status in statuses(0) if status.service == "buffer"]]
    assert services.look(config, silent, 2, 102) == services.look(config, silent, 4, 104) == {}
    absent = services.look(config, silent, 6, 106)
    assert [*absent] == ["buffer-0"] and absent["buffer-0"].since == 100 and "silent" in absent["buffer-0"].why
    gone = services.look(config, statuses(8, "buffer"), 12, 112)
    assert [*gone] == ["buffer"] and gone["buffer"].since == 100 and "gone" in gone["buffer"].why
    again = services.look(config, statuses(14, buffer="starting"), 14, 114)
    assert again["buffer-0"].why == "starting again"
    assert services.look(config, statuses(16), 16, 116) == {}


def test_a_replica_that_left_is_not_missed_while_another_is_there(config: RunConfig) -> None:
    services = AbsentServices()
    second = ServiceStatus(service="rollout", instance="rollout-1", host="h", pid=1, http="", state="ready", at=1)
    services.look(config, [*statuses(0), second], 0, 0)
    assert services.look(config, statuses(2), 2, 2) == {}


def test_nothing_is_expected_of_a_run_that_is_over() -> None:
    services = AbsentServices()
    assert services.look(None, [], 0, 0) == {}


def test_a_critic_and_a_gateway_are_needed_where_the_run_has_them(tmp_path: Path) -> None:
    config = run_config(tmp_path, algorithm={"advantage_estimator": "ppo"}, gateway={"gateway_replicas": 1})
    assert set(AbsentServices().look(config, statuses(0), 0, 0)) == {"critic", "gateway"}


def test_a_run_of_myxo_serve_needs_neither_buffer_nor_rewards(tmp_path: Path) -> None:
    config = run_config(tmp_path, **SERVED)
    assert set(AbsentServices().look(config, [], 0, 0)) == {"rollout", "trainer", "gateway"}


def test_a_looker_that_was_held_up_calls_nobody_silent(config: RunConfig) -> None:
    services = AbsentServices()
    services.look(config, statuses(0), 0, 0)
    assert services.look(config, statuses(0), 60, 60) == {}


def write_metrics(root: Path, tag: str, steps: range) -> None:
    """Writes the lines of metrics of a run's directory anew."""
    (root / "tensorboard").mkdir(parents=True, exist_ok=True)
    lines = root / "tensorboard" / METRIC_LINES
    lines.unlink(missing_ok=True)
    lines.write_text("".join(f'[{step}.5, {step}, {{"{tag}": 1.0}}]\n' for step in steps))


async def test_versions_that_the_stream_has_dropped_are_known_by_the_metrics(tmp_path: Path) -> None:
    async def read(*_given: object, **_named: object) -> AsyncIterator[tuple[int, Any]]:
        for version in (5, 6):
            yield version, WeightsPushed(version=version, replicas=[], seconds=2.0, at=1.0)

    write_metrics(tmp_path, PUSH_METRICS["seconds"], range(3, 7))
    source: Any = SimpleNamespace(directory=tmp_path, life="a", live=True, names=Subjects("r"), followers=[], read=read, feed=ChangeFeed())
    history = EventHistory(source)
    await history.follow()
    pushes = {version: [push.seconds for push in item.pushes] for version, item in history.pushes.versions.items()}
    assert pushes == {3: [1.0], 4: [1.0], 5: [2.0], 6: [2.0]}


async def test_a_run_beside_that_was_begun_anew_is_drawn_anew(tmp_path: Path) -> None:
    root = tmp_path / "other"
    others = OtherRuns(RunSource("own", None, None, tmp_path / "own"))
    found = []
    for life, steps in enumerate((4, 1)):
        write_metrics(root, "train/loss", range(steps))
        (root / runs.FROZEN).write_text("{}")
        os.utime(root / runs.FROZEN, ns=(life, life))
        history = await others.metrics("other")
        assert history is not None
        found.append(history.series["train/loss"].steps.tolist())
    assert found == [[0.0, 1.0, 2.0, 3.0], [0.0]]


class _Over(Exception):
    """All rounds were seen."""


async def test_what_one_page_cannot_read_is_named_until_it_can_and_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "POLL_SECONDS", 0.0)
    source = RunSource("run", None, None, None)
    rounds: list[Exception | None] = [BadMessage("odd"), BadMessage("odd"), OSError("no room"), sqlite3.Error("full"), None, None]
    seen: list[list[str]] = []

    async def broken() -> Collection[str]:
        if (error := rounds[len(seen)]) is not None:
            raise error
        return ()

    async def whole() -> Collection[str]:
        seen.append(sorted(source.away))
        if len(seen) == len(rounds):
            raise _Over
        return ()

    source.followers = [broken, whole]
    with pytest.raises(_Over):
        await source._follow()
    assert seen == [[], [LEDGER], [LEDGER], [FILE], [FILE], []]


async def test_an_index_whose_disk_was_full_or_whose_run_began_anew_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [GroupsAdmitted(first=number, count=1, version=0, at=1.0) for number in range(3)]

    async def read(*_given: object, after: int) -> AsyncIterator[tuple[int, Any]]:
        for entry in list(enumerate(records, 1))[after:]:
            yield entry

    async def ledger_end() -> int:
        return len(records)

    def full(*_given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    known: dict[str, Any] = {"names": Subjects("r"), "directory": None, "followers": [], "read": read, "feed": ChangeFeed()}
    source = SimpleNamespace(**known, live=True, life="old", ledger_end=ledger_end, follow_again=lambda: None)
    index = RunIndex(source)  # type: ignore[arg-type]
    monkeypatch.setattr(run_histories, "RECORDS", 1)
    monkeypatch.setattr(run_histories, "PIECE_SECONDS", -1.0)  # one record a piece
    with monkeypatch.context() as patched, pytest.raises(sqlite3.Error):
        patched.setattr(GroupIndex, "_put", full)
        await index.follow()
    for _ in range(2):  # what is shown lacks groups until all are read again
        with pytest.raises(sqlite3.Error, match="TMPDIR.*: database or disk is full"):
            await index.follow()
    assert await index.follow() == [SAMPLES] and index.groups.page(GroupQuery())[1] == 3
    source.life = "new"
    del records[1:]
    assert await index.follow() == [SAMPLES] and index.groups.page(GroupQuery())[1] == 1


async def test_a_long_run_whose_first_events_are_dropped_is_judged_by_its_metric_files(tmp_path: Path) -> None:
    async def read(stream: str, *_given: object, **_named: object) -> AsyncIterator[tuple[int, Any]]:
        if stream == Subjects("r").ledger_stream:
            yield 1, RunFinished(steps=COMPARED_STEPS, at=1.0)

    async def ledger_end() -> int:
        return 1

    found = MetricHistory()
    for number in range(COMPARED_STEPS):
        found.put(REWARD, number, 0.5, 1.0)
    known: dict[str, Any] = {"run": "r", "directory": None, "away": {}, "over": True, "live": True, "life": "", "connected": False}
    known |= {"config": run_config(tmp_path), "read": read, "ledger_end": ledger_end, "followers": [], "lookers": []}
    source: Any = SimpleNamespace(**known, shared=lambda _kind: SimpleNamespace(metrics=found))
    pipeline = RunPipeline(source)
    await source.followers[0]()
    assert [alarm.kind for alarm in (await pipeline.health()).alarms] == [AlarmKind.NOT_RISEN]
