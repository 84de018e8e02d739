"""What a dead group died of: infrastructure, its task or the policy; in the ledger, which older ledgers do not say, and in the audit."""

import random

import pytest

from services.buffer import outcome_check, policy
from services.rollout.engine.transport import EngineUnreachable, InvalidRequest
from shared.bus.subjects import Subjects
from shared.hooks import HookFailed
from shared.process.worker_pool import CallLate, WorkerDied
from shared.runtime.errors import INFRASTRUCTURE, POLICY, TASK, BadMessage, DeadlineExceeded, Fault, MyxoError, PayloadMissing
from shared.schema import codec
from shared.schema.ledger import EvalScored, GroupDead, LedgerRecord
from shared.schema.ledger_audit import audit
from shared.schema.messages import Failed, Payload
from tests.support.buffer_config import buffer_config
from tests.support.tables import table
from tests.unit.buffer.world import World

AWAY = DeadlineExceeded("2 rewards", "the judge", 60.0, "the group is given up")


@table(
    ("error", "fault"),
    [
        (AWAY, INFRASTRUCTURE),
        (PayloadMissing("g0"), INFRASTRUCTURE),
        (EngineUnreachable("unix:http.sock", "no connection"), INFRASTRUCTURE),
        (CallLate("2 rewards", "verifier exact", 2.0, "given up"), TASK),
        (WorkerDied("verifier exact's process ended"), TASK),
        (InvalidRequest("the prompt is too long"), TASK),
        (HookFailed("custom_rm_path", "a:b", "ValueError"), TASK),
        (BadMessage("Generated.payload"), TASK),
    ],
)
def test_an_error_says_whose_fault_it_is(error: MyxoError, fault: Fault) -> None:
    assert error.fault == fault


def world() -> World:
    made = World(buffer_config(steps=3, groups=2, samples=1, max_staleness=1, interval=1), random.Random(0))
    made.decide(policy.live(made.state, made.limits, 0, 0.0))
    return made


def failed(fault: Fault) -> Failed:
    return Failed(group="g00000000", attempt=0, reason="it died", by="reward-0", fault=fault)


@pytest.mark.parametrize("fault", [INFRASTRUCTURE, TASK, ""])
def test_the_ledger_has_it_from_who_gave_the_group_up(fault: Fault) -> None:
    [record] = policy.failed(world().state, failed(fault), 1.0)
    assert isinstance(record, GroupDead) and (record.fault, record.reason) == (fault, "reward-0: it died")
    assert LedgerRecord.decode(record.encode()) == record


@pytest.mark.parametrize("record", [GroupDead(group="g00000000", reason="old", at=0.0)])
def test_ledgers_that_say_nothing_of_it_are_read(record: GroupDead) -> None:
    fields = codec.unpack(record.encode())
    assert isinstance(fields, dict) and fields.pop("fault") == ""
    assert LedgerRecord.decode(codec.pack(fields)) == record
    scored = EvalScored(group="eval.a.0.0", dataset="a", version=0, rewards=[], reason="old", at=0.0)
    assert scored.fault == ""


def test_an_outcome_that_came_too_often_died_of_the_infrastructure_and_a_forged_one_of_its_task() -> None:
    subjects = Subjects("run")
    own = f"{subjects.payload_prefix('g00000000', 0)}0:a"
    for key, last, fault in ((own, True, INFRASTRUCTURE), ("another", True, TASK)):
        payload = Payload(keys=[key], bytes=1)
        checked = outcome_check.checked(failed("").model_copy(update={"payload": payload}), subjects, last=last)
        assert isinstance(checked, Failed) and checked.fault == fault


def test_the_audit_counts_what_was_at_fault() -> None:
    played = world()
    records: list[LedgerRecord] = []
    for number, fault in enumerate((INFRASTRUCTURE, POLICY, INFRASTRUCTURE, "")):
        records.append(GroupDead(group=f"g{number:08d}", reason="why", fault=fault, at=1.0))
    report = audit([*played.records, *records], 1, 2)
    assert report.violations == []
    assert report.faults == {"infrastructure": 2, "policy": 1, "not said": 1} and report.dead == {"why": 4}
