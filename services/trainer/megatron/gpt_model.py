"""The model of this rank: Megatron's GPT model, configured from an architecture and a layout."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from services.trainer.megatron import DEVICE_TYPE, sharded_state
from services.trainer.megatron.draft import DraftLayers
from services.trainer.megatron.expert_balance import Balancing
from services.trainer.megatron.hf_weights import load_hf, weights_of
from services.trainer.megatron.lora import Adapters, adapters_of, load_adapters, renew_adapters, silence_adapters
from services.trainer.megatron.moe import DISPATCHER, dispatcher_of
from services.trainer.megatron.spec import ValueHead, decoder_spec, family_layer_spec
from services.trainer.parallel.likelihood import OutputHead, VocabularySlice
from services.trainer.parallel.runtime import device
from services.trainer.parallel.staged_shards import StagedShards
from services.trainer.parallel.trained_model import LayerModules, TrainedModel
from shared.config.flag_table import OF_DEEPEP
from shared.model.architecture import Architecture, GroupedYarn, LinearScaling, Llama3Scaling, Rope
from shared.model.architecture_flags import flags_of
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError

T = TypeVar("T")

# Gives the specs of a stage's layers; its argument is the number of the rank's chunk, None where it has one alone
LayersOf = Callable[[int | None], TransformerBlockSubmodules]


class HiddenStatesModel(GPTModel):
    """Megatron's model, but for its output: the last stage gives its hidden states [1, U, hidden size]. The output layer is applied to a
    chunk of them at a time (`services.trainer.parallel.likelihood`), so that the logits of a micro-batch never exist at once."""

    def _postprocess(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        if not self.post_process or isinstance(self.output_layer, ValueHead):
            output: Tensor = super()._postprocess(hidden_states, *inputs, **options)
            return output
        return hidden_states.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class ParallelHead(OutputHead):
    """The output layer of a tensor-parallel rank. ``scattered``: whether the ranks split the tokens."""

    scattered: bool = False

    def inputs(self, hidden: Tensor) -> Tensor:
        """Returns the layer's whole input [U, hidden size] of this rank's hidden states, whose gradient the ranks sum up."""
        if self.scattered:
            whole: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.vocabulary.group)
            return whole
        copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=self.vocabulary.group)
        return copied


@dataclass(kw_only=True)
class MegatronModel(TrainedModel):
    """The parts of the model that this rank holds; ``chunks``: its stages, wrapped for data parallelism, several in interleaved pipelines.

    Args:
        config: Megatron's. balancing: of the experts; None: there is none. draft_scale: weight of the draft layers' loss.
    """

    config: TransformerConfig
    balancing: Balancing | None = None
    draft_scale: float = 0.0

    @property
    def head(self) -> ParallelHead:
        """Returns the output layer, on ranks that have the model's last stage."""
        module, group = self.modules[-1], parallel_state.get_tensor_model_parallel_group()
        tied = module.share_embeddings_and_output_weights
        weight = module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
        vocabulary = VocabularySlice.of(group, weight.size(0), self.architecture.vocab_size)
        overlaps = self.chunks[-1].ddp_config.overlap_grad_reduce
        return ParallelHead(weight, vocabulary, self.chunk_size, overlaps, scattered=self.config.sequence_parallel)

    @property
    def modules(self) -> list[GPTModel]:
        return [chunk.module for chunk in self.chunks]

    @property
    def layer_modules(self) -> LayerModules:
        decoders = [module.decoder for module in self.modules]
        layers = {layer.layer_number - 1: layer for decoder in decoders for layer in decoder.layers}
        return LayerModules(layers, decoders[-1].final_layernorm, parallel_state.get_tensor_model_parallel_rank())

    def train(self, mode: bool) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def weight_tensors(self, adapters: bool = False) -> list[Tensor]:
        held = [tensor for chunk in self.modules for _, tensor in weights_of(chunk)]
        return [tensor for tensor in held if getattr(tensor, "adapter", False)] if adapters else held

    def live_tensors(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
            yield from (buffer.param_data for buffer in flat_buffers(chunk) if buffer.param_data is not None)

    def load_hf(self, directory: Path) -> None:
        load_hf(self.modules, self.config, self.architecture, directory, drafts=False)

    @property
    def adapters(self) -> Adapters:
        """Returns the adapters of this rank's pipeline stage; none without LoRA."""
        return {} if self.lora is None else adapters_of(self.modules, self.config, self.architecture)

    def load_adapters(self, directory: Path) -> None:
        load_adapters(self.adapters, directory)

    def renew_adapters(self, seed: int, rank: int, parts: Collection[str]) -> None:
        """Makes all adapters new ones, as `lora.renew_adapters` does."""
        renew_adapters(self.modules, self.config, self.architecture, seed, rank, parts)

    def silence_adapters(self) -> None:
        silence_adapters(self.adapters)

    def sharded_state(self, layers_apart: bool = False) -> dict[str, Any]:
        """Returns the weights as checkpoints hold them. ``layers_apart``: each layer has its own name; otherwise like layers are stacked
        under one."""
        metadata = {**sharding_metadata(), **({"non_homogeneous_layers": True} if layers_apart else {})}
        return {f"model{index}": module.sharded_state_dict(metadata=metadata) for index, module in enumerate(self.modules)}

    def load_state(self, loaded: Mapping[str, Any]) -> None:
        for index, module in enumerate(self.modules):
            module.load_state_dict(loaded[f"model{index}"])

    def stage_state(self, state: dict[str, Any], random: Any, shards: StagedShards, directory: Path) -> None:
        sharded_state.stage(state, random, shards, directory)

    def read_state(self, state: dict[str, Any], directory: Path, *, with_random: bool, exact: bool) -> dict[str, Any]:
        return sharded_state.read(state, directory, with_random, exact)


def flat_buffers(chunk: Any) -> list[Any]:
    """Returns Megatron's flat buffers of parameters and gradients."""
    return [*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])]


def sharding_metadata() -> dict[str, Any]:
    """Returns what Megatron's sharded states of models and optimizers need to be told."""
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def transformer_config(
    architecture: Architecture, layout: ParallelLayout, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Returns Megatron's configuration.

    Args:
        overrides: fields that replace those set here: recomputation, and the user's.

    Raises:
        ConfigError: Megatron refuses them.
    """
    fields: dict[str, Any] = dict(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron's allgather takes no variable lengths, which it checks for dense models too
        calculate_per_token_loss=True,  # losses and gradients are summed, over micro-batches and data-parallel ranks
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        sequence_parallel=layout.sequence_parallel,
        transformer_impl="local",
        use_cpu_initialization=DEVICE_TYPE == "cpu",
        # gloo still reads an output that is under way; NCCL has it kept until it is sent
        deallocate_pipeline_outputs=DEVICE_TYPE == "cuda",
        # these need Apex, Transformer Engine or a compiler
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=DEVICE_TYPE == "cuda",  # SwiGLU in one kernel, which keeps its input only
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    if layout.chunks > 1:
        # Otherwise the interleaved schedule pairs a stage's two messages of one moment with the wrong receives.
        fields.update(virtual_pipeline_model_parallel_size=layout.chunks, overlap_p2p_comm=True, batch_p2p_comm=False)
    kind = TransformerConfig if architecture.latent is None else MLATransformerConfig
    dispatcher = dispatcher_of(overrides, layout)
    if dispatcher != "flex":
        overrides = {name: value for name, value in overrides.items() if name not in {DISPATCHER, *OF_DEEPEP}}
    config = laid_over(kind, {**fields, **_architecture_fields(architecture, kind)}, overrides, "transformer")
    config.moe_token_dispatcher_type = dispatcher
    if isinstance(architecture.rope.scaling, GroupedYarn):  # no field: the attention looks for it, and scales cosines and sines by it
        config.yarn_rotary_scaling_factor = architecture.rope.scaling.factor
    return config


def _architecture_fields(a: Architecture, kind: type[TransformerConfig]) -> dict[str, Any]:
    """Returns the fields that follow from the architecture alone: its flags, and what has no flag or another name there."""
    known = {field.name for field in dataclasses.fields(kind)}
    flags = {"rotary_scaling_factor": 1.0, **flags_of(a)}
    if a.experts is not None and a.experts.groups == 1:
        flags |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    fields = {
        **{name: value for name, value in flags.items() if name in known},
        "num_query_groups": a.num_key_value_heads,
        "kv_channels": a.head_dim,
        "layernorm_epsilon": a.norm_eps,
        "add_bias_linear": a.biases,
        # where it is true Megatron sums the gradients of these norms over ranks that hold different heads, as if they held the same weights
        "qk_layernorm": a.qk_norm or a.latent is not None,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "softmax_scale": a.softmax_scale,
    }
    if a.gelu:  # Megatron's own formula, of fewer digits, is not transformers'
        fields |= {"activation_func": partial(F.gelu, approximate="tanh"), "bias_activation_fusion": False}
    if a.indexer is not None or a.linear is not None:
        # the modules are made here: `SparseLatentAttention` gives its attention what Megatron would pass, and linear attention has
        # context parallelism, which Megatron refuses
        fields["experimental_attention_variant"] = None
    if a.experts is not None:
        fields |= {
            "num_moe_experts": a.experts.count,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            # unless the user says so the biases stay as loaded: pre-training balanced the experts with them
            "moe_router_bias_update_rate": 0.0,
        }
        if a.experts.swiglu_limit is not None:
            fields |= {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": a.experts.swiglu_limit}
    return fields


def laid_over(kind: type[T], fields: Mapping[str, Any], overrides: Mapping[str, Any], part: str) -> T:
    """Returns one of Megatron's configurations. Raises ConfigError with Megatron's reason if it refuses the overrides."""
    unknown = sorted(overrides.keys() - {field.name for field in dataclasses.fields(kind)})  # type: ignore[arg-type]
    if unknown:
        raise ConfigError(f"trainer.megatron.{unknown[0]}", overrides[unknown[0]], f"a field of Megatron's {kind.__name__}")
    try:
        return kind(**{**fields, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        if not overrides:
            raise
        given = ", ".join(f"{name} = {value!r}" for name, value in overrides.items())
        raise ConfigError(f"trainer.megatron ({part})", given, f"what Megatron accepts ({error})") from error


def build_chunks(
    architecture: Architecture, config: TransformerConfig, layout: ParallelLayout, value_head: bool = False, layers: LayersOf | None = None
) -> list[GPTModel]:
    """Returns this rank's parts of the model, on its device, with weights that are yet to be loaded; a value head's are zero.

    Args:
        layers: gives the specs of the layers of a stage, in the place of the family's own.
    """
    stages = range(layout.chunks) if layout.chunks > 1 else [None]
    layers = layers or partial(decoder_spec, architecture, config)
    return [_build_chunk(architecture, config, layout, value_head, stage, layers(stage)) for stage in stages]


def _build_chunk(
    a: Architecture,
    config: TransformerConfig,
    layout: ParallelLayout,
    value_head: bool,
    stage: int | None,
    layers: TransformerBlockSubmodules,
) -> GPTModel:
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    model = HiddenStatesModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=layout.padded_vocabulary(a.vocab_size),  # for the embedding and the output layer
        max_sequence_length=a.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_percent=a.rope.fraction,
        rotary_base=a.rope.theta,
        vp_stage=stage,
    )
    if value_head and last:
        model.output_layer = ValueHead(config)
    if a.trained_drafts and last:
        drafts = range(a.num_layers, a.num_layers + a.trained_drafts)
        model.mtp = DraftLayers(config, a, [family_layer_spec(a, config, index) for index in drafts], stage)
    # Megatron takes experts without expert parallelism for parameters like any other, and sums their gradients over the data-parallel
    # ranks only: wrong, silently, where they are not split as other matrices are and tensor-parallel ranks have seen different tokens
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
    model.to(device())
    _set_embeddings(model, a, config)
    return model


def _set_embeddings(model: GPTModel, a: Architecture, config: TransformerConfig) -> None:
    for module in model.modules() if a.latent is None else ():  # latent attention has its own inside
        if hasattr(module, "rotary_pos_emb"):
            rope = a.rope if module is model or a.window_rope is None else a.window_rope
            module.rotary_pos_emb.inv_freq = inverse_frequencies(rope, a.head_dim).to(device())
    if a.scaled_embedding and model.pre_process:
        scale = torch.tensor(a.hidden_size**0.5, dtype=config.params_dtype).item()
        model.embedding.word_embeddings.register_forward_hook(lambda _module, _inputs, embedded: embedded * scale)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Returns the frequencies of a rotary position embedding: float32 [rotated dimensions / 2]; latent attention has its own."""
    rotated = int(head_dim * rope.fraction)
    if isinstance(rope.scaling, GroupedYarn):
        return _blended(rope.scaling, rope.theta, rotated)
    # Megatron knows Llama 3's scaling with fixed constants only
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    if isinstance(rope.scaling, LinearScaling):
        return frequencies / rope.scaling.factor
    return _stretched(rope.scaling, frequencies) if isinstance(rope.scaling, Llama3Scaling) else frequencies


def _blended(scaling: GroupedYarn, theta: float, rotated: int) -> Tensor:
    """Blends frequencies with those of the longer context as YaRN does, in the order of operations of the Hugging Face implementation."""

    def bound(rotations: float) -> float:
        return rotated * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = bound(scaling.beta_fast), bound(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    wavelengths = theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    high += 0.001 if low == high else 0
    kept = 1 - torch.clamp((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _stretched(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    """Stretches float32 [pairs] as Llama 3 does, in the order of operations of the Hugging Face implementation."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, stretched)


def wrap_chunks(
    chunks: list[GPTModel], config: TransformerConfig, use_distributed_optimizer: bool, overrides: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Gives each chunk its float32 gradient buffers, reduced over the data-parallel ranks after the last micro-batch.

    Args:
        overrides: fields of Megatron's DistributedDataParallelConfig that replace those set here.
    """
    ddp = laid_over(
        DistributedDataParallelConfig,
        {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": use_distributed_optimizer,
            "overlap_grad_reduce": False,
            "check_for_nan_in_grad": False,  # the optimizer step looks at the norm, and skips instead of aborting
        },
        overrides,
        "ddp",
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    if ddp.overlap_grad_reduce:  # the reduction starts in the backward pass of the last micro-batch, not of each
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    else:
        for parameter in (parameter for chunk in chunks for name, parameter in chunk.named_parameters() if ".experts." in name):
            parameter.grouped_gradient = True
    return wrapped
