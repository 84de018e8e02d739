"""The flags that lower what a config needs of its GPUs, each tried by planning again with it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from myxo.plan.run_plan import MemoryNeed, RunPlan
from shared.config.rollout_section import RolloutSection
from shared.config.trainer_section import TrainerSection
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout, division_problems

WORTH = 0.02
"""The share of a need that a flag has to take off to be told."""

LEAST_TOKENS = 1024
"""Tokens of a micro-batch below which training only gets slow."""

LOW_PRECISION = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16"}


@dataclass(frozen=True)
class Remedy:
    """Flags with what the kind of process then needs. ``fits``: whether that is enough."""

    flags: str
    total: int
    fits: bool


def remedies(plan: RunPlan, need: MemoryNeed) -> list[Remedy]:
    """Returns what would lower a need: first what is enough, then what saves most."""
    changes = _for_engine(plan) if need.role == "engine" else _for_trainer(plan, need.role)
    found = []
    for flags, changed in changes:
        after = max((other for other in changed.needs if other.role == need.role), key=lambda other: other.total - other.available)
        saved = (need.total - need.available) - (after.total - after.available)
        if saved > WORTH * need.total:
            found.append(Remedy(flags, after.total, after.fits))
    return [*(remedy for remedy in found if remedy.fits), *sorted((it for it in found if not it.fits), key=lambda it: it.total)]


def _for_trainer(plan: RunPlan, role: str) -> Iterator[tuple[str, RunPlan]]:
    trainer = plan.config.trainer
    for flags, update in _trainer_flags(trainer, role):
        changed = trainer.model_copy(update=update)
        if _divides(plan.architecture, changed, role):
            yield flags, replace(plan, config=plan.config.model_copy(update={"trainer": changed}))


def _trainer_flags(trainer: TrainerSection, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields flags with the fields that they change."""
    megatron = trainer.megatron
    if not trainer.recomputes_layers:
        yield "--recompute", {"recompute": True, "recompute_granularity": None, "recompute_modules": []}
    if (tokens := trainer.max_tokens_per_gpu // 2) >= LEAST_TOKENS:
        yield f"--max-tokens-per-gpu {tokens}", {"max_tokens_per_gpu": tokens}
    if trainer.log_probs_chunk_size < 0 or trainer.log_probs_chunk_size > 1024:
        yield "--log-probs-chunk-size 1024", {"log_probs_chunk_size": 1024}
    adjustable = trainer.use_distributed_optimizer and trainer.train_dtype == "bfloat16"
    if adjustable and not megatron.get("optimizer_cpu_offload"):
        yield "--optimizer-cpu-offload", {"megatron": {**megatron, "optimizer_cpu_offload": True}}
    if adjustable and not megatron.get("use_precision_aware_optimizer"):
        spelled = " ".join(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in LOW_PRECISION.items())
        yield spelled, {"megatron": {**megatron, **LOW_PRECISION}}
    if not trainer.use_distributed_optimizer:
        yield "--use-distributed-optimizer", {"use_distributed_optimizer": True}
    yield from _more_ranks(trainer, role)


def _more_ranks(trainer: TrainerSection, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields layouts that divide the model further."""
    tensor, per_node = trainer.tensor_model_parallel_size * 2, trainer.ranks_per_node(role)
    sequence = "" if trainer.sequence_parallel else " --sequence-parallel"
    if tensor <= per_node:
        update = {"tensor_model_parallel_size": tensor, "sequence_parallel": True}
        yield f"--tensor-model-parallel-size {tensor}{sequence}", update
    if trainer.expert_model_parallel_size * 2 <= trainer.ranks(role):
        expert = trainer.expert_model_parallel_size * 2
        yield f"--expert-model-parallel-size {expert}", {"expert_model_parallel_size": expert}
    if per_node < 8:
        yield f"--{role}-num-gpus-per-node {2 * per_node}", {f"{role}_num_gpus_per_node": 2 * per_node}
    else:
        nodes = 2 * trainer.nodes(role)
        yield f"--{role}-num-nodes {nodes}", {f"{role}_num_nodes": nodes}
    if 2 * tensor <= 16 and per_node < 8:
        update = {f"{role}_num_gpus_per_node": 2 * per_node, "tensor_model_parallel_size": tensor, "sequence_parallel": True}
        yield f"--{role}-num-gpus-per-node {2 * per_node} --tensor-model-parallel-size {tensor}{sequence}", update


def _divides(architecture: Architecture, trainer: TrainerSection, role: str) -> bool:
    layout = ParallelLayout.of(trainer)
    problems = [*layout.world_problems(trainer.ranks(role)), *division_problems(architecture, layout, trainer.megatron)]
    return not problems


def _for_engine(plan: RunPlan) -> Iterator[tuple[str, RunPlan]]:
    rollout = plan.config.rollout
    for flags, update in _engine_flags(plan, rollout):
        changed = rollout.model_copy(update=update)
        yield flags, replace(plan, config=plan.config.model_copy(update={"rollout": changed}))


def _engine_flags(plan: RunPlan, rollout: RolloutSection) -> Iterator[tuple[str, dict[str, Any]]]:
    given = {name.lstrip("-").replace("_", "-"): value for name, value in rollout.sglang.items()}
    gpus = rollout.rollout_num_gpus_per_engine
    while plan.architecture.num_attention_heads % (gpus := 2 * gpus) == 0 and gpus <= 512:
        yield f"--rollout-num-gpus-per-engine {gpus}", {"rollout_num_gpus_per_engine": gpus}
    if "kv-cache-dtype" not in given:
        yield "--sglang-kv-cache-dtype fp8_e4m3", {"sglang": {**rollout.sglang, "kv-cache-dtype": "fp8_e4m3"}}
    if plan.engine is not None and plan.engine.share < 0.8:
        others = {name: value for name, value in rollout.sglang.items() if name.lstrip("-").replace("_", "-") != "mem-fraction-static"}
        yield "--sglang-mem-fraction-static 0.85", {"sglang": {**others, "mem-fraction-static": 0.85}}
