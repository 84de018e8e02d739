"""What a torn run needs, from its ledger and its checkpoints alone."""

import pytest

from myxo.commands.repair import LedgerCut, LedgerExtent, RepairPlan, extent, repair_plan
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord, LedgerRepaired, VersionLive
from tests.support.tables import table


def ledger(*steps: int) -> list[LedgerRecord]:
    """These steps were trained, as records; a negative number: a checkpoint of so many steps is durable."""
    return [
        BatchTrained(step=step, version=step, started=0.0, ended=1.0, at=1.0) if step >= 0 else CheckpointDurable(steps=-step, at=1.0)
        for step in steps
    ]


def numbered(records: list[LedgerRecord], *lacking: int) -> list[tuple[int, LedgerRecord]]:
    return [(sequence, record) for sequence, record in enumerate(records, 1) if sequence not in lacking]


def test_a_whole_ledger_is_good_to_its_end() -> None:
    found = extent(numbered(ledger(0, 1, 2, -2, 3)), 5)
    assert found == LedgerExtent(trained=4, durable=2)
    assert extent([], 0) == LedgerExtent()


@table(("lacking", "after", "trained"), [((3,), 2, 2), ((1,), 0, 0), ((2, 3), 1, 1), ((5,), 4, 3), ((3, 5), 2, 2), ((1, 2, 3, 4, 5), 0, 0)])
def test_a_ledger_is_cut_before_its_first_gap(lacking: tuple[int, ...], after: int, trained: int) -> None:
    found = extent(numbered(ledger(0, 1, 2, -2, 3), *lacking), 5)
    assert found.cut is not None and (found.cut.after, found.cut.last, found.trained) == (after, 5, trained)
    assert f"records {after + 1} to" in found.cut.why


def test_what_a_repair_has_cut_is_no_gap() -> None:
    repaired = LedgerRepaired(resume=2, cut_after=2, cut_last=5, at=1.0)
    records = [*enumerate(ledger(0, 1), 1), (6, repaired), *enumerate(ledger(2, 3), 7)]
    assert extent(records, 8) == LedgerExtent(trained=4)
    late = extent([*records, (10, VersionLive(version=1, at=1.0))], 10)
    assert late.cut is not None and late.cut.after == 8


@table(
    ("trained", "durable", "held", "resume", "aside"),
    [
        (5, 4, [2, 4], 4, ()),
        (4, 4, [2, 4], 4, ()),
        (3, 2, [2, 4], 2, (4,)),
        (3, 0, [4], 0, (4,)),
        (3, 0, [], 0, ()),
        (7, 2, [2, 4, 8, 10], 4, (8, 10)),
    ],
)
def test_a_run_goes_back_to_the_newest_checkpoint_that_the_ledger_knows(
    trained: int, durable: int, held: list[int], resume: int, aside: tuple[int, ...]
) -> None:
    plan = repair_plan(LedgerExtent(trained, durable), held)
    assert plan == RepairPlan(resume, None, aside) and plan.needed == bool(aside)


@pytest.mark.parametrize(("trained", "durable", "held"), [(3, 2, [4]), (5, 4, [2]), (5, 4, [])])
def test_where_no_checkpoint_fits_nothing_is_touched(trained: int, durable: int, held: list[int]) -> None:
    plan = repair_plan(LedgerExtent(trained, durable), held)
    assert plan.problem and not plan.set_aside and f"from {durable} to {trained} steps" in plan.problem


def test_a_cut_alone_is_worth_a_repair() -> None:
    plan = repair_plan(LedgerExtent(4, 2, LedgerCut(9, 12, "records 10 to 11 are gone")), [2])
    assert plan.needed and plan.resume == 2 and not plan.set_aside
