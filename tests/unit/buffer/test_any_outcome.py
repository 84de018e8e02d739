"""Whatever outcomes arrive, in whatever order, nothing stops the buffer, its ledger replays, and it frees nobody else's blobs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.buffer import outcome_consumer, policy, rollout_keeper
from services.buffer.buffer_config import BufferConfig
from services.buffer.ledger_writer import Trial
from services.buffer.state import BufferState
from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema.digests import attest_scored
from shared.schema.ledger import LedgerRecord, group_id
from shared.schema.ledger_audit import Audit
from shared.schema.message import LARGEST, LARGEST_REWARD, SCHEMA
from shared.schema.messages import BatchRefused, GroupOutcome, Outcome, Scored, failure_of
from tests.support.buffer_config import buffer_config

NAMES = Subjects("run")
GROUPS = [group_id(0), group_id(1), group_id(2), group_id(5), "eval.heldout.0.0", "eval.heldout.0.1"]
ODD_GROUPS = ["g99999999", "eval.other.0.0", "eval.heldout.1.0", "g", "", "g00000000:0", "g\x00", "x" * 500, "g00000000\n"]


@dataclass
class Core:
    """A buffer without bus and store: what it has recorded, as bytes, and what it has freed."""

    limits: BufferConfig
    limit: int
    state: BufferState = field(default_factory=BufferState)
    ledger: list[bytes] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    batches: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trial = Trial(self.state)
        self.audit = Audit(self.limits.rollout.max_staleness, self.limits.rollout.rollout_batch_size)

    def decide(self, decision: Callable[[], Sequence[LedgerRecord]]) -> None:
        self._record(decision())
        while following := [*policy.close(self.state, self.limits, 0.0), *policy.admit(self.state, self.limits, 0.0)]:
            self._record(following)

    def _record(self, records: Sequence[LedgerRecord]) -> None:
        for record, data in self.trial.entries(records, self.limit):
            assert len(data) <= self.limit
            self.ledger.append(data)
            rollout_keeper.ended_groups(self.state, record)
            self.audit.see(record)
            self.state.apply(record)
            self.freed += self.state.released
        assert self.audit.report().violations == []
        assert self.state.in_flight == self.audit.report().in_flight

    def outcomes(self, messages: Sequence[bytes], last: bool) -> None:
        """Takes messages as the service does: rewards together, the others one by one; what cannot be read ends its group."""
        read: list[GroupOutcome] = []
        for data in messages:
            try:
                read.append(outcome_consumer.checked(Outcome.decode(data), NAMES, last=last))
            except BadMessage as error:
                if (failed := failure_of(data, str(error), "buffer")) is not None:
                    read.append(failed)
        rewards = [outcome for outcome in read if isinstance(outcome, Scored)]
        self.decide(lambda: policy.outcomes(self.state, self.limits, rewards, 0.0))
        for outcome in read:
            if not isinstance(outcome, Scored):
                self.decide(lambda outcome=outcome: policy.outcomes(self.state, self.limits, [outcome], 0.0))  # type: ignore[misc]
            self.freed += policy.unwanted(self.state, outcome)

    def ask(self) -> None:
        step = self.state.formed_steps
        version = self.limits.version_of_step(step)
        if step < self.limits.rollout.num_rollout:
            self.decide(lambda: policy.form_batch(self.state, self.limits, step, version, 0.0))
        for formed in self.state.batches:
            self.decide(lambda step=formed: policy.amended(self.state, self.limits, step, 0.0))  # type: ignore[misc]
            if (batch := policy.batch(self.state, formed)) is not None:
                batch.encode()

    def train(self) -> None:
        step = self.state.trained_steps
        if step in self.state.batches and not self.state.batches[step].lost:
            batch = self.state.batches[step]
            scored = [(group.id, group.scored.samples, group.scored.removed) for group in batch.groups if group.scored is not None]
            attestation = attest_scored(scored, batch.mask_below)
            self.decide(lambda: policy.trained(self.state, step, step + 1, 0.0, 1.0, 0.0, attestation))
            made = self.limits.newest_version(self.state.trained_steps)
            self.decide(lambda: policy.live(self.state, self.limits, made, 0.0))

    def save(self) -> None:
        self.decide(lambda: policy.durable(self.state, self.state.trained_steps, 0.0))

    def refuse(self, group: str, at: float) -> None:
        known = self.state.groups.get(group)
        message = BatchRefused(step=0 if known is None else known.step or 0, group=group, sample=0, reason="x" * 2000, at=at)
        self.decide(lambda: policy.refused(self.state, message, 0.0, lost=int(at) % 2 == 1))

    def lose(self, group: str) -> None:
        self.decide(lambda: policy.lost_ready(self.state, group, 0.0))

    def restart(self) -> None:
        """The successor's state is that of the buffer that died."""
        state = BufferState()
        for data in self.ledger:
            state.apply(LedgerRecord.decode(data))
        assert state == self.state
        self.state, self.trial = state, Trial(state)

    def check_freed(self) -> None:
        """Only what groups of this run own is freed, and nothing that a batch still needs."""
        assert not set(FOREIGN) & set(self.freed)
        needed = {key for group in self.state.groups.values() if group.scored is not None for key in group.scored.keys}
        assert not needed & set(self.freed)
        self.freed.clear()  # an outcome may come again, or before its group, and name the same blobs


NUMBERS = [0, 0, 1, 1, 2, 5, -1, 2**31 - 1, 2**31, 2**40, 2**63]
VERSIONS = [0, 0, 0, 0, 0, 1, 1, 2, 2**31 - 1, 2**40]
REWARDS = [0.0, 0.0, 1.0, 1.0, 1.0, 1, -LARGEST_REWARD, LARGEST_REWARD, 1.7e308, float("nan"), float("inf"), 2**64 - 1, "1"]
PARTS = ["format", "reward", "x" * 64, "x" * 65, "", "é" * 64, "a\x1b[31m", "\x00"]
TEXTS = ["", "why", "é" * 5000, "\x1b[2J\x00", "a\nb"]
FOREIGN = ["run:group:g00000077:0:a:0", "run:group:eval.heldout.0.77:0:a:0", "other:group:g00000000:0:a:0", "run:exchange:x", "k" * 400, ""]


@dataclass
class Outcomes:
    """Makes outcomes as they may come: nearly right, or with anything in a field."""

    dice: random.Random

    def rarely(self, of: int) -> bool:
        return self.dice.randrange(of) == 0

    def counts(self, samples: int) -> list[Any]:
        if self.rarely(10):
            return self.dice.choices(NUMBERS, k=self.dice.randrange(4))
        return [self.dice.choice([3, 5]) for _ in range(samples)] if self.rarely(2) else []

    def payload(self, group: str, attempt: object, samples: int) -> dict[str, Any]:
        generation = self.dice.choice("ab")
        keys = [f"run:group:{group}:{attempt}:{generation}:{part}" for part in range(self.dice.choice([1, 1, 1, 2, 0]))]
        if self.rarely(10):
            keys += self.dice.choices([*FOREIGN, *keys], k=2)
        if self.rarely(40):
            keys = [f"{group}:{part}".join(["run:group:", f":{attempt}:"]).ljust(100, "0") for part in range(self.dice.choice([200, 1025]))]
        return {
            "keys": keys,
            "bytes": self.dice.choice([0, 100, 100, 100, -1, 2**50]),
            "tokens": self.counts(samples),
            "sizes": self.counts(2),
        }

    def scored(self, samples: int) -> dict[str, Any]:
        oldest = self.dice.choice(VERSIONS)
        newest = oldest if self.rarely(2) else max(oldest, self.dice.choice(VERSIONS))
        meta = {"tokens": 3, "trained": 3, "oldest": oldest, "newest": newest, "finish": "stop"}
        meta |= {"tokens": self.dice.choice(NUMBERS)} if self.rarely(10) else {}
        if self.rarely(15):
            meta |= {"trained": self.dice.choice(NUMBERS), "digest": self.dice.choice(NUMBERS)}
            meta |= {"spans": [[self.dice.choice(VERSIONS), self.dice.choice(NUMBERS)] for _ in range(2)]}
        parts: list[dict[str, Any]] = []
        if self.rarely(4):
            parts = [{name: self.dice.choice(REWARDS) for name in self.dice.sample(PARTS, 2)}] * samples
        elif self.rarely(8):
            parts = [{f"{'é' * 60}{part}": 1 for part in range(64)}] * samples
        reward = self.dice.choice(REWARDS) if self.rarely(3) else 1.0
        return {
            "samples": [meta] * samples,
            "rollouts": [] if self.rarely(2) else list(range(samples)) if self.rarely(2) else self.counts(samples),
            "replica": "r",
            "started": 0.0,
            "ended": 1,
            "rewards": [reward] * (samples + self.rarely(20)),
            "parts": parts,
            "removed": self.dice.choices(NUMBERS, k=2) if self.rarely(5) else [],
            "filtered": self.dice.choice(TEXTS) if self.rarely(8) else None,
            "environment": "math",
        }

    def fine(self, name: str, core: Core) -> bytes:
        """The rewards of a group as it is awaited."""
        group, samples = core.state.groups.get(name), core.limits.rollout.n_samples_per_prompt
        attempt, version = 0 if group is None else group.attempt, max(0, core.state.live_version)
        fields = {"group": name, "attempt": attempt, "payload": {"keys": [f"run:group:{name}:{attempt}:a:0"], "bytes": 9}}
        meta = {"tokens": 3, "trained": 3, "oldest": version, "newest": version, "finish": "stop"}
        fields |= {"samples": [meta] * samples, "rewards": [1.0] * samples, "replica": "r", "environment": "math", "started": 0, "ended": 1}
        return codec.pack({"schema": SCHEMA, "kind": "Scored", **fields})

    def one(self, core: Core) -> bytes:
        dice, samples = self.dice, core.limits.rollout.n_samples_per_prompt
        awaited = [group.id for group in core.state.outstanding] or GROUPS
        if self.rarely(2):
            return self.fine(dice.choice(awaited), core)
        group = dice.choice(ODD_GROUPS if self.rarely(15) else GROUPS if self.rarely(2) else awaited)
        attempt = dice.choice([0, 1, 2, -1, LARGEST, 2**40, "0"]) if self.rarely(4) else 0
        kind = dice.choice(["Scored"] * 8 + ["Failed", "Interrupted", "Interrupted", "Outcome", "GroupDead", "Generated"])
        samples = dice.choice([0, 1, 3, 300]) if self.rarely(8) else samples
        fields: dict[str, Any] = {"group": group, "attempt": attempt}
        if kind == "Scored" or self.rarely(2):
            fields["payload"] = self.payload(group, attempt, samples)
        if kind in ("Scored", "Generated"):
            fields |= self.scored(samples)
        elif kind == "Interrupted":
            fields |= {"stale": self.rarely(4), "replica": "r"}
        else:
            fields |= {"reason": dice.choice(TEXTS), "by": dice.choice(["r", "", "x" * 999])}
        if self.rarely(15):
            fields[dice.choice(sorted(fields))] = dice.choice([None, [], {}, b"\xff", *TEXTS, *NUMBERS])
        return codec.pack({"schema": SCHEMA, "kind": kind, **fields})


CONFIGS = st.builds(
    buffer_config,
    steps=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    samples=st.sampled_from([2, 2, 1, 300]),
    max_staleness=st.sampled_from([0, 1]),
    interval=st.sampled_from([1, 2]),
    staleness=st.sampled_from(["drop", "requeue", "continue", "mask"]),
    surplus=st.sampled_from([0, 3]),
    eval_prompts=st.sampled_from([0, 2]),
    eval_interval=st.sampled_from([None, 1]),
    eval_first=st.booleans(),
)
PLAYS = given(CONFIGS, st.sampled_from([8192, 1 << 20]), st.integers(0, 2**32), st.integers(0, 20))


def play(config: BufferConfig, limit: int, seed: int, events: int) -> Core:
    core, dice = Core(config, limit), random.Random(seed)
    sender = Outcomes(dice)
    core.decide(lambda: policy.live(core.state, config, 0, 0.0))
    for _ in range(events):
        match dice.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                messages = [sender.one(core) for _ in range(dice.randint(1, 4))]
                core.outcomes(messages, last=sender.rarely(20))
            case 5 | 6:
                core.ask()
            case 7 | 8:
                core.train()
            case 9:
                core.save()
            case 10:
                core.restart()
            case _ if sender.rarely(2):
                core.refuse(dice.choice(GROUPS), float(dice.randrange(4)))
            case _:
                core.lose(dice.choice(GROUPS))
        core.check_freed()
    core.restart()
    return core


@settings(max_examples=300)
@PLAYS
def test_any_outcome_leaves_the_buffer_alive_and_its_ledger_replayable(config: BufferConfig, limit: int, seed: int, events: int) -> None:
    play(config, limit, seed, events)


@pytest.mark.extra
@pytest.mark.timeout(3600)
@settings(max_examples=30_000)
@PLAYS
def test_so_do_many_more(config: BufferConfig, limit: int, seed: int, events: int) -> None:
    play(config, limit, seed, events)


def test_the_play_reaches_what_it_is_meant_to_reach() -> None:
    """The property would be empty if nearly all messages were refused, or none."""
    seen: set[str] = set()
    for seed in range(60):
        config = buffer_config(steps=3, groups=2, samples=2, max_staleness=1, interval=1, surplus=3, eval_prompts=2 * (seed % 2))
        for data in play(config, 8192, seed, 40).ledger:
            record = LedgerRecord.decode(data)
            reason = getattr(record, "reason", "")
            seen |= {record.event(), *(words for words in WORDS if words in reason)}
    assert seen >= {"groups_scored", "batch_formed", "batch_trained", "checkpoint_durable", "group_requeued", "groups_dropped", *WORDS}


WORDS = {
    "names the blob",
    "was delivered too often",
    "over the bus's limit",
    "payload.tokens",
    "rewards.0",
    "holds tokens of versions",
    "named rewards of",
    "filtered",
}
"""Of reasons for which groups are dead."""
