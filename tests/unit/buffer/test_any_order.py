"""Whatever happens in whatever order, the invariants hold after every record, and the run finishes once everything comes back."""

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.buffer import prompt_supply
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.data import data_source
from shared.data.data_source import DrawnPrompts
from shared.data.tokenizer import Tokenizer
from shared.schema.ledger import GroupRequeued, GroupsAdmitted, GroupsDropped, LedgerRecord
from tests.support.adaptive_source import Hearing, Remembering, SourceInProcess
from tests.support.buffer_config import buffer_config
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.buffer.world import World

LIMITS = st.builds(
    buffer_config,
    steps=st.integers(1, 6),
    groups=st.integers(1, 3),
    samples=st.integers(1, 2),
    max_staleness=st.sampled_from([0, 1, 3]),
    interval=st.sampled_from([1, 2, 3]),
    staleness=st.sampled_from(["drop", "requeue", "continue", "mask"]),
    order=st.sampled_from(["completion", "windowed_fifo", "fifo"]),
    window=st.sampled_from([0, 3, 5]),
    surplus=st.sampled_from([0, 0, 1, 3]),
    eval_prompts=st.sampled_from([0, 0, 1, {"heldout": 3, "other": 1}]),
    eval_interval=st.sampled_from([None, 1, 2, 3]),
    eval_first=st.booleans(),
)

EVENTS = [
    *[World.begin] * 6,
    *[World.finish] * 6,
    *[World.ask] * 4,
    *[World.train] * 4,
    *[World.push] * 4,
    World.save,
    World.save,
    World.fail,
    World.fail_late,
    World.interrupt,
    World.interrupt,
    World.fall_short,
    World.lose_payload,
    World.refuse,
    World.kill_trainer,
    World.kill_buffer,
]


RUNS = given(LIMITS, st.integers(0, 2**32), st.integers(0, 150), st.booleans())


def play(limits: BufferConfig, seed: int, events: int, filters: bool) -> None:
    """Plays a run of random events to its end."""
    world = World(limits, random.Random(seed), filters=filters)
    for _ in range(events):
        world.dice.choice(EVENTS)(world)
    world.check_replay()
    world.settle()
    world.check_end()


@settings(max_examples=200)
@RUNS
def test_invariants_hold_and_the_run_finishes(limits: BufferConfig, seed: int, events: int, filters: bool) -> None:
    play(limits, seed, events, filters)


@pytest.mark.extra
@settings(max_examples=2500)
@RUNS
def test_invariants_hold_in_many_more_runs(limits: BufferConfig, seed: int, events: int, filters: bool) -> None:
    play(limits, seed, events, filters)


CALM = [World.begin, World.begin, World.finish, World.ask, World.train, World.push, World.save, World.kill_trainer, World.kill_buffer]


@settings(max_examples=60)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_in_order_of_admission_nothing_is_ever_over_the_bound(max_staleness: int, interval: int, groups: int, seed: int) -> None:
    limits = buffer_config(steps=6, groups=groups, samples=1, max_staleness=max_staleness, interval=interval, order="fifo")
    world = World(limits, random.Random(seed))
    for _ in range(150):
        world.dice.choice(CALM)(world)
    world.settle()
    world.check_end()
    assert not any(isinstance(record, GroupsDropped | GroupRequeued) for record in world.records)


@table("interval", [1, 2])
@table("max_staleness", [0, 1, 3])
@table("eval_prompts", [0, 2])
def test_a_calm_run_finishes_and_drops_nothing(max_staleness: int, interval: int, eval_prompts: int) -> None:
    limits = buffer_config(
        steps=5, groups=2, samples=2, max_staleness=max_staleness, interval=interval, eval_prompts=eval_prompts, eval_interval=interval
    )
    world = World(limits, random.Random(0))
    world.settle()
    world.check_end()
    assert world.state.dropped == world.state.dead == 0
    assert world.state.admitted == limits.rollout.num_rollout * limits.rollout.rollout_batch_size
    assert world.audit.report().max_staleness <= max_staleness


def test_the_play_reaches_what_it_is_meant_to_reach() -> None:
    """The property above would be empty if groups never went stale, were never requeued, or never came twice."""
    seen: set[str] = set()
    for seed, policy in enumerate(["drop", "requeue", "continue", "mask"] * 60):
        limits = buffer_config(
            steps=5,
            groups=2,
            samples=2,
            max_staleness=seed // 4 % 2,
            interval=1 + seed // 8 % 3,
            staleness=policy,  # type: ignore[arg-type]
            order="fifo" if seed % 5 == 0 else "completion",
            surplus=seed % 3,
            eval_prompts=seed % 3,
            eval_interval=2,
        )
        world = World(limits, random.Random(seed), filters=seed % 4 == 0)
        for _ in range(120):
            world.dice.choice(EVENTS)(world)
        world.settle()
        world.check_end()
        seen |= {record.event() for record in world.records}
        seen |= {f"staleness {age}" for age in world.audit.report().staleness}
        seen |= {f"{policy}: masked"} if world.audit.report().masked else set()
        for record in world.records:
            if isinstance(record, GroupsDropped):
                seen |= {f"{policy}: {record.reason}"}
            if isinstance(record, GroupRequeued):
                seen |= {f"{policy}: {record.reason}, {'continues' if record.partial else 'anew'}"}
    stale = {"drop: stale", "requeue: stale, anew", "continue: stale, continues", "mask: stale", "continue: masked", "mask: masked"}
    assert seen >= stale | {"drop: surplus", "drop: filtered: zero_std", "drop: filtered: no sample is left to train"}
    assert seen >= {f"{policy}: r did not end it, continues" for policy in ("drop", "requeue", "continue", "mask")}
    assert seen >= {"group_dead", "batch_amended", "eval_ended", "staleness 0", "staleness 1", "drop: payload lost, anew"}
    assert not seen & {"drop: masked", "requeue: masked", "requeue: stale", "continue: stale", "mask: stale, continues"}


# --- a source of prompts that adapts is told what follows from the ledger: over any history and any deaths it gives the same prompts


class Buffers:
    """Buffers one after another, on the same ledger and the same directory: each follows the ledger and draws prompts when it likes."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, dice: random.Random) -> None:
        self.config = run_config(directory, data={"prompt_data": None, "data_source": "tests.support.adaptive_source:Any"})
        self.tokenizer, self.dice = tokenizer, dice
        self.path = self.config.run.root / "prompts" / "drawn.jsonl"
        self.begin([])

    def begin(self, records: list[LedgerRecord]) -> None:
        """A new buffer reads the ledger."""
        self.prompts = DrawnPrompts(self.config, self.tokenizer)
        self.state = BufferState()
        for record in records:
            self.follow(record)

    def follow(self, record: LedgerRecord) -> None:
        prompt_supply.follow_results(self.prompts.results, self.state, record)
        self.state.apply(record)

    def draw(self, number: int) -> None:
        if 0 <= number < self.state.admitted:
            self.prompts.at(number)

    def given(self) -> list[str]:
        return [str(self.prompts.at(number).content) for number in range(self.state.admitted)]


def history(limits: object, seed: int, events: int) -> list[LedgerRecord]:
    world = World(limits, random.Random(seed), filters=bool(seed % 2))  # type: ignore[arg-type]
    for _ in range(events):
        world.dice.choice(EVENTS)(world)
    world.settle()
    world.check_end()
    return world.records


@pytest.mark.parametrize("made", [Hearing, Remembering])
def test_any_history_with_any_deaths_gives_the_same_prompts(
    made: type, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(tiny_model)
    monkeypatch.setattr(data_source, "SourceProcess", partial(SourceInProcess, made=made))
    monkeypatch.setattr(data_source, "TOLD_AT_ONCE", 3)
    reached = {"deaths": 0, "told": 0}

    @settings(max_examples=100, deadline=None)
    @given(LIMITS, st.integers(0, 2**32), st.integers(20, 150))
    def same(limits: object, seed: int, events: int) -> None:
        records, dice = history(limits, seed, events), random.Random(seed)
        calm, mortal = (Buffers(tmp_path_factory.mktemp("run"), tokenizer, dice) for _ in range(2))
        for position, record in enumerate(records):
            calm.follow(record)
            calm.draw(calm.state.admitted - 1)
            mortal.follow(record)
            if dice.random() < 0.3:
                mortal.draw(dice.randrange(mortal.state.admitted + 1) - 1)
            if dice.random() < 0.05:  # killed, perhaps in the middle of a line, perhaps with the disk
                reached["deaths"] += 1
                if dice.random() < 0.5 and mortal.path.exists():
                    kept = dice.choice([0, mortal.path.stat().st_size, max(0, mortal.path.stat().st_size - 20)])
                    mortal.path.write_bytes(mortal.path.read_bytes()[:kept])
                mortal.begin(records[: position + 1])
        assert mortal.given() == calm.given()
        assert [mortal.prompts.at(number).metadata["heard"] for number in range(mortal.state.admitted)] == expected(records)
        reached["told"] += mortal.prompts.results.before(mortal.state.admitted - 1)

    same()
    assert reached["deaths"] > 20 and reached["told"] > 100, reached


def expected(records: list[LedgerRecord]) -> list[int]:
    """How many groups had ended when each was admitted, by the state's own counts."""
    state, counts = BufferState(), list[int]()
    for record in records:
        if isinstance(record, GroupsAdmitted):
            counts += [state.trained + state.dropped + state.dead] * record.count
        state.apply(record)
    return counts


@settings(max_examples=150, deadline=None)
@given(LIMITS, st.integers(0, 2**32), st.integers(0, 150))
def test_every_group_that_ends_is_told_once(limits: object, seed: int, events: int) -> None:
    records, state, told = history(limits, seed, events), BufferState(), list[int]()
    for record in records:
        found = prompt_supply.prompt_results(state, record)
        told += [result.number for result in found]
        for result in found:
            scored = state.groups[f"g{result.number:08d}"].scored
            assert list(result.rewards) == ([] if scored is None else list(scored.rewards))
        state.apply(record)
    assert sorted(told) == list(range(state.admitted))
