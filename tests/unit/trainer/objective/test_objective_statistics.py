"""What is known of a whole optimizer step: the same however its tokens are spread over ranks; and which loss a run has."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.correction import (
    EDGES,
    Statistics,
    batch_statistics,
    counts,
    importance_weight,
    second_moment_limit,
    summarised,
)
from services.trainer.objective.custom_objective import CustomFunctions, CustomLoss
from services.trainer.objective.loss import PolicyLoss, SftLoss, loss_of
from services.trainer.objective.reduce import MaskedTokens, denominator, passing, rollout_parts, sequence_sum
from services.trainer.packing import PackedBatch
from shared.config.algorithm import AlgorithmSection
from tests.support.tables import table

from . import batches, reference


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1), scale=batches.SCALES, level=st.sampled_from(["token", "sequence", "geometric"]), cut=st.integers(0, 6)
)
def test_ranks_that_hold_parts_find_what_one_finds(seed, scale, level, cut):
    config = AlgorithmSection(use_m2po=True, tis_batch_normalize=True, tis_level=level, tis_mode="mask", tis_clip_low=0.5)
    sequences = batches.draw_sequences(seed, count=6, scale=scale, proximal=True)
    weights = batches.weights_of(sequences, config)
    whole = batch_statistics(config, [batches.packed(sequences, weights)])
    assert whole.mean_weight == pytest.approx(reference.mean_weight(sequences, config), rel=1e-9)

    parts = [(sequences[a:b], weights[a:b]) for a, b in ((0, cut), (cut, 6)) if b > a]
    ranks = [[batches.packed(*part)] for part in parts]
    sent: list[list[torch.Tensor]] = []
    for rank in ranks:  # what each rank sends, first
        sent.append([])
        batch_statistics(config, rank, lambda values: (sent[-1].append(values), values)[1])
    for rank in ranks:
        calls = iter(zip(*sent, strict=True))
        found = batch_statistics(config, rank, lambda values, calls=calls: torch.cat(next(calls)))
        assert found.mean_weight == pytest.approx(whole.mean_weight, rel=1e-12)
        assert found.second_moment_limit == whole.second_moment_limit


@table(
    ("moments", "bound", "limit"),
    [
        ([], 0.1, math.inf),
        ([0.0, 0.1, 0.1], 0.1, math.inf),  # zeros do not count, and equality stays
        ([0.1, 0.3], 0.1, 0.2),
        ([0.1, 0.3, 0.3], 0.2, 0.2),  # one of the equal ones alone would fit: they go together
        ([0.2], 0.1, 0.0),
        ([0.05, 0.06, 9.0, 0.0], 0.04, 0.0),
        ([0.01, 0.06, 9.0], 0.04, 4.53),
    ],
)
def test_the_limit_of_second_moments(moments, bound, limit):
    assert second_moment_limit(torch.tensor(moments, dtype=torch.float64), bound) == pytest.approx(limit)


def test_nothing_is_gathered_that_nothing_asks_for():
    def gather(values):
        raise AssertionError

    assert batch_statistics(AlgorithmSection(), [], gather) == Statistics()


def test_a_batch_without_trained_tokens_has_statistics():
    config = AlgorithmSection(use_m2po=True, tis_batch_normalize=True)
    filler = batches.plainly_packed([], [])
    filler = filler.with_fields(proximal_log_probs=torch.zeros(filler.tokens.shape))
    assert batch_statistics(config, [filler]) == Statistics(1.0, math.inf)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_weights_that_a_mask_leaves_have_mean_one(level):
    """The masked-out are no weights of the mean: the others would be blown up by the share of those that went."""
    config = AlgorithmSection(
        advantage_estimator="reinforce_plus_plus",
        tis_batch_normalize=True,
        tis_level=level,
        tis_mode="mask",
        tis_clip_low=0.8,
        tis_clip=1.4,
    )
    sequences = batches.draw_sequences(11, count=12, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    tokens = MaskedTokens(batch.fields["proximal_log_probs"], batch)
    log_ratio = tokens.log_probs - tokens.field("rollout_log_probs")
    weight = importance_weight(log_ratio, tokens.mask, batch.cu_seqlens, config).weight
    share = tokens.mask.double()
    if level != "token":
        share = share / sequence_sum(share, batch.cu_seqlens).clamp(min=1.0)
    left = share * (weight > 0)
    assert 0 < left.sum() < share.sum()
    normalized = weight / batch_statistics(config, [batch]).mean_weight
    assert (left * normalized).sum().item() == pytest.approx(left.sum().item(), rel=1e-12)


def test_which_loss_a_run_has():
    config, statistics = AlgorithmSection(), Statistics(1.5, None)
    rest = CustomFunctions(), 3, statistics, 4.0
    loss = loss_of(config, *rest)
    assert isinstance(loss, PolicyLoss)
    assert (loss.config, loss.batch_version, loss.statistics, loss.denominator) == (config, 3, statistics, 4.0)
    assert isinstance(loss_of(AlgorithmSection(loss_type="sft_loss"), *rest), SftLoss)
    custom = loss_of(AlgorithmSection(loss_type="custom_loss", custom_loss_function_path="m:f"), *rest)
    assert isinstance(custom, CustomLoss)
    assert custom.takes_logits


def test_rejection_sampling_trains_what_passes():
    rewards = [-1.0, 0.0, 0.5, 1.0]
    assert passing(AlgorithmSection(loss_type="sft_loss"), rewards).tolist() == [False, False, True, True]
    assert passing(AlgorithmSection(loss_type="sft_loss", rejection_threshold=0.5), rewards).tolist() == [False, False, False, True]
    assert passing(AlgorithmSection(), rewards).all()


def test_what_sums_are_divided_by():
    parts = rollout_parts([2, 0, 3], ["a", "a", "b"])
    assert denominator([2, 0, 3], parts) == 2.0
    assert denominator([2, 0, 3], parts, "token_mean") == 5.0


# --- the distribution of the differences between engine and trainer, from counts that add up over micro-batches and ranks


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
