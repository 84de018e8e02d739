"""Dead groups: in a row, a minute, and from when on a run is hopeless."""

import pytest

from services.buffer.buffer_config import BufferConfig
from services.buffer.run_failure import RATE_SECONDS, DeadGroups
from shared.schema.ledger import (
    BatchAmended,
    BatchTrained,
    EvalScored,
    GroupDead,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    SampleRefused,
)
from tests.support.run_config import run_config
from tests.support.tables import table


def dead(at: float = 0.0, reason: str = "rollout-0: the hook raised") -> GroupDead:
    return GroupDead(group="g00000000", reason=reason, at=at)


def heldout(*rewards: float, reason: str = "") -> EvalScored:
    return EvalScored(group="eval.x.0.0", dataset="x", version=0, rewards=list(rewards), oldest=0, newest=0, reason=reason, at=0.0)


def fed(*records: LedgerRecord) -> DeadGroups:
    found = DeadGroups()
    for record in records:
        found.see(record)
    return found


def test_a_run_is_hopeless_at_its_limit_and_the_newest_reason_is_told() -> None:
    assert fed(dead(), dead()).hopeless(3) is None
    said = fed(dead(), dead(), dead(reason="reward-0: no label")).hopeless(3)
    assert said == "3 groups in a row failed (rollout.max_dead_in_a_row = 3), the last one: reward-0: no label"


def test_any_number_is_fine_at_0() -> None:
    assert fed(*[dead()] * 1000).hopeless(0) is None


def test_a_heldout_prompt_that_the_store_lost_is_nobodys_fault() -> None:
    found = fed(dead(), dead(), heldout(reason="reward-0: payload lost"))
    assert (found.in_a_row, found.eval_failed) == (2, 1)


@pytest.mark.parametrize("between", [GroupsScored(groups=[], at=0.0), heldout(0.5)])
def test_whatever_is_scored_ends_the_row(between: LedgerRecord) -> None:
    assert fed(dead(), dead(), between, dead()).in_a_row == 1


@pytest.mark.parametrize("between", [GroupsAdmitted(first=0, count=1, version=0, at=0.0), GroupsDropped(groups=[], reason="stale", at=0.0)])
def test_other_records_do_not(between: LedgerRecord) -> None:
    assert fed(dead(), between, dead()).in_a_row == 2


def test_a_heldout_prompt_that_fails_counts() -> None:
    found = fed(dead(), heldout(reason="reward-0: no label"))
    assert (found.in_a_row, found.eval_failed, found.reason) == (2, 1, "reward-0: no label")


def refused(group: str) -> list[LedgerRecord]:
    """The trainer refuses a group three times; what takes its place comes back scored."""
    refusal = SampleRefused(step=0, group=group, sample=0, reason="mask holds 7", refused=0.0, at=0.0)
    return [refusal, refusal, refusal, GroupDead(group=group, reason="trainer: mask holds 7", at=0.0), GroupsScored(groups=[], at=0.0)]


def test_groups_that_come_back_and_cannot_be_trained_end_the_run_too() -> None:
    found = fed(*refused("g1"), *refused("g2"))
    assert (found.in_a_row, found.refused, found.hopeless(3)) == (0, 2, None)
    told = fed(*refused("g1"), *refused("g2"), *refused("g3")).hopeless(3)
    assert told == "the trainer refused 3 groups for one step (rollout.max_dead_in_a_row = 3), the last one: trainer: mask holds 7"
    trained = BatchTrained(step=0, version=0, started=0.0, ended=0.0, at=0.0)
    assert fed(*refused("g1"), *refused("g2"), trained, *refused("g3")).hopeless(3) is None


def test_steps_that_go_on_without_what_the_store_lost_are_no_failure() -> None:
    def lost(step: int) -> list[LedgerRecord]:
        return [*refused(f"g{step}")[:-1], BatchAmended(step=step, removed=[f"g{step}"], added=[], at=0.0)]

    assert fed(*(record for step in range(9) for record in lost(step))).hopeless(3) is None


def test_a_refusal_alone_is_no_death() -> None:
    records = [SampleRefused(step=0, group=f"g{index}", sample=0, reason="", refused=0.0, at=0.0) for index in range(9)]
    assert fed(*records).hopeless(3) is None


def test_the_rate_is_of_late() -> None:
    found = fed(*[dead(at=float(second)) for second in range(600)])
    assert found.per_minute(600.0) == pytest.approx(60.0, rel=0.02)
    assert found.per_minute(600.0 + RATE_SECONDS) == 0.0
    assert fed(dead(at=1.0)).per_minute(1.0) == 1.0, "of a life of seconds as much as has come"


@table(("batch", "given", "limit"), [(2, None, 32), (64, None, 256), (64, 5, 5), (2, 0, 0)])
def test_the_default_is_a_few_batches(tmp_path, batch: int, given: int | None, limit: int) -> None:  # type: ignore[no-untyped-def]
    config = run_config(tmp_path, rollout={"rollout_batch_size": batch, "max_dead_in_a_row": given})
    assert BufferConfig(config.rollout).max_dead_in_a_row == limit
