"""What the ledger of a run says about who waited for whom, by hand-made records whose answer is known."""

import itertools
import math

import pytest

from shared.config.run_config import RunConfig
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    RunFinished,
    group_id,
)
from shared.schema.messages import Payload, SampleMeta, ScoredGroup
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsPushed
from shared.view.bottleneck import causes_of, workload
from shared.view.flow_history import (
    KEPT_SECONDS,
    MOST_STEPS,
    PAUSED,
    ActivitySpan,
    FlowHistory,
    GroupPassage,
    laid_over,
    seconds_of,
    wait_causes,
)
from shared.view.flow_view import flow_view, length_classes, step_parts
from tests.support.tables import table


def scored(number: int, started: float, ended: float, replica: str = "rollout-0", **given: object) -> ScoredGroup:
    samples = [SampleMeta(tokens=10, oldest=0, newest=0, finish="stop", trained=10) for _ in range(2)]
    fields = {"samples": samples, "rewards": [0.0, 1.0]} | given
    payload = Payload(keys=["k"], bytes=1)
    return ScoredGroup(group=group_id(number), attempt=0, payload=payload, replica=replica, started=started, ended=ended, **fields)


def admitted(first: int, count: int, at: float) -> GroupsAdmitted:
    return GroupsAdmitted(first=first, count=count, version=0, at=at)


def formed(step: int, numbers: list[int], at: float, version: int = 0, mask_below: int = 0) -> BatchFormed:
    return BatchFormed(step=step, version=version, groups=[group_id(number) for number in numbers], mask_below=mask_below, at=at)


def trained(step: int, started: float, ended: float, version: int = 0) -> BatchTrained:
    return BatchTrained(step=step, version=version, started=started, ended=ended, at=ended)


def two_steps(replica: str = "rollout-0") -> FlowHistory:
    """Step 0 trains from 100 to 110, step 1 from 162: its last group is admitted at 120, begins at 130, ends at 150, is scored at 160."""
    history = FlowHistory()
    for record in (
        admitted(0, 2, 90.0),
        GroupsScored(groups=[scored(0, 91, 95)], at=96.0),
        formed(0, [0], 99.0),
        trained(0, 100.0, 110.0),
        GroupsScored(groups=[scored(1, 92, 97)], at=112.0),
        admitted(2, 1, 120.0),
        GroupsScored(groups=[scored(2, 130, 150, replica)], at=160.0),
        formed(1, [1, 2], 161.0),
        trained(1, 162.0, 170.0),
    ):
        history.apply(record)
    return history


def test_a_wait_is_divided_among_the_way_of_the_last_group() -> None:
    last = GroupPassage("g", "rollout-0", admitted=120, started=130, generated=150, scored=160)
    causes = wait_causes((110, 162), last, saving=2, stall=3)
    assert causes == [
        ("saving", (110, 112)),
        ("pushing", (112, 115)),
        ("admission", (115, 120)),
        ("queue", (120, 130)),
        ("generation", (130, 150)),
        ("scoring", (150, 160)),
        ("handing out", (160, 162)),
    ]


@table(
    "last",
    [
        GroupPassage("g", "r", 0, 0, 0, 0),
        GroupPassage("g", "r", 500, 400, 300, 200),
        GroupPassage("g", "r", math.inf, 0, math.inf, 0),
        GroupPassage("g", "r", 105, math.nan, 108, math.nan),
        None,
    ],
)
def test_the_parts_of_a_wait_are_the_wait_whatever_the_clocks_say(last: GroupPassage | None) -> None:
    causes = wait_causes((100, 110), last, saving=1.0)
    assert causes[0] == ("saving", (100, 101)) and causes[-1][1][1] == 110
    assert all(before[1][1] == after[1][0] for before, after in itertools.pairwise(causes))


def test_the_wait_for_a_step_is_charged_to_its_last_group() -> None:
    load = workload(two_steps("rollout-7"), (0, 170))
    total = 170 - 110
    assert load.steps == 1 and load.awaited == ["rollout-7"]
    expected = {"admission": 10, "queue": 10, "generation": 20, "scoring": 10, "handing out": 2}
    assert load.waits == pytest.approx({cause: seconds / total for cause, seconds in expected.items()})
    assert load.replicas == pytest.approx({"rollout-7": 20 / total}), "the other did nothing in the time of this step"
    assert load.queued == pytest.approx(10 / 30), "of the last group's way from its admission to its end"


def test_checkpoints_and_pushes_are_the_trainers_own_part_of_its_wait() -> None:
    history = two_steps()
    history.metric(MetricsWritten(role="actor", step=1, values={"perf/train_save_time": 6.0, "perf/train_push_time": 3.0}, at=171.0))
    history.metric(MetricsWritten(role="critic", step=1, values={"perf/train_save_time": 60.0}, at=171.0))
    history.push(WeightsPushed(version=1, replicas=[ReplicaPush(replica="rollout-0", paused=4.0)], seconds=5.0, stall=1.5, at=168.0))
    assert step_parts(history, (0, 170)) == pytest.approx({"saving": 2 / 3, "pushing weights": 1 / 3}), "of the actor's step alone"
    waits = workload(history, (0, 170)).waits
    assert waits["saving"] == pytest.approx(6 / 60) and waits["pushing"] == pytest.approx((3 + 1.5) / 60)
    assert waits["admission"] == pytest.approx(1 / 60), "what is left of the wait before the admission"
    assert history.pauses["rollout-0"][0] == ActivitySpan(PAUSED, 164.0, 168.0)


def told(instance: str, what: str, at: float) -> ServiceEvent:
    return ServiceEvent(service=instance.partition("-")[0], instance=instance, what=what, at=at)


def test_a_trainer_that_died_waited_for_itself() -> None:
    history = two_steps()
    for event in (told("trainer-0", "joined", 50.0), told("trainer-0", "restarted", 112.0), told("trainer-0", "joined", 118.0)):
        history.service_event(event)
    history.observe("trainer", "trainer-0", "loading the checkpoint", 119.0)
    history.observe("trainer", "trainer-0", "loading the checkpoint", 125.0)
    history.observe("trainer", "trainer-0", "ready", 126.0)
    causes = dict(causes_of(history, history.steps[1]))
    assert causes["restarting"] == (110.0, 125.0) and causes["queue"] == (125.0, 130.0) and "admission" not in causes
    assert history.absences("trainer-0") == [ActivitySpan("not there", 112.0, 118.0)]
    assert "restarting" not in dict(causes_of(two_steps(), two_steps().steps[1]))


def test_a_replica_waits_between_its_groups_and_is_not_there_while_it_restarts(run_config: RunConfig) -> None:
    history = FlowHistory()
    history.apply(admitted(0, 2, 100.0))
    history.apply(GroupsScored(groups=[scored(0, 100, 110), scored(1, 130, 140)], at=150.0))
    history.service_event(told("rollout-0", "restarted", 115.0))
    history.service_event(told("rollout-0", "joined", 120.0))
    [line] = flow_view(history, run_config, [], 999.0, 100.0).services
    assert line.shares == pytest.approx({"generating": 20 / 40, "waiting": 15 / 40, "not there": 5 / 40}) and line.busy == 0.5


def test_tokens_are_told_by_length_and_age() -> None:
    history = FlowHistory()
    long = SampleMeta(tokens=40, oldest=1, newest=3, finish="length", trained=40, spans=((1, 10), (3, 30)))
    short = SampleMeta(tokens=5, oldest=3, newest=3, finish="stop", trained=5)
    history.apply(admitted(0, 4, 1.0))
    groups = [scored(0, 2, 3, samples=[long, short], removed=(1,)), scored(1, 2, 3, samples=[short, short], rewards=[1.0, 1.0])]
    history.apply(GroupsScored(groups=[*groups, scored(2, 2, 3), scored(3, 2, 3)], at=4.0))
    history.apply(GroupsDropped(groups=[group_id(2)], reason="stale", at=5.0))
    history.apply(formed(0, [0, 1], 6.0, version=3, mask_below=2))
    history.apply(trained(0, 7.0, 8.0, version=3))
    step = history.steps[0]
    assert step.ages == {0: 30 + 10} and step.masked_tokens == 10
    assert (step.samples, step.truncated, step.groups, step.equal_rewards) == (4, 1, 2, 1)
    by_length = {length: (item.samples, item.trained, item.masked, item.dropped) for length, item in history.lengths.items()}
    assert by_length == {40: (1, 30, 10, 0), 5: (3, 10, 0, 5), 10: (2, 0, 0, 20)}
    classes = length_classes(history.lengths)
    assert sum(item.samples for item in classes) == 6 and [item.shortest for item in classes] == [5, 10, 40]


def test_old_tokens_of_a_sample_that_a_filter_removed_are_not_told_as_masked() -> None:
    history = FlowHistory()
    history.apply(admitted(0, 1, 1.0))
    old = SampleMeta(tokens=5, oldest=0, newest=0, finish="stop", trained=5)
    new = SampleMeta(tokens=7, oldest=3, newest=3, finish="stop", trained=7)
    history.apply(GroupsScored(groups=[scored(0, 2, 3, samples=[old, new], removed=(0,))], at=4.0))
    history.apply(formed(0, [0], 6.0, version=3, mask_below=2))
    history.apply(trained(0, 7.0, 8.0, version=3))
    assert (history.steps[0].masked_tokens, history.lengths[5].masked, history.lengths[5].dropped) == (0, 0, 5)


def test_a_group_that_is_generated_anew_or_replaced_is_followed() -> None:
    history = FlowHistory()
    history.apply(admitted(0, 3, 1.0))
    history.apply(GroupsScored(groups=[scored(0, 2, 3), scored(1, 2, 3)], at=4.0))
    assert history.ready == [4.0, 4.0] and history.outstanding == [1.0]
    history.apply(GroupRequeued(group=group_id(0), attempt=1, reason="stale", at=5.0))
    assert history.outstanding == [1.0, 1.0] and history.lengths[10].dropped == 20
    history.apply(formed(0, [1], 6.0))
    history.apply(GroupDead(group=group_id(1), reason="refused", at=7.0))
    history.apply(GroupsScored(groups=[scored(0, 6, 7)], at=8.0))
    history.apply(BatchAmended(step=0, removed=[group_id(1)], added=[group_id(0)], at=9.0))
    history.apply(trained(0, 10.0, 11.0))
    last = history.steps[0].last
    assert last is not None and last.group == group_id(0) and [group.reason for group in history.dead] == ["refused"]
    assert history.ready == [] and history.outstanding == [1.0]


def test_memory_follows_the_last_hour() -> None:
    history = FlowHistory()
    for number in range(1000):
        at = 60.0 * number
        history.apply(admitted(number, 1, at))
        history.apply(GroupsScored(groups=[scored(number, at + 1, at + 20)], at=at + 30))
        history.observe("rollout", f"rollout-{number % 2}", "generating" if number % 3 else "waiting", at)
        history.apply(GroupsDropped(groups=[group_id(number)], reason="stale", at=at + 40))
        history.forget()
    most = KEPT_SECONDS / 60 + 2
    assert len(history.generated["rollout-0"]) <= most and all(len(spans) <= most for spans in history.looks.values())
    assert history.outstanding == [] and history.ready == [] and history.dropped["stale"] == 1000


def test_all_rewards_of_a_long_run_are_known_and_groups_a_minute_are_of_the_part_that_was_read(run_config: RunConfig) -> None:
    history = FlowHistory()
    for number in range(MOST_STEPS + 1):
        history.metric(MetricsWritten(role="actor", step=number, values={"rollout/raw_reward": 0.5}, at=1.0))
    assert len(history.metrics) == MOST_STEPS and history.rewards == dict.fromkeys(range(MOST_STEPS + 1), 0.5)
    history.service_event(told("buffer-0", "joined", 10.0))
    history.apply(admitted(9000, 60, 1000.0))
    history.apply(admitted(9060, 60, 1060.0))
    assert flow_view(history, run_config, [], 1060.0, 3600.0).stages[0].per_minute == 120


def test_what_was_not_looked_at_for_long_is_not_known() -> None:
    history = FlowHistory()
    for at, activity in ((100.0, "waiting"), (102.0, "generating"), (104.0, "generating"), (200.0, "generating")):
        history.observe("rollout", "rollout-0", activity, at)
    spans = [(span.activity, span.begin, span.end) for span in history.looks["rollout-0"] if span.end > span.begin]
    assert spans == [("generating", 100.0, 104.0)]


def test_spans_lie_over_one_another() -> None:
    below = [ActivitySpan("waiting", 0, 100)]
    above = [ActivitySpan("generating", *interval) for interval in ((10, 30), (20, 50), (60, 60))]
    spans = laid_over([below, above, [ActivitySpan("paused", 40, 45), ActivitySpan("paused", math.nan, 60)]], (5, 80))
    assert spans == [
        ActivitySpan("waiting", 5, 10),
        ActivitySpan("generating", 10, 40),
        ActivitySpan("paused", 40, 45),
        ActivitySpan("generating", 45, 50),
        ActivitySpan("waiting", 50, 80),
    ]
    assert seconds_of(spans) == {"generating": 35, "waiting": 35, "paused": 5}
    assert laid_over([], (0, 1)) == [] and laid_over([above], (90, 100)) == []


def status(service: str, instance: str, state: str = "ready", **gauges: float) -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="", state=state, version=1, gauges=gauges, at=170.0)


def test_a_run_whose_trainer_loads_waits_for_it(run_config: RunConfig) -> None:
    history, ready = (
        two_steps(),
        [status("buffer", "buffer-0", live_version=1), status("rollout", "rollout-0"), status("reward", "reward-0")],
    )
    history.apply(trained(2, 171.0, 172.0))
    history.apply(trained(3, 173.0, 174.0))
    for trainer in ([status("trainer", "trainer-0", "loading the model")], []):
        said = flow_view(history, run_config, [*ready, *trainer], 175.0, 100.0).bottleneck.sentence
        assert said == ("The run waits for trainer-0 loading the model." if trainer else "The run waits for a trainer service.")
    second = [*ready, status("rollout", "rollout-1", "starting"), status("trainer", "trainer-0")]
    assert flow_view(history, run_config, second, 175.0, 100.0).bottleneck.waiting != "the run", "one replica continues"
    history.apply(RunFinished(steps=4, at=176.0))
    assert flow_view(history, run_config, ready, 177.0, 100.0).bottleneck.waiting != "the run", "who leaves is not waited for"


def test_the_view_of_a_live_run_and_of_one_at_rest(run_config: RunConfig) -> None:
    history = two_steps()
    live = [
        status("buffer", "buffer-0", queue_task=3, queue_generated=2, queue_generated_held=1, ready=5),
        status("rollout", "rollout-0", running_groups=4),
        status("reward", "reward-0", scoring=1),
        status("trainer", "trainer-0"),
        status("environment", "calc", state="away"),
    ]
    for at in (168.0, 170.0):
        for one in live[:4]:
            history.observe(one.service, one.instance, {"rollout": "generating", "reward": "scoring"}.get(one.service, "ready"), at)
    view = flow_view(history, run_config, live, 172.0, 60.0)
    assert view.live and (view.begin, view.end) == (112.0, 172.0)
    assert [(stage.name, stage.groups) for stage in view.stages] == [
        ("tasks", 3), ("generating", 4), ("scoring", 3), ("ready", 5), ("training", 0)
    ]  # fmt: skip
    lines = {line.instance: line for line in view.services}
    assert set(lines) == {"buffer-0", "rollout-0", "reward-0", "trainer-0"}
    assert lines["trainer-0"].doing == "waiting for its batch" and lines["rollout-0"].doing == "generating"
    assert lines["buffer-0"].busy is None and 0 < (lines["trainer-0"].busy or 0) < 1
    for line in view.services:
        assert sum(line.shares.values()) == pytest.approx(1)
        assert all(112 <= span.begin < span.end <= 172 for span in line.spans)
        assert all(before.end <= after.begin for before, after in itertools.pairwise(line.spans))

    rest = flow_view(history, run_config, [], 9999.0, 60.0)
    assert not rest.live and rest.end == 170.0 and rest.services[-1].doing == "not seen"
    empty = flow_view(FlowHistory(), run_config, [], 9999.0, 60.0)
    assert empty.services == [] and "Too few steps" in empty.bottleneck.sentence
