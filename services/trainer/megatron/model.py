"""The model of this rank: Megatron's GPT model, configured from an architecture and a layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.families import Architecture
from services.trainer.megatron.runtime import ParallelLayout, device, round_up
from services.trainer.megatron.spec import decoder_spec
from shared.errors import ConfigError


@dataclass
class Model:
    """The parts of the model that this rank holds.

    Args:
        architecture: the whole model's. config: Megatron's. layout: how ranks share it.
        chunks: the rank's stages, wrapped for data parallelism; one, but for interleaved pipelines.
    """

    architecture: Architecture
    config: TransformerConfig
    layout: ParallelLayout
    chunks: list[DistributedDataParallel]

    @property
    def modules(self) -> list[GPTModel]:
        return [chunk.module for chunk in self.chunks]

    def train(self, mode: bool) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def check_divisible(architecture: Architecture, layout: ParallelLayout) -> None:
    """Raises ConfigError, with the numbers, where the layout cannot divide the architecture."""
    a, tensor = architecture, layout.tensor
    field = "trainer.tensor_model_parallel_size"
    divided = {
        "attention heads": a.num_attention_heads,
        "key/value heads": a.num_key_value_heads,
        "MLP channels": a.ffn_hidden_size,
    }
    if a.experts is not None and layout.expert_tensor > 1:
        divided["MLP channels of an expert"] = a.experts.ffn_hidden_size
    for what, size in divided.items():
        if size % tensor:
            raise ConfigError(field, tensor, f"a divisor of the model's {size} {what}")
    if a.num_layers % layout.pipeline:
        raise ConfigError("trainer.pipeline_model_parallel_size", layout.pipeline, f"a divisor of its {a.num_layers} layers")
    if layout.expert > 1 and a.experts is None:
        raise ConfigError("trainer.expert_model_parallel_size", layout.expert, f"1; {a.model_type} has no experts")
    if a.experts is not None and a.experts.count % layout.expert:
        raise ConfigError("trainer.expert_model_parallel_size", layout.expert, f"a divisor of its {a.experts.count} experts")
    if a.experts is not None and tensor > 1 and not layout.sequence_parallel:
        raise ConfigError("trainer.sequence_parallel", False, "true; Megatron trains experts with tensor parallelism only so")


def padded_vocab_size(architecture: Architecture, layout: ParallelLayout) -> int:
    """Rows of the embedding and the output layer: the vocabulary, rounded up to a multiple of the tensor-parallel size."""
    return round_up(architecture.vocab_size, layout.tensor)


def transformer_config(
    architecture: Architecture, layout: ParallelLayout, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration. ``recompute``: keep only each layer's input and run the layer again in the backward pass."""
    a = architecture
    options: dict[str, object] = {}
    if a.experts is not None:
        options.update(
            num_moe_experts=a.experts.count,
            moe_router_topk=a.experts.per_token,
            moe_ffn_hidden_size=a.experts.ffn_hidden_size,
            moe_layer_freq=[int(a.is_moe_layer(layer)) for layer in range(a.num_layers)],
            # softmax over the chosen experts' logits is softmax over all, rescaled; without rescaling it comes first
            moe_router_pre_softmax=not a.experts.normalize,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
            moe_grouped_gemm=False,
            moe_permute_fusion=False,
        )
    if recompute:
        options.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_key_value_heads,
        kv_channels=a.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=a.norm_eps,
        qk_layernorm=a.family.qk_norm,
        add_qkv_bias=a.family.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that takes variable lengths; checked for dense models too
        calculate_per_token_loss=True,  # losses and gradients are summed, over micro-batches and data-parallel ranks
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=DEVICE_TYPE == "cpu",
        deallocate_pipeline_outputs=True,
        # these need Apex, Transformer Engine or a compiler
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def build_chunks(architecture: Architecture, config: TransformerConfig, layout: ParallelLayout) -> list[GPTModel]:
    """This rank's part of the model, on its device, with weights that are yet to be loaded."""
    a = architecture
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(a, config),
        vocab_size=padded_vocab_size(a, layout),
        max_sequence_length=a.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=a.rope.theta,
    )
    model.to(device())
    # Megatron knows Llama 3's scaling with fixed constants only
    model.rotary_pos_emb.inv_freq = a.rope.inverse_frequencies(a.head_dim).to(device())
    return [model]


def wrap_chunks(
    chunks: list[GPTModel], config: TransformerConfig, use_distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """Give each chunk its float32 gradient buffers, reduced over the data-parallel ranks after the last micro-batch."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,  # the optimizer step looks at the norm, and skips instead of aborting
    )
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
