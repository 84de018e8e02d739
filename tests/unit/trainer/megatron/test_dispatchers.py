"""The dispatchers of tokens give the same values; one that is not there is told or refused."""

import pytest
import torch

from services.trainer.megatron.moe import PaddedAllGatherDispatcher
from shared.config import flag_table
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import pack, sequences

ALLGATHER = {"megatron": {"moe_token_dispatcher_type": "allgather"}}
LAYOUTS = {"EP2": {"expert_model_parallel_size": 2}, "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}


def dispatched(hf_dir, config):
    """Losses and norms of two steps; log-probs of micro-batches that differ in length from rank to rank; the dispatchers."""
    model = rank_steps.actor(hf_dir, **config)
    kinds = {type(layer.mlp.token_dispatcher) for layer in model.model.modules[0].decoder.layers}
    batch = pack(sequences(3 + model.data_parallel_rank, seed=9))
    steps = rank_steps.steps(model, 2)
    return kinds, [(step.loss, step.grad_norm) for step in steps], model.log_probs([batch])[0]


@pytest.mark.parametrize("layout", ["EP2", pytest.param("TP2 SP", marks=pytest.mark.extra)])
def test_an_allgather_equals_the_all_to_all(layout, hf, two_ranks):
    expected = two_ranks.run(dispatched, hf("qwen3_moe"), LAYOUTS[layout])
    for found, other in zip(two_ranks.run(dispatched, hf("qwen3_moe"), {**LAYOUTS[layout], **ALLGATHER}), expected, strict=True):
        assert found[0] == {PaddedAllGatherDispatcher} != other[0]
        for numbers, others in zip(found[1], other[1], strict=True):
            assert numbers == pytest.approx(others, rel=1e-5, abs=1e-5)
        assert torch.allclose(found[2], other[2], atol=1e-4)


def test_what_does_not_go_with_it_is_refused(hf):
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type = 'allgather': .*moe_shared_expert_overlap"):
        rank_steps.actor(hf("glm4_moe"), megatron={"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": True})


def test_deepep_is_told_to_be_missing():
    given = {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}
    told = dict(flag_table.without_effect(given))
    assert not flag_table.has_deepep() and told.keys() == {"--moe-enable-deepep", "--moe-token-dispatcher-type"}
    assert all("DeepEP is not installed" in reason for reason in told.values())
    assert not dict(flag_table.without_effect({"moe_token_dispatcher_type": "allgather"}))
