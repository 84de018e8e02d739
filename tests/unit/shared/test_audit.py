"""The audit accepts a run that kept the invariants and names each way of breaking one."""

from collections.abc import Callable
from typing import Any

from shared.schema.digests import attest
from shared.schema.ledger import (
    PAYLOAD_LOST,
    BatchAmended,
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    SampleRefused,
    VersionLive,
    group_id,
)
from shared.schema.ledger_audit import audit
from shared.schema.messages import SampleMeta, ScoredGroup
from tests.support.attested_ledger import attested
from tests.support.tables import table
from tests.support.valid_messages import example

BOUND, SIZE = 1, 2


def scored(*numbers: int, oldest: int = 0, newest: int = 0) -> GroupsScored:
    samples = [SampleMeta(tokens=1, trained=1, oldest=oldest, newest=newest, finish="stop")]
    groups = [example(ScoredGroup, group=group_id(number), attempt=0, samples=samples) for number in numbers]
    return GroupsScored(groups=groups, at=0.0)


def formed(step: int, *numbers: int, version: int | None = None) -> BatchFormed:
    return BatchFormed(step=step, version=step if version is None else version, groups=[group_id(number) for number in numbers], at=0.0)


def trained(step: int) -> BatchTrained:
    return BatchTrained(step=step, version=step + 1, started=0.0, ended=1.0, attestation=attest([]), at=0.0)


def admitted(first: int, count: int) -> GroupsAdmitted:
    return GroupsAdmitted(first=first, count=count, version=0, at=0.0)


def live(version: int) -> VersionLive:
    return VersionLive(version=version, at=0.0)


def durable(steps: int) -> CheckpointDurable:
    return CheckpointDurable(steps=steps, at=0.0)


def run() -> list[LedgerRecord]:
    """Two steps of two groups: one group dropped, one dead, one generated anew."""
    return [
        live(0),  # 0
        admitted(0, 4),  # 1
        scored(0, 1),  # 2
        formed(0, 0, 1),  # 3
        trained(0),  # 4
        live(1),  # 5
        scored(2, oldest=0, newest=1),  # 6
        GroupRequeued(group=group_id(2), attempt=1, reason="payload lost", at=0.0),  # 7
        GroupDead(group=group_id(3), reason="verifier hung", at=0.0),  # 8
        admitted(4, 2),  # 9
        scored(2, 4, 5, oldest=0, newest=1),  # 10
        GroupsDropped(groups=[group_id(4)], reason="stale", at=0.0),  # 11
        formed(1, 2, 5),  # 12
        trained(1),  # 13
        live(2),  # 14
        durable(2),  # 15
        RunFinished(steps=2, at=0.0),  # 16
    ]


def test_a_run_that_kept_the_invariants() -> None:
    report = audit(attested(run()), BOUND, SIZE)
    assert report.violations == []
    assert report.ok and report.finished
    assert (report.admitted, report.trained, report.in_flight) == (6, 4, 0)
    assert report.dropped == {"stale": 1}
    assert report.dead == {"verifier hung": 1}
    assert (report.steps, report.durable_steps, report.live_version) == (2, 2, 2)
    assert report.max_staleness == 1
    assert report.staleness == {0: 2, 1: 2}


def test_every_beginning_of_such_a_run_kept_them_too() -> None:
    for length in range(len(run())):
        report = audit(attested(run()[:length]), BOUND, SIZE)
        assert report.ok
        ended = report.trained + report.dropped.total() + report.dead.total()
        assert report.admitted == ended + report.in_flight


def insert(at: int, record: LedgerRecord) -> Callable[[list[LedgerRecord]], Any]:
    return lambda records: records.insert(at, record)


def replace(at: int, record: LedgerRecord) -> Callable[[list[LedgerRecord]], Any]:
    return lambda records: records.__setitem__(at, record)


def remove(at: int) -> Callable[[list[LedgerRecord]], Any]:
    return lambda records: records.pop(at)


@table(
    ("change", "violation"),
    [
        (replace(9, admitted(5, 2)), "admission starts at group 5, 4 were admitted before"),
        (insert(2, admitted(0, 4)), "10 admitted, but 6 ended and 0 in flight"),
        (insert(6, scored(7)), "g00000007 was scored but is not in flight"),
        (insert(5, scored(0)), "g00000000 was scored but is not in flight"),
        (insert(7, scored(2)), "g00000002 was scored twice in one attempt"),
        (insert(5, GroupRequeued(group=group_id(1), attempt=1, reason="x", at=0.0)), "g00000001 was requeued but is not in flight"),
        (insert(12, GroupsDropped(groups=[group_id(4)], reason="stale", at=0.0)), "g00000004 was ended (stale) but is not in flight"),
        (insert(9, GroupDead(group=group_id(3), reason="again", at=0.0)), "g00000003 was ended (again) but is not in flight"),
        (insert(9, GroupsDropped(groups=[group_id(3)], reason="stale", at=0.0)), "g00000003 was ended (stale) but is not in flight"),
        (insert(5, GroupDead(group=group_id(0), reason="x", at=0.0)), "g00000000 was ended (x) but is not in flight"),
        (insert(13, GroupDead(group=group_id(5), reason="x", at=0.0)), "g00000005 was trained in step 1 but is not in flight"),
        (replace(12, formed(3, 2, 5, version=1)), "batch of step 3 was formed after that of step 0"),
        (insert(4, formed(0, 2, 3)), "batch of step 0 was formed after that of step 0"),
        (replace(12, formed(1, 2)), "batch of step 1 has 1 groups, not 2"),
        (replace(12, formed(1, 2, 5, 4)), "batch of step 1 has 3 groups, not 2"),
        (replace(12, formed(1, 2, 2)), "g00000002 is in two batches"),
        (replace(12, formed(1, 0, 2)), "g00000000 was batched for step 1 but is not in flight"),
        (replace(10, scored(2, 4, oldest=0, newest=1)), "g00000005 was batched for step 1 without a score"),
        (remove(7), "g00000002 was scored twice in one attempt"),
        (replace(12, formed(1, 2, 5, version=2)), "step 1 trains a sample of g00000002 that is 2 versions old; the bound is 1"),
        (replace(12, formed(1, 2, 5, version=0)), "step 1 on version 0 holds a token of version 1"),
        (remove(4), "step 1 was trained after 0 steps"),
        (insert(5, trained(0)), "step 0 was trained after 1 steps"),
        (insert(14, durable(3)), "checkpoint of 3 steps is durable, 2 were trained"),
        (insert(16, durable(1)), "durable steps fell from 2 to 1"),
        (insert(15, live(1)), "live version went from 2 to 1"),
        (insert(15, live(2)), "live version went from 2 to 2"),
        (remove(13), "the run finished with 2 groups in flight"),
        (remove(8), "the run finished with 1 groups in flight"),
    ],
)
def test_each_violation_is_named(change: Callable[[list[LedgerRecord]], Any], violation: str) -> None:
    records = run()
    change(records)
    report = audit(attested(records), BOUND, SIZE)
    assert not report.ok
    assert any(violation in found for found in report.violations), report.violations


def refused(step: int, number: int, at: float = 0.0) -> SampleRefused:
    return SampleRefused(step=step, group=group_id(number), sample=0, reason="token 7 is outside", refused=at, at=at)


def dead(number: int) -> GroupDead:
    return GroupDead(group=group_id(number), reason="trainer", at=0.0)


def amended(step: int, removed: list[int], added: list[int]) -> BatchAmended:
    return BatchAmended(step=step, removed=[group_id(number) for number in removed], added=[group_id(number) for number in added], at=0.0)


def amended_run() -> list[LedgerRecord]:
    """One step of two groups: one of them is refused, and another takes its place."""
    beginning = [live(0), admitted(0, 2), scored(0, 1), formed(0, 0, 1)]
    return [*beginning, refused(0, 0), dead(0), admitted(2, 1), scored(2), amended(0, [0], [2]), trained(0)]


def test_a_group_that_the_trainer_refuses_is_replaced() -> None:
    for length in range(len(amended_run())):
        assert audit(attested(amended_run()[:length]), BOUND, SIZE).violations == []
    report = audit(attested(amended_run()), BOUND, SIZE)
    assert report.violations == []
    assert (report.admitted, report.trained, report.dead, report.amended, report.in_flight) == (3, 2, {"trainer": 1}, 1, 0)


def requeued(number: int) -> GroupRequeued:
    return GroupRequeued(group=group_id(number), attempt=1, reason=PAYLOAD_LOST, at=0.0)


def test_a_group_that_the_store_has_lost_is_generated_anew_for_its_step() -> None:
    beginning = [live(0), admitted(0, 2), scored(0, 1), formed(0, 0, 1)]
    records = [*beginning, refused(0, 0), requeued(0), scored(0), amended(0, [0], [0]), trained(0)]
    report = audit(attested(records), BOUND, SIZE)
    assert report.violations == []
    assert (report.admitted, report.trained, report.dead, report.amended, report.in_flight) == (2, 2, {}, 1, 0)
    del records[4]
    assert "g00000000 was requeued while it is in a batch, and was not refused" in audit(attested(records), BOUND, SIZE).violations
    after = audit(attested([*beginning, trained(0), refused(0, 0), requeued(0)]), BOUND, SIZE)
    assert "g00000000 was requeued but is not in flight" in after.violations, "what is trained is not generated again"


def test_a_trained_group_that_is_refused_when_it_is_trained_again_ends_as_dead() -> None:
    records = [live(0), admitted(0, 2), scored(0, 1), formed(0, 0, 1), trained(0), refused(0, 0), dead(0), amended(0, [0], [])]
    report = audit(attested([*records, durable(1)]), BOUND, SIZE)
    assert report.violations == []
    assert (report.admitted, report.trained, report.dead, report.in_flight) == (2, 1, {"trainer": 1}, 0)


@table(
    ("change", "violation"),
    [
        (remove(4), "step 0 was amended by removing ['g00000000']; of its groups [] had left it"),
        (remove(5), "step 0 was amended by removing ['g00000000']; of its groups [] had left it"),
        (replace(8, amended(0, [1], [2])), "step 0 was amended by removing ['g00000001']; of its groups ['g00000000'] had left it"),
        (replace(8, amended(1, [0], [2])), "step 1 was amended by removing ['g00000000']; of its groups [] had left it"),
        (replace(8, amended(0, [0], [1])), "g00000001 is in two batches"),
        (replace(8, amended(0, [0], [0])), "g00000000 was batched for step 0 but is not in flight"),
        (remove(7), "g00000002 was batched for step 0 without a score"),
        (replace(7, scored(2, newest=1)), "step 0 on version 0 holds a token of version 1"),
        (remove(8), "g00000000 was trained in step 0 but is not in flight"),
        (replace(4, refused(0, 2)), "g00000002 was refused in step 0, which does not train it"),
        (replace(4, refused(1, 0)), "g00000000 was refused in step 1, which does not train it"),
        (insert(10, dead(1)), "g00000001 was ended (trainer) but is not in flight"),
    ],
)
def test_each_violation_of_an_amendment_is_named(change: Callable[[list[LedgerRecord]], Any], violation: str) -> None:
    records = amended_run()
    change(records)
    assert any(violation in found for found in audit(attested(records), BOUND, SIZE).violations), audit(
        attested(records), BOUND, SIZE
    ).violations


def test_a_run_that_goes_on_after_its_end_is_not_finished() -> None:
    report = audit(attested([*run(), admitted(6, 2)]), BOUND, SIZE)
    assert report.ok
    assert not report.finished
    assert report.in_flight == 2
