"""Tiny models and batches: real architectures, a few thousand weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.packing import PackedBatch

VOCAB = 67
"""A prime, so that no tensor-parallel size divides it."""


def make_checkpoint(kind: str, directory: Path) -> None:
    """Write a random Hugging Face checkpoint of ``kind``, with norms and biases that are not trivial."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.15,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    t = transformers
    configs = {
        "qwen3": lambda: t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False),
        "qwen3_tied": lambda: t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "qwen2": lambda: t.Qwen2Config(**sizes, tie_word_embeddings=True),
        "llama": lambda: t.LlamaConfig(**sizes, tie_word_embeddings=False),
        "llama3_rope": lambda: t.LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters=llama3),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **sizes, **experts, head_dim=16, norm_topk_prob=True, tie_word_embeddings=False
        ),
        "qwen3_moe_mixed": lambda: t.Qwen3MoeConfig(
            **sizes, **experts, head_dim=16, norm_topk_prob=False, mlp_only_layers=[0], tie_word_embeddings=False
        ),
    }
    torch.manual_seed(sorted(configs).index(kind))
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)


def sequences(count: int, seed: int = 3, longest: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def pack(seqs: Sequence[Tensor]) -> PackedBatch:
    """One micro-batch that trains every label, with advantages that differ from token to token."""
    tokens = torch.cat(list(seqs))
    labels = torch.cat([torch.cat([s[1:], s.new_zeros(1)]) for s in seqs])
    mask = torch.cat([torch.cat([torch.ones(len(s) - 1), torch.zeros(1)]) for s in seqs])
    starts = torch.tensor([0, *(len(s) for s in seqs)]).cumsum(0).int()
    advantages = torch.sin(tokens.float() * 3 + labels)
    return PackedBatch(tokens, labels, mask, starts, max(len(s) for s in seqs), {"advantages": advantages})
