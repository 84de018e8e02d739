"""The memory that each kind of a run's processes needs of its GPU, whether it fits, and the flags that lower it.

A trainer's rank: what `shared.model.memory_plan` counts, checked against measured runs. An engine's GPU: weights and the longest sequence
of the run, of the share that the engine takes. Colocated, the one has to live beside what the other leaves on the GPU.

The plan is within 5 % of what was measured, so the check refuses a config only where it needs 10 % more than there is; nearer than 10 % to
the limit, on either side, it is noted.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from rich.table import Table
from rich.text import Text

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.bus import runs
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.config.trainer_section import LOG_PROBS_TOKENS, TOKENS_PER_GPU, TrainerSection
from shared.model.architecture import Architecture
from shared.model.engine_plan import EnginePlan, plan_engine
from shared.model.memory_plan import OUTSIDE_BYTES, StagePlan, plan_trainer, total_parameters
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.model.quantization import engine_bytes
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError

# What a colocated engine that has released weights and cache still has: CUDA's context, graphs, workspaces (docs/deployment.md).
ASLEEP_BYTES = 5_000_000_000
NEAR = 0.1  # how far the need may be off what it is compared with before it counts as surely too large, or surely small enough


@dataclass(frozen=True)
class MemoryNeed:
    """The need of one GPU of a kind of process.

    ``of``: the kind, for people. ``role``: actor, critic or engine. ``ranks``: how many GPUs are of this kind. ``parts``: bytes by name;
    together they are the need. ``available``: bytes that there are for it. ``field``: of the config, that an error names. ``host``: bytes
    of host memory beside.
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
class PlannedGroup:
    """A group of engines. ``name``: for people. ``field``: of the config, that an error names. ``engines``: how many. ``plan``: of a GPU.
    ``alike``: they are all engines of the policy, which the fields of ``[rollout]`` describe. ``lent``: they are on the trainer's GPUs."""

    name: str
    field: str
    engines: int
    plan: EnginePlan
    alike: bool
    lent: bool = False


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    ``config``: of the run. ``architecture``: of its policy. ``gpu_bytes``: of each GPU. ``critic``: the architecture of the critic, where
    it has one of its own. ``models``: those of frozen models, as far as they are known.
    """

    config: RunConfig
    architecture: Architecture
    gpu_bytes: int
    critic: Architecture | None = None
    models: Mapping[str, Architecture] = field(default_factory=dict)

    @cached_property
    def needs(self) -> list[MemoryNeed]:
        """Returns the needs of all kinds of processes."""
        return [*self.trainer_needs, *self._engine()]

    @cached_property
    def trainer_needs(self) -> list[MemoryNeed]:
        """Returns the needs of the trainer's ranks."""
        return [*self._trainer("actor"), *self._trainer("critic")]

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

    @cached_property
    def engine(self) -> EnginePlan | None:
        """Returns the plan of the GPU of one of the policy's engines, of the first group; None where the run has none."""
        return self.engines[0].plan if self.engines else None

    @cached_property
    def engines(self) -> "list[PlannedGroup]":
        """Returns the plans of all groups of engines, the policy's first, without those of models whose shape is not known."""
        found, rollout = [], self.config.rollout
        on_gpus = {name: shape for name, shape in self.models.items() if rollout.models[name].device != "cpu"}
        for model, shape in {"": self.architecture, **on_gpus}.items() if not self.config.debug.trains_only else ():
            several, alike = len(rollout.engines(model)) > 1, not (model or rollout.engine_groups)
            for place in range(len(rollout.engines(model))):
                group = self.config.of_engines(model, place)
                own, held = group.rollout, engine_bytes(group.model.hf_checkpoint, group.rollout.rollout_precision)
                name = ("engine of " + model if model else "engine") + (f", group {place}" if several else "")
                table = f"models.{model}" if model else f"engine_groups.{place}"
                field = "rollout.rollout_num_gpus_per_engine" if alike else f"rollout.{table}.num_gpus_per_engine"
                found.append(PlannedGroup(name, field, own.rollout_replicas, plan_engine(shape, own, self.gpu_bytes, None, held), alike))
        if found and (lent := devices.lent_instances(self.config)):
            own = devices.as_lent(self.config.of_engines()).rollout
            held = engine_bytes(self.config.model.hf_checkpoint, own.rollout_precision)
            plan = plan_engine(self.architecture, own, self.gpu_bytes, None, held)
            found.append(PlannedGroup("lent engine", "trainer.lent_mem_fraction_static", len(lent), plan, alike=False, lent=True))
        return found

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
        for own_parts, same in itertools.groupby(plans, key=_parts):
            group = list(same)
            first, last, name = group[0].stage, group[-1].stage, role
            if len(plans) > 1:
                name += f", stage {first}" if first == last else f", stages {first} to {last}"
            parts = {**own_parts, "CUDA, NCCL": OUTSIDE_BYTES}
            if role == "actor" and (trainer.colocate or devices.lent_instances(self.config)):
                parts |= {"colocated" if trainer.colocate else "lent engine": self._beside_trainer()}
            ranks = trainer.ranks(role) // len(plans) * len(group)
            field = "trainer.max_tokens_per_gpu" if group[0].activations > _static(group[0]) else f"trainer.{role}_num_gpus_per_node"
            yield MemoryNeed(name, role, ranks, parts, self.gpu_bytes, field, group[0].host)

    def _beside_trainer(self) -> int:
        """Returns the bytes that colocation takes of the trainer's GPU while it trains: the engine's, and the buckets of pushes."""
        trainer, count = self.config.trainer, 2
        if trainer.nodes("actor") > 1:  # as a stage's source, and as the relay of stages of other machines
            count += 3 + 5 * -(-trainer.pipeline_model_parallel_size // trainer.ranks_per_node("actor"))
        awake = self.engine.budget if trainer.offload_rollout is False and self.engine is not None else 0
        return awake + ASLEEP_BYTES + count * self._bucket

    @cached_property
    def _bucket(self) -> int:
        """Returns the bytes of a push's largest bucket: a tensor of all experts is in one piece."""
        largest = max(map(prod, hf_tensors(self.architecture).values())) if self.architecture.stacked_experts else 0
        return max(self.config.weights.update_weight_buffer_size, 2 * largest)

    def _engine(self) -> Iterator[MemoryNeed]:
        for group in self.engines if self.engine is not None else ():
            engine, parts = group.plan, self._engine_parts(group)
            role = "engine" if group.alike else "group"
            yield MemoryNeed(group.name, role, group.engines * engine.gpus, parts, engine.budget, group.field)

    def _engine_parts(self, group: "PlannedGroup") -> dict[str, int]:
        engine, config = group.plan, self.config
        parts = {"weights": engine.weights, "longest sequence": engine.longest * engine.token_bytes}
        if group.lent or (group.alike and config.trainer.colocate and not config.debug.debug_rollout_only):
            stays = group.lent or config.trainer.offload_train is False
            held = [_static(stage) for stage in self.stages("actor")] if stays else [0]
            kept = max(held) + OUTSIDE_BYTES + 2 * self._bucket
            beside = max(kept - (self.gpu_bytes - engine.budget), 0)
            parts |= {"trainer" if group.lent else "colocated": beside} if beside else {}
        return parts


def _static(plan: StagePlan) -> int:
    return plan.weights + plan.gradients + plan.optimizer


def _parts(plan: StagePlan) -> dict[str, int]:
    held = {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer}
    return {**held, "activations": plan.activations, "working": max(plan.likelihood, plan.working)}


LEAST_TOKENS = 1024  # tokens of a micro-batch below which training only gets slow
MOST_TOKENS = 32_768  # above, products gain nothing more; stages of a pipeline share them, to have micro-batches enough
TOKENS = (MOST_TOKENS, 24_576, 16_384, 12_288, TOKENS_PER_GPU, 4096, 2048, LEAST_TOKENS)
CHUNKS = (LOG_PROBS_TOKENS, 4096, 8192)
# What torch takes of a GPU for activations over what it needs of them at a time: micro-batches differ in size, and it keeps the memory of
# earlier ones. 0.6B parameters took 22 GB for the plan's 12, and 93 for 49. The torch backend's own layers save up to 1.6 times the plan.
SPREAD = {"megatron": 1.9, "torch": 3.0}


def settled_tokens(plan: RunPlan) -> tuple[TrainerSection, str]:
    """Returns ``[trainer]`` with the most tokens of a micro-batch, then of a chunk of log-probs, that GPUs have room for, where these are
    `auto`, and the line about it.

    `NEAR` of the memory stays free, and above the values of a CPU the `SPREAD` of activations. Where nothing has room the values are those
    of a CPU, or what the longest sample needs that the config describes; checks report what would help.
    """
    trainer, rollout = plan.config.trainer, plan.config.rollout
    tokens, chunk = trainer.max_tokens_per_gpu, trainer.log_probs_chunk_size
    if "auto" not in (tokens, chunk):
        return trainer, ""
    most = max(MOST_TOKENS // trainer.pipeline_model_parallel_size, TOKENS_PER_GPU)
    longest = min(rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 0), rollout.rollout_max_context_len or 1 << 31)
    least = max(-(-longest // trainer.context_parallel_size), LEAST_TOKENS)
    wanted = [*(size for size in TOKENS if least < size <= most), least] if tokens == "auto" else [trainer.tokens_per_gpu]
    chunks = CHUNKS if chunk == "auto" else [trainer.log_probs_tokens]
    options = [_with_tokens(plan, size, chunks[0]) for size in wanted]
    chosen = next(filter(_has_room, options), _with_tokens(plan, max(TOKENS_PER_GPU, least) if tokens == "auto" else wanted[0], chunks[0]))
    for size in chunks[1:]:
        if _has_room(wider := _with_tokens(plan, chosen.config.trainer.tokens_per_gpu, size)):
            chosen = wider
    found = chosen.config.trainer
    need = max((need.total for need in chosen.trainer_needs), default=0)
    said = f"micro-batches of {found.tokens_per_gpu} tokens a GPU, log-probs of {found.log_probs_tokens} at a time: the plan is "
    kept = f"{NEAR:.0%} and what torch keeps beside stay free" if _has_room(chosen) else "no size leaves the plan's margin free"
    return found, said + f"{_gb(need)} of a GPU's {_gb(plan.gpu_bytes)} GB, {kept}"


def _with_tokens(plan: RunPlan, tokens: int, chunk: int) -> RunPlan:
    return replace(plan, config=plan.config.with_fields(trainer={"max_tokens_per_gpu": tokens, "log_probs_chunk_size": chunk}))


def _has_room(plan: RunPlan) -> bool:
    trainer = plan.config.trainer
    wide = trainer.tokens_per_gpu > TOKENS_PER_GPU or not 0 < trainer.log_probs_tokens <= LOG_PROBS_TOKENS
    spread = SPREAD[trainer.trainer_backend] - 1 if wide else 0
    kept = [spread * (need.parts["activations"] + need.parts["working"]) for need in plan.trainer_needs]
    return all(need.total + beside <= (1 - NEAR) * need.available for need, beside in zip(plan.trainer_needs, kept, strict=True))


def settle_trainer(inspection: Inspection) -> tuple[dict[str, int], str]:
    """Returns the sizes in tokens of ``[trainer]``, and a line about them. Of `auto`: what the run had before, the plan's, a CPU's."""
    config, trainer, said = inspection.config, inspection.config.trainer, ""
    on_gpu = devices.resolve(trainer.train_device) == "cuda"
    if not inspection.fresh and (begun := runs.frozen(config.run.root)) is not None:
        automatic = [name for name in ("max_tokens_per_gpu", "log_probs_chunk_size") if getattr(trainer, name) == "auto"]
        kept = {name: getattr(begun.trainer, name) for name in automatic}
        trainer = trainer.model_copy(update=kept)
        if kept and on_gpu:
            said = ", ".join(f"{name} = {value}" for name, value in kept.items()) + ": what `auto` was when the run began"
    auto = "auto" in (trainer.max_tokens_per_gpu, trainer.log_probs_chunk_size) and not config.debug.debug_rollout_only
    if auto and on_gpu and (plan := plan_of(inspection)) is not None:
        trainer, said = settled_tokens(plan)
    return {"max_tokens_per_gpu": trainer.tokens_per_gpu, "log_probs_chunk_size": trainer.log_probs_tokens}, said


WORTH = 0.02  # share of a need that a flag has to take off to be reported
LOW_PRECISION = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16"}


@dataclass(frozen=True)
class Remedy:
    """Flags with what the kind of process then needs. ``fits``: whether that is enough."""

    flags: str
    total: int
    fits: bool


def remedies(plan: RunPlan, need: MemoryNeed) -> list[Remedy]:
    """Returns what would lower a need: first what is enough, then what saves most."""
    found, trainer, name = list[Remedy](), plan.config.trainer, "rollout" if need.role == "engine" else "trainer"
    if need.role == "group":  # its own table says what to change
        return found
    for flags, update in _engine_flags(plan) if need.role == "engine" else _trainer_flags(trainer, need.role):
        changed = replace(plan, config=plan.config.with_fields(**{name: update}))
        if name == "trainer" and not _divides(plan.architecture, changed.config.trainer, need.role):
            continue
        after = max((other for other in changed.needs if other.role == need.role), key=lambda other: other.total - other.available)
        saved = (need.total - need.available) - (after.total - after.available)
        if saved > WORTH * need.total:
            found.append(Remedy(flags, after.total, after.fits))
    return [*(remedy for remedy in found if remedy.fits), *sorted((it for it in found if not it.fits), key=lambda it: it.total)]


def _trainer_flags(trainer: TrainerSection, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
    megatron = trainer.megatron
    if not trainer.recomputes_layers:
        yield "--recompute", {"recompute": True, "recompute_granularity": None, "recompute_modules": []}
    if (tokens := trainer.tokens_per_gpu // 2) >= LEAST_TOKENS:
        yield f"--max-tokens-per-gpu {tokens}", {"max_tokens_per_gpu": tokens}
    if not 0 < trainer.log_probs_tokens <= 1024:
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
    return not [*layout.world_problems(trainer.ranks(role)), *division_problems(architecture, layout, trainer.megatron)]


def _engine_flags(plan: RunPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    rollout, gpus = plan.config.rollout, plan.config.rollout.rollout_num_gpus_per_engine
    given = {name.lstrip("-").replace("_", "-"): value for name, value in rollout.sglang.items()}
    while plan.architecture.num_attention_heads % (gpus := 2 * gpus) == 0 and gpus <= 512:
        yield f"--rollout-num-gpus-per-engine {gpus}", {"rollout_num_gpus_per_engine": gpus}
    if "kv-cache-dtype" not in given:
        yield "--sglang-kv-cache-dtype fp8_e4m3", {"sglang": {**rollout.sglang, "kv-cache-dtype": "fp8_e4m3"}}
    if plan.engine is not None and plan.engine.share < 0.8:
        others = {name: value for name, value in rollout.sglang.items() if name.lstrip("-").replace("_", "-") != "mem-fraction-static"}
        yield "--sglang-mem-fraction-static 0.85", {"sglang": {**others, "mem-fraction-static": 0.85}}


GB = 1e9
MOST_REMEDIES = 6
LEGEND = "working: logits of a chunk of tokens, or what the backward pass of a layer needs for a moment, whichever is more"


def trainer_table(plan: RunPlan) -> Table | None:
    """Returns a column for each kind of trainer's rank; None where the run has no trainer."""
    needs = [need for need in plan.needs if need.role not in ("engine", "group")]
    if not needs:
        return None
    table = _table("trainer, a rank", [need.of for need in needs])
    table.add_row("ranks", *(str(need.ranks) for need in needs))
    for name in dict.fromkeys(name for need in needs for name in need.parts):
        table.add_row(name, *(_gb(need.parts.get(name, 0)) for need in needs))
    table.add_row("together", *(Text(_gb(need.total), style="bold" if need.fits else "bold red") for need in needs))
    table.add_row("of a GPU's", *(_gb(need.available) for need in needs))
    table.add_row("host memory", *(_gb(need.host) for need in needs))
    return table


def engine_table(plan: RunPlan) -> Table | None:
    """Returns what is planned of an engine's GPU; None where the run has no engine."""
    if plan.engine is None:
        return None
    groups = plan.engines
    table = _table("engine, a GPU", [group.name.removeprefix("engine of ") for group in groups] if len(groups) > 1 else [""])
    planned = [group.plan for group in groups]
    table.add_row("engines x GPUs", *(f"{group.engines} x {group.plan.gpus}" for group in groups))
    table.add_row("weights", *(_gb(engine.weights) for engine in planned))
    table.add_row("KV cache", *(_gb(engine.cache) for engine in planned))
    whole = _gb(plan.gpu_bytes)
    table.add_row("together, at most", *(f"{_gb(engine.budget)} = {engine.share:.3g} of a GPU's {whole}" for engine in planned))
    copies = [f" in each of {engine.copies} caches" if engine.copies > 1 else "" for engine in planned]
    tokens = zip(planned, copies, strict=True)
    table.add_row("tokens in the cache", *(f"{engine.tokens:,}{caches}, of {engine.token_bytes:,} bytes" for engine, caches in tokens))
    table.add_row("longest sequences", *(f"{engine.tokens // engine.longest:,} of {engine.longest:,} tokens" for engine in planned))
    return table


def verdicts(plan: RunPlan) -> Iterator[str]:
    """Yields what does not fit, why, and which flags would lower it."""
    for need in plan.needs:
        if need.fits:
            continue
        yield problem(need)
        found = remedies(plan, need)
        for remedy in found[:MOST_REMEDIES]:
            yield f"  {remedy.flags}: {_gb(remedy.total)} GB{', which fits' if remedy.fits else ''}"
        if not found:
            yield "  no single flag lowers it: take more or larger GPUs, or a smaller model"


def problem(need: MemoryNeed) -> str:
    """Returns in a sentence what does not fit."""
    most = f"most of it: {need.largest}, {_gb(need.parts[need.largest])} GB"
    return f"{need.of}: needs {_gb(need.total)} GB of a GPU, there are {_gb(need.available)}; {most}"


def as_json(plan: RunPlan, notes: list[str]) -> dict[str, Any]:
    """Returns the plan as plain values; sizes are bytes."""
    engine = plan.engine
    return {
        "fits": plan.fits,
        "gpu_bytes": plan.gpu_bytes,
        "parameters": total_parameters(plan.architecture),
        "needs": [
            {
                **{name: getattr(need, name) for name in ("of", "role", "ranks", "parts", "total", "available", "host", "fits", "largest")},
                "remedies": [] if need.fits else [vars(remedy) for remedy in remedies(plan, need)],
            }
            for need in plan.needs
        ],
        "stages": {role: [stage.as_json() for stage in plan.stages(role)] for role in ("actor", "critic") if plan.stages(role)},
        "engine": None if engine is None else {**vars(engine), "cache": engine.cache},
        "groups": [{"of": group.name, "engines": group.engines, **vars(group.plan)} for group in plan.engines] if engine else [],
        "notes": notes,
    }


def _table(first: str, columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True, min_width=20)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _gb(size: int) -> str:
    return f"{size / GB:.1f}"


MOST_NAMED = 3


def check_gpu_memory(inspection: Inspection) -> Findings:
    """Yields a kind of process whose GPU is surely too small for it; notes one that comes near it."""
    config = inspection.config
    train, generate = config.trainer.train_device, config.rollout.rollout_device
    used = {"actor": train, "critic": train, "engine": generate, "group": generate}
    on_gpus = {role for role, device in used.items() if devices.resolve(device) == "cuda"}
    if not on_gpus or (plan := plan_of(inspection)) is None:
        return
    for need in plan.needs:
        if need.role not in on_gpus or need.total <= (1 - NEAR) * need.available:
            continue
        if need.total > (1 + NEAR) * need.available and not config.debug.ignore_memory_plan:
            expected = f"{problem(need)}{_advice(plan, need)}; `myxo plan` shows all of it, and --ignore-memory-plan starts anyway"
            section, name, *further = need.field.split(".")
            yield ConfigError(need.field, "…" if further else getattr(getattr(config, section), name), expected)
        elif need.fits:
            yield Note(f"memory: {need.of} is near its limit: {need.total / 1e9:.1f} GB of {need.available / 1e9:.1f} by `myxo plan`")
        else:
            yield Note(f"memory: {problem(need)}; it may fail for lack of memory{_advice(plan, need)}")


def _advice(plan: RunPlan, need: MemoryNeed) -> str:
    enough = [remedy for remedy in remedies(plan, need) if remedy.fits][:MOST_NAMED]
    return f"; with one of these it fits: {', '.join(remedy.flags for remedy in enough)}" if enough else ""


def plan_of(inspection: Inspection) -> RunPlan | None:
    """Returns the plan of a config on this machine's GPUs; None where there are none, or the shape is not known, or not divided."""
    config, gpu_bytes, architecture = inspection.config, inspection.gpu_bytes, inspection.planned
    if gpu_bytes is None or architecture is None:
        return None
    models = {"actor": architecture, **({"critic": inspection.critic or architecture} if config.algorithm.has_critic else {})}
    if not all(_divides(model, config.trainer, role) for role, model in models.items()):
        return None
    return RunPlan(config, architecture, gpu_bytes, inspection.critic, inspection.frozen_models)
