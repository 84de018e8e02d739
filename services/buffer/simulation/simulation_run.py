"""A simulation of every wanted policy at every wanted bound, and the outcome of each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from numpy.random import default_rng

from services.buffer.batch_order import Order
from services.buffer.buffer_config import BufferConfig
from services.buffer.simulation.length_tally import LengthShare, LengthTally
from services.buffer.simulation.modelled_engine import Baseline
from services.buffer.simulation.workload_model import WorkloadModel
from services.buffer.simulation.world import World
from services.buffer.staleness import Policy
from shared.config.rollout_section import RolloutSection
from shared.schema.ledger import BatchFormed, LedgerRecord

Simulated = Literal["unbounded", "drop", "requeue", "continue", "mask"]
"""The staleness policies, and one that no run can have: admission keeps to the bound, batches take whatever came back."""

POLICIES: tuple[Simulated, ...] = get_args(Simulated)
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Setting:
    """A policy and an order. window: groups that ``windowed_fifo`` looks ahead."""

    policy: Simulated
    order: Order = "completion"
    window: int = 0

    @property
    def name(self) -> str:
        """Returns the name of the setting in tables and JSON."""
        policy = "unbounded (reference)" if self.policy == "unbounded" else self.policy
        if (self.policy, self.order) == ("unbounded", "completion"):
            return policy
        return f"{policy}/{self.order}" + (f"({self.window})" if self.order == "windowed_fifo" else "")


@dataclass(frozen=True)
class PolicyOutcome:
    """The outcome of one setting at one bound.

    speedup: of steps per second, token_speedup: of trained tokens per second, both over the synchronous run; of_limit: part of the largest
    speed-up that there can be. max_age: over the whole run, in versions; ages: trained samples by age, after the warm-up. dropped,
    dropped_tokens: samples and generated tokens that were thrown away; masked: tokens in batches that were not trained.
    """

    setting: Setting
    bound: int
    steps: int
    speedup: float
    of_limit: float
    token_speedup: float
    samples_per_second: float
    max_age: int
    ages: dict[int, int]
    dropped: LengthShare
    dropped_tokens: LengthShare
    masked: LengthShare

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))


@dataclass(frozen=True)
class SimulationPlan:
    """The plan of a simulation. steps: those that are measured, after ``warm_up`` others. interrupting: as for `World`."""

    model: WorkloadModel
    settings: Sequence[Setting]
    bounds: Sequence[int]
    steps: int
    warm_up: int
    seed: int
    interrupting: bool = True

    def baseline(self) -> Baseline:
        """Returns the synchronous run of the model."""
        return Baseline.of(self.model, default_rng(self.seed))

    def outcomes(self, baseline: Baseline, stepped: Callable[[Setting, int], None] = lambda *_: None) -> Iterable[PolicyOutcome]:
        """Simulates one after the other. stepped: called with setting and bound at every batch. Raises SimulationBroken."""
        for setting, bound in product(self.settings, self.bounds):
            yield self._outcome(setting, bound, baseline, stepped)

    def _outcome(self, setting: Setting, bound: int, baseline: Baseline, stepped: Callable[[Setting, int], None]) -> PolicyOutcome:
        model, tally = self.model, LengthTally(self.model, self.warm_up)

        def see(record: LedgerRecord) -> None:
            if isinstance(record, BatchFormed):
                stepped(setting, bound)

        config, enforced = buffer_config(model, setting, bound), setting.policy != "unbounded"
        world = World(model, config, default_rng(self.seed), tally, enforced=enforced, interrupting=self.interrupting, see=see)
        report = world.run(self.warm_up + self.steps)
        speedup = baseline.step / tally.step_seconds
        return PolicyOutcome(
            setting=setting,
            bound=bound,
            steps=self.steps,
            speedup=speedup,
            of_limit=speedup / baseline.limit,
            token_speedup=speedup * tally.tokens_per_step / (model.batch * model.capped_mean),
            samples_per_second=model.batch / tally.step_seconds,
            max_age=report.max_staleness,
            ages=dict(sorted(tally.ages.items())),
            dropped=tally.share("discarded", "discarded", "trained"),
            dropped_tokens=tally.share("discarded_tokens", "discarded_tokens", "batched_tokens"),
            masked=tally.share("masked_tokens", "batched_tokens"),
        )


def buffer_config(model: WorkloadModel, setting: Setting, bound: int) -> BufferConfig:
    """Returns the buffer's config for a setting at a bound."""
    policy: Policy = "drop" if setting.policy == "unbounded" else setting.policy
    rollout = RolloutSection(
        num_rollout=1,
        rollout_batch_size=model.groups,
        n_samples_per_prompt=model.samples,
        max_staleness=bound,
        staleness_policy=policy,
        rollout_order=setting.order,
    )
    return BufferConfig(rollout.model_copy(update={"rollout_window": setting.window or None}))  # also of windows that no run may have


def settings(policies: Sequence[Simulated], orders: Sequence[Order] | None, windows: Sequence[int]) -> list[Setting]:
    """Returns each policy in each order, once for every window where the order has one. orders None: all for ``drop``, else one."""
    wanted = []
    for policy in policies:
        for order in orders or (ORDERS if policy == "drop" else ("completion",)):
            wanted += [Setting(policy, order, window) for window in (windows if order == "windowed_fifo" else (0,))]
    return wanted
