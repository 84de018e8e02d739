"""Which groups a record ends, with what their state and the record know of them, and which of those are kept."""

from services.buffer.rollout_keeper import chosen_groups, ended_groups, trained_not_durable
from services.buffer.state import BufferState
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    eval_group_id,
    group_id,
)
from shared.schema.messages import Payload, SampleMeta, ScoredGroup


def scored(number: int, removed: tuple[int, ...] = ()) -> ScoredGroup:
    return ScoredGroup(
        group=group_id(number),
        attempt=number,
        payload=Payload(keys=[f"k{number}"], bytes=10),
        samples=[SampleMeta(tokens=3, trained=3, oldest=version, newest=version, finish="stop") for version in (0, 2)],
        rewards=[0.0, 1.0],
        parts=({"form": 0.5}, {"form": 1.0}),
        removed=removed,
        replica="r",
        started=0,
        ended=1,
    )


def state(*records: LedgerRecord) -> BufferState:
    made = BufferState()
    for record in (GroupsAdmitted(first=0, count=4, version=0, at=0), *records):
        made.apply(record)
    return made


def test_a_trained_batch_ends_its_groups_with_all_that_is_known_of_them() -> None:
    formed = BatchFormed(step=0, version=2, groups=[group_id(0), group_id(1)], mask_below=1, at=2)
    before = state(GroupsScored(groups=[scored(0), scored(1, removed=(1,))], at=1), formed)
    record = BatchTrained(step=0, version=3, started=2, ended=3, at=4.0)
    first, second = ended_groups(before, record)
    head = first.record
    assert (head.group, head.attempt, head.status, head.step, head.version, head.at) == (group_id(0), 0, "trained", 0, 2, 4.0)
    assert (first.keys, first.size, first.rewards, first.parts) == (("k0",), 10, (0.0, 1.0), ({"form": 0.5}, {"form": 1.0}))
    assert (head.mask_below, first.stale, second.removed) == (1, (0,), (1,))
    assert trained_not_durable(before, 5.0) == []
    before.apply(record)
    assert [(group.record.group, group.again) for group in trained_not_durable(before, 5.0)] == [(group_id(0), True), (group_id(1), True)]
    before.apply(CheckpointDurable(steps=1, at=5))
    assert trained_not_durable(before, 5.0) == []


def test_dropped_and_dead_groups_have_their_samples_and_their_reason() -> None:
    before = state(GroupsScored(groups=[scored(0)], at=1))
    back, away = ended_groups(before, GroupsDropped(groups=[group_id(0), group_id(1)], reason="surplus", at=2))
    assert (back.record.status, back.record.reason, back.keys, back.record.step) == ("dropped", "surplus", ("k0",), None)
    assert (away.record.status, away.keys, away.rewards) == ("dropped", (), ())
    (dead,) = ended_groups(before, GroupDead(group=group_id(2), reason="math: hung", payload=Payload(keys=["k2"], bytes=1), at=2))
    assert (dead.record.status, dead.record.reason, dead.keys, dead.rewards) == ("dead", "math: hung", ("k2",), ())
    assert ended_groups(before, GroupsScored(groups=[scored(3)], at=2)) == []


def test_held_out_prompts_end_when_they_come_back() -> None:
    name, payload = eval_group_id("heldout", 3, 7), Payload(keys=["k"], bytes=5)
    before = state(EvalStarted(dataset="heldout", version=3, prompts=9, at=0))
    values = {"group": name, "dataset": "heldout", "version": 3, "oldest": 3, "newest": 3, "payload": payload, "at": 1.0}
    (group,) = ended_groups(before, EvalScored(**values, rewards=[1.0], parts=({"form": 1.0},)))
    head = group.record
    assert (head.status, head.dataset, head.version, group.keys, group.parts) == ("evaluated", "heldout", 3, ("k",), ({"form": 1.0},))
    (group,) = ended_groups(before, EvalScored(**values, rewards=[], reason="rollout-0: too long"))
    assert (group.record.status, group.record.reason, group.keys) == ("failed", "rollout-0: too long", ("k",))


def test_the_share_is_the_same_in_every_process_and_leaves_evaluations_whole() -> None:
    before = BufferState()
    before.apply(GroupsAdmitted(first=0, count=4000, version=0, at=0))
    groups = ended_groups(before, GroupsDropped(groups=list(before.groups), reason="stale", at=1))
    quarter = chosen_groups(groups, 0.25)
    assert 900 < len(quarter) < 1100
    assert chosen_groups(groups, 0.25) == quarter
    assert {group.record.group for group in quarter} <= {group.record.group for group in chosen_groups(groups, 0.5)}
    assert [group.record.group for group in quarter[:3]] == ["g00000000", "g00000005", "g00000008"]
    assert chosen_groups(groups, 1.0) == groups and chosen_groups(groups, 0.0) == []
    fields = {"dataset": "heldout", "version": 0, "oldest": 0, "newest": 0, "at": 1.0}
    evaluated = [
        group
        for row in range(9)
        for group in ended_groups(before, EvalScored(group=eval_group_id("heldout", 0, row), rewards=[], **fields))
    ]
    assert chosen_groups(evaluated, 0.01) == evaluated and chosen_groups(evaluated, 0.0) == []
