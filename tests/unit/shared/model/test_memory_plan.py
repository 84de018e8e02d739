"""The plans of memory: of a rank, and of an engine's GPU."""

import json
import re
import tomllib
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks.trainer_mfu import RESULTS, WRITTEN, planned_gb
from shared.config import flag_table
from shared.config.rollout_section import RolloutSection
from shared.config.trainer_section import TrainerSection
from shared.model.architecture import Architecture, Experts, Rope
from shared.model.architecture_flags import described_shape
from shared.model.engine_plan import fewest_gpus, plan_engine
from shared.model.families import with_drafts
from shared.model.memory_plan import OUTSIDE_BYTES, plan_trainer, total_parameters
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.model.tensor_table import hf_tensors
from tests.support.tables import table

READY = sorted((Path(__file__).parents[4] / "configs" / "models").glob("*.toml"))


def ready(path):
    """The section, the shape, the published parameters and the GPUs of a ready config."""
    text = path.read_text()
    given = tomllib.loads(text)["trainer"]
    trainer = TrainerSection(**{**given, "megatron": flag_table.canonical(given["megatron"])})
    parameters = int(re.search(r"([\d,]+) parameters", text)[1].replace(",", ""))
    return trainer, described_shape(trainer.megatron), parameters, int(re.search(r"(\d+) GPUs? of 80 GB", text)[1])


@table("path", READY)
def test_a_ready_config_is_divided_and_fits_80_gb(path):
    trainer, shape, parameters, gpus = ready(path)
    layout = ParallelLayout.of(trainer)
    assert total_parameters(shape) == parameters
    assert trainer.ranks("actor") == gpus
    assert [str(problem) for problem in [*layout.world_problems(gpus), *division_problems(shape, layout, trainer.megatron)]] == []
    plans = plan_trainer(shape, trainer, gpus)
    assert sum(plan.layers for plan in plans) == shape.num_layers
    assert all(plan.peak + OUTSIDE_BYTES < 80e9 for plan in plans)


def test_offload_and_fewer_bits_take_what_they_say():
    trainer, shape, parameters, _ = ready(next(path for path in READY if path.stem == "qwen3-4b"))

    def plan(**flags):
        return plan_trainer(shape, trainer.model_copy(update={"megatron": {**trainer.megatron, **flags}}), 1)[0]

    assert (plan().weights, plan().gradients, plan().optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    away = plan(optimizer_cpu_offload=True)
    assert (away.optimizer, away.host) == (0, 12 * parameters)
    narrow = plan(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", main_grads_dtype="bf16")
    assert (narrow.gradients, narrow.optimizer) == (2 * parameters, 8 * parameters)


def test_recomputation_saves_activations():
    trainer, shape, _, _ = ready(next(path for path in READY if path.stem == "qwen3-4b"))
    plain = trainer.model_copy(update={"recompute": False})
    half = plain.model_copy(update={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 18})
    saved = [plan_trainer(shape, section, 2)[0].activations for section in (trainer, half, plain)]
    assert saved == sorted(saved) and saved[0] < saved[2] / 10
    chunked, whole = (plan_trainer(shape, plain.model_copy(update={"log_probs_chunk_size": size}), 2)[0].likelihood for size in (2048, -1))
    assert chunked < whole / 3


@table("name", WRITTEN)
def test_the_plan_is_within_a_tenth_of_what_torch_measured(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())
    measured = [row["peak_gb"] for row in rows]
    assert measured and [planned_gb(row) for row in rows] == pytest.approx(measured, rel=0.1)


def test_draft_layers_that_train_are_planned_on_the_last_stage():
    """Their parameters are those of the table of names; without a tied embedding the stage borrows the first one's for a step."""
    _, shape, _, _ = ready(next(path for path in READY if path.stem == "glm-4.5-air"))
    trainer = TrainerSection(pipeline_model_parallel_size=2, enable_mtp_training=True, use_distributed_optimizer=False)
    drafted = with_drafts(replace(shape, draft_layers=1), trainer)
    (first, last), (first_with, last_with) = (plan_trainer(each, trainer, 8) for each in (shape, drafted))
    tensors, plain = hf_tensors(drafted), hf_tensors(shape)
    added = sum(prod(tensors[name]) for name in tensors.keys() - plain.keys())
    assert first_with == first and last_with.parameters - last.parameters == added
    assert last_with.weights - last.weights == 2 * (added + shape.vocab_size * shape.hidden_size)
    assert last_with.activations > last.activations and last_with.likelihood == 2 * last.likelihood


def test_the_torch_backends_shards_are_counted_by_copy_by_what_trains_and_where_they_lie():
    _, shape, _, _ = ready(next(path for path in READY if path.stem == "qwen3-4b"))
    base = TrainerSection(trainer_backend="torch", actor_num_gpus_per_node=8)
    changes = {"all": {}, "copies": {"fsdp_shard_ranks": 2}, "lora": {"lora_rank": 8}, "host": {"fsdp_cpu_offload": True}}
    changes |= {"tensor": {"tensor_model_parallel_size": 2}}
    plan = {name: plan_trainer(shape, base.model_copy(update=given), 8)[0] for name, given in changes.items()}
    assert plan["copies"].optimizer == pytest.approx(4 * plan["all"].optimizer, rel=1e-6)
    assert plan["tensor"].optimizer == pytest.approx(plan["all"].optimizer, rel=1e-3) and plan["tensor"].weights < plan["all"].weights
    assert plan["lora"].optimizer < 0.02 * plan["all"].optimizer
    assert plan["host"].optimizer == 0 and plan["host"].host == pytest.approx(16 * plan["all"].parameters / 8, rel=1e-6)


# --- the plan of an engine's GPU: weights and cache by the model's shape, and what SGLang's flags change

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
