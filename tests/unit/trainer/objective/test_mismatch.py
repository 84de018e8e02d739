"""The distribution of the differences between engine and trainer, from counts that add up over micro-batches and ranks."""

import math
from dataclasses import replace

import pytest
import torch

from services.trainer.objective.correction import EDGES, counts, summarised
from services.trainer.objective.reduce import MaskedTokens
from services.trainer.packing import PackedBatch


def batch(lengths: list[int], mask: torch.Tensor) -> PackedBatch:
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    weights = mask / mask.sum()
    return PackedBatch(torch.zeros(total).long(), torch.zeros(total).long(), mask, bounds, max(lengths), {"weights": weights})


def test_what_is_reported_is_the_distribution_of_all_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    sums, every = dict[str, float](), list[torch.Tensor]()
    for lengths in ([300, 40], [5000]):
        total = sum(lengths)
        mask = (torch.rand(total, generator=generator) < 0.7).float()
        given = batch(lengths, mask)
        engine = -torch.rand(total, generator=generator)
        trainer = engine + 10 ** torch.empty(total).uniform_(-6, -1, generator=generator) * torch.randn(total, generator=generator).sign()
        tokens = MaskedTokens(trainer, given)
        found = counts(tokens.blank(trainer), tokens.blank(engine), tokens)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
        every.append((trainer - engine)[mask > 0])
    reported, difference = summarised(sums, bound=0.01), torch.cat(every).abs()
    for name, exact in (("mismatch_p99", difference.quantile(0.99)), ("mismatch_max", difference.max())):
        assert exact <= reported[name] * 1.001 and reported[name] <= exact * 10**0.25 * 1.001
    assert reported["mismatch_beyond"] == pytest.approx(float((difference > 0.01).float().mean()), abs=2e-3)
    assert reported["mismatch_k1"] == pytest.approx(sum(float(-one.mean()) for one in every), rel=1e-3)
    assert reported["mismatch_of_inf"] == pytest.approx(float(every[1].abs().mean()), rel=1e-3)
    assert {"mismatch_at_256", "mismatch_at_inf", "mismatch_of_1024"} <= reported.keys() and "mismatch_of_4096" not in reported
    assert not [name for name in reported if "count" in name]


def test_equal_log_probs_and_ones_that_no_bin_holds() -> None:
    given = batch([8], torch.ones(8))
    tokens = MaskedTokens(torch.zeros(8), given)
    equal = summarised({name: float(one) for name, one in counts(torch.zeros(8), torch.zeros(8), tokens).items()}, 0.1)
    assert equal["mismatch_max"] <= EDGES[0] and equal["mismatch_beyond"] == equal["mismatch_k3"] == 0.0
    far = {name: float(one) for name, one in counts(torch.full((8,), -50.0), torch.zeros(8), tokens).items()}
    assert summarised(far, 0.1)["mismatch_beyond"] == 1.0 and math.isfinite(summarised(far, 0.1)["mismatch_k3"])
    assert summarised({"loss": 1.0}, 0.1) == {"loss": 1.0}


def test_the_expert_whose_tokens_differ_most_is_named() -> None:
    generator, total = torch.Generator().manual_seed(0), 600
    experts = torch.randint(0, 8, (total, 3, 2), generator=generator).to(torch.int16)
    experts[:100] = -1  # the router's own choice: nothing is known of these
    through = (experts == 5).flatten(1).any(1)
    trainer = torch.where(through, 0.5, 0.01)
    trainer[:100] = 9.0
    given = replace(batch([total], torch.ones(total)), experts=experts, num_experts=8)
    found = summarised({name: float(one) for name, one in counts(trainer, torch.zeros(total), MaskedTokens(trainer, given)).items()}, 0.1)
    assert (found["mismatch_expert"], found["mismatch_expert_mean"]) == (5.0, pytest.approx(0.5))
    assert not [name for name in found if "count" in name]
    few = replace(batch([8], torch.ones(8)), experts=experts[100:108], num_experts=8)
    sums = {name: float(one) for name, one in counts(trainer[100:108], torch.zeros(8), MaskedTokens(torch.zeros(8), few)).items()}
    assert "mismatch_expert" not in summarised(sums, 0.1)
