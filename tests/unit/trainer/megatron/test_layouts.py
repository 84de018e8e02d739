"""Every layout of ranks computes what one process computes.

Those of `ALWAYS` cover each parallelism; those that cover every pair of them, of kinds of optimizer and of recomputation, are extra."""

import pytest
import torch

from tests.support.tables import not_refused
from tests.unit.trainer.megatron import rank_steps

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2 = {"context_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
FOUR_STAGES = {"megatron": {"pipeline_model_parallel_layout": "E,t|t|(t|)*1,t*1L"}}
WHOLE = {"use_distributed_optimizer": False}


def etp(size):
    return {"expert_tensor_parallel_size": size}


TWO_RANKS = {
    "DP2": ("qwen3_tied", {}),
    "DP2 whole optimizer": ("qwen3_tied", WHOLE),
    "TP2 biases": ("qwen2", TP2),
    "TP2 SP tied": ("qwen3_tied", TP2_SP),
    "TP2 SP recompute": ("qwen3", {**TP2_SP, "recompute": True}),
    "CP2": ("qwen3", CP2),
    "CP2 tied, whole optimizer": ("qwen3_tied", {**CP2, **WHOLE}),
    "CP2 recompute attention": ("qwen3", {**CP2, "recompute_granularity": "selective", "recompute_modules": ("core_attn",)}),
    "PP2 tied": ("qwen3_tied", PP2),
    "PP2 uneven": ("deep", {**PP2, "megatron": {"num_layers_in_first_pipeline_stage": 3}}),
    "PP2 VPP2": ("deep", VPP2),
    "PP2 layout of four stages": ("deep", {**PP2, **FOUR_STAGES}),
    "PP2 VPP2 whole optimizer": ("deep", {**VPP2, **WHOLE}),
    "overlapped gradient reduction": ("deep", {**VPP2, "megatron": {"overlap_grad_reduce": True}}),
    "MoE DP2 whole optimizer": ("qwen3_moe", WHOLE),
    "MoE EP2": ("qwen3_moe", EP2),
    "MoE EP2 mixed layers, whole optimizer": ("qwen3_moe_mixed", {**EP2, **WHOLE}),
    "MoE TP2 SP": ("qwen3_moe", TP2_SP),
    "MoE TP2 SP EP2": ("qwen3_moe", {**TP2_SP, **EP2}),
    "MoE TP2 SP ETP1": ("qwen3_moe", {**TP2_SP, **etp(1)}),
    "MoE ETP2": ("qwen3_moe", {**etp(2), **WHOLE}),
    "MoE CP2 EP2": ("qwen3_moe", {**CP2, **EP2}),
    "MoE PP2, a stage without experts": ("qwen3_moe_mixed", PP2),
    "MoE PP2 VPP2": ("deep_moe", VPP2),
}
FOUR_RANKS = {
    "TP2 PP2 SP": ("qwen3_tied", {**TP2_SP, **PP2}),
    "CP2 TP2 SP": ("qwen3", {**CP2, **TP2_SP}),
    "CP2 TP2 whole optimizer": ("qwen3_tied", {**CP2, **TP2, **WHOLE}),
    "CP2 PP2": ("qwen3_tied", {**CP2, **PP2}),
    "CP2 DP2": ("qwen3_tied", CP2),
    "CP4": ("qwen3", {"context_parallel_size": 4}),
    "PP4": ("deep", {"pipeline_model_parallel_size": 4}),
    "PP2 VPP2 TP2 SP": ("deep", {**VPP2, **TP2_SP}),
    "MoE EP2 TP2 SP": ("qwen3_moe", {**EP2, **TP2_SP}),
    "MoE EP2 TP2 SP ETP2": ("qwen3_moe", {**EP2, **TP2_SP, **etp(2)}),
    "MoE EP4 TP2 SP ETP1": ("qwen3_moe", {"expert_model_parallel_size": 4, **TP2_SP, **etp(1)}),
    "MoE EP2 CP2 TP2 SP whole optimizer": ("qwen3_moe", {**EP2, **CP2, **TP2_SP, **WHOLE}),
    "MoE EP2 CP2 PP2 VPP2": ("deep_moe", {**EP2, **CP2, **VPP2}),
    "latent attention, shared experts: EP2 CP2 TP2 SP": ("deepseek_v3", {**EP2, **CP2, **TP2_SP}),
    "linear attention: CP2 TP2": ("qwen3_5_text", {**CP2, "tensor_model_parallel_size": 2}),
    "linear attention: CP2 PP2": ("qwen3_5_text", {**CP2, "pipeline_model_parallel_size": 2}),
    "sparse attention: CP2 TP2 SP": ("glm_moe_dsa", {**CP2, **TP2_SP}),
    "sparse attention: EP2 CP4": ("deepseek_v32", {**EP2, "context_parallel_size": 4}),
    "MoE TP2 SP ETP4": ("qwen3_moe", {**TP2_SP, **etp(4), **WHOLE}),
}


ALWAYS = {"DP2 whole optimizer", "TP2 SP recompute", "MoE EP2 CP2 PP2 VPP2"}


def layouts(cases):
    """The names of the cases, those outside of `ALWAYS` marked as extra."""
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.extra) for name in cases]


@pytest.fixture
def one_process(hf, once):
    return lambda kind: once(rank_steps.reinforce, hf(kind), {})


def assert_steps(found, expected):
    """Of results of steps: losses and norms of gradients."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-4)


def assert_equal(expected, ranks):
    for rank in ranks:
        for name in ("grpo", "ppo", "critic 0", "critic 1", "critic 2"):
            step, reference = rank[name], expected[name]
            assert step.skipped is None
            assert step.loss == pytest.approx(reference.loss, abs=1e-5), name
            assert step.grad_norm == pytest.approx(reference.grad_norm, abs=1e-4), name
            assert step.metrics.keys() == reference.metrics.keys()
            assert step.metrics == pytest.approx(reference.metrics, rel=1e-6, abs=1e-5)
        assert (rank["log_probs"] - expected["log_probs"]).abs().max() < 1e-4
        assert (rank["values"] - expected["values"]).abs().max() < 1e-4
    first, *others = (rank["weights"] for rank in ranks)
    assert first.keys() == expected["weights"].keys()
    for name, tensor in first.items():
        assert (tensor - expected["weights"][name]).abs().max() < 1e-4, name
    for other in others:
        assert list(other) == list(first)
        assert all(tensor is None for tensor in other.values())


@pytest.mark.parametrize("layout", layouts(TWO_RANKS))
def test_two_ranks_equal_one_process(layout, hf, one_process, two_ranks):
    kind, config = TWO_RANKS[layout]
    assert_equal(one_process(kind), two_ranks.run(rank_steps.reinforce, hf(kind), config))


@pytest.mark.parametrize("layout", layouts(FOUR_RANKS))
def test_four_ranks_equal_one_process(layout, hf, one_process, four_ranks):
    kind, config = FOUR_RANKS[layout]
    assert_equal(one_process(kind), four_ranks.run(rank_steps.reinforce, hf(kind), config))


def test_the_steps_change_the_model(one_process):
    """The comparisons above would hold for a model that does not train, too."""
    report = one_process("qwen3")
    assert len({report[name].loss for name in ("critic 0", "critic 1", "critic 2")}) == 3
    assert all(report[name].grad_norm > 0.1 for name in ("grpo", "ppo"))
    assert report["critic 2"].grad_norm > 0.01
    assert report["values"].std() > 0.01


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"recompute": True}, marks=pytest.mark.extra),
        pytest.param({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, marks=pytest.mark.extra),
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
    ],
)
def test_recompute_changes_nothing(recompute, alone, hf, one_process):
    assert_equal(one_process("qwen3"), [alone.reinforce(hf("qwen3"), recompute)])


@pytest.mark.parametrize("megatron", [{"overlap_grad_reduce": True}, pytest.param({}, marks=pytest.mark.extra)])
def test_micro_batches_that_fill_no_round_of_the_interleaved_schedule(megatron, alone, hf, two_ranks):
    expected, expected_log_probs = alone.odd_micro_batches(hf("deep"), {})
    for step, log_probs in two_ranks.run(rank_steps.odd_micro_batches, hf("deep"), {**VPP2, "megatron": megatron}):
        assert step.loss == pytest.approx(expected.loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, abs=1e-4)
        for ours, theirs in zip(log_probs, expected_log_probs, strict=True):
            assert (ours - theirs).abs().max() < 1e-4


def test_bfloat16_trains_in_parallel(hf, two_ranks):
    first, second = two_ranks.run(rank_steps.train, hf("qwen3"), {**TP2_SP, "train_dtype": "bfloat16"}, 3)
    assert first["steps"] == second["steps"]
    assert all(step.skipped is None and step.grad_norm > 0.1 for step in first["steps"])


@pytest.mark.parametrize("config", [*(pytest.param(config, marks=pytest.mark.extra) for config in ({}, CP2)), TP2_SP])
def test_the_first_step_is_on_policy(config, hf, two_ranks):
    for metrics in two_ranks.run(rank_steps.first_step, hf("qwen3"), config):
        tokens = sum(float(batch.loss_mask.sum()) for batch in map(rank_steps.micro_batch, range(rank_steps.MICRO_BATCHES)))
        assert metrics["ois"] == tokens  # every ratio is exactly 1
        assert abs(metrics["ppo_kl"]) / tokens < 1e-6
        assert abs(metrics["kl_loss"]) / tokens < 1e-6


def test_deterministic_runs_give_the_same_bits(alone, hf):
    try:
        first, second = (alone.train(hf("qwen3_moe"), {"deterministic": True}, 2) for _ in range(2))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first["steps"] == second["steps"]
    assert torch.equal(first["log_probs"], second["log_probs"])
    assert all(torch.equal(tensor, second["weights"][name]) for name, tensor in first["weights"].items())


def test_a_layout_that_does_not_fit_is_refused_with_names_and_numbers(make_actor):
    cases = [
        ("qwen3", {"tensor_model_parallel_size": 3}, ["tensor_model_parallel_size", "3", "4 attention heads"]),
        ("qwen3", {"tensor_model_parallel_size": 4}, ["tensor_model_parallel_size", "4", "2 key/value heads"]),
        ("qwen3", {"pipeline_model_parallel_size": 3}, ["pipeline_model_parallel_size", "3", "2 layers"]),
        ("qwen3", VPP2, ["virtual_pipeline_model_parallel_size", "2", "1, the layers of each of the 2 stages"]),
        ("qwen3", EP2, ["expert_model_parallel_size", "2", "no experts"]),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, ["expert_model_parallel_size", "3", "4 experts"]),
        ("qwen3_moe", etp(5), ["expert_tensor_parallel_size", "5", "24 MLP channels"]),
        ("qwen3_moe", EP2, ["expert_model_parallel_size", "divisor of 1"]),
        ("qwen3_moe", TP2, ["sequence_parallel"]),
        ("deepseek_v3", TP2, ["sequence_parallel", "low ranks"]),
        ("qwen3", TP2, ["2 x 1 x 1", "world size, 1"]),
        ("qwen3", CP2, ["context_parallel_size", "1 x 1 x 2", "world size, 1"]),
        ("qwen3_moe", etp(2), ["expert_tensor_parallel_size", "2", "the 1 ranks of a stage"]),
        ("gpt_oss", {**TP2, "sequence_parallel": True}, ["expert_tensor_parallel_size", "2", "1; each expert of gpt_oss has biases"]),
        ("deep", {**PP2, "megatron": {"num_layers_in_last_pipeline_stage": 4}}, ["num_layers_in_last", "4"]),
        ("deep", {"megatron": {"num_layers_in_last_pipeline_stage": 1}}, ["num_layers_in_last", "pipeline"]),
        (
            "deep",
            {**PP2, "megatron": {"pipeline_model_parallel_layout": "Et|t|ttL"}},
            ["= 'Et|t|ttL': 2 stages, or 4 where virtual_pipeline_model_parallel_size is 2", "it has 3"],
        ),
        (
            "deep",
            {**PP2, "virtual_pipeline_model_parallel_size": 1, **FOUR_STAGES},
            ["pipeline_model_parallel_layout", "2 stages", "it has 4"],
        ),
        ("qwen3", {"megatron": {"no_such_field": 1}}, ["no_such_field", "unknown"]),
        ("qwen3", {"megatron": {"transformer_impl": "transformer_engine"}}, ["transformer_impl", "not installed"]),
    ]
    assert not not_refused(lambda kind, config: make_actor(kind, **config), cases)
