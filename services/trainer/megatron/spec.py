"""The modules of the transformer layers: Megatron's own, or Transformer Engine's where the run asks for them.

:func:`decoder_spec` alone decides the modules of a layer. The weight names of both implementations are in `shared.model.tensor_table`.
Transformer Engine's layers have not been run: none of the machines that this was made on has it.

``--spec MODULE NAME`` names layers of a user's own module. The name is a spec, or a function that returns one: Megatron's ``ModuleSpec``
of every layer, or ``TransformerBlockSubmodules`` with those of this rank's stage. A function gets what it asks for by name of ``config``
(Megatron's TransformerConfig), ``vp_stage``, ``architecture`` (the model's `Architecture`) and ``args``, which has the flags of the model
and those given, for functions in slime's form (args, config, vp_stage).

A layer must have the parameters of the model's family, since weights are loaded, exported and pushed by their names, and take packed
sequences. `layer_spec` makes one to begin with.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from services.trainer.megatron.attention import ChosenKeysAttention, PackedCausalAttention, SparseLatentAttention
from services.trainer.megatron.expert_balance import BalancedRouter
from services.trainer.megatron.hf_weights import numbered_chunks, weights_of
from services.trainer.megatron.linear_attention import PackedGatedDeltaNet
from services.trainer.megatron.moe import GroupedExperts, ReplayedLayer, ReplayedMoELayer
from services.trainer.parallel.runtime import device
from shared.hooks.loading import load_object
from shared.model.architecture import Architecture
from shared.model.architecture_flags import FIELD, flags_of
from shared.model.tensor_table import layer_rows
from shared.runtime.errors import ConfigError


def shared_weight(content: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """Returns a parameter that every tensor-parallel rank holds whole, in the model's dtype on this rank's device."""
    parameter = torch.nn.Parameter(content.to(dtype=config.params_dtype, device=device()))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension (Zhang and Sennrich 2019).

    On a CPU the casts have the order of the Hugging Face models: the statistics in float32, the product with the weight in the input's
    dtype. On a GPU it is one of PyTorch's kernels, which casts once, at the end, as the kernels of engines do.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shared_weight(torch.ones(hidden_size), config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes [..., hidden_size] and returns the same shape and dtype."""
        if hidden.is_cuda:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps)
        return normed


class ZeroCenteredNorm(RMSNorm):
    """RMS norm that multiplies by one more than its weight. All is computed in float32, and cast once."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps, 1.0)
        return normed


class JointHeadNorm(torch.nn.Module):
    """One RMS norm over all heads of the queries, or of the keys, which tensor-parallel ranks share: each has the weights of its heads.

    Args:
        heads: of the whole model. hidden_size: width of a head.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self.width = eps, heads * hidden_size
        self.weight = shared_weight(torch.ones(self.width // config.tensor_model_parallel_size), config)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Takes [..., heads of this rank, head width] and returns the same shape and dtype."""
        wide = states.flatten(-2).float()
        group = parallel_state.get_tensor_model_parallel_group()
        # every rank's heads are divided by the sum over all ranks, so that its gradient is summed as well
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=group)
        squares = copy_to_tensor_model_parallel_region(squares, group=group)
        normed = (wide * torch.rsqrt(squares / self.width + self.eps)).to(states.dtype)
        return (self.weight * normed).view_as(states)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Returns Megatron's sharded state: the weight is split by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
        return sharded


class LatentNorm(RMSNorm):
    """The norm of latent attention's low-rank vectors, whose epsilon is a constant of the models, not an entry of their config."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(config, hidden_size, 1e-6)


class NormedResidual(torch.nn.Module):
    """Replaces Megatron's sum of a block's output with the residual: the output is normed first."""

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Returns the function that Megatron calls with the block's (output, bias), the residual and a dropout probability."""

        def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            assert bias is None and not dropout
            return residual + self.norm(output)

        return add


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole: latent attention's projections to low ranks, which all heads share.

    Args:
        input_size, output_size: of the last dimension. Megatron gives the others to every linear layer; of them only ``config`` and
            ``init_method`` have a meaning here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool = False,
        **_: object,
    ) -> None:
        super().__init__()
        assert not bias
        self.weight = shared_weight(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device()), config)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Takes [..., input_size]; returns [..., output_size], and no bias."""
        return F.linear(hidden, self.weight), None


class ValueHead(torch.nn.Module):
    """The critic's head, in the place of the output layer: a linear map from hidden states to numbers, without bias, zero at first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.split = config.sequence_parallel
        self.weight = shared_weight(torch.zeros(1, config.hidden_size), config)
        self.weight.value_head = True  # type: ignore[attr-defined]  # no tensor of a Hugging Face checkpoint

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        """Takes [U, 1, hidden size]; returns float32 [U, 1, 1], and no bias. The other arguments are the output layer's."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.split:  # all ranks compute the same from the values, so each takes its own part of the gradient
            group = parallel_state.get_tensor_model_parallel_group()
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return values, None


class WindowedSelfAttention(SelfAttention):
    """Megatron's attention with a rotary embedding of its own, in the place of the model's."""

    def __init__(self, config: TransformerConfig, *given: Any, **others: Any) -> None:
        super().__init__(config, *given, **others)
        self.rotary_pos_emb = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=config.use_cpu_initialization)

    def forward(self, hidden_states: Tensor, *given: Any, packed_seq_params: Any = None, **others: Any) -> tuple[Tensor, Tensor | None]:
        """Takes and returns what Megatron's attention does."""
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, packed_seq_params)
        others["rotary_pos_emb"] = self.rotary_pos_emb(length, packed_seq=True)
        attended: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *given, packed_seq_params=packed_seq_params, **others)
        return attended


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one float32 number a row; autograd would keep four float32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, center: float = 0.0) -> Tensor:
        """``center``: what the weight is counted from; not zero: the product is taken in float32, too."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.center = center
        if center:
            return ((weight.float() + center) * (wide * scale)).to(hidden.dtype)
        return weight * (wide * scale).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        upstream = gradient.float()
        for_weight = (upstream * normed).flatten(0, -2).sum(0)
        upstream = upstream * (weight.float() + ctx.center)
        along = (upstream * normed).mean(-1, keepdim=True)
        for_hidden = upstream.addcmul_(normed, along, value=-1).mul_(scale)
        return for_hidden.to(hidden.dtype), for_weight.to(weight.dtype), None, None


if not hasattr(moe_utils, "te_general_gemm"):
    # The router's matrix product asks for this name, which exists only where Transformer Engine does (0.15, 0.16).
    moe_utils.te_general_gemm = None

if not HAVE_TE:
    # Without Transformer Engine this module takes it for installed all the same (0.16), and its own linear layer that every
    # tensor-parallel rank holds whole is not marked for sequence parallelism.
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = ReplicatedLinear


def decoder_spec(architecture: Architecture, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the layers of this rank's pipeline stage.

    Args:
        architecture: the whole model's. config: Megatron's, of the same model. vp_stage: which of the rank's model chunks.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    engine = config.transformer_impl == "transformer_engine"
    layers = [family_layer_spec(architecture, config, index) for index in range(first, first + count)]
    if architecture.indexer is not None:
        indexer, chosen = architecture.indexer, [number for number in range(architecture.num_layers) if architecture.has_indexer(number)]
        assert indexer is not None
        if first not in chosen:  # where Megatron itself sizes the stages
            raise ConfigError("trainer.pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size(),
                              f"stages that begin with a layer that has an indexer; one begins with layer {first}")  # fmt: skip
        for number, layer in enumerate(layers, first):
            attention, source = layer.submodules.self_attention, max(each for each in chosen if each <= number)
            attention.module, attention.submodules.core_attention = SparseLatentAttention, ChosenKeysAttention
            reused = number + 1 in indexer.shared_layers
            attention.params = {**attention.params, "source": source + 1, "reused": reused, "interleaved": indexer.interleaved}
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm if engine else norm_of(architecture))


def family_layer_spec(architecture: Architecture, config: TransformerConfig, layer: int) -> ModuleSpec:
    """Returns the layer of this index, from 0. Raises ConfigError as `check_engine`."""
    engine = config.transformer_impl == "transformer_engine"
    if engine:
        check_engine(architecture, config)
    experts = architecture.experts.count if architecture.experts and architecture.is_moe_layer(layer) else None
    spec = (engine_layer_spec if engine else layer_spec)(architecture, config, experts, architecture.window(layer))
    if architecture.is_linear_layer(layer):
        submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
        spec.submodules.self_attention = ModuleSpec(module=PackedGatedDeltaNet, submodules=submodules)
    return spec


def norm_of(architecture: Architecture) -> type[RMSNorm]:
    """Returns the norm of a model's layers."""
    return ZeroCenteredNorm if architecture.zero_centered_norms else RMSNorm


def check_engine(architecture: Architecture, config: TransformerConfig) -> None:
    """Raises ConfigError where Transformer Engine's layers cannot stand in for the local ones."""
    field, given = "trainer.megatron.transformer_impl", config.transformer_impl
    if not HAVE_TE:
        raise ConfigError(field, given, "local; Transformer Engine is not installed")
    a = architecture
    own = a.latent is not None or a.linear is not None or a.post_norms or a.joint_qk_norm
    if own or a.sinks or a.biases or any(a.windows):
        raise ConfigError(field, given, f"local; {architecture.model_type} has layers that are made for it only")
    if config.context_parallel_size > 1:
        raise ConfigError(field, given, "local with context parallelism, which is Myxo's own")


def engine_layer_spec(architecture: Architecture, config: TransformerConfig, experts: int | None, _window: int = 0) -> ModuleSpec:
    """Returns one layer of Transformer Engine's modules, which take packed sequences as they are."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=architecture.qk_norm
    )
    spec.module = ReplayedLayer
    if experts is not None:
        spec.submodules.mlp.module, spec.submodules.mlp.submodules.router = ReplayedMoELayer, BalancedRouter
    return spec


def layer_spec(architecture: Architecture, config: TransformerConfig, experts: int | None, window: int = 0) -> ModuleSpec:
    """Returns one layer: Megatron's local spec with the packed attention and a norm that knows sequence parallelism.

    Args:
        window: tokens that a query of the layer sees, itself included; 0 for all.
    """
    latent = architecture.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm or latent,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    spec.module, layer = ReplayedLayer, spec.submodules
    if experts is not None:
        layer.mlp.module, layer.mlp.submodules.experts.module = ReplayedMoELayer, GroupedExperts
        layer.mlp.submodules.router = BalancedRouter
    layer.input_layernorm = layer.pre_mlp_layernorm = norm_of(architecture)
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedCausalAttention, params={"window": window, "sinks": architecture.sinks})
    if latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = multi_latent_attention.Linear
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm_of(architecture)
    elif architecture.joint_qk_norm:
        heads = architecture.num_attention_heads, architecture.num_key_value_heads
        attention.q_layernorm, attention.k_layernorm = (ModuleSpec(module=JointHeadNorm, params={"heads": count}) for count in heads)
    if window and architecture.window_rope is not None:
        layer.self_attention.module = WindowedSelfAttention
    if architecture.post_norms:
        after = ModuleSpec(module=NormedResidual, params={"config": config, "norm": norm_of(architecture)})
        layer.self_attn_bda = layer.mlp_bda = after
    return spec


def named_spec(
    spec: Sequence[str], architecture: Architecture, config: TransformerConfig, given: Mapping[str, Any], vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of this rank's pipeline stage.

    Args:
        spec: module and name. given: Megatron's flags as the config has them.

    Raises ConfigError: it cannot be imported, its function fails, or what it returns is no spec of so many layers.
    """
    module, name = spec
    value = f"{module} {name}"
    found = load_object(FIELD, value, module, name)
    if callable(found) and not isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        known = {
            "args": SimpleNamespace(**{**fields, **flags_of(architecture), **given, "spec": list(spec)}),
            "config": config,
            "vp_stage": vp_stage,
            "architecture": architecture,
        }
        found = _called(found, known, value)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    if isinstance(found, ModuleSpec):
        found = TransformerBlockSubmodules(layer_specs=[found] * count)
    if not isinstance(found, TransformerBlockSubmodules) or len(found.layer_specs or []) != count:
        raise ConfigError(FIELD, value, f"a ModuleSpec, or TransformerBlockSubmodules of {count} layers; it gives {type(found).__name__}")
    return dataclasses.replace(found, layer_norm=found.layer_norm or norm_of(architecture))


def check_layers(spec: Sequence[str], chunks: Sequence[GPTModel], architecture: Architecture) -> None:
    """Compares the parameters of built layers with those of the model's family. Raises ConfigError where they differ, or where experts
    could not be given the tokens that go to them."""
    value = " ".join(spec)
    for first, chunk in numbered_chunks(chunks, chunks[0].config):
        for number, layer in enumerate(chunk.decoder.layers, first):
            _check_layer(value, number, layer, architecture)


def _check_layer(value: str, number: int, layer: Any, architecture: Architecture) -> None:
    rows = layer_rows(architecture, number)
    has = {name for name, _ in weights_of(layer)}
    lacking = [row.megatron[0] for row in rows if has.isdisjoint(name.format(expert=0) for name in row.megatron)]
    experts = range(architecture.experts.count // layer.config.expert_model_parallel_size if architecture.experts else 1)
    unknown = sorted(has - {name.format(expert=expert) for row in rows for name in row.megatron for expert in experts})
    if lacking or unknown:
        differs = f"no {lacking[0]}" if lacking else f"{unknown[0]} besides"
        raise ConfigError(FIELD, value, f"layers with the parameters of {architecture.model_type}; layer {number} has {differs}")
    replayed = isinstance(layer, ReplayedLayer) and isinstance(layer.mlp, ReplayedMoELayer)
    if architecture.is_moe_layer(number) and not replayed:
        expected = f"a ReplayedLayer with a ReplayedMoELayer for experts, not {type(layer).__name__} with {type(layer.mlp).__name__}"
        raise ConfigError(FIELD, value, f"{expected} (services.trainer.megatron.moe), in layer {number}")


def _called(function: Callable[..., Any], known: Mapping[str, Any], value: str) -> Any:
    parameters = inspect.signature(function).parameters.values()
    asked = [each.name for each in parameters if each.name in known]
    for each in parameters:
        needed = each.default is inspect.Parameter.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if needed and each.name not in known:
            raise ConfigError(FIELD, value, f"a function of {', '.join(known)}; it wants {each.name}")
    try:
        return function(**{name: known[name] for name in asked})
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(FIELD, value, f"a function that returns layers; it raised {type(error).__name__}: {error}") from error
