"""The GPU memory of an engine: its weights, and how many tokens its KV cache holds beside them. Without SGLang.

An engine takes a share of its GPU (``--mem-fraction-static``) for weights and cache together; the cache gets what the weights leave. Where
the share is not given, SGLang makes it of the GPU's size (0.5.20, ``handle_gpu_memory_settings``); so does this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.rollout_section import RolloutSection
from shared.config.sglang_flags import count
from shared.config.speculation import ALGORITHM, OF_THE_MODEL
from shared.model.architecture import Architecture
from shared.model.memory_plan import ATTENTION, kv_bytes, layer_parameters, stage_parameters
from shared.model.parallel_layout import ParallelLayout

MIB = 1 << 20

SIZES = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512), (1 << 20, 16384, 512, 512))
"""GPUs of less than so many GiB → tokens of a chunk of prefill, and the batch of CUDA graphs with fewer and with more than 3 GPUs."""

PREFILL_GRAPHS_MIB, LATENT_GRAPHS_MIB = 480, 1536
"""What SGLang keeps for CUDA graphs of prefill, about; with latent attention. Engines have none of these unless asked
(`shared.config.engine_limits.captures_prefill`): the plan leaves the room to what it does not know of."""

STATES_SHARE = 0.9  # The memory of linear attention's states, by that of the cache, where no flag says it

LEAST_RESERVED_MIB = 10 << 10  # What it leaves free at least, on GPUs of more than 60 GiB


@dataclass(frozen=True)
class EnginePlan:
    """The memory of one GPU of an engine, in bytes.

    Args:
        gpus: of the engine. weights: of this GPU. share: of the GPU for weights and cache. budget: that, in bytes. token_bytes: of a token
            in the cache of this GPU, with its share of linear attention's states. tokens: that the cache holds; a sequence has
            no more. copies: caches of the engine that hold different sequences (data parallelism). longest: tokens of prompt and response
            that the run may ask for.
    """

    gpus: int
    weights: int
    share: float
    budget: int
    token_bytes: int
    tokens: int
    copies: int
    longest: int

    @property
    def cache(self) -> int:
        """Returns the bytes of the cache."""
        return self.tokens * self.token_bytes

    @property
    def needed(self) -> int:
        """Returns the bytes of weights and the longest sequence: with fewer, the engine cannot serve the run."""
        return self.weights + self.longest * self.token_bytes


@dataclass(frozen=True)
class EngineLayout:
    """The division of a model over the GPUs of an engine, as SGLang's flags say: ranks that share matrices (``tensor``) and heads
    (``heads``), stages of layers, and caches of their own (``copies``)."""

    tensor: int
    heads: int
    stages: int
    copies: int

    @classmethod
    def of(cls, gpus: int, flags: Mapping[str, Any]) -> "EngineLayout":
        stages = _whole(flags, 1, "pp-size")
        copies = _whole(flags, 1, "dp-size")
        if flags.get("enable-dp-attention"):
            tensor = max(gpus // stages, 1)
            return cls(tensor, max(tensor // copies, 1), stages, copies)
        tensor = max(gpus // (stages * copies), 1)
        return cls(tensor, tensor, stages, copies)


def plan_engine(
    a: Architecture, rollout: RolloutSection, gpu_bytes: int, gpus: int | None = None, weight_bytes: float | None = None
) -> EnginePlan:
    """Returns the plan of one GPU.

    Args:
        gpus: of the engine, where that is another number than the config's. weight_bytes: of a parameter of the layers, where the
            checkpoint is quantized (`shared.model.quantization.engine_bytes`).
    """
    flags = rollout.engine_flags
    gpus = gpus or rollout.rollout_num_gpus_per_engine
    layout = EngineLayout.of(gpus, flags)
    width = 4 if flags.get("dtype") in ("float32", "float") else 2
    if weight_bytes is None:
        weight_bytes = 1 if str(flags.get("quantization", "")).endswith("fp8") else width
    own = str(rollout.engine_flags.get(ALGORITHM)).upper() in OF_THE_MODEL
    drafts = a.draft_layers if own or rollout.speculation in ("mtp", "auto") else 0
    weights = max(_weights(a, layout, stage, weight_bytes, width) for stage in range(layout.stages))
    layer = stage_parameters(a, ParallelLayout(tensor=layout.tensor), range(a.num_layers - 1, a.num_layers), False, False)
    weights += int(drafts * (sum(layer) + 2 * a.hidden_size**2) * weight_bytes)
    share = float(flags.get("mem-fraction-static") or default_share(gpu_bytes, layout, flags, a.latent is not None))
    budget = int(share * gpu_bytes)
    stored = 1 if str(flags.get("kv-cache-dtype", "")).startswith("fp8") else width
    token_bytes = -(-kv_bytes(a, layout.heads, stored) * (a.num_layers + drafts) // (a.num_layers * layout.stages))
    if a.linear is not None:
        token_bytes = int(token_bytes * (1 + float(flags.get("mamba-full-memory-ratio") or STATES_SHARE)))
    tokens = max(budget - weights, 0) // token_bytes
    most = _whole(flags, 0, "max-total-tokens")
    return EnginePlan(
        gpus=gpus,
        weights=weights,
        share=share,
        budget=budget,
        token_bytes=token_bytes,
        tokens=min(tokens, most) if most else tokens,
        copies=layout.copies,
        longest=rollout.rollout_max_context_len or (rollout.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len,
    )


def default_share(gpu_bytes: int, layout: EngineLayout, flags: Mapping[str, Any], latent: bool) -> float:
    """Returns the share of a GPU that SGLang takes where none is given."""
    total = gpu_bytes / MIB
    _, chunk, few, many = next(size for size in SIZES if total < size[0] << 10)
    batch = _whole(flags, few if layout.tensor < 4 else many, "cuda-graph-max-bs")
    reserved = 512 + 1.5 * max(_whole(flags, chunk, "chunked-prefill-size"), 2048) + layout.tensor * layout.stages * 128
    if not flags.get("disable-cuda-graph"):
        reserved += 2 * batch + (LATENT_GRAPHS_MIB if latent else PREFILL_GRAPHS_MIB)
    if flags.get("enable-dp-attention"):
        reserved += batch * layout.copies * (4.5 if batch > 300 else 3)
    if total > 60 << 10:
        reserved = max(reserved, LEAST_RESERVED_MIB)
    return round(max(total - reserved, 0) / total, 3)


def fewest_gpus(a: Architecture, rollout: RolloutSection, gpu_bytes: int, most: int = 512) -> int | None:
    """Returns the fewest GPUs of an engine, a power of two, over which the model's heads divide and on which it fits; None: none do."""
    gpus = 1
    while gpus <= most and a.num_attention_heads % gpus == 0:
        plan = plan_engine(a, rollout, gpu_bytes, gpus)
        if plan.needed <= plan.budget:
            return gpus
        gpus *= 2
    return None


def _weights(a: Architecture, layout: EngineLayout, stage: int, weight_bytes: float, width: int) -> int:
    """Returns the bytes of a GPU's weights: embeddings and output layer are of the engine's dtype, ``width`` bytes each."""
    ends = _parameters(a, layout, stage, 0)
    return ends * width + int((_parameters(a, layout, stage, a.num_layers) - ends) * weight_bytes)


def _parameters(a: Architecture, layout: EngineLayout, stage: int, count: int) -> int:
    """Returns the parameters of a GPU of a pipeline stage, of the model's first ``count`` layers and its ends. Attention with caches of its
    own is copied, embeddings with it."""
    size = -(-a.num_layers // layout.stages)
    layers = range(min(stage * size, count), min((stage + 1) * size, count))
    ends = stage == 0, stage == layout.stages - 1
    found = sum(stage_parameters(a, ParallelLayout(tensor=layout.tensor), layers, *ends))
    if layout.heads < layout.tensor:
        for ranks, sign in ((layout.heads, 1), (layout.tensor, -1)):
            found += sign * sum(layer_parameters(a, ParallelLayout(tensor=ranks), each, ATTENTION)[0] for each in layers)
        found += (a.vocab_size // layout.heads - a.vocab_size // layout.tensor) * a.hidden_size if ends[0] else 0
    return found


def _whole(flags: Mapping[str, Any], default: int, name: str) -> int:
    """Returns the number of a flag that has one above zero; what is none is SGLang's to refuse."""
    try:
        number = count(str(flags[name]))
    except (KeyError, ValueError):
        return default
    return number if number > 0 else default
