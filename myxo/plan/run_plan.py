"""What each kind of a run's processes needs of its GPU, and whether it fits. Pure.

A trainer's rank: what `shared.model.memory_plan` counts, checked against measured runs. An engine's GPU: weights and the longest sequence
of the run, of the share that the engine takes. Colocated, the one has to live beside what the other leaves on the GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shared.config.run_config import RunConfig
from shared.model.architecture import Architecture
from shared.model.engine_plan import EnginePlan, plan_engine
from shared.model.memory_plan import OUTSIDE_BYTES, StagePlan, plan_trainer

ASLEEP_BYTES = 5_000_000_000
"""What a colocated engine that has released weights and cache still has: CUDA's context, graphs, workspaces (docs/deployment.md)."""

NEAR = 0.1
"""How far the need may be off what it is compared with before it counts as surely too large, or surely small enough."""


@dataclass(frozen=True)
class MemoryNeed:
    """The need of one GPU of a kind of process.

    Args:
        of: the kind, for people. role: actor, critic or engine. ranks: how many GPUs are of this kind. parts: bytes by name; together they
            are the need. available: bytes that there are for it. field: of the config, that an error names. host: bytes of host memory
            beside.
    """

    of: str
    role: str
    ranks: int
    parts: Mapping[str, int]
    available: int
    field: str
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Args:
        config: of the run. architecture: of its policy. gpu_bytes: of each GPU. critic: the architecture of the critic, where it has one of
            its own.
    """

    config: RunConfig
    architecture: Architecture
    gpu_bytes: int
    critic: Architecture | None = None

    @cached_property
    def needs(self) -> list[MemoryNeed]:
        """Returns the needs of all kinds of processes."""
        return [*self._trainer("actor"), *self._trainer("critic"), *self._engine()]

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

    @cached_property
    def engine(self) -> EnginePlan | None:
        """Returns the plan of an engine's GPU; None where the run has none."""
        return None if self.config.debug.trains_only else plan_engine(self.architecture, self.config.rollout, self.gpu_bytes)

    def stages(self, role: str) -> list[StagePlan]:
        """Returns the plans of a role's pipeline stages; none where the run has no such role."""
        config = self.config
        if config.debug.debug_rollout_only or (role == "critic" and not config.algorithm.has_critic):
            return []
        shape = (self.critic or self.architecture) if role == "critic" else self.architecture
        return plan_trainer(shape, config.trainer, config.trainer.ranks(role), value_head=role == "critic")

    def _trainer(self, role: str) -> Iterator[MemoryNeed]:
        """Yields the need of a rank of each stage; stages that are alike as one."""
        trainer, plans = self.config.trainer, self.stages(role)
        groups: list[list[StagePlan]] = []
        for plan in plans:
            if groups and _parts(groups[-1][0]) == _parts(plan):
                groups[-1].append(plan)
            else:
                groups.append([plan])
        for group in groups:
            first, last, name = group[0].stage, group[-1].stage, role
            if len(plans) > 1:
                name += f", stage {first}" if first == last else f", stages {first} to {last}"
            parts = {**_parts(group[0]), "CUDA, NCCL": OUTSIDE_BYTES}
            if role == "actor" and trainer.colocate:
                parts |= {"colocated": self._beside_trainer()}
            ranks = trainer.ranks(role) // len(plans) * len(group)
            field = "trainer.max_tokens_per_gpu" if group[0].activations > sum(_static(group[0])) else f"trainer.{role}_num_gpus_per_node"
            yield MemoryNeed(name, role, ranks, parts, self.gpu_bytes, field, group[0].host)

    def _beside_trainer(self) -> int:
        """Returns the bytes that colocation takes of the trainer's GPU while it trains: the engine's, and the buckets of pushes."""
        trainer = self.config.trainer
        count = 2
        if trainer.nodes("actor") > 1:  # as a stage's source, and as the relay of stages of other machines
            count += 3 + 5 * -(-trainer.pipeline_model_parallel_size // trainer.ranks_per_node("actor"))
        buckets = count * self.config.weights.update_weight_buffer_size
        if self.config.trainer.offload_rollout is False and self.engine is not None:
            return self.engine.budget + ASLEEP_BYTES + buckets
        return ASLEEP_BYTES + buckets

    def _engine(self) -> Iterator[MemoryNeed]:
        engine, config = self.engine, self.config
        if engine is None:
            return
        parts = {"weights": engine.weights, "longest sequence": engine.longest * engine.token_bytes}
        if config.trainer.colocate and not config.debug.debug_rollout_only:
            held = [sum(_static(stage)) for stage in self.stages("actor")] if config.trainer.offload_train is False else [0]
            kept = max(held) + OUTSIDE_BYTES + 2 * config.weights.update_weight_buffer_size
            beside = max(kept - (self.gpu_bytes - engine.budget), 0)
            parts |= {"colocated": beside} if beside else {}
        gpus = config.rollout.rollout_replicas * engine.gpus
        yield MemoryNeed("engine", "engine", gpus, parts, engine.budget, "rollout.rollout_num_gpus_per_engine")


def _static(plan: StagePlan) -> tuple[int, int, int]:
    return plan.weights, plan.gradients, plan.optimizer


def _parts(plan: StagePlan) -> dict[str, int]:
    return {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations,
        "working": max(plan.likelihood, plan.working),
    }
