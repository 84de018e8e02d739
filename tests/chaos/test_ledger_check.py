"""The suite's own check of a ledger finds whatever must not be in one."""

from collections.abc import Callable
from typing import Any

import pytest

from shared.schema import codec
from tests.chaos.fast.scripted_weights import ALPHABET, first_state, next_state, number_of, problems_of, token_of, version_of
from tests.chaos.ledger_check import LedgerCheck, LedgerFindings

Records = list[dict[str, Any]]


def scored(group: str, oldest: int = 0, digest: int = 5) -> dict[str, Any]:
    sample = {"tokens": 3, "oldest": oldest, "newest": oldest, "finish": "length", "trained": 3, "spans": [], "digest": digest}
    return {"group": group, "samples": [sample], "removed": []}


def trained(step: int, version: int) -> dict[str, Any]:
    return {"kind": "BatchTrained", "step": step, "version": version, "attestation": {"samples": 1}}


def good() -> Records:
    """Two steps of one group each."""
    return [
        {"kind": "GroupsAdmitted", "first": 0, "count": 2, "version": 0},
        {"kind": "GroupsScored", "groups": [scored("g00000000", digest=1)]},
        {"kind": "BatchFormed", "step": 0, "version": 0, "groups": ["g00000000"], "mask_below": 0},
        trained(0, 0),
        {"kind": "VersionLive", "version": 1},
        {"kind": "GroupsScored", "groups": [scored("g00000001", digest=2)]},
        {"kind": "BatchFormed", "step": 1, "version": 1, "groups": ["g00000001"], "mask_below": 0},
        trained(1, 1),
        {"kind": "CheckpointDurable", "steps": 2},
        {"kind": "RunFinished", "steps": 2},
    ]


def found(records: Records, sequences: list[int] | None = None) -> LedgerFindings:
    check = LedgerCheck(bound=1, size=1)
    for sequence, record in zip(sequences or range(1, len(records) + 1), records, strict=True):
        check.take(sequence, codec.pack(record))
    return check.end()


def test_a_good_ledger_says_what_the_weights_are():
    findings = found(good())
    assert findings.problems == []
    assert findings.state == next_state(next_state(first_state(), [1]), [2])
    assert findings.ends == {"g00000000": "trained", "g00000001": "trained"}


def change(index: int, **fields: Any) -> Callable[[Records], object]:
    return lambda records: records[index].update(fields)


BAD: dict[str, tuple[Callable[[Records], object], str]] = {
    "a group is lost": (lambda records: records[0].update(count=3), "1 of 3 groups have no end"),
    "a group is trained twice": (change(6, groups=["g00000000"]), "g00000000 is in the batches of steps 0 and 1"),
    "a step is missing": (lambda records: records.pop(3), "step 1 was trained as the 0th"),
    "a step comes twice": (lambda records: records.insert(4, trained(0, 0)), "step 0 was trained as the 1th"),
    "a group ends twice": (
        lambda records: records.insert(4, {"kind": "GroupDead", "group": "g00000000", "reason": "no"}),
        "after its end",
    ),
    "nobody admitted it": (change(0, count=1), "g00000001 was scored, and never admitted"),
    "a token is too old": (lambda records: (records[6].update(version=2), records[7].update(version=2)), "has a token of version 0"),
    "a token is of a version to come": (change(5, groups=[scored("g00000001", oldest=2)]), "has a token of version 2"),
    "a version goes live again": (
        lambda records: records.insert(8, {"kind": "VersionLive", "version": 1}),
        "version 1 became live after 1",
    ),
    "the trainer trained something else": (change(7, attestation={"samples": 2}), "the trainer attests"),
    "what is durable was not trained": (change(8, steps=3), "a checkpoint of 3 steps is durable"),
    "a batch has no score": (lambda records: records.pop(5), "g00000001 is in the batch of step 1 without a score"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_must_not_be_is_found(name: str):
    alter, words = BAD[name]
    records = good()
    alter(records)
    assert any(words in problem for problem in found(records).problems), found(records).problems


def test_a_group_that_the_trainer_refuses_leaves_its_batch():
    """Also where its step had been trained and is to be trained again."""
    records = good()
    records[0]["count"] = 3
    refused = [
        {"kind": "SampleRefused", "step": 1, "group": "g00000001", "sample": 0, "reason": "no"},
        {"kind": "GroupDead", "group": "g00000001", "reason": "no"},
        {"kind": "GroupsScored", "groups": [scored("g00000002", oldest=1, digest=7)]},
        {"kind": "BatchAmended", "step": 1, "removed": ["g00000001"], "added": ["g00000002"]},
    ]
    for at in (7, 8):
        findings = found([*records[:at], *refused, *records[at:]])
        assert findings.problems == []
        assert findings.ends["g00000001"] == "dead: no" and findings.ends["g00000002"] == "trained"
        assert findings.state == next_state(next_state(first_state(), [1]), [7])


def test_a_group_that_the_store_has_lost_is_generated_anew_for_its_batch():
    records, kind = good(), {"kind": "GroupRequeued", "group": "g00000001", "attempt": 1, "partial": None}
    lost = [
        {"kind": "SampleRefused", "step": 1, "group": "g00000001", "sample": 0, "reason": "no"},
        {**kind, "reason": "payload lost"},
        {"kind": "GroupsScored", "groups": [scored("g00000001", oldest=1, digest=7)]},
        {"kind": "BatchAmended", "step": 1, "removed": ["g00000001"], "added": ["g00000001"]},
    ]
    findings = found([*records[:7], *lost, *records[7:]])
    assert findings.problems == [] and findings.ends["g00000001"] == "trained"
    assert findings.state == next_state(next_state(first_state(), [1]), [7])
    for wrong in (lost[1:], [lost[0], {**kind, "reason": "stale"}, *lost[2:]]):
        problems = found([*records[:7], *wrong, *records[7:]]).problems
        assert any("g00000001 left the batch of step 1" in problem for problem in problems), problems


def test_a_message_that_is_missing_in_the_stream_is_found():
    assert "the stream goes from message 4 to 6" in found(good(), [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]).problems[0]


def test_tokens_and_weights_tell_where_they_come_from():
    for version in (0, 1, 40, ALPHABET - 1):
        for position in (0, 7, 300):
            assert version_of(token_of(version, position), position) == version
    torch = pytest.importorskip("torch")
    state = next_state(first_state(), [3, 9])
    assert next_state(first_state(), [9, 3]) == state != next_state(first_state(), [9])
    weights = {name: torch.full((2, 2), number_of(state, 4, name)) for name in ("a.q_proj.weight", "a.k_proj.weight", "b.weight")}
    assert torch.equal(weights["a.q_proj.weight"], weights["a.k_proj.weight"])
    assert problems_of(weights, state, 4) == []
    assert problems_of(weights, state, 5) and problems_of(weights, first_state(), 4)
    weights["b.weight"][0, 0] += 1
    assert len(problems_of(weights, state, 4)) == 1
