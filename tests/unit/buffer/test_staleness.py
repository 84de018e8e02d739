"""The four staleness policies and the three orders, decision by decision."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.policy import BadChoice
from services.buffer.staleness import Policy
from services.buffer.state import BufferState
from shared.schema.ledger import (
    BatchFormed,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    VersionLive,
    group_id,
)
from shared.schema.messages import Batch, Interrupted, Payload, SampleMeta, Scored
from tests.support.buffer_config import buffer_config
from tests.support.tables import table
from tests.unit.buffer.decisions import fold, meta, of_samples

Ages = Sequence[tuple[int, int]]
"""(oldest, newest) version of each sample."""


def limits(**changes: Any) -> BufferConfig:
    return buffer_config(**{"steps": 8, "groups": 2, "samples": 2, "max_staleness": 1, "interval": 1, **changes})


def scored(number: int, ages: Ages = ((0, 0), (0, 0)), attempt: int = 0, **changes: Any) -> Scored:
    return of_samples(Scored, group_id(number), [meta(*age, tokens=4) for age in ages], f"{number}:{attempt}", attempt=attempt, **changes)


def at_step(run: BufferConfig, step: int, *groups: Scored) -> BufferState:
    """A run whose next batch is that of ``step``, version ``step`` live, with these groups back and as many more out."""
    state = BufferState()
    state.formed_steps = state.trained_steps = step
    fold(state, [GroupsAdmitted(first=0, count=2 * len(groups) + 2, version=0, at=0.0), VersionLive(version=step, at=0.0)])
    fold(state, policy.scored(state, run, list(groups), 0.0))
    return state


def formed(state: BufferState, run: BufferConfig, step: int, **changes: Any) -> list[LedgerRecord]:
    return fold(state, policy.form_batch(state, run, step, step, 0.0, **changes))


def in_batch(records: list[LedgerRecord]) -> list[int]:
    return [int(name[1:]) for record in records if isinstance(record, BatchFormed) for name in record.groups]


FRESH: Ages = ((2, 2), (2, 3))
MIXED: Ages = ((1, 1), (1, 3))  # one sample all stale in a batch of version 3 and bound 1, one with a fresh end
TAIL: Ages = ((1, 2), (0, 3))  # both with fresh ends
STALE: Ages = ((1, 1), (0, 1))


@table(("name", "ages", "fate"), [
        ("drop", FRESH, "batch"), ("drop", TAIL, "dropped"), ("drop", MIXED, "dropped"), ("drop", STALE, "dropped"),
        ("requeue", FRESH, "batch"), ("requeue", TAIL, "anew"), ("requeue", MIXED, "anew"), ("requeue", STALE, "anew"),
        ("continue", FRESH, "batch"), ("continue", TAIL, "batch"), ("continue", MIXED, "continues"), ("continue", STALE, "continues"),
        ("mask", FRESH, "batch"), ("mask", TAIL, "batch"), ("mask", MIXED, "batch"), ("mask", STALE, "dropped"),
    ])  # fmt: skip
def test_what_becomes_of_a_group_over_the_bound(name: Policy, ages: Ages, fate: str) -> None:
    run = limits(staleness=name)
    state = at_step(run, 3, scored(0, ages), scored(1, FRESH))
    records = formed(state, run, 3)
    dropped = [record.groups for record in records if isinstance(record, GroupsDropped)]
    again = [record for record in records if isinstance(record, GroupRequeued)]
    requeued = [(record.group, record.attempt, record.partial, record.renew_below) for record in again]
    assert dropped == ([[group_id(0)]] if fate == "dropped" else [])
    assert requeued == {"anew": [(group_id(0), 1, None, 0)], "continues": [(group_id(0), 1, Payload(keys=["0:0"], bytes=1), 3)]}.get(
        fate, []
    )
    assert in_batch(records) == ([0, 1] if fate == "batch" else [])
    if fate == "batch":
        batch = policy.batch(state, 3)
        assert batch is not None and batch.mask_below == (2 if name in ("continue", "mask") else 0)


@pytest.mark.parametrize("name", ["drop", "requeue", "continue", "mask"])
def test_a_sample_of_which_nothing_is_trained_has_no_age(name: Policy) -> None:
    run, whole = limits(staleness=name), scored(0, FRESH)
    empty = SampleMeta(tokens=0, trained=0, oldest=0, newest=0, finish="length")
    part = whole.model_copy(update={"samples": [empty, whole.samples[1]]})
    assert in_batch(formed(at_step(run, 3, part, scored(1, FRESH)), run, 3)) == [0, 1]
    [_, dropped] = policy.scored(at_step(run, 3), run, [part.model_copy(update={"removed": (1,)})], 0.0)
    assert isinstance(dropped, GroupsDropped) and policy.NOTHING_LEFT in dropped.reason


def test_a_payload_is_kept_for_whoever_goes_on_and_let_go_behind_it() -> None:
    run = limits(staleness="continue")
    state = at_step(run, 3, scored(0, MIXED), scored(1, FRESH))
    fold(state, policy.form_batch(state, run, 3, 3, 0.0))
    assert state.released == []
    assert state.outstanding[0].partial == Payload(keys=["0:0"], bytes=1)
    fold(state, policy.scored(state, run, [scored(0, FRESH, attempt=1)], 0.0))
    assert state.released == ["0:0"]
    assert state.groups[group_id(0)].partial is None


def test_a_replica_that_leaves_hands_on_what_it_has() -> None:
    run = limits()
    state = at_step(run, 1, scored(1))
    left = Interrupted(group=group_id(0), attempt=0, stale=False, replica="rollout-2", payload=Payload(keys=["part"], bytes=3))
    [record] = fold(state, policy.interrupted(state, run, left, 0.0))
    assert isinstance(record, GroupRequeued) and record.reason == "rollout-2 did not end it"
    assert state.groups[group_id(0)].partial == left.payload
    assert policy.interrupted(state, run, left, 0.0) == []  # said twice
    # the next one leaves before it has done anything
    again = left.model_copy(update={"attempt": 1, "payload": None})
    fold(state, policy.interrupted(state, run, again, 0.0))
    assert (state.groups[group_id(0)].attempt, state.groups[group_id(0)].partial) == (2, left.payload)
    assert state.released == []
    # and the group fails in the end: nothing stays behind
    late = Interrupted(group=group_id(1), attempt=0, stale=False, replica="r")
    assert policy.interrupted(state, run, late, 0.0) == []  # it came back
    state.apply(GroupsDropped(groups=[group_id(0)], reason="x", at=0.0))
    assert state.released == ["part"]


@pytest.mark.parametrize(("name", "record"), [("drop", GroupsDropped), ("mask", GroupsDropped), ("requeue", GroupRequeued)])
def test_what_a_replica_stopped_for_its_age_is_settled_at_once(name: Policy, record: type[LedgerRecord]) -> None:
    run = limits(staleness=name)
    state = at_step(run, 1, scored(1))
    [found] = fold(state, policy.interrupted(state, run, Interrupted(group=group_id(0), attempt=0, stale=True, replica="r"), 0.0))
    assert isinstance(found, record) and found.reason == "stale"  # type: ignore[attr-defined]


@table(
    ("order", "window", "came_back", "batch"),
    [
        ("completion", 0, [5, 3, 0], [3, 5]),
        ("fifo", 0, [5, 3, 0], []),
        ("fifo", 0, [1, 5, 0], [0, 1]),
        ("windowed_fifo", 4, [5, 3, 0], [0, 3]),
        ("windowed_fifo", 4, [5, 4, 3], []),
        ("windowed_fifo", 0, [5, 3, 2], [2, 3]),  # two batches
        ("windowed_fifo", 6, [5, 3, 0], [3, 5]),
    ],
)
def test_orders(order: Any, window: int, came_back: list[int], batch: list[int]) -> None:
    run = limits(order=order, window=window)
    state = at_step(run, 0, *[scored(number) for number in came_back])
    assert in_batch(formed(state, run, 0)) == batch


def test_a_window_stands_still_until_its_oldest_group_is_back() -> None:
    run = limits(order="windowed_fifo", window=3)
    state = at_step(run, 0, *[scored(number) for number in (1, 2, 3, 4)])
    assert in_batch(formed(state, run, 0)) == [1, 2]
    assert in_batch(formed(state, run, 1)) == []  # 0 has been overtaken by two
    fold(state, policy.scored(state, run, [scored(0)], 0.0))
    assert in_batch(formed(state, run, 1)) == [0, 3]


def test_fifo_goes_on_behind_what_is_batched_dropped_or_dead() -> None:
    run = limits(order="fifo")
    state = at_step(run, 0, *[scored(number) for number in (0, 1, 3, 4)])
    assert in_batch(formed(state, run, 0)) == [0, 1]
    assert in_batch(formed(state, run, 1)) == []  # group 2 is still out
    state.apply(GroupsDropped(groups=[group_id(2)], reason="x", at=0.0))
    assert in_batch(formed(state, run, 1)) == [3, 4]


def test_over_sampling_keeps_a_surplus_under_way() -> None:
    run = limits(surplus=3)
    state = BufferState()
    fold(state, policy.live(state, run, 0, 0.0))
    [admitted] = fold(state, policy.admit(state, run, 0.0))
    assert isinstance(admitted, GroupsAdmitted) and admitted.count == 2 * 2 + 3
    state.formed_steps = run.rollout.num_rollout
    assert policy.admit(state, run, 0.0) == []  # every batch is there


def test_a_filtered_group_is_recorded_with_its_rewards_and_dropped() -> None:
    run = limits()
    state = at_step(run, 0, scored(0), scored(1))
    gone, half = scored(3, rewards=[1.0, 0.0], removed=(0, 1)), scored(5, rewards=[1.0, 0.5], removed=(0,))
    lot = [scored(2, filtered="zero_std"), gone, scored(4, filtered="zero_std"), half]
    records = fold(state, policy.scored(state, run, lot, 0.0))
    assert [record.rewards for record in records[0].groups] == [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.5]]  # type: ignore[attr-defined]
    ends = {record.reason: record.groups for record in records[1:] if isinstance(record, GroupsDropped)}
    assert ends == {"filtered: zero_std": [group_id(2), group_id(4)], "filtered: no sample is left to train": [group_id(3)]}
    assert list(state.ready) == [group_id(number) for number in (0, 1, 5)]
    [room] = policy.admit(state, run, 0.0)
    assert isinstance(room, GroupsAdmitted)


def test_rewards_of_many_samples_are_recorded_in_several_messages() -> None:
    run = limits(samples=1500)
    state = at_step(run, 0)
    lot = [scored(number, ((0, 0),) * 1500, parts=({"format": 0.5},) * 1500) for number in range(2)]
    records = policy.scored(state, run, lot, 0.0)
    lots = [[group.group for group in record.groups] for record in records if isinstance(record, GroupsScored)]
    assert lots == [[group_id(0)], [group_id(1)]]
    assert all(len(record.encode()) < 1 << 19 for record in records)


def test_named_rewards_reach_the_trainer_as_a_few_numbers_a_name() -> None:
    run = limits(samples=3)
    one = ({"format": 1.0, "length": 10.0}, {}, {"format": 0.0})
    many = ({f"x{number}": 1.0 for number in range(40)} | {"format": 0.5},) * 3
    state = at_step(run, 0, scored(0, ((0, 0),) * 3, parts=one), scored(1, ((0, 0),) * 3, parts=many))
    formed(state, run, 0)
    batch = policy.batch(state, 0)
    assert batch is not None
    part = batch.parts["format"]
    assert (part.samples, part.mean, part.min, part.max) == (5, pytest.approx(0.5), 0.0, 1.0)
    assert part.std == pytest.approx(statistics.pstdev([1.0, 0.0, 0.5, 0.5, 0.5]))
    assert batch.parts["length"].model_dump() == {"samples": 1, "mean": 10.0, "std": 0.0, "min": 10.0, "max": 10.0}
    assert len(batch.parts) == 42
    assert Batch.decode(batch.encode()) == batch
    assert [group.parts for group in batch.groups] == [(), ()]
    shown = policy.batch(state, 0, named=True)
    assert shown is not None and [group.parts for group in Batch.decode(shown.encode()).groups] == [one, many]


def test_a_batch_whose_named_rewards_are_over_the_limit_loses_its_largest_group() -> None:
    parts = tuple({f"{sample}.{name}" + "n" * 50: 1.0 for name in range(9)} for sample in range(100))
    for named, dead in ((False, []), (True, [group_id(1)])):
        run = replace(limits(samples=100), named_rewards=named, message_bytes=policy.PARTS_BYTES + 60_000)
        state = at_step(run, 0, scored(0, ((0, 0),) * 100), scored(1, ((0, 0),) * 100, parts=parts))
        assert [record.group for record in formed(state, run, 0) if isinstance(record, GroupDead)] == dead


def test_names_of_rewards_without_end_do_not_fill_a_message() -> None:
    run = limits(samples=100)
    parts = tuple({f"{sample}.{name}": 1.0 for name in range(9)} for sample in range(200))
    lots = [scored(group, ((0, 0),) * 100, parts=parts[100 * group : 100 * group + 100]) for group in range(2)]
    state = at_step(run, 0, *lots)
    formed(state, run, 0)
    batch = policy.batch(state, 0)
    assert batch is not None and len(batch.parts) == 64


def test_removed_samples_do_not_age_and_reach_the_trainer_as_removed() -> None:
    run = limits()
    old_and_gone = scored(0, ((0, 0), (3, 3)), removed=(0,))
    state = at_step(run, 3, old_and_gone, scored(1, FRESH))
    assert in_batch(formed(state, run, 3)) == [0, 1]
    batch = policy.batch(state, 3)
    assert batch is not None and [group.removed for group in batch.groups] == [(0,), ()]


@table(
    ("rollouts", "samples", "fits"),
    [([], 2, True), ([0, 0, 1], 3, True), ([0, 1, 1, 1], 4, True), ([0, 0, 0], 3, False), ([0, 1, 2], 3, False), ([0, 1], 3, False)],
)
def test_a_rollout_may_fan_out_into_several_samples(rollouts: list[int], samples: int, fits: bool) -> None:
    run = limits()
    state = at_step(run, 0)
    records = policy.scored(state, run, [scored(0, ((0, 0),) * samples, rollouts=rollouts)], 0.0)
    assert [isinstance(record, GroupsScored) for record in records] == [fits]
    if not fits:
        assert "rollouts" in records[0].reason  # type: ignore[attr-defined]


def test_a_buffer_filter_chooses_among_what_fits() -> None:
    run = limits()
    state = at_step(run, 3, scored(0, FRESH), scored(1, STALE), scored(2, FRESH), scored(3, FRESH))
    assert [group.number for group in policy.candidates(state, run, 3, 3)] == [0, 2, 3]
    for chosen, found in (
        ([group_id(1), group_id(2)], "g00000001"),
        ([group_id(2), group_id(2)], "1 of them different"),
        ([group_id(0), group_id(2), group_id(3)], "chose 3 groups"),
    ):
        with pytest.raises(BadChoice, match=found):
            policy.form_batch(state, run, 3, 3, 0.0, chosen)
    assert in_batch(policy.form_batch(state, run, 3, 3, 0.0, [group_id(3)])) == []  # waits
    assert in_batch(formed(state, run, 3, chosen=[group_id(3), group_id(0)])) == [0, 3]
