"""What a rollout function of the user's does with its groups: the buffer drops what it discards, and admits more where it needs more."""

from services.buffer import outcome_check, policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.bus.subjects import REWARD, ROLLOUT, Subjects
from shared.schema.ledger import GroupsAdmitted, GroupsDropped, VersionLive, group_id
from shared.schema.messages import Discarded, Wanted
from tests.support.buffer_config import buffer_config


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
        assert outcome_check.source_refusal(names, names.scored(ROLLOUT), message) is None
        assert outcome_check.source_refusal(names, names.scored(REWARD), message) is not None
