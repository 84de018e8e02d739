"""What becomes of a batch that the trainer cannot train."""

import random

import pytest

from services.buffer import policy
from services.buffer.policy import MOST_LOST, MOST_REFUSALS
from shared.runtime.errors import INFRASTRUCTURE
from shared.schema.ledger import PAYLOAD_LOST, BatchAmended, GroupDead, GroupRequeued, LedgerRecord, SampleRefused
from shared.schema.messages import BatchRefused
from tests.support.buffer_config import buffer_config
from tests.support.tables import table
from tests.unit.buffer.world import World, replay


def ready_world(**changes: object) -> World:
    """A run whose first batch is formed, of two groups, with others on their way."""
    limits = buffer_config(**{"steps": 3, "groups": 2, "samples": 1, "max_staleness": 1, "interval": 1, **changes})  # type: ignore[arg-type]
    world = World(limits, random.Random(0))
    world.decide(policy.live(world.state, limits, 0, 0.0))
    come_back(world, 2)
    world.ask()
    assert set(world.batches) == {0}
    return world


def come_back(world: World, count: int) -> None:
    """So many of the groups that are away are generated on the live weights, and scored."""
    for job in world.jobs[:count]:
        job.oldest = world.state.live_version
        world._deliver([world._scored(job)])
    del world.jobs[:count]


def refusals(world: World, group: str, count: int, step: int = 0, first: float = 0.0, lost: bool = False) -> list[LedgerRecord]:
    records: list[LedgerRecord] = []
    for index in range(count):
        message = BatchRefused(step=step, group=group, sample=0, reason="token 9 is outside the vocabulary", at=first + index)
        made = policy.refused(world.state, message, 5.0, lost)
        world.decide(made)
        records += made
    return records


def test_the_third_refusal_ends_the_group_with_its_reason() -> None:
    world = ready_world()
    assert [type(record) for record in refusals(world, "g00000000", MOST_REFUSALS - 1)] == [SampleRefused] * (MOST_REFUSALS - 1)
    assert world.state.groups["g00000000"].step == 0 and policy.batch(world.state, 0) is not None
    *_, last = refusals(world, "g00000000", 1, first=100.0)
    assert isinstance(last, GroupDead) and last.reason == "trainer: sample g00000000/0: token 9 is outside the vocabulary"
    assert "g00000000" not in world.state.groups and world.state.dead == 1
    assert policy.batch(world.state, 0) is None, "a batch with a hole is not handed out"
    assert "g00000000:0" in world.freed


def test_a_repeated_request_counts_once() -> None:
    world = ready_world()
    for _ in range(5):
        refusals(world, "g00000000", 1, first=7.0)
    assert world.state.groups["g00000000"].refused == (7.0,)


def test_the_count_survives_the_buffer() -> None:
    world = ready_world()
    refusals(world, "g00000000", 2)
    world.state = replay(world.records)
    assert isinstance(refusals(world, "g00000000", 1, first=9.0)[-1], GroupDead)


@table(("step", "group"), [(1, "g00000000"), (0, "g00000003"), (0, "g00000099"), (0, "eval.x.0.0"), (9, "no-group")])
def test_what_is_not_in_the_batch_is_no_refusal(step: int, group: str) -> None:
    assert refusals(ready_world(), group, 4, step=step) == []


def test_the_step_goes_on_with_a_replacement_once_one_is_ready() -> None:
    world = ready_world()
    refusals(world, "g00000001", MOST_REFUSALS)
    assert policy.amended(world.state, world.limits, 0, 0.0) == []
    come_back(world, 1)
    world.ask()
    batch = policy.batch(world.state, 0)
    assert batch is not None and [group.group for group in batch.groups] == ["g00000000", "g00000002"]
    assert isinstance(world.records[-1], BatchAmended) and world.records[-1].removed == ["g00000001"]
    world.train()
    world.settle()
    world.check_end()


def test_the_last_batch_gets_a_group_that_is_admitted_for_it() -> None:
    world = ready_world(steps=1, max_staleness=0)
    assert not world.jobs
    refusals(world, "g00000000", MOST_REFUSALS)
    assert [job.group for job in world.jobs] == ["g00000002"]
    world.settle()
    world.check_end()
    assert world.state.trained == 2


@pytest.mark.parametrize("both", [False, True])
def test_a_step_that_is_trained_again_goes_on_with_what_is_left(both: bool) -> None:
    world = ready_world()
    world.train()
    world.kill_trainer()
    for name in ("g00000000", "g00000001")[: 1 + both]:
        refusals(world, name, MOST_REFUSALS)
    come_back(world, 2)
    world.ask()
    batch = policy.batch(world.state, 0)
    assert batch is not None and [group.group for group in batch.groups] == ([] if both else ["g00000001"])
    assert world.state.trained == 1 - both
    world.check_replay()
    world.settle()
    world.check_end()


def test_with_a_critic_nothing_is_replaced() -> None:
    """The critic has given its values to the groups that are left, and to no other."""
    world = ready_world()
    world.limits = type(world.limits)(world.limits.rollout, world.limits.weights, has_critic=True)
    refusals(world, "g00000000", MOST_REFUSALS)
    come_back(world, 2)
    world.ask()
    batch = policy.batch(world.state, 0)
    assert batch is not None and [group.group for group in batch.groups] == ["g00000001"]


def test_a_group_that_the_store_has_lost_is_generated_anew_for_the_same_step() -> None:
    """All of a batch, and no other group is admitted: the step waits for those very groups."""
    world = ready_world(steps=1, max_staleness=0)
    for name in ("g00000000", "g00000001"):
        refused, again = refusals(world, name, MOST_REFUSALS, lost=True)
        assert isinstance(refused, SampleRefused) and isinstance(again, GroupRequeued)
        assert (again.attempt, again.reason, again.partial) == (1, PAYLOAD_LOST, None)
    assert policy.batch(world.state, 0) is None and world.state.dead == 0
    world.check_replay()
    come_back(world, 1)
    assert policy.amended(world.state, world.limits, 0, 0.0) == []
    come_back(world, 1)
    world.ask()
    batch = policy.batch(world.state, 0)
    assert batch is not None and [group.payload.keys for group in batch.groups] == [["g00000000:1"], ["g00000001:1"]]
    world.settle()
    world.check_end()
    assert (world.state.trained, world.state.dead) == (2, 0)


def test_a_group_that_is_lost_again_and_again_is_dead_and_the_store_is_blamed() -> None:
    world = ready_world(steps=1, max_staleness=0)
    for at in range(MOST_LOST):
        assert isinstance(refusals(world, "g00000000", 1, first=float(at), lost=True)[-1], GroupRequeued)
        come_back(world, 1)
        world.ask()
    *_, last = refusals(world, "g00000000", MOST_REFUSALS, first=100.0, lost=True)
    assert isinstance(last, GroupDead) and last.fault == INFRASTRUCTURE
    world.settle()
    world.check_end()


def test_a_step_that_is_trained_again_goes_on_without_what_the_store_has_lost() -> None:
    world = ready_world()
    world.train()
    world.kill_trainer()
    *_, last = refusals(world, "g00000000", MOST_REFUSALS, lost=True)
    assert isinstance(last, GroupDead) and last.fault == INFRASTRUCTURE
    world.ask()
    batch = policy.batch(world.state, 0)
    assert batch is not None and [group.group for group in batch.groups] == ["g00000001"]
    world.settle()
    world.check_end()


def test_a_step_with_a_hole_cannot_be_reported() -> None:
    world = ready_world()
    refusals(world, "g00000000", MOST_REFUSALS)
    with pytest.raises(policy.WrongStep, match="its groups g00000000 were refused, and are not replaced yet"):
        policy.trained(world.state, 0, 1, 0.0, 1.0, 0.0)
