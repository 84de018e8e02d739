"""The ledger's fold into spans: one root for each group, whatever becomes of it, and the same after a buffer's restart."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from services.buffer.group_spans import GroupSpans
from shared.runtime.traces import TraceSpan
from shared.schema import ledger
from shared.schema.ledger import LedgerRecord
from shared.schema.messages import SampleMeta, ScoredGroup
from tests.support.valid_messages import example


def scored(group: str, started: float, rewards: Iterable[float] = (1.0, 0.0), attempt: int = 0) -> ScoredGroup:
    samples = [example(SampleMeta, tokens=3, oldest=0, newest=0, trained=3)] * 2
    known = {"samples": samples, "rewards": list(rewards), "replica": "rollout-0"}
    return example(ScoredGroup, group=group, attempt=attempt, started=started, ended=started + 1, **known)


def spans(*records: LedgerRecord) -> list[TraceSpan]:
    fold = GroupSpans()
    return [span for record in records for span in fold.apply(record)]


ADMITTED = ledger.GroupsAdmitted(at=1, first=0, count=2, version=0)
SCORED = ledger.GroupsScored(at=5, groups=[scored("g00000000", 2), scored("g00000001", 3)])
FORMED = ledger.BatchFormed(at=6, step=0, version=0, groups=["g00000000", "g00000001"])
TRAINED = ledger.BatchTrained(at=10, step=0, version=0, started=7, ended=9)


def test_a_trained_group_waited_for_a_replica_a_batch_and_the_trainer() -> None:
    made = [span for span in spans(ADMITTED, SCORED, FORMED, TRAINED) if span.trace == "g00000000"]
    assert [(span.name, span.started, span.ended, span.root) for span in made] == [
        ("wait for a replica", 1, 2, False),
        ("wait for a batch", 5, 6, False),
        ("wait for the trainer", 6, 7, False),
        ("group", 1, 9, True),
    ]
    root = made[-1]
    assert root.links == ("step 0",) and not root.error
    known = {"group": "g00000000", "end": "trained", "admitted_version": 0, "attempts": 1, "mean_reward": 0.5}
    assert root.attributes == {**known, "step": 0, "trained_version": 0}


def test_a_group_that_went_out_again_tells_why_and_counts_its_attempts() -> None:
    requeued = ledger.GroupRequeued(at=6, group="g00000000", attempt=1, reason="stale")
    *_, wait, dead = spans(
        ADMITTED,
        SCORED,
        requeued,
        ledger.GroupsScored(at=9, groups=[scored("g00000000", 8, attempt=1)]),
        ledger.GroupDead(at=10, group="g00000000", reason="no verifier"),
    )
    assert (wait.started, wait.ended) == (6, 8)
    assert (dead.error, dead.events, dead.attributes["attempts"], dead.attributes["end"]) == (
        "no verifier",
        (("requeued: stale", 6),),
        2,
        "dead",
    )


def test_a_dropped_group_is_no_failure() -> None:
    (root,) = spans(ADMITTED, ledger.GroupsDropped(at=4, groups=["g00000001"], reason="too old"))
    assert (root.trace, root.root, root.error, root.attributes["reason"], root.ended) == ("g00000001", True, "", "too old", 4)


def test_a_group_that_left_its_batch_to_be_generated_anew_is_trained_with_another() -> None:
    made = spans(
        ledger.GroupsAdmitted(at=1, first=0, count=3, version=0),
        SCORED,
        ledger.GroupsScored(at=5, groups=[scored("g00000002", 2)]),
        FORMED,
        ledger.GroupRequeued(at=7, group="g00000001", attempt=1, reason="payload lost"),
        ledger.BatchAmended(at=7, step=0, removed=["g00000001"], added=["g00000002"]),
        TRAINED,
        ledger.GroupsScored(at=11, groups=[scored("g00000001", 10, attempt=1)]),
        ledger.BatchFormed(at=12, step=1, version=1, groups=["g00000001"]),
        ledger.BatchTrained(at=15, step=1, version=1, started=13, ended=14),
    )
    ends = [(span.trace, span.attributes["step"], span.attributes["attempts"]) for span in made if span.root]
    assert ends == [("g00000000", 0, 1), ("g00000002", 0, 1), ("g00000001", 1, 2)]


def test_a_group_that_takes_anothers_place_is_trained_with_the_batch() -> None:
    made = spans(
        ledger.GroupsAdmitted(at=1, first=0, count=3, version=0),
        SCORED,
        ledger.GroupsScored(at=5, groups=[scored("g00000002", 2)]),
        FORMED,
        ledger.GroupDead(at=7, group="g00000001", reason="cannot be trained"),
        ledger.BatchAmended(at=7, step=0, removed=["g00000001"], added=["g00000002"]),
        TRAINED,
    )
    assert [(span.trace, span.attributes["end"]) for span in made if span.root] == [
        ("g00000001", "dead"),
        ("g00000000", "trained"),
        ("g00000002", "trained"),
    ]


def test_an_evaluation_has_a_trace_and_each_of_its_prompts_one() -> None:
    figures = {"oldest": 2, "newest": 2, "prompts": 2, "failed": 1, "samples": 1, "mean_reward": 1.0}
    fine, failed, whole = spans(
        ledger.EvalStarted(at=1, dataset="aime", version=2, prompts=2),
        ledger.EvalScored(at=3, group="eval.aime.2.0", dataset="aime", version=2, rewards=[1.0]),
        ledger.EvalScored(at=4, group="eval.aime.2.1", dataset="aime", version=2, rewards=[], reason="late"),
        ledger.EvalEnded(at=5, dataset="aime", version=2, live=2, **figures),
    )
    assert (fine.trace, fine.root, fine.started, fine.ended, fine.error, fine.attributes["mean_reward"]) == (
        "eval.aime.2.0",
        True,
        1,
        3,
        "",
        1.0,
    )
    assert (failed.error, failed.links) == ("late", (whole.trace,))
    assert (whole.name, whole.root, whole.started, whole.ended) == ("evaluation", True, 1, 5)


RECORDS = [
    ADMITTED,
    SCORED,
    ledger.GroupRequeued(at=6, group="g00000001", attempt=1, reason="lost"),
    FORMED,
    TRAINED,
    ledger.GroupDead(at=11, group="g00000000", reason="x"),
    ledger.GroupsDropped(at=11, groups=["g00000001"], reason="x"),
    ledger.BatchAmended(at=7, step=0, removed=["g00000001"], added=["g00000009"]),
    ledger.EvalScored(at=3, group="eval.aime.2.0", dataset="aime", version=2, rewards=[1.0]),
    ledger.CheckpointDurable(at=12, steps=1),
    ledger.RunFinished(at=13, steps=1),
]


@given(st.lists(st.sampled_from(RECORDS), max_size=30))
def test_no_order_of_records_ends_the_fold_or_a_group_twice(records: list[LedgerRecord]) -> None:
    """Nor does it hold what has ended."""
    fold = GroupSpans()
    roots, admitted = 0, 0
    for record in records:
        admitted += 2 * isinstance(record, ledger.GroupsAdmitted)
        roots += sum(span.root and not span.trace.startswith("eval") for span in fold.apply(record))
    assert roots <= admitted and len(fold._open) <= 2
