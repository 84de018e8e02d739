"""Groups that end: what is known of them, what dead ones died of, and what functions of the user's do with theirs."""

import random

import pytest

from services.buffer import outcome_consumer, policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.rollout_keeper import chosen_groups, ended_groups, trained_not_durable
from services.buffer.run_failure import RATE_SECONDS, DeadGroups
from services.buffer.state import BufferState
from services.rollout.engine.transport import EngineUnreachable, InvalidRequest
from shared.bus.subjects import REWARD, ROLLOUT, Subjects
from shared.hooks import HookFailed
from shared.process.worker_pool import CallLate, WorkerDied
from shared.runtime.errors import INFRASTRUCTURE, POLICY, TASK, BadMessage, DeadlineExceeded, Fault, MyxoError, PayloadMissing
from shared.schema import codec
from shared.schema.ledger import (
    BatchAmended,
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
    SampleRefused,
    VersionLive,
    eval_group_id,
    group_id,
)
from shared.schema.ledger_audit import audit
from shared.schema.messages import Discarded, Failed, Payload, ScoredGroup, Wanted
from tests.support.buffer_config import buffer_config
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.buffer.decisions import meta, of_samples
from tests.unit.buffer.world import World


def scored(number: int, removed: tuple[int, ...] = ()) -> ScoredGroup:
    known = {"payload": Payload(keys=[f"k{number}"], bytes=10), "rewards": [0.0, 1.0], "parts": ({"form": 0.5}, {"form": 1.0})}
    return of_samples(ScoredGroup, group_id(number), [meta(0, 0, 3), meta(2, 2, 3)], "key", attempt=number, removed=removed, **known)


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


# --- dead groups: in a row, a minute, and from when on a run is hopeless


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
    assert told == "3 groups for one step were refused or lost (rollout.max_dead_in_a_row = 3), the last one: trainer: mask holds 7"
    trained = BatchTrained(step=0, version=0, started=0.0, ended=0.0, at=0.0)
    assert fed(*refused("g1"), *refused("g2"), trained, *refused("g3")).hopeless(3) is None


def test_groups_that_come_back_and_are_lost_again_and_again_end_the_run_too() -> None:
    one = dead(reason="payload lost, 4 times"), GroupsScored(groups=[], at=0.0)
    found = fed(*one, *one)
    assert (found.in_a_row, found.hopeless(3)) == (0, None)
    assert (told := fed(*one, *one, *one).hopeless(3)) is not None and "3 groups for one step were refused or lost" in told


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


# --- what a dead group died of: infrastructure, its task or the policy; in the ledger, which older ledgers do not say, and in the audit

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
        checked = outcome_consumer.checked(failed("").model_copy(update={"payload": payload}), subjects, last=last)
        assert isinstance(checked, Failed) and checked.fault == fault


def test_the_audit_counts_what_was_at_fault() -> None:
    played = world()
    records: list[LedgerRecord] = []
    for number, fault in enumerate((INFRASTRUCTURE, POLICY, INFRASTRUCTURE, "")):
        records.append(GroupDead(group=f"g{number:08d}", reason="why", fault=fault, at=1.0))
    report = audit([*played.records, *records], 1, 2)
    assert report.violations == []
    assert report.faults == {"infrastructure": 2, "policy": 1, "not said": 1} and report.dead == {"why": 4}


# --- what a rollout function of the user's does with its groups: the buffer drops what it discards, and admits more where it needs more


def limits() -> BufferConfig:
    return buffer_config(steps=8, groups=2, samples=2, max_staleness=0, interval=1)


def begun(run: BufferConfig) -> BufferState:
    """A run with weights, and the groups of its first step under way."""
    state = BufferState()
    state.apply(VersionLive(version=0, at=0.0))
    for record in policy.admit(state, run, 0.0):
        state.apply(record)
    return state


def test_a_discarded_group_is_dropped_once_and_replaced() -> None:
    run = limits()
    state = begun(run)
    message = Discarded(group=group_id(1), attempt=0, reason="the rollout function did not hand it in", by="r")
    assert policy.outcomes(state, run, [message.model_copy(update={"attempt": 1})], 0.0) == [], "of an attempt that is none"
    [record] = policy.outcomes(state, run, [message], 0.0)
    assert record == GroupsDropped(groups=[group_id(1)], reason="discarded: the rollout function did not hand it in", at=0.0)
    state.apply(record)
    assert policy.outcomes(state, run, [message], 0.0) == []
    [admitted] = policy.admit(state, run, 0.0)
    assert admitted == GroupsAdmitted(first=2, count=1, version=0, at=0.0)


def test_a_function_that_discards_gets_more_groups_than_the_step_trains() -> None:
    run = limits()
    state = begun(run)
    assert policy.admit(state, run, 0.0) == []
    message = Wanted(group=group_id(1), attempt=0, count=3, by="r")
    [record] = policy.outcomes(state, run, [message], 0.0)
    assert record == GroupsAdmitted(first=2, count=3, version=0, at=0.0)
    state.apply(record)
    assert policy.admit(state, run, 0.0) == [], "none beyond those"
    for number in range(3):
        state.apply(GroupsDropped(groups=[group_id(number)], reason="discarded", at=0.0))
    assert policy.outcomes(state, run, [message], 0.0) == [], "its group has ended: said twice, or late"
    assert policy.admit(state, run, 0.0) == [], "two are left for the step"


def test_what_a_function_may_have_at_once_is_bound() -> None:
    run = limits()
    state = begun(run)
    most = policy.WANTED_BATCHES * run.rollout.rollout_batch_size
    message = Wanted(group=group_id(0), attempt=0, count=60_000, by="r")
    [record] = policy.outcomes(state, run, [message], 0.0)
    state.apply(record)
    assert len(state.outstanding) == most
    assert policy.outcomes(state, run, [message], 0.0) == []


def test_only_a_rollout_service_may_say_so() -> None:
    names = Subjects("run")
    for message in (Discarded(group="g", attempt=0, reason="x", by="r"), Wanted(group="g", attempt=0, count=1, by="r")):
        assert outcome_consumer.source_refusal(names, names.scored(ROLLOUT), message) is None
        assert outcome_consumer.source_refusal(names, names.scored(REWARD), message) is not None
