"""A schedule of faults, drawn from a seed: the same seed gives the same schedule. Pure.

Each fault hits one or two processes, a link, a disk or what is stored, in a phase of the run; all kinds, processes and phases come in turn
as seeds continue.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.chaos.fast.fast_config import FastShape

FLOW, START, EVALUATION, SAVE, PUSH, LAST_STEP, SHUTDOWN = "flow", "start", "evaluation", "save", "push", "last step", "shutdown"
PHASES = (FLOW, START, EVALUATION, SAVE, PUSH, LAST_STEP, SHUTDOWN)
"""When a fault may come. The start is before the first step, the shutdown after the last."""

KILL, FREEZE, SLOW, CUT, DELAY = "kill -9", "freeze", "slow", "cut", "delay"
DUPLICATES, DISK_FULL, TRUNCATE, DELETE = "duplicates", "disk full", "truncate", "delete"

PROCESSES = (
    "buffer-0",
    "reward-0",
    "reward-0/worker",
    "rollout-0",
    "rollout-1",
    "rollout-0/engine",
    "rollout-0/engine/scheduler",
    "rollout-1/engine/detokenizer",
    "trainer-0",
    "nats",
    "valkey",
)
"""Processes of a run by the names that they have in it."""

TARGETS: dict[str, tuple[str, ...]] = {
    KILL: PROCESSES,
    FREEZE: PROCESSES,
    SLOW: ("trainer-0", "rollout-0/engine/scheduler", "rollout-1/engine/scheduler", "reward-0/worker"),
    CUT: ("nats link", "valkey link", "nats link/buffer", "nats link/reward", "nats link/rollout", "nats link/trainer"),
    DELAY: ("nats link", "valkey link"),
    DUPLICATES: ("messages",),
    DISK_FULL: ("disk",),
    TRUNCATE: ("checkpoint", "snapshot", "aof", "stream block"),
    DELETE: ("payloads",),
}
"""What each kind of fault may hit. A link to NATS is everybody's, or that of the services of one kind."""

REAL_PROCESSES = (
    "buffer-0",
    "reward-0",
    "reward-0/worker",
    "rollout-0",
    "rollout-0/engine",
    "rollout-0/engine/scheduler",
    "rollout-0/engine/detokenizer",
    "trainer-0",
    "trainer-0/rank",
    "nats",
    "valkey",
)
REAL_TARGETS = {KILL: REAL_PROCESSES, FREEZE: REAL_PROCESSES}
"""As `PROCESSES` and `TARGETS`, of runs with a real engine and two ranks of a trainer."""

KINDS = tuple(TARGETS)
LOSSY = (TRUNCATE, DELETE)
"""Kinds that take away what a run has stored: it may give up groups, or itself, with a reason; nothing may be wrong all the same."""

_WEIGHTS = {KILL: 6, FREEZE: 4, SLOW: 1, CUT: 2, DELAY: 1, DUPLICATES: 1, DISK_FULL: 1, TRUNCATE: 1, DELETE: 1}

LONGEST_DELAY_S = 0.6
LONGEST_S = 12.0
MOST_FAULTS = 4


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: what happens. targets: to whom, at once. phase: when; ``step``: as many are trained at least. delay: seconds after that.
        seconds: how long it lasts; 0 for what happens once.
    """

    kind: str
    targets: tuple[str, ...]
    phase: str = FLOW
    step: int = 0
    delay: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        when = f"step {self.step}" if self.phase == FLOW else f"{self.phase} (from step {self.step} on)"
        return f"{self.kind} of {' and '.join(self.targets)}{lasting}, {self.delay:g} s into {when}"


@dataclass(frozen=True)
class Schedule:
    """A run's shape and its faults, in their order."""

    seed: int
    shape: FastShape
    faults: tuple[Fault, ...]

    @property
    def lossy(self) -> bool:
        """Returns whether it takes away what the run has stored."""
        return any(fault.kind in LOSSY for fault in self.faults)

    def without(self, index: int) -> "Schedule":
        """Returns the schedule less one of its faults."""
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])

    def undisturbed(self) -> "Schedule":
        return replace(self, faults=())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Schedule":
        faults = tuple(Fault(**{**fault, "targets": tuple(fault["targets"])}) for fault in fields["faults"])
        return cls(fields["seed"], FastShape(**fields["shape"]), faults)

    def __str__(self) -> str:
        shape = ", ".join(f"{name} {value}" for name, value in asdict(self.shape).items())
        return "\n".join([f"seed {self.seed}: {shape}", *(f"  {fault}" for fault in self.faults)])


def drawn(seed: int, kinds: tuple[str, ...] = KINDS, *, deterministic: bool = False, real: bool = False) -> Schedule:
    """Returns the schedule of a seed.

    Args:
        kinds: those that may come. deterministic: the run is synchronous, so that its weights do not depend on time. real: for a run with
            a real engine, whose processes alone are disturbed.
    """
    draw = random.Random(seed)
    known = REAL_TARGETS if real else TARGETS
    staleness = 0 if deterministic else draw.choice((0, 1, 1, 2))
    shape = FastShape(
        staleness=staleness,
        policy=draw.choice(("drop", "requeue", "continue", "mask")) if staleness else "drop",
        mode=draw.choice(("in_place", "retract", "abort")),
        save_interval=draw.choice((1, 2, 3)),
        eval_interval=draw.choice((3, 5)),
        lend=not real and seed % 4 == 3,
    )
    faults = [
        _fault(draw, seed + index, shape, {kind: known[kind] for kind in kinds if kind in known})
        for index in range(draw.randint(1, MOST_FAULTS))
    ]
    return Schedule(seed, shape, tuple(sorted(faults, key=_order)))


def _fault(draw: random.Random, turn: int, shape: FastShape, targets_of: Mapping[str, tuple[str, ...]]) -> Fault:
    kind = draw.choices(list(targets_of), [_WEIGHTS[kind] for kind in targets_of])[0]
    phase, known = draw.choice(PHASES), targets_of[kind]
    first = known[turn % len(known)]
    others = [target for target in known if target != first]
    targets = (first, draw.choice(others)) if kind in (KILL, FREEZE) and draw.random() < 0.3 else (first,)
    step = {START: 0, LAST_STEP: shape.steps - 1, SHUTDOWN: shape.steps}.get(phase, draw.randint(1, shape.steps - 2))
    delay = round(draw.uniform(0.0, LONGEST_DELAY_S if phase != START else 3.0), 3)
    lasts = round(draw.uniform(0.5, LONGEST_S), 1) if kind not in (KILL, *LOSSY) else 0.0
    return Fault(kind, targets, phase, step, delay, lasts)


def _order(fault: Fault) -> tuple[int, int]:
    return fault.step, PHASES.index(fault.phase)
