"""FLOPs against a count of the real model's matrix products, and MFU's denominators."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer import flops
from shared.model.architecture import Architecture, Experts, LatentAttention, Rope
from shared.model.families import read_architecture
from tests.support.tables import table
from tests.unit.trainer.megatron.tiny import make_checkpoint

DENSE = Architecture("qwen3", 2, 64, 96, 8, 2, 16, 128, 512, 1e-6, False, Rope(1e4))


def counted(directory: Path, length: int) -> int:
    """Operations that torch counts in HF's forward pass, attention as plain products over all pairs."""
    config = AutoConfig.from_pretrained(directory)
    if config.model_type == "deepseek_v3":
        config.num_key_value_heads = config.num_attention_heads  # latent attention has no others, but HF's plain products ask
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the products that torch can count
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **plain).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe_mixed", "deepseek_v3"])
def test_the_count_is_that_of_the_model_itself(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    architecture = read_architecture(tmp_path)
    length = 24
    pairs_of_all, pairs_seen = length * length, length * (length + 1) / 2
    unseen = (pairs_of_all - pairs_seen) * architecture.num_layers * flops._attention(architecture)
    rotated = architecture.latent.qk_pos_emb_head_dim if architecture.latent else architecture.head_dim
    rotation = 2 * (rotated // 2) * length  # HF makes its angles by a matrix product
    assert counted(tmp_path, length) - unseen - rotation == pytest.approx(flops.forward(architecture, [length]), rel=1e-12)


def test_a_pack_is_its_sequences_one_by_one() -> None:
    lengths = [3, 17, 64]
    assert flops.forward(DENSE, lengths) == sum(flops.forward(DENSE, [length]) for length in lengths)
    assert flops.training(DENSE, lengths) == 3 * flops.forward(DENSE, lengths)
    assert flops.forward(DENSE, []) == 0


def test_what_is_shared_is_counted_once() -> None:
    """Two sequences of 10 and 64 tokens, and one of 30 that begins with 20 of the latter's: its last 10 tokens see 20 others each."""
    shared = flops.work([20])
    apart = flops.forward(DENSE, [10, 64, 30]) - flops.forward(DENSE, [20])
    assert flops.forward(DENSE, [10, 64, 30], shared=shared) == apart
    own = flops.forward(DENSE, [10, 64, 10]) + 10 * 20 * 2 * 4 * 8 * 16  # pairs, layers, heads, width
    assert flops.forward(DENSE, [10, 64, 30], shared=shared) == own
    assert flops.training(DENSE, [10, 64, 30], shared=shared) == 3 * own


def test_a_long_sequence_costs_what_its_pairs_cost() -> None:
    quadratic = flops.forward(DENSE, [200]) - 2 * flops.forward(DENSE, [100])
    assert quadratic == 100 * 100 * 2 * 4 * 8 * 16  # pairs across the halves, layers, heads, width


def test_experts_count_as_many_as_a_token_takes() -> None:
    experts = Experts(count=16, per_token=2, ffn_hidden_size=32, normalize=True, dense_layers=(0,), shared_ffn_hidden_size=24)
    sparse = Architecture(**{**vars(DENSE), "experts": experts})
    dense_mlp, moe_mlp = 6 * 64 * 96, 2 * 64 * 16 + 6 * 64 * (2 * 32 + 24)
    assert flops.forward(sparse, [10]) - flops.forward(DENSE, [10]) == 10 * (moe_mlp - dense_mlp)


def test_latent_attention_counts_its_low_ranks() -> None:
    latent = LatentAttention(q_lora_rank=24, kv_lora_rank=20, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=10)
    model = Architecture(**{**vars(DENSE), "latent": latent})
    query, key_value, out = 64 * 24 + 24 * 8 * 16, 64 * (20 + 4) + 20 * 8 * (12 + 10), 8 * 10 * 64
    plain = 64 * 16 * (8 + 2 + 2 + 8)
    pairs = 10 * 11 / 2 * 2 * (2 * 8 * (12 + 4 + 10) - 4 * 8 * 16)
    assert flops.forward(model, [10]) - flops.forward(DENSE, [10]) == 10 * 2 * 2 * (query + key_value + out - plain) + pairs


def test_a_critic_has_no_vocabulary() -> None:
    assert flops.forward(DENSE, [10]) - flops.forward(DENSE, [10], value_head=True) == 10 * 2 * 64 * 127


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    pairs = 10 * 11 / 2 * 2 * 4 * 8 * 16
    assert flops.training(DENSE, [10], adapters=True) == 2 * flops.forward(DENSE, [10]) + pairs


def test_the_published_shape_costs_about_six_operations_a_parameter_and_token() -> None:
    big = Architecture("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, True, Rope(1e6))
    parameters = 4.02e9
    without_pairs = flops.training(big, [1] * 1000) / 1000
    assert without_pairs == pytest.approx(6 * parameters, rel=0.01)


@table(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
        ("NVIDIA GeForce GTX 1080", "bfloat16", None),
    ],
)
def test_peaks_are_known_by_name(device: str, dtype: str, peak: float | None) -> None:
    assert flops.peak(device, dtype) == peak
