"""Every layout of ranks computes what one process computes."""

import pytest

from tests.unit.trainer.megatron import rank_steps

STEPS = 3
LAYOUTS = {
    "DP2 distributed optimizer": ("qwen3_tied", {}),
    "DP2": ("qwen3_tied", {"use_distributed_optimizer": False}),
    "TP2": ("qwen3_tied", {"tensor_model_parallel_size": 2}),
    "TP2 untied": ("qwen3", {"tensor_model_parallel_size": 2}),
    "TP2 qwen2": ("qwen2", {"tensor_model_parallel_size": 2}),
    "TP2 SP": ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "TP2 SP tied": ("qwen3_tied", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "PP2 tied": ("qwen3_tied", {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "EP2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
    "EP2 mixed layers": ("qwen3_moe_mixed", {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "MoE TP2 SP": ("qwen3_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "MoE TP2 SP EP2": (
        "qwen3_moe",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
    "MoE PP2": ("qwen3_moe_mixed", {"pipeline_model_parallel_size": 2}),
    "TP2 recompute": ("qwen3", {"tensor_model_parallel_size": 2, "recompute": True}),
}


@pytest.fixture(scope="module")
def one_process(hf):
    """What one process does with a kind of model, computed once."""
    from services.trainer.megatron import runtime

    known = {}

    def train(kind):
        if kind not in known:
            known[kind] = rank_steps.train(hf(kind), {}, STEPS)
        return known[kind]

    yield train
    runtime.stop()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, hf, one_process, two_ranks):
    kind, config = LAYOUTS[layout]
    expected = one_process(kind)
    ranks = two_ranks.run(rank_steps.train, hf(kind), config, STEPS)
    for rank in ranks:
        assert [step.skipped for step in rank["steps"]] == [None] * STEPS
        for step, reference in zip(rank["steps"], expected["steps"], strict=True):
            assert step.loss == pytest.approx(reference.loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(reference.grad_norm, abs=1e-4)
            assert step.metrics.keys() == reference.metrics.keys()
            assert step.metrics["tokens"] == reference.metrics["tokens"]
            assert step.metrics["entropy"] == pytest.approx(reference.metrics["entropy"], rel=1e-5)
        difference = (rank["log_probs"] - expected["log_probs"]).abs().max()
        assert difference < 1e-4
    first, *others = (rank["weights"] for rank in ranks)
    assert first.keys() == expected["weights"].keys()
    for name, tensor in first.items():
        assert (tensor - expected["weights"][name]).abs().max() < 1e-4, name
    for other in others:
        assert list(other) == list(first)
        assert all(tensor is None for tensor in other.values())


def test_the_steps_change_the_model(one_process):
    """The comparisons above would hold for a model that does not train, too."""
    losses = [step.loss for step in one_process("qwen3")["steps"]]
    assert len(set(losses)) == STEPS
    assert all(step.grad_norm > 0.1 for step in one_process("qwen3")["steps"])


def test_recompute_changes_nothing(alone, hf, one_process):
    again = alone.train(hf("qwen3"), {"recompute": True}, STEPS)
    for step, reference in zip(again["steps"], one_process("qwen3")["steps"], strict=True):
        assert step.loss == pytest.approx(reference.loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(reference.grad_norm, abs=1e-4)


def test_bfloat16_trains_in_parallel(hf, two_ranks):
    config = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "dtype": "bfloat16"}
    first, second = two_ranks.run(rank_steps.train, hf("qwen3"), config, STEPS)
    assert first["steps"] == second["steps"]
    assert all(step.skipped is None and step.grad_norm > 0.1 for step in first["steps"])
