"""The plan of an engine's GPU: weights and cache by the model's shape, and what SGLang's flags change."""

import pytest

from shared.config.rollout_section import RolloutSection
from shared.model.architecture import Architecture, Experts, Rope
from shared.model.engine_plan import fewest_gpus, plan_engine
from shared.model.memory_plan import total_parameters

QWEN3_32B = Architecture("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 40960, 1e-6, False, Rope(1e6), qk_norm=True)
GPU = 80_000_000_000


def rollout(gpus: int = 1, **sglang: object) -> RolloutSection:
    given = {name.replace("_", "-"): value for name, value in sglang.items()}
    return RolloutSection(num_rollout=1, rollout_batch_size=1, rollout_num_gpus_per_engine=gpus, sglang=given)


def test_a_cache_token_has_the_bytes_of_its_keys_and_values():
    plan = plan_engine(QWEN3_32B, rollout(mem_fraction_static=0.9), GPU)
    assert plan.weights == 2 * total_parameters(QWEN3_32B)
    assert plan.token_bytes == 64 * 2 * 8 * 128 * 2
    assert plan.tokens == (72_000_000_000 - plan.weights) // plan.token_bytes
    assert plan_engine(QWEN3_32B, rollout(mem_fraction_static=0.9, kv_cache_dtype="fp8_e4m3"), GPU).tokens == pytest.approx(
        2 * plan.tokens, 1
    )
    assert plan_engine(QWEN3_32B, rollout(max_total_tokens="2k"), GPU).tokens == 0
    assert plan_engine(QWEN3_32B, rollout(gpus=2, max_total_tokens="2k"), GPU).tokens == 2000


def test_gpus_share_weights_and_heads_until_there_are_more_gpus_than_heads():
    plans = {gpus: plan_engine(QWEN3_32B, rollout(gpus), GPU) for gpus in (1, 8, 16)}
    assert plans[8].weights == pytest.approx(plans[1].weights / 8, rel=0.001)
    assert [plan.token_bytes for plan in plans.values()] == [262_144, 32_768, 32_768]


def test_data_parallel_attention_copies_attention_and_keeps_whole_heads():
    plain, apart = plan_engine(QWEN3_32B, rollout(8), GPU), plan_engine(QWEN3_32B, rollout(8, dp_size=4, enable_dp_attention=True), GPU)
    assert apart.token_bytes == 4 * plain.token_bytes
    assert apart.weights > plain.weights and apart.copies == 4


def test_stages_share_layers():
    assert plan_engine(QWEN3_32B, rollout(2, pp_size=2), GPU).token_bytes == 262_144 // 2


def test_the_fewest_gpus_that_hold_a_model():
    assert fewest_gpus(QWEN3_32B, rollout(), GPU) == 2
    assert fewest_gpus(QWEN3_32B, rollout(), 192_000_000_000) == 1
    assert fewest_gpus(QWEN3_32B, rollout(), 1_000_000_000) is None


def test_a_cache_has_about_the_tokens_that_an_engine_had():
    """SGLang 0.5.16 on an H100 of 81,559 MiB, the model of benchmarks/routing_replay.py: it logged max_total_num_tokens=6019382."""
    experts = Experts(32, 4, 512, True)
    model = Architecture("qwen3_moe", 4, 1024, 2048, 8, 2, 128, 32768, 4096, 1e-6, False, Rope(1e4), qk_norm=True, experts=experts)
    assert plan_engine(model, rollout(mem_fraction_static=0.3), 81559 << 20).tokens == pytest.approx(6_019_382, rel=0.1)
