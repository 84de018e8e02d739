"""A source of prompts that adapts is told what follows from the ledger: over any history and any deaths it gives the same prompts."""

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.buffer import prompt_supply
from services.buffer.state import BufferState
from shared.data import data_source
from shared.data.data_source import DrawnPrompts
from shared.data.tokenizer import Tokenizer
from shared.schema.ledger import GroupsAdmitted, LedgerRecord
from tests.support.adaptive_source import Hearing, Remembering, SourceInProcess
from tests.support.run_config import run_config
from tests.unit.buffer.test_any_order import EVENTS, LIMITS
from tests.unit.buffer.world import World


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
