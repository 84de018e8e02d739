"""Single decisions of the buffer: what each event leads to, and what is refused in which words."""

import dataclasses
from array import array

import pytest

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.policy import WrongStep
from services.buffer.state import BufferState, Result
from services.buffer.task_publisher import _sampling
from shared.config.rollout_section import RolloutSection
from shared.runtime.errors import INFRASTRUCTURE
from shared.schema import codec
from shared.schema.ledger import (
    BatchFormed,
    EvalEnded,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    VersionLive,
    eval_group_id,
    eval_group_parts,
    group_id,
)
from shared.schema.messages import Failed, Payload, Scored
from tests.support.buffer_config import buffer_config
from tests.support.tables import table
from tests.unit.buffer.decisions import fold, meta, of_samples

LIMITS = buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1)


def test_without_training_version_0_is_every_steps_and_admission_goes_by_the_steps_that_are_recorded() -> None:
    limits = dataclasses.replace(buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1), rollout_only=True)
    assert [limits.version_of_step(step) for step in range(4)] == [0, 0, 0, 0]
    assert limits.last_version == limits.newest_version(4) == 0
    assert [limits.admissible_groups(0, steps) for steps in range(5)] == [4, 6, 8, 8, 8]


def came_back(group: str, attempt: int = 0, samples: int = 2, rewards: int | None = None, oldest: int = 0, reward: float = 1.0) -> Scored:
    given = [reward] * (samples if rewards is None else rewards)
    return of_samples(Scored, group, [meta(oldest, oldest)] * samples, f"{group}:{attempt}", attempt=attempt, rewards=given)


def started(limits: BufferConfig = LIMITS, version: int = 0) -> BufferState:
    """A run whose ``version`` is live and whose groups are admitted."""
    state = BufferState()
    fold(state, policy.live(state, limits, version, 0.0))
    fold(state, policy.admit(state, limits, 0.0))
    return state


def score(state: BufferState, *numbers: int, limits: BufferConfig = LIMITS, oldest: int = 0) -> list[LedgerRecord]:
    attempts = {number: state.groups[group_id(number)].attempt for number in numbers}
    lot = [came_back(group_id(number), attempt, oldest=oldest) for number, attempt in attempts.items()]
    return fold(state, policy.scored(state, limits, lot, 0.0))


@table(("max_staleness", "interval", "admitted"), [(0, 1, 2), (1, 1, 4), (3, 1, 8), (9, 1, 8), (0, 2, 4), (1, 2, 8)])
def test_admission_follows_the_live_version_and_never_exceeds_the_run(max_staleness: int, interval: int, admitted: int) -> None:
    limits = buffer_config(steps=4, groups=2, samples=2, max_staleness=max_staleness, interval=interval)
    assert policy.admit(BufferState(), limits, 0.0) == []
    assert started(limits).admitted == admitted


def test_what_ends_without_being_trained_frees_its_admission() -> None:
    state = started()
    [dead] = fold(state, policy.failed(state, Failed(group=group_id(1), attempt=0, reason="the verifier hung", by="reward-1"), 0.0))
    assert isinstance(dead, GroupDead) and dead.reason == "reward-1: the verifier hung"
    [again] = policy.admit(state, LIMITS, 0.0)
    assert isinstance(again, GroupsAdmitted) and (again.first, again.count) == (4, 1)


def test_payloads_that_nobody_will_read_are_let_go() -> None:
    state = started(EVALUATED)
    payload = Payload(keys=["a", "b"], bytes=1)
    fold(state, policy.failed(state, Failed(group="eval.heldout.0.0", attempt=0, reason="x", by="r", payload=payload), 0.0))
    assert state.released == ["a", "b"]
    fold(state, policy.scored(state, EVALUATED, [came_back("eval.heldout.0.1", samples=1)], 0.0))
    assert state.released == ["eval.heldout.0.1:0"]
    state = started()
    fold(state, policy.failed(state, Failed(group=group_id(1), attempt=0, reason="x", by="r", payload=payload), 0.0))
    assert state.released == ["a", "b"]
    fold(state, policy.failed(state, Failed(group=group_id(2), attempt=0, reason="x", by="r"), 0.0))
    assert state.released == []
    fold(state, policy.scored(state, LIMITS, [came_back(group_id(0), samples=1)], 0.0))
    assert state.released == [f"{group_id(0)}:0"]


def test_what_a_late_attempt_wrote_is_let_go_and_nothing_that_is_in_use() -> None:
    state = started()
    first = came_back(group_id(0))
    assert policy.unwanted(state, came_back("eval.heldout.0.0", samples=1)) == ["eval.heldout.0.0:0"]  # no such evaluation
    fold(state, policy.scored(state, LIMITS, [first], 0.0))
    assert policy.unwanted(state, first) == []  # delivered twice, in use
    other = first.model_copy(update={"payload": Payload(keys=["another generation"], bytes=1)})
    fold(state, policy.scored(state, LIMITS, [other], 0.0))
    assert policy.unwanted(state, other) == ["another generation"]  # made of the same attempt by a second replica
    fold(state, policy.lost_ready(state, group_id(0), 0.0))
    assert policy.unwanted(state, first) == [f"{group_id(0)}:0"]
    score(state, 0, 1)
    fold(state, policy.form_batch(state, LIMITS, 0, 0, 0.0))
    second = came_back(group_id(0), attempt=1)
    assert policy.unwanted(state, second) == []
    fold(state, policy.trained(state, 0, 1, 0.0, 1.0, 0.0))
    assert policy.unwanted(state, second) == []  # a trainer that comes back will read it
    fold(state, policy.durable(state, 1, 0.0))
    assert policy.unwanted(state, second) == [f"{group_id(0)}:1"]


def test_training_does_not_wait_for_the_first_evaluation() -> None:
    limits = buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=1)
    state = started(limits)
    assert state.evaluations and state.admitted == 4


def test_a_batch_takes_what_came_back_first_in_order_of_admission() -> None:
    state = started()
    score(state, 3)
    score(state, 1)
    score(state, 0)
    [formed] = policy.form_batch(state, LIMITS, 0, 0, 0.0)
    assert isinstance(formed, BatchFormed)
    assert formed.groups == [group_id(1), group_id(3)]


def test_too_few_groups_make_no_batch() -> None:
    state = started()
    score(state, 3)
    assert policy.form_batch(state, LIMITS, 0, 0, 0.0) == []
    assert policy.batch(state, 0) is None


def test_what_is_over_the_bound_is_dropped_and_its_payload_let_go() -> None:
    limits = buffer_config(steps=4, groups=2, samples=2, max_staleness=0, interval=1)
    state = started(limits)
    score(state, 0, 1, limits=limits)
    fold(state, policy.form_batch(state, limits, 0, 0, 0.0))
    fold(state, policy.trained(state, 0, 1, 0.0, 1.0, 0.0))
    fold(state, policy.live(state, limits, 1, 0.0))
    fold(state, policy.admit(state, limits, 0.0))
    score(state, 2, limits=limits, oldest=0)
    score(state, 3, limits=limits, oldest=1)
    [dropped] = policy.form_batch(state, limits, 1, 1, 0.0)
    assert isinstance(dropped, GroupsDropped) and dropped.groups == [group_id(2)] and dropped.reason == "stale"
    fold(state, [dropped])
    assert state.released == [f"{group_id(2)}:0"]
    [again] = policy.admit(state, limits, 0.0)
    assert isinstance(again, GroupsAdmitted) and again.count == 1


def test_a_batch_is_handed_out_again_until_a_checkpoint_beyond_it_is_durable() -> None:
    state = started()
    score(state, 0, 1)
    fold(state, policy.form_batch(state, LIMITS, 0, 0, 0.0))
    first = policy.batch(state, 0)
    assert first is not None and [group.rewards for group in first.groups] == [[1.0, 1.0]] * 2
    fold(state, policy.trained(state, 0, 1, 0.0, 1.0, 0.0))
    assert policy.batch(state, 0) == first
    assert policy.trained(state, 0, 1, 0.0, 1.0, 0.0) == []
    fold(state, policy.durable(state, 1, 0.0))
    assert policy.batch(state, 0) is None
    assert sorted(state.released) == [f"{group_id(0)}:0", f"{group_id(1)}:0"]
    assert policy.durable(state, 1, 0.0) == policy.durable(state, 0, 0.0) == []


@table(
    ("ask", "words"),
    [
        (lambda state: policy.form_batch(state, LIMITS, 1, 1, 0.0), "step 1 was asked for; the next batch is of step 0"),
        (lambda state: policy.form_batch(state, LIMITS, 0, 1, 0.0), "step 0 trains on version 0, not 1"),
        (lambda state: policy.trained(state, 0, 1, 0.0, 1.0, 0.0), "step 0 was reported as trained; its batch was not formed yet"),
        (lambda state: policy.trained(state, 3, 1, 0.0, 1.0, 0.0), "step 3 was reported as trained; the next one to train is 0"),
        (lambda state: policy.durable(state, 1, 0.0), "a checkpoint of 1 steps was reported; 0 are trained"),
    ],
)
def test_what_does_not_follow_is_refused_with_what_was_expected(ask: object, words: str) -> None:
    with pytest.raises(WrongStep, match=words):
        ask(started())  # type: ignore[operator]


def test_repeats_late_attempts_and_strangers_give_no_record() -> None:
    state = started()
    lot = [
        came_back(group_id(0)),
        came_back(group_id(0)),
        came_back(group_id(1), attempt=1),
        came_back(group_id(99)),
        came_back("stranger"),
    ]
    [record] = fold(state, policy.scored(state, LIMITS, lot, 0.0))
    assert isinstance(record, GroupsScored) and [group.group for group in record.groups] == [group_id(0)]
    assert policy.scored(state, LIMITS, lot[:1], 0.0) == []
    for group, attempt in ((group_id(0), 0), (group_id(1), 1), (group_id(99), 0), ("stranger", 0)):
        assert policy.failed(state, Failed(group=group, attempt=attempt, reason="x", by="r"), 0.0) == []


@table(("samples", "rewards"), [(1, 1), (2, 1), (1, 2), (0, 0), (3, 3)])
def test_a_group_that_came_back_with_other_numbers_is_dead(samples: int, rewards: int) -> None:
    state = started()
    [record] = policy.scored(state, LIMITS, [came_back(group_id(0), samples=samples, rewards=rewards)], 0.0)
    assert isinstance(record, GroupDead)
    assert record.reason == f"{samples} samples of {samples} rollouts, with {rewards} rewards, came back for 2 rollouts"


@table(("min_rollouts", "came", "taken"), [(None, 2, True), (None, 1, False), (1, 1, True), (3, 2, False), (4, 4, True)])
def test_a_group_may_lack_rollouts_that_failed(min_rollouts: int | None, came: int, taken: bool) -> None:
    limits = buffer_config(steps=4, groups=2, samples=4, max_staleness=1, interval=1)
    limits = dataclasses.replace(limits, rollout=limits.rollout.model_copy(update={"min_rollouts": min_rollouts}))
    [record] = policy.scored(started(), limits, [came_back(group_id(0), samples=came, rewards=came)], 0.0)
    assert isinstance(record, GroupsScored) == taken


@pytest.mark.parametrize("changes", [{"parts": ({"format": 1.0},)}, {"removed": (2,)}, {"removed": (-1,)}])
def test_a_group_whose_named_rewards_or_removed_samples_do_not_fit_is_dead(changes: dict[str, object]) -> None:
    [record] = policy.scored(started(), LIMITS, [came_back(group_id(0)).model_copy(update=changes)], 0.0)
    assert isinstance(record, GroupDead) and record.reason.endswith("came back for 2 samples")


def test_a_lost_payload_has_its_group_generated_anew_once() -> None:
    state = started()
    score(state, 0)
    [record] = fold(state, policy.lost_ready(state, group_id(0), 0.0))
    assert isinstance(record, GroupRequeued) and record.attempt == 1
    assert policy.lost_ready(state, group_id(0), 0.0) == []
    assert policy.scored(state, LIMITS, [came_back(group_id(0), attempt=0)], 0.0) == []
    assert policy.scored(state, LIMITS, [came_back(group_id(0), attempt=1)], 0.0)


def test_a_ready_group_that_is_lost_for_the_fourth_time_is_dead() -> None:
    state = started()
    for attempt in range(policy.MOST_LOST):
        fold(state, policy.scored(state, LIMITS, [came_back(group_id(0), attempt=attempt)], 0.0))
        [record] = fold(state, policy.lost_ready(state, group_id(0), 0.0))
        assert isinstance(record, GroupRequeued)
    fold(state, policy.scored(state, LIMITS, [came_back(group_id(0), attempt=policy.MOST_LOST)], 0.0))
    [record] = fold(state, policy.lost_ready(state, group_id(0), 0.0))
    assert isinstance(record, GroupDead) and record.fault == INFRASTRUCTURE and state.dead == 1


def test_a_group_may_not_begin_on_weights_too_old_for_its_step() -> None:
    limits = buffer_config(steps=8, groups=2, samples=2, max_staleness=1, interval=2)
    state = started(limits)
    assert state.admitted == 8
    assert [policy.min_version(state.groups[group_id(number)], state, limits) for number in range(8)] == [0] * 8
    for step in range(2):
        score(state, 2 * step, 2 * step + 1, limits=limits)
        fold(state, policy.form_batch(state, limits, step, 0, 0.0))
        fold(state, policy.trained(state, step, 0, 0.0, 1.0, 0.0))
    fold(state, policy.live(state, limits, 1, 0.0))
    fold(state, policy.admit(state, limits, 0.0))
    assert [policy.min_version(state.groups[group_id(number)], state, limits) for number in range(4, 12)] == [0] * 4 + [1] * 4


def test_only_deaths_before_a_group_let_it_begin_on_older_weights() -> None:
    limits = buffer_config(steps=8, groups=2, samples=2, max_staleness=1, interval=1)
    state = started(limits)
    score(state, 0, 1, limits=limits)
    fold(state, policy.form_batch(state, limits, 0, 0, 0.0))
    fold(state, policy.trained(state, 0, 0, 0.0, 1.0, 0.0))
    fold(state, policy.live(state, limits, 1, 0.0))
    fold(state, policy.admit(state, limits, 0.0))
    four = state.groups[group_id(4)]
    fold(state, [GroupDead(group=group_id(5), reason="x", fault="task", at=0.0)])
    assert policy.min_version(four, state, limits) == 1, "it is meant for step 2"
    fold(state, [GroupDead(group=group_id(2), reason="x", fault="task", at=0.0)])
    assert policy.min_version(four, state, limits) == 0, "it has moved up to step 1"
    assert [state.ended_before(number) for number in (3, 4)] == [1, 1]
    for number in (3, 4):
        fold(state, [GroupDead(group=group_id(number), reason="x", fault="task", at=0.0)])
    fold(state, policy.admit(state, limits, 0.0))
    assert policy.min_version(state.groups[group_id(6)], state, limits) == 0 and state.ended_before(6) == 4, "the first of step 1"


def test_older_news_of_versions_gives_no_record() -> None:
    state = started(version=3)
    assert policy.live(state, LIMITS, 3, 0.0) == policy.live(state, LIMITS, 2, 0.0) == []
    [record] = policy.live(state, LIMITS, 4, 0.0)
    assert isinstance(record, VersionLive)
    with pytest.raises(policy.WrongVersion, match="version 5 are announced; the run's last is 4"):
        policy.live(state, LIMITS, 5, 0.0)


# --- evaluation


EVALUATED = buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=2, eval_interval=3)


def test_evaluations_are_due_first_last_and_every_interval() -> None:
    state, due = BufferState(), []
    for version in range(5):
        fold(state, policy.live(state, EVALUATED, version, 0.0))
        due += [version] if (version, "heldout") in state.evaluations else []
    assert due == [0, 3, 4]


def test_an_evaluation_starts_though_the_buffer_died_between_its_two_records() -> None:
    state = BufferState()
    fold(state, policy.live(state, EVALUATED, 0, 0.0)[:1])
    [record] = fold(state, policy.live(state, EVALUATED, 0, 0.0))
    assert isinstance(record, EvalStarted)
    assert policy.live(state, EVALUATED, 0, 0.0) == []


def test_an_evaluation_ends_with_the_mean_of_what_came_back() -> None:
    state = started(EVALUATED)
    lot = [came_back("eval.heldout.0.1", samples=3, oldest=0, reward=0.5)]
    fold(state, policy.scored(state, EVALUATED, lot * 2, 0.0))
    assert policy.close(state, EVALUATED, 0.0) == []
    fold(state, policy.failed(state, Failed(group="eval.heldout.0.0", attempt=0, reason="x", by="r"), 0.0))
    [ended] = fold(state, policy.close(state, EVALUATED, 0.0))
    assert isinstance(ended, EvalEnded)
    assert (ended.samples, ended.failed, ended.mean_reward) == (3, 1, 0.5)
    assert policy.scored(state, EVALUATED, lot, 0.0) == []


@table("group", ["eval.heldout.0.2", "eval.heldout.0.01", "eval.other.0.0", "eval.heldout.1.0", "eval.heldout.0.x", "eval.0.0"])
def test_what_was_not_asked_for_does_not_count_for_an_evaluation(group: str) -> None:
    state = started(EVALUATED)
    assert policy.scored(state, EVALUATED, [came_back(group, samples=1)], 0.0) == []
    assert policy.failed(state, Failed(group=group, attempt=0, reason="x", by="r"), 0.0) == []


def test_a_held_out_prompt_without_scores_counts_as_failed() -> None:
    state = started(EVALUATED)
    [record] = fold(state, policy.scored(state, EVALUATED, [came_back("eval.heldout.0.0", samples=0)], 0.0))
    assert isinstance(record, EvalScored) and record.rewards == []
    evaluation = state.evaluations[0, "heldout"]
    assert (evaluation.failed, list(evaluation.pending)) == (1, ["eval.heldout.0.1"])


def test_ids_of_held_out_prompts_are_read_back_and_no_other() -> None:
    assert eval_group_parts(eval_group_id("heldout", 3, 17)) == ("heldout", 3, 17)
    for name in (group_id(3), "eval.heldout.3", "eval.heldout.3.x", "eval.a.b.3.4", "eval.heldout.-1.0", ""):
        assert eval_group_parts(name) is None


# --- the end


def test_the_run_ends_once_all_is_durable_and_evaluated() -> None:
    limits = buffer_config(steps=1, groups=1, samples=1, max_staleness=0, interval=1, eval_prompts=1, eval_first=False)
    state = started(limits)
    fold(state, policy.scored(state, limits, [came_back(group_id(0), samples=1)], 0.0))
    fold(state, policy.form_batch(state, limits, 0, 0, 0.0))
    fold(state, policy.trained(state, 0, 1, 0.0, 1.0, 0.0))
    assert policy.close(state, limits, 0.0) == [], "the step is not durable yet"
    fold(state, policy.durable(state, 1, 0.0))
    assert policy.close(state, limits, 0.0) == [], "the last version is not evaluated yet"
    fold(state, policy.live(state, limits, 1, 0.0))
    fold(state, policy.scored(state, limits, [came_back("eval.heldout.1.0", samples=1)], 0.0))
    assert isinstance(fold(state, policy.close(state, limits, 0.0))[0], EvalEnded)
    [finished] = fold(state, policy.close(state, limits, 0.0))
    assert isinstance(finished, RunFinished) and finished.steps == 1
    assert policy.close(state, limits, 0.0) == []


def test_what_a_shortened_run_had_admitted_too_many_is_dropped_as_surplus() -> None:
    longer = buffer_config(steps=4, groups=1, samples=1, max_staleness=2, interval=1)
    state = started(longer)
    fold(state, policy.scored(state, longer, [came_back(group_id(0), samples=1), came_back(group_id(1), samples=1)], 0.0))
    limits = buffer_config(steps=1, groups=1, samples=1, max_staleness=2, interval=1)
    fold(state, policy.form_batch(state, limits, 0, 0, 0.0))
    fold(state, policy.trained(state, 0, 1, 0.0, 1.0, 0.0))
    fold(state, policy.durable(state, 1, 0.0))
    dropped, finished = fold(state, policy.close(state, limits, 0.0))
    assert isinstance(dropped, GroupsDropped) and dropped.reason == policy.SURPLUS
    assert dropped.groups == [group_id(1), group_id(2)]
    assert isinstance(finished, RunFinished)
    assert state.in_flight == 0


# --- what tasks say of a response's text: the run's word, unless a set of held-out prompts has its own


@table(("run", "own", "said"), [(None, None, None), (True, None, True), (False, None, False), (False, True, True), (True, False, False)])
def test_special_tokens_are_left_out_as_the_run_says(run: bool | None, own: bool | None, said: bool | None) -> None:
    rollout = RolloutSection(num_rollout=1, rollout_batch_size=1, rollout_skip_special_tokens=run)
    assert _sampling(rollout, [], skip_special_tokens=own).skip_special_tokens is said


@table("samples", [1, 2, 300])
def test_the_bound_of_what_a_group_takes_of_a_batch_holds(samples: int) -> None:
    """Only where the bounds of a batch's groups are over the bus's limit are they encoded for their size."""
    state, number = started(), range(samples)
    widest = dataclasses.replace(Result.of(came_back(group_id(0), samples=samples)), rewards=array("d", [0.1] * samples))
    wide = {
        "keys": ("k" * 200, "é" * 90),
        "sizes": ((1 << 31) - 1,) * 2,
        "tokens": array("I", [(1 << 31) - 1] * samples),
        "removed": tuple(number),
    }
    parts = tuple({"é" * 64: 0.1, **{f"reward-{name}": -0.1 for name in range(7)}} for _ in number)
    group = state.groups[group_id(0)]
    group.scored = dataclasses.replace(widest, digest="0" * 32, parts=parts, size=1 << 39, **wide)
    for named in (False, True):
        exact = len(codec.pack(policy._batch_group(group, 1 << 30, named).model_dump()))
        assert exact <= policy._most_bytes(group, named) < 8 * exact + 2000
