"""The GPU memory that a rank of the trainer needs, worked out from the model's shape, the layout and the settings; without torch.

Static memory is exact: weights, gradient buffers, the optimizer's state. Activations are what the layers of `services.trainer.megatron`
save for the backward pass, tensor by tensor; experts are taken to get equal numbers of tokens. The plan is of torch's allocations
(``torch.cuda.max_memory_allocated``); what CUDA and NCCL take beside them is a constant.
"""

import math
import re
from dataclasses import asdict, dataclass, replace

from shared.config.trainer_section import OptimizerState, TrainerSection
from shared.model.architecture import Architecture, LinearAttention, Tower
from shared.model.parallel_layout import ParallelLayout, stage_layers
from shared.model.tensor_table import layer_rows, sizes
from shared.model.trainable_parameters import Freezing, Lora

ATTENTION = "self_attention."  # How Megatron's names of a layer's attention begin, and those of its indexer
INDEXER = f"{ATTENTION}indexer."

OUTSIDE_BYTES = 2_000_000_000
"""CUDA's context, the libraries' workspaces and NCCL's buffers: what a GPU has less for torch; measured at 1.2 to 2 GB."""

SCORE_BYTES = 24 << 25  # For the scores that `services.trainer.fsdp.packed_attention` computes at a time where attention is not one kernel
SLICE_BYTES = 12 * (32 << 20)  # A slice of offloaded state on the device (`services.trainer.megatron.optimizer`)


@dataclass(frozen=True)
class StagePlan:
    """The memory of one pipeline stage's rank, in bytes.

    Args:
        stage: its index. layers: transformer layers. parameters: of this rank; experts among them: expert_parameters.
        likelihood: logits of a chunk, their statistics. working: what the backward pass of a layer needs for a moment, or what a
            recomputed layer saves. host: the optimizer's state in host memory.
    """

    stage: int
    layers: int
    parameters: int
    expert_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    likelihood: int
    working: int
    host: int

    @property
    def peak(self) -> int:
        """Returns the most that torch allocates at a time."""
        return self.weights + self.gradients + self.optimizer + self.activations + max(self.likelihood, self.working)

    def as_json(self) -> dict[str, int]:
        return {**asdict(self), "peak": self.peak}


def plan_trainer(architecture: Architecture, trainer: TrainerSection, ranks: int, value_head: bool = False) -> list[StagePlan]:
    """Returns the plan of each pipeline stage. ``ranks``: of the role, over all nodes."""
    layout = ParallelLayout.of(trainer)
    if value_head:
        architecture = replace(architecture, trained_drafts=0, tower=None)
    counts = stage_layers(architecture, layout, trainer.megatron)
    first, plans = 0, []
    for stage, count in enumerate(counts):
        plans.append(_stage(architecture, trainer, layout, ranks, stage, range(first, first + count), value_head))
        first += count
    return [_sharded(plan, architecture, trainer, layout, ranks) for plan in plans] if trainer.trainer_backend == "torch" else plans


def _sharded(plan: StagePlan, a: Architecture, trainer: TrainerSection, layout: ParallelLayout, ranks: int) -> StagePlan:
    """Returns a plan under FSDP2: every rank has a float32 share of a copy, and gathers two layers' pieces, or all, and the embeddings at a
    time; layers keep more for the backward pass where norms and activations are not one kernel."""
    experts, shards = plan.expert_parameters, trainer.fsdp_shard_ranks or ranks
    whole = (plan.parameters - experts) * layout.tensor + experts * layout.expert * layout.expert_tensor_size
    share, trained = -(-whole // shards), -(-(plan.gradients // 4 * whole) // plan.parameters // shards)
    ends = (1 if a.tied_embeddings else 2) * a.vocab_size * a.hidden_size
    at_once = 2 if trainer.fsdp_reshard_after_forward else a.num_layers
    layers = at_once * max(plan.parameters - ends // layout.tensor, 0) // a.num_layers
    width = 4 if trainer.train_dtype == "float32" else 2
    gathered = (ends + layers) * width
    apart = unfused_bytes(a, layout, trainer.tokens_per_gpu, width)
    if a.model_type.startswith("gemma2"):  # scores with caps
        plan = replace(plan, working=plan.working + SCORE_BYTES)
    if trainer.recomputes_layers:
        plan = replace(plan, working=plan.working + apart)
    else:
        plan = replace(plan, activations=plan.activations + apart * plan.layers)
    if a.tower is not None:
        seen = -(-a.tower.parameters // shards)
        learns = Lora.of(trainer) is None and Freezing.of(trainer).trains(a.tower.matrix)
        share, trained = share + seen, trained + seen * learns
        gathered += min(at_once, a.tower.layers) * a.tower.parameters // a.tower.layers * width
        layer = tower_bytes(a.tower, trainer.tokens_per_gpu, width)
        kept = trainer.tokens_per_gpu * a.tower.per_token * a.tower.hidden_size * width if trainer.recomputes_layers else layer
        plan = replace(
            plan,
            parameters=plan.parameters + a.tower.parameters,
            activations=plan.activations + (kept * a.tower.layers + layer if learns else 0),
            working=max(plan.working, layer),
        )
    if trainer.fsdp_cpu_offload:
        return replace(plan, weights=gathered, gradients=0, optimizer=0, host=4 * share + 12 * trained)
    return replace(plan, weights=4 * share + gathered, gradients=4 * trained, optimizer=8 * trained)


def unfused_bytes(a: Architecture, layout: ParallelLayout, tokens: int, width: int) -> int:
    """Returns what a layer of transformers' keeps beside `layer_activations` where `services.trainer.fsdp.fused_layers` replaces nothing:
    norms of one more than their weight keep input and output in float32; a gate keeps what its activation returns.
    """
    heads = (a.num_attention_heads + a.num_key_value_heads) * a.head_dim // layout.tensor if a.qk_norm else 0
    normed = (4 if a.post_norms else 2) * a.hidden_size + heads if a.zero_centered_norms else 0
    gated = (a.gelu or a.fused_gate_up) and a.experts is None
    return tokens * ((8 - width) * normed + width * a.ffn_hidden_size // layout.tensor * gated)


def tower_bytes(t: Tower, tokens: int, width: int) -> int:
    """Returns what a layer of transformers' that sees or hears saves for its backward pass, if all ``tokens`` stand for what it is shown.
    What lies before its layers and behind them keeps about as much as one more."""
    saved = (9 + 2 * t.rotated) * t.hidden_size + (3 if t.gated else 2) * t.ffn_hidden_size  # queries, keys and values before rotation
    return tokens * t.per_token * (width * saved + 4 * t.heads + 8 * t.hidden_size // t.heads * t.rotated)


def _stage(
    a: Architecture, trainer: TrainerSection, layout: ParallelLayout, ranks: int, stage: int, layers: range, value_head: bool
) -> StagePlan:
    ends = stage == 0, stage == layout.pipeline - 1
    dense, experts = stage_parameters(a, layout, layers, *ends, value_head)
    wide = trainer.train_dtype == "float32"
    keeping = OptimizerState.of(trainer.megatron) or OptimizerState()
    replicas = max(ranks // (layout.tensor * layout.pipeline), 1) if trainer.use_distributed_optimizer else 1
    expert_replicas = max(ranks // (layout.expert_tensor_size * layout.expert * layout.pipeline), 1)
    expert_replicas = expert_replicas if trainer.use_distributed_optimizer else 1
    trained = dense - sum(layer_parameters(a, layout, layer, INDEXER)[0] for layer in layers), experts
    adapters = 0, 0
    if not value_head and (lora := Lora.of(trainer)) is not None:
        trained = adapters = lora.parameters(a, layout, layers)
    state = -(-trained[0] // replicas) + -(-trained[1] // expert_replicas)
    state_bytes = 8 if wide else keeping.state_bytes
    width = 4 if wide else 2
    tokens, chunk = trainer.tokens_per_gpu, trainer.log_probs_tokens
    rows = layout.padded_vocabulary(a.vocab_size) // layout.tensor
    at_once = tokens if chunk < 0 else min(chunk, tokens)
    saved, working = activation_bytes(a, trainer, layout, layers, stage, width)
    inputs = tokens * a.hidden_size * width * 2  # the head's whole input, and its gradient
    heads = 1 + a.trained_drafts if ends[1] and not value_head else 0
    likelihood = (at_once * rows * width + inputs + 16 * tokens) * heads
    offloaded = int(state * state_bytes * keeping.offload_fraction)
    lends = all((a.trained_drafts, ends == (False, True), not a.tied_embeddings))  # the first stage, its embedding to the last one's drafts
    return StagePlan(
        stage=stage,
        layers=len(layers),
        parameters=dense + experts + sum(adapters),
        expert_parameters=experts + adapters[1],
        weights=(dense + experts + sum(adapters) + rows * a.hidden_size * lends) * width,
        gradients=sum(trained) * (2 if keeping.main_grads == "bf16" else 4),
        optimizer=state * state_bytes - offloaded,
        activations=saved,
        likelihood=likelihood,
        working=max(working, (3 if keeping.overlap else 1) * SLICE_BYTES - saved if offloaded else 0),
        host=offloaded,
    )


def stage_parameters(
    a: Architecture, layout: ParallelLayout, layers: range, first: bool, last: bool, value_head: bool = False
) -> tuple[int, int]:
    """Returns the parameters of a rank, without and of experts. ``first``, ``last``: whether it has the embedding, the output layer."""
    hidden = a.hidden_size
    rows = layout.padded_vocabulary(a.vocab_size) // layout.tensor * hidden
    dense = rows if first else 0
    if last:
        dense += hidden + (hidden if value_head else 0 if first and a.tied_embeddings else rows)
    drafts = range(a.num_layers, a.num_layers + (a.trained_drafts if last else 0))
    dense += len(drafts) * (2 * hidden * hidden + 3 * hidden)
    found = [layer_parameters(a, layout, layer) for layer in [*layers, *drafts]]
    return dense + sum(of_dense for of_dense, _ in found), sum(of_experts for _, of_experts in found)


_WHOLE = re.compile(r"norm\.weight|router|gate_weight|linear_proj\.bias|_down_proj|indexer")
"""In Megatron's names of what each tensor-parallel rank has whole; a norm over all heads is divided as they are."""


def layer_parameters(a: Architecture, layout: ParallelLayout, layer: int, within: str = "") -> tuple[int, int]:
    """Returns the parameters of a layer on a rank, without and of experts, of those whose names in Megatron begin with ``within``."""
    size, dense, experts = sizes(a), 0, 0
    for row in layer_rows(a, layer):
        count = sum(math.prod(size[word] for word in words) for _, words in row.tensors)
        if not row.megatron[0].startswith(within):
            continue
        if a.experts is not None and row.per_expert:
            of_one = count // (a.experts.count if row.stacked else 1)
            ranks = 1 if row.megatron[0].endswith(".bias") else layout.expert_tensor_size
            experts += of_one * (a.experts.count // layout.expert) // ranks
        else:
            whole = _WHOLE.search(row.megatron[0]) and "joint_qk_norm" not in row.when
            dense += count if whole else count // layout.tensor
    return dense, experts


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a layer saves for its backward pass, by what saves them.

    Args:
        working: what that pass holds beside them at most, and releases: gradients, some while what they were made of is there no more.
    """

    attention: int
    core: int
    norms: int
    mlp: int
    act: int
    input: int
    working: int

    @property
    def total(self) -> int:
        return self.attention + self.core + self.norms + self.mlp + self.act + self.input


def _choice_bytes(a: Architecture, tokens: int) -> int:
    """Returns the bytes of the places of the keys that a token attends to; 0 where it attends to all."""
    return 4 * a.indexer.top_k if a.indexer is not None and tokens > a.indexer.top_k else 0


def layer_activations(a: Architecture, layout: ParallelLayout, layer: int, tokens: int, width: int) -> LayerActivations:
    """Returns what one layer saves of a micro-batch. ``tokens``: of this rank. ``width``: bytes of an element."""
    tensor, h = layout.tensor, a.hidden_size
    whole = tokens // tensor if layout.sequence_parallel else tokens  # tokens of what the ranks do not divide by channels
    beside = 0
    if a.linear is not None and a.is_linear_layer(layer):
        attention, beside, core = *linear_activations(a.linear, tokens, width, tensor), 0
    elif a.latent is None:
        queries, keys = a.num_attention_heads * a.head_dim // tensor, a.num_key_value_heads * a.head_dim // tensor
        # a norm keeps its input: keys are a view of the projection, queries are a copy; one over all heads keeps it in float32 as well
        gates = 3 * queries * a.output_gate
        normed = queries if a.qk_norm else 3 * (queries + keys) if a.joint_qk_norm else 0
        attention = (
            tokens * width * ((queries + 2 * keys) + normed + gates + queries + keys + 4 * a.head_dim)
        )  # projected; rotated; cosines
        core = tokens * (width * queries + 4 * a.num_attention_heads // tensor)
    else:
        m = a.latent
        heads, query = a.num_attention_heads // tensor, m.qk_head_dim + m.qk_pos_emb_head_dim
        low = (m.q_lora_rank or 0) + m.kv_lora_rank + m.qk_pos_emb_head_dim
        attention = tokens * width * heads * (4 * query + m.qk_head_dim + 2 * m.v_head_dim) + whole * width * 2 * low
        core = tokens * (width * heads * m.v_head_dim + 4 * heads + _choice_bytes(a, tokens))
    norms = whole * width * h * (4 if a.post_norms else 2)  # of what the norms return, and the norms behind the blocks keep
    if a.experts is not None and a.is_moe_layer(layer):
        e = a.experts
        routed = (tokens // tensor if layout.sequence_parallel else tokens) * e.per_token
        shared = e.shared_ffn_hidden_size // tensor
        row, inner = routed * width, e.ffn_hidden_size
        mlp = row * (h + 2 * inner) + 32 * routed + tokens * width * 2 * shared + whole * 5 * e.count  # ordered, projected; indices; scores
        mlp += row * h if layout.expert > 1 else 0  # what was exchanged between the ranks, beside its order by experts
        act = row * inner + tokens * width * shared
        # the clamped projection, and the products that added biases to it
        mlp += 0 if e.swiglu_limit is None else row * 2 * inner
        matrices = e.count // layout.expert * h * inner // layout.expert_tensor_size * width
        # the second product's backward pass: gradients of its output, input and matrices; the first one's, whose output is gone
        working = max(row * (h + inner) + matrices, row * (h - inner) + 2 * matrices) + whole * width * h
    else:
        mlp, act = (tokens * width * parts * a.ffn_hidden_size // tensor for parts in (2, 1))
        working = mlp + act
    return LayerActivations(attention, core, norms, mlp, act, 2 * whole * width * h, max(working, beside))


def linear_activations(m: LinearAttention, tokens: int, width: int, tensor: int) -> tuple[int, int]:
    """Returns the bytes that linear attention in plain PyTorch saves on each of ``tensor`` ranks, and what its backward pass holds beside
    them: the matrices of all chunks of 64 tokens in float32, which it computes again."""
    mixed, wide = 2 * m.keys + m.values, m.linear_num_value_heads * m.linear_key_head_dim  # keys, once they are as many as values
    saved = width * (m.projected + 3 * mixed + 2 * wide + m.values) + 4 * (4 * m.keys + 4 * m.values)
    chunk = 64
    states = m.linear_num_value_heads * m.linear_key_head_dim * m.linear_value_head_dim // chunk
    again = 4 * (6 * m.linear_num_value_heads * chunk + 8 * wide + 6 * m.values + 3 * states)
    return tokens * saved // tensor, tokens * again // tensor


def activation_bytes(
    a: Architecture, trainer: TrainerSection, layout: ParallelLayout, layers: range, stage: int, width: int
) -> tuple[int, int]:
    """Returns the bytes that a stage holds for the backward passes, and what the pass through one layer needs beside."""
    tokens = trainer.tokens_per_gpu
    found = [layer_activations(a, layout, layer, tokens, width) for layer in layers]
    widest = max((each.working for each in found), default=0)
    if trainer.recomputes_layers:
        whole = tokens // layout.tensor if layout.sequence_parallel else tokens
        saved, working = _with_layers_recomputed(trainer, found, whole * width * a.hidden_size, widest)
    else:
        modules = (trainer.recompute_modules or ["core_attn"]) if trainer.recompute_granularity == "selective" else []
        dropped = [_dropped(each, modules) for each in found]
        saved, working = sum(each.total for each in found) - sum(dropped), widest + max(dropped, default=0)
    held, parts = micro_batches(layout, stage)
    saved = saved * held // parts
    if a.trained_drafts and stage == layout.pipeline - 1:  # with the loss's, and never recomputed as a whole
        draft = layer_activations(a, layout, a.num_layers, tokens, width)
        whole = tokens // layout.tensor if layout.sequence_parallel else tokens
        saved += a.trained_drafts * (draft.total + 6 * whole * width * a.hidden_size)
        working = max(working, draft.working)
    return saved, working


def _with_layers_recomputed(trainer: TrainerSection, found: list[LayerActivations], kept: int, widest: int) -> tuple[int, int]:
    """Returns the same where whole layers are recomputed. ``kept``: bytes of a layer's input."""
    if trainer.recompute_method == "block":
        again = min(trainer.recompute_num_layers or 1, len(found))
        working = found[again - 1].total if again == len(found) else 0
        return again * kept + sum(each.total for each in found[again:]), max(widest, working)
    unit = trainer.recompute_num_layers or 1
    largest = max((each.total for each in found), default=0)
    return -(-len(found) // unit) * kept, unit * largest + widest


def _dropped(each: LayerActivations, modules: list[str]) -> int:
    """Returns what recomputation of modules saves of a layer."""
    parts = {
        "core_attn": each.core,
        "layernorm": each.norms,
        "moe_act": each.act,
        "mlp": each.mlp + each.act,
        "moe": each.mlp + each.act,
        "mla_up_proj": each.attention // 2,
        "shared_experts": 0,
    }
    if {"mlp", "moe"} & set(modules):
        parts["moe_act"] = 0
    if "mlp" in modules:
        parts["moe"] = 0
    return sum(parts[module] for module in set(modules))


def micro_batches(layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Returns how many micro-batches a stage holds at most, in chunks, and its chunks.

    One forward, one backward in turn (Narayanan et al. 2021, sections 2.2.1 and 2.2.2).
    """
    behind = layout.pipeline - stage - 1
    if layout.chunks == 1:
        return behind + 1, 1
    return 2 * behind + (layout.chunks - 1) * layout.pipeline + 1, layout.chunks


def kv_bytes(a: Architecture, ranks: int, width: int = 2) -> int:
    """Returns the bytes of a token in an engine's cache, on each of the ``ranks`` that share its model by heads."""
    if a.latent is not None:
        index = 0 if a.indexer is None else a.indexer.head_dim + 4  # a key of 8-bit floats, and its factor
        return a.softmax_layers * (width * (a.latent.kv_lora_rank + a.latent.qk_pos_emb_head_dim) + index)
    return a.softmax_layers * width * 2 * a.head_dim * max(a.num_key_value_heads // ranks, 1)


def total_parameters(a: Architecture) -> int:
    """Returns the parameters of the whole model."""
    return sum(stage_parameters(a, ParallelLayout(), range(a.num_layers), True, True))
