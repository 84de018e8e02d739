"""The index of groups: the same groups, orders and provenance as folds of the whole ledger in memory have, whatever the ledger holds."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    SampleRefused,
    VersionLive,
    eval_group_id,
    group_id,
)
from shared.schema.messages import SampleMeta, ScoredGroup
from shared.view.group_history import GroupHistory, GroupRecord, ProvenanceStep, ledger_words
from shared.view.group_index import GroupIndex, GroupQuery, KeptPlace
from tests.support.tables import table
from tests.support.valid_messages import example

Ledger = list[tuple[int, LedgerRecord]]

BIG = (1 << 31) - 1


def scored(chance: random.Random, number: int, attempt: int, version: int) -> ScoredGroup:
    size = chance.choice((1, 2, 4))
    alike = chance.random() < 0.3
    samples = []
    for _ in range(size):
        oldest, finish = max(0, version - chance.randrange(4)), chance.choice(("stop", "length"))
        samples.append(SampleMeta(tokens=chance.randrange(1, 900), oldest=oldest, newest=version, finish=finish))  # type: ignore[arg-type]
    rewards = [1.0 if alike else chance.choice((-1e9, -0.5, 0.0, 0.25, 1.0, 1e9)) for _ in range(size)]
    rollouts = tuple(chance.randrange(size) for _ in range(size)) if chance.random() < 0.3 else ()
    known = {"replica": chance.choice(("rollout-0", "rollout-1")), "started": 100.0, "ended": 100.0 + chance.random()}
    return example(ScoredGroup, group=group_id(number), attempt=attempt, samples=samples, rewards=rewards, rollouts=rollouts, **known)


def random_ledger(seed: int, steps: int = 12) -> Ledger:
    """A ledger with every kind of record that concerns groups; the sequence has gaps, as one after a purge."""
    chance, records, ready, admitted = random.Random(seed), list[LedgerRecord](), list[int](), 0
    for step in range(steps):
        at = 1000.0 + step
        records += [VersionLive(version=step, at=at), GroupsAdmitted(first=admitted, count=8, version=step, at=at)]
        came, admitted = list(range(admitted, admitted + 8)), admitted + 8
        chance.shuffle(came)
        for number in came[:2]:
            fate = chance.choice(("dead", "stale", "again"))
            if fate == "dead":
                records.append(GroupDead(group=group_id(number), reason="reward-0: the Verifier hung 100 %_", at=at))
            elif fate == "stale":
                records.append(GroupsScored(groups=[scored(chance, number, 0, step)], at=at))
                records.append(GroupsDropped(groups=[group_id(number)], reason="stale", at=at))
            else:
                records.append(GroupRequeued(group=group_id(number), attempt=1, reason="payload lost", at=at))
        records.append(GroupsScored(groups=[scored(chance, number, 0, step) for number in came[2:]], at=at))
        ready += came[2:]
        batch, ready = ready[:3], ready[3:]
        records.append(BatchFormed(step=step, version=step, groups=[group_id(number) for number in batch], mask_below=step // 3, at=at))
        if chance.random() < 0.3:
            bad, ready = batch[0], ready[1:] + ready[:1]
            records.append(SampleRefused(step=step, group=group_id(bad), sample=0, reason="too long", refused=at, at=at))
            records.append(GroupDead(group=group_id(bad), reason="refused three times", at=at))
            records.append(BatchAmended(step=step, removed=[group_id(bad)], added=[group_id(ready.pop(0))], at=at))
        if step < steps - 1:
            records.append(BatchTrained(step=step, version=step, started=at, ended=at + 0.5, at=at + 0.5))
        if step % 4 == 3:
            records.append(CheckpointDurable(steps=step, at=at))
            records.append(EvalStarted(dataset="heldout", version=step, prompts=3, at=at))
            for row in range(2):
                rewards = [1.0, 0.0] if chance.random() < 0.7 else []
                group = eval_group_id("heldout", step, row)
                records.append(
                    EvalScored(group=group, dataset="heldout", version=step, rewards=rewards, lengths=(3, 4) if rewards else (), at=at)
                )
    return [(3 * index + 1, record) for index, record in enumerate(records)]


@pytest.fixture
def index() -> GroupIndex:
    return GroupIndex()


def fold(index: GroupIndex, ledger: Ledger, pieces: int = 7) -> None:
    for begin in range(0, len(ledger), pieces):
        index.apply(ledger[begin : begin + pieces])


def in_memory(ledger: Ledger, wanted: Callable[[GroupRecord], bool] = lambda group: group.dataset is None) -> list[GroupRecord]:
    """The wanted groups as a fold of the whole ledger has them in the end; training groups, where nothing else is wanted."""
    history, groups = GroupHistory(), dict[str, GroupRecord]()
    for sequence, record in ledger:
        groups |= {group.group: group for group in history.apply(sequence, record)}
    return [group for group in groups.values() if wanted(group)]


def names(groups: Iterable[GroupRecord]) -> set[str]:
    return {group.group for group in groups}


def trained_on(group: GroupRecord, version: int) -> bool:
    return any(oldest <= version <= newest for oldest, newest in zip(group.oldest, group.newest, strict=True))


CASES: list[tuple[dict[str, Any], Callable[[GroupRecord], bool]]] = [
    ({}, lambda group: True),
    ({"status": ["trained"]}, lambda group: group.status == "trained"),
    ({"status": ["dead"]}, lambda group: group.status == "dead"),
    ({"step": 3}, lambda group: group.step == 3),
    ({"version": 5}, lambda group: trained_on(group, 5)),
    ({"version": BIG}, lambda group: trained_on(group, BIG)),
    ({"min_reward": 0.1, "max_reward": 0.9}, lambda group: group.reward is not None and 0.1 <= group.reward <= 0.9),
    ({"group": "7"}, lambda group: group.group == group_id(7)),
    ({"group": group_id(7)}, lambda group: group.group == group_id(7)),
    ({"evaluation": True}, lambda group: True),
    ({"evaluation": True, "version": 7}, lambda group: group.version == 7),
    ({"evaluation": True, "dataset": "heldout"}, lambda group: group.dataset == "heldout"),
]


@table("seed", range(4))
def test_pages_hold_what_a_fold_in_memory_selects(index: GroupIndex, seed: int) -> None:
    ledger = random_ledger(seed)
    fold(index, ledger)
    for query, wanted in CASES:
        groups, total = index.page(GroupQuery(limit=200, **query))
        evaluation = "evaluation" in query
        expected = in_memory(ledger, lambda group: (group.dataset is not None) == evaluation and wanted(group))  # noqa: B023
        assert (names(groups), total) == (names(expected), len(expected)), query
        assert {group.group: group for group in groups} == {group.group: group for group in expected}


@table("order", ["changed", "admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds"])
@table("descending", [True, False])
def test_pages_one_after_another_are_the_whole_list_in_order(index: GroupIndex, order: str, descending: bool) -> None:
    fold(index, random_ledger(5))
    whole, total = index.page(GroupQuery(sort=order, descending=descending, limit=200))
    found = list[GroupRecord]()
    for offset in range(0, total, 7):
        found += index.page(GroupQuery(sort=order, descending=descending, limit=7, offset=offset))[0]
    assert found == whole
    values = [value for group in whole if (value := figure(group, order)) is not None]
    assert values == sorted(values, reverse=descending)
    assert [figure(group, order) for group in whole[len(values) :]] == [None] * (total - len(values))


def figure(group: GroupRecord, order: str) -> float | None:
    match order:
        case "spread":
            return max(group.rewards) - min(group.rewards) if group.rewards else None
        case "tokens":
            return sum(group.tokens) if group.tokens else None
        case "longest":
            return max(group.tokens, default=None)
        case "truncated":
            return len(group.truncated)
    return getattr(group, order)  # type: ignore[no-any-return]


def test_flags_choose_by_what_groups_hold(index: GroupIndex) -> None:
    ledger = random_ledger(6)
    fold(index, ledger)
    everything = in_memory(ledger)

    def chosen(**query: object) -> set[str]:
        return names(index.page(GroupQuery.model_validate({"limit": 200, **query}))[0])

    with_rewards = [group for group in everything if group.rewards]
    assert chosen(teaches=True) == {group.group for group in with_rewards if len(set(group.rewards)) > 1}
    assert chosen(teaches=False) == {group.group for group in with_rewards if len(set(group.rewards)) == 1}
    assert chosen(truncated=True) == {group.group for group in everything if group.truncated}
    assert chosen(truncated=False) == {group.group for group in everything if not group.truncated}
    assert chosen(retried=True) == {group.group for group in everything if group.attempt}
    assert chosen(forked=True) == {group.group for group in everything if len(set(group.rollouts)) < len(group.rollouts)}
    assert chosen(replica="rollout-1") == {group.group for group in everything if group.replica == "rollout-1"}
    assert chosen(reason="verifier HUNG") == {group.group for group in everything if "Verifier hung" in group.reason} != set()
    assert chosen(reason="100 %_") != set()
    assert chosen(reason="x%") == set(), "a percent sign is no wildcard"
    assert chosen(status=["trained", "dead"]) == {group.group for group in everything if group.status in ("trained", "dead")}
    assert chosen(group="g3") == chosen(group="3") == {group_id(3)}
    assert len(chosen(evaluation=True, group="eval.heldout.7.")) == 2
    assert chosen(group="' OR 1=1 --") == set()
    assert chosen(min_tokens=500, max_tokens=900) == {group.group for group in with_rewards if 500 <= sum(group.tokens) <= 900}
    assert chosen(since=1003.0, until=1005.0) == {group.group for group in everything if 1003 <= group.at <= 1005}


@pytest.mark.parametrize("seed", range(3))
def test_provenance_is_that_of_a_fold_of_the_whole_ledger(index: GroupIndex, seed: int) -> None:
    ledger = random_ledger(seed)
    fold(index, ledger)
    everything = in_memory(ledger, lambda group: True)
    assert len(everything) > 90
    steps, history = dict[str, list[ProvenanceStep]](), GroupHistory()
    for sequence, record in ledger:
        for group in history.apply(sequence, record):
            if (words := ledger_words(record, group)) is not None:
                steps.setdefault(group.group, []).append(ProvenanceStep(sequence, record.at, record.event(), words))
    for group in everything:
        found = index.provenance(group)
        others = [step for step in found if step.event in ("eval_started", "checkpoint_durable")]
        assert [step for step in found if step not in others] == steps[group.group]
        expected = {"eval_started": group.dataset is not None, "checkpoint_durable": history.durable(group)}
        assert [step.event for step in others] == [event for event, told in expected.items() if told]


def test_batches_are_as_they_were_amended(index: GroupIndex) -> None:
    records: list[LedgerRecord] = [
        GroupsAdmitted(first=0, count=3, version=0, at=1.0),
        BatchFormed(step=4, version=2, groups=[group_id(0), group_id(1)], mask_below=1, at=2.0),
        BatchAmended(step=4, removed=[group_id(0)], added=[group_id(2)], at=3.0),
    ]
    fold(index, list(enumerate(records, 1)))
    batch = index.batch(4)
    assert batch is not None
    assert (batch.groups, batch.version, batch.mask_below, batch.amended) == ((group_id(1), group_id(2)), 2, 1, 1)
    assert (batch.formed, batch.started, batch.ended) == (2.0, None, None)
    index.apply([(4, BatchTrained(step=4, version=3, started=5.0, ended=6.0, at=6.0))])
    batch = index.batch(4)
    assert batch is not None and (batch.started, batch.ended, len(batch.groups)) == (5.0, 6.0, 2)
    assert index.batch(5) is None


def test_kept_places_are_those_of_the_attempt_that_came_back_and_go_with_their_file(index: GroupIndex) -> None:
    first, second = KeptPlace("g", 0, "a", 9, 10), KeptPlace("g", 2, "b", 10, 20)
    index.keep([KeptPlace("g", 0, "a", 0, 10), second, first])
    assert (index.kept("g", 0), index.kept("g", 2), index.kept("g", 1), index.kept("x", 0)) == (first, second, second, None)
    index.forget_file("b")
    assert index.kept("g", 2) == first, "of two lines of an attempt the last: the first is of what a repair has cut off"


def test_facets_count_every_group_once(index: GroupIndex) -> None:
    ledger = random_ledger(3)
    fold(index, ledger)
    facets = index.facets()
    assert sum(facet.groups for facet in facets if not facet.evaluation) == 96
    expected = len(in_memory(ledger, lambda group: group.status == "trained"))
    assert sum(facet.groups for facet in facets if facet.status == "trained") == expected


@table(
    "query",
    [
        {"limit": 0},
        {"limit": 201},
        {"offset": -1},
        {"offset": 1 << 31},
        {"step": 1 << 31},
        {"min_reward": float("nan")},
        {"max_reward": float("inf")},
        {"sort": "name; DROP TABLE groups"},
        {"status": ["asleep"]},
        {"group": "x" * 201},
        {"reason": ""},
        {"stpe": 3},
    ],
)
def test_a_query_that_is_none_is_refused_by_its_field(query: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(query))):
        GroupQuery.model_validate(query)
