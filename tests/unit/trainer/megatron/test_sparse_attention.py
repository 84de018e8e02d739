"""Attention to the keys that an indexer chooses: packs, chunks, recomputation, adapters, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.megatron import attention
from services.trainer.megatron.packed_sequences import least_saved
from shared.config.engine_limits import unequal_context_problem
from shared.config.trainer_section import TrainerSection
from shared.model.families import read_architecture
from shared.model.memory_plan import total_parameters
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import lora_steps, rank_steps
from tests.unit.trainer.megatron.test_prefix_sharing import gradients
from tests.unit.trainer.megatron.tiny import pack, sequences

KIND = "glm_moe_dsa"
CLOSE = {"atol": 1e-5, "rtol": 0}


@pytest.fixture
def changed(hf, tmp_path):
    """``changed(tensors, **entries)``: a copy of the checkpoint with other tensors and entries of its config."""

    def make(change=lambda tensors: None, **entries):
        target = shutil.copytree(hf(KIND), tmp_path / f"copy{len(list(tmp_path.iterdir()))}")
        config = json.loads((target / "config.json").read_text()) | entries
        (target / "config.json").write_text(json.dumps(config))
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors")
        return target

    return make


def log_probs(directory, seqs):
    return rank_steps.actor(directory).log_probs([pack(seqs)])[0]


def test_a_pack_in_chunks_has_the_gradients_of_its_sequences(make_actor, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 5)
    monkeypatch.setattr(attention, "SCORES", 1000)  # a few queries of 16 heads
    model, seqs = make_actor(KIND), [torch.arange(5), *sequences(6, longest=40), torch.arange(6)]
    packed = gradients(model, pack(seqs), rank_steps.weighted_loss, need_entropy=True)
    monkeypatch.undo()
    alone = [gradients(model, pack([one]), rank_steps.weighted_loss, need_entropy=True) for one in seqs]
    assert packed[0] == pytest.approx(sum(loss for loss, _, _ in alone), rel=1e-5)
    for name, gradient in packed[2].items():
        total = torch.stack([each[name] for _, _, each in alone]).sum(0)
        assert (gradient - total).norm() <= 1e-4 * total.norm() + 1e-6, name


def test_keys_are_chosen_in_long_sequences_only(hf, changed):
    seqs = [torch.arange(6), torch.arange(40)]
    sparse, dense = log_probs(hf(KIND), seqs), log_probs(changed(index_topk=64), seqs)
    torch.testing.assert_close(sparse[:12], dense[:12], **CLOSE)  # and the first six of the longer one
    assert (sparse[12:] - dense[12:]).abs().max() > 1e-2


def test_interleaved_indexers_pair_neighbours(hf, changed):
    """transformers has halves only; a checkpoint with the rotated rows in the other order is the same model."""

    def reorder(tensors):
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11])
        for name in [name for name in tensors if ".indexer." in name and "weights_proj" not in name]:
            tensors[name] = tensors[name].unflatten(0, (-1, 12))[:, order].flatten(0, 1).contiguous()

    seqs = [torch.arange(40)]
    expected = log_probs(hf(KIND), seqs)
    torch.testing.assert_close(log_probs(changed(reorder, indexer_rope_interleave=True), seqs), expected, **CLOSE)
    assert (log_probs(changed(indexer_rope_interleave=True), seqs) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "config",
    [
        {"recompute": True},
        pytest.param({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}, marks=pytest.mark.extra),
        pytest.param({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, marks=pytest.mark.extra),
    ],
)
def test_what_is_computed_again_chooses_the_same_keys(config, make_actor):
    straight, again = (rank_steps.steps(make_actor(KIND, **given), 2) for given in ({}, config))
    for step, expected in zip(again, straight, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)


def test_the_indexer_stays_as_it_was_loaded(hf, make_actor):
    loaded, model = load_file(hf(KIND) / "model.safetensors"), make_actor(KIND, train_dtype="bfloat16", lr=0.1)
    rank_steps.steps(model, 1)
    out = rank_steps.exported(model)
    of_indexers = [name for name in out if ".indexer." in name]
    assert len(of_indexers) == 2 * 5
    for name in of_indexers:
        exact = "norm" in name or "weights_proj" in name
        assert torch.equal(out[name], loaded[name] if exact else loaded[name].bfloat16()), name
    assert not torch.equal(out["model.norm.weight"], loaded["model.norm.weight"].bfloat16())


@pytest.mark.extra
def test_adapters_train_beside_it(hf):
    report = lora_steps.train(hf(KIND), {"lora_rank": 4, "lora_alpha": 8}, 2)
    assert report["steps"][1].loss != report["steps"][0].loss
    assert not [name for name in report["adapters"] if "indexer" in name]
    base = load_file(hf(KIND) / "model.safetensors")
    assert all(torch.equal(tensor, base[name]) for name, tensor in report["base"].items())


def test_the_plan_counts_it(hf):
    for kind in (KIND, "deepseek_v32"):
        architecture = read_architecture(hf(kind))
        tensors = hf_tensors(architecture).values()
        assert total_parameters(architecture) == sum(torch.Size(shape).numel() for shape in tensors)


def test_which_layers_share_is_read_as_engines_read_it(changed):
    shared = [
        ({"indexer_types": None, "index_topk_freq": 2}, (2,)),
        ({"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3}, (3,)),
        ({"indexer_types": None, "index_topk_pattern": "FFSS"}, (2, 3)),
        ({"indexer_types": None}, ()),
    ]
    for entries, wanted in shared:
        indexer = read_architecture(changed(**entries)).indexer
        assert indexer is not None and indexer.shared_layers == wanted


def test_what_is_not_exact_is_refused(hf, make_actor):
    architecture = read_architecture(hf(KIND))  # layers 0 and 2 have indexers
    cases = [
        ({"pipeline_model_parallel_size": 4}, {}, "pipeline_model_parallel_size = 4: stages that begin with layers of [2]"),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_first_pipeline_stage": 1}, "those that begin with [1]"),
    ]
    for layout, overrides, words in cases:
        (problem,) = division_problems(architecture, ParallelLayout.of(TrainerSection(**layout)), overrides)
        assert words in str(problem)
    with pytest.raises(ConfigError, match=r"prefix_sharing.*whole sequences"):
        least_saved("on", make_actor(KIND).model.config)


def test_an_engine_on_a_cpu_has_no_context_that_is_sparse():
    entries = {"index_topk": 2048, "max_position_embeddings": 163840}
    assert unequal_context_problem(entries, {"context-length": "2048"}, "cpu") is None
    assert unequal_context_problem({"max_position_embeddings": 163840}, {}, "cpu") is None
    for flags in ({}, {"context-length": 2049}):
        problem = str(unequal_context_problem(entries, flags, "cpu"))
        assert "context-length" in problem and "at most 2048 on a CPU" in problem
    assert unequal_context_problem(entries, {}, "cuda") is None
    assert unequal_context_problem(entries, {}, "cuda", trained=2048) is None, "no longer sample is trained"
    assert unequal_context_problem(entries, {"context-length": 2048}, "cuda", trained=8192) is None
    assert "at most 2048 with trainer_backend = torch" in str(unequal_context_problem(entries, {}, "cuda", trained=8192))


@pytest.mark.parametrize("written", ["rope_scaling", "rope_parameters"])
def test_no_engine_has_a_context_in_which_it_chooses_angles_by_batch(written: str):
    rope = {"type" if written == "rope_scaling" else "rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
    entries = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072, written: rope}
    assert unequal_context_problem(entries, {"context-length": 4096}, "cuda") is None
    for flags in ({}, {"context-length": "4097"}):
        assert "at most 4096, original_max_position_embeddings" in str(unequal_context_problem(entries, flags, "cuda"))
    assert unequal_context_problem({**entries, written: {"rope_type": "yarn"}}, {}, "cuda") is None
