"""The policy loss as a whole, against the reference and against itself."""

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.loss import PolicyLoss
from services.trainer.objective.reduce import MissingField
from services.trainer.partition import balance
from shared.config.algorithm import AlgorithmSection
from tests.support.tables import table

from . import batches, reference

many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_against_reference(sequences, config):
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    current = batches.currents(sequences)
    loss, metrics = batches.policy_loss(sequences, config, batch, 4)(current, batches.entropies(sequences), batch)
    loss.backward()
    expected_loss, expected_metrics, expected_gradients = reference.policy_loss(sequences, config, batch_version=4)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    measured = {name: value.item() for name, value in metrics.items() if not name.startswith("mismatch_")}
    assert measured == pytest.approx(expected_metrics, rel=1e-9, abs=1e-12)
    expected = batches.spread(sequences, expected_gradients)
    torch.testing.assert_close(current.grad, expected, rtol=1e-9, atol=1e-12)


@many
@given(sequences=batches.sequence_batches(), config=batches.configs())
def test_loss_metrics_and_gradient_equal_the_formulas(sequences, config):
    check_against_reference(sequences, config)


@table("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
def test_every_estimator_off_policy_equals_the_formulas(estimator):
    for off_policy, proximal, seed in product(("decoupled", "rollout", "none"), (True, False), range(3)):
        config = AlgorithmSection(advantage_estimator=estimator, off_policy=off_policy, kl_loss_coef=0.01, entropy_coef=1e-3)
        check_against_reference(batches.draw_sequences(seed, count=5, scale=0.3, proximal=proximal), config)


CORRECTIONS = {
    "m2po": {"use_m2po": True},
    "m2po around the rollout": {"use_m2po": True, "off_policy": "rollout", "advantage_estimator": "ppo"},
    "m2po without a bound": {"use_m2po": True, "m2_threshold": 0.0},
    "truncate": {"tis_mode": "truncate", "tis_clip": 1.1},
    "sequences of mean weight 1": {"tis_level": "sequence", "tis_batch_normalize": True},
    "rejection": {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.2},
    "veto": {"rs_veto_threshold": 0.7, "tis_mode": "mask", "tis_clip_low": 0.5},
}


@table("changes", CORRECTIONS.values())
def test_every_correction_equals_the_formulas(changes):
    config = AlgorithmSection(**changes)
    for seed in range(4):
        check_against_reference(batches.draw_sequences(seed, count=6, scale=0.3, proximal=seed % 2 == 0), config)


SMOOTH = {
    "plain": AlgorithmSection(),
    "dual clip": AlgorithmSection(eps_clip_high=0.28, eps_clip_c=1.5),
    "gspo, icepop": AlgorithmSection(advantage_estimator="gspo", tis_mode="mask", tis_clip_low=0.5),
    "opsm": AlgorithmSection(off_policy="rollout", use_opsm=True, opsm_delta=0.05),
    **{kind: AlgorithmSection(kl_loss_coef=0.1, kl_loss_type=kind) for kind in ("k1", "k2", "k3", "low_var_kl")},
    **{
        f"unbiased {kind}": AlgorithmSection(kl_loss_coef=0.1, kl_loss_type=kind, use_unbiased_kl=True)
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
}
"""Without a stopped gradient, hence without cispo: finite differences would see what autograd must not."""


@pytest.mark.parametrize("config", SMOOTH.values(), ids=SMOOTH)
def test_gradient_equals_finite_differences(config):
    for seed in range(3):
        sequences = batches.draw_sequences(seed, count=12, scale=0.3, proximal=True)
        batch = batches.packed(sequences, batches.weights_of(sequences, config))
        assert batch.loss_mask.sum() > 10
        assert torch.autograd.gradcheck(lambda x, batch=batch: PolicyLoss(config)(x, None, batch)[0], [batches.currents(sequences)])


def test_entropy_has_its_gradient():
    config = AlgorithmSection(entropy_coef=0.25)
    sequences = batches.draw_sequences(seed=3, count=4, scale=0.3, proximal=True)
    batch, entropy = batches.packed(sequences, batches.weights_of(sequences, config)), batches.entropies(sequences)
    entropy.requires_grad_()
    PolicyLoss(config)(batches.currents(sequences), entropy, batch)[0].backward()
    torch.testing.assert_close(entropy.grad, -0.25 * batch.fields["weights"])


@few
@given(
    seed=st.integers(0, 2**32 - 1),
    estimator=st.sampled_from(["grpo", "gspo", "cispo"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_without_proximal_log_probs_the_policy_is_its_own_proximal_policy(seed, estimator, dtype):
    config = AlgorithmSection(advantage_estimator=estimator, off_policy="none")
    sequences = batches.draw_sequences(seed, count=4, scale=2.0, proximal=False)
    weights = batches.weights_of(sequences, config)
    current = batches.currents(sequences, dtype)
    loss, metrics = PolicyLoss(config)(current, None, batches.packed(sequences, weights, torch.float32))
    batch = batches.plainly_packed(sequences, weights)
    assert metrics["ppo_kl"].item() == 0.0
    assert metrics["pg_clipfrac"].item() == 0.0
    assert metrics["ois"].item() == batch.fields["weights"].to(metrics["ois"].dtype).sum().item()  # ratio exactly 1
    loss.backward()  # of a policy gradient on its own samples: -A times the weight
    mean_advantage = batch.fields["advantages"] * batch.fields["weights"]
    tolerance = dict(rtol=1e-2, atol=1e-3) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(current.grad.float(), -mean_advantage, **tolerance)


@few
@given(sequences=batches.sequence_batches(), config=batches.configs(), dp_size=st.integers(1, 4), budget=st.integers(9, 30))
def test_sum_over_any_split_equals_the_whole(sequences, config, dp_size, budget):
    weights = batches.weights_of(sequences, config)
    batch = batches.packed(sequences, weights)
    whole, loss_of = batches.currents(sequences), batches.policy_loss(sequences, config, batch, 4)
    loss, metrics = loss_of(whole, batches.entropies(sequences), batch)
    loss.backward()
    offsets = np.cumsum([0] + [s.prompt + len(s.mask) for s in sequences])

    total, sums, gradient = 0.0, dict.fromkeys(metrics, 0.0), torch.zeros_like(whole)
    placement = balance([s.prompt + len(s.mask) for s in sequences], dp_size, budget)
    for indexes in (micro_batch for rank in placement for micro_batch in rank if micro_batch):
        part = [sequences[i] for i in indexes]
        current = batches.currents(part)
        part_loss, part_metrics = loss_of(current, batches.entropies(part), batches.packed(part, weights[indexes]))
        part_loss.backward()
        total += part_loss.item()
        assert part_metrics.keys() == sums.keys()
        sums = {name: sums[name] + part_metrics[name].item() for name in sums}
        places = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indexes])
        gradient[places] = current.grad
    assert total == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in metrics.items()}, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-15)


@few
@given(
    sequences=batches.sequence_batches(), config=batches.configs(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30])
)
def test_what_the_mask_excludes_cannot_be_seen(sequences, config, garbage):
    clean = batches.packed(sequences, batches.weights_of(sequences, config))
    excluded = clean.loss_mask == 0
    floats = {name: field for name, field in clean.fields.items() if field.is_floating_point()}
    dirty = clean.with_fields(**{name: field.masked_fill(excluded, garbage) for name, field in floats.items()})
    dirty = dirty.with_fields(versions=clean.fields["versions"].masked_fill(excluded, 4))
    results = []
    for batch, fill in ((clean, 0.0), (dirty, garbage)):
        current = batches.currents(sequences).detach().masked_fill(excluded, fill).requires_grad_()
        entropy = batches.entropies(sequences).masked_fill(excluded, fill).requires_grad_()
        loss, metrics = batches.policy_loss(sequences, config, batch, 4)(current, entropy, batch)
        loss.backward()
        results.append([loss.detach(), *metrics.values(), current.grad])
        assert torch.all(current.grad[excluded] == 0)
        if config.entropy_coef:
            assert torch.all(entropy.grad[excluded] == 0)
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_extreme_ratios_stay_finite_in_float32(estimator):
    sequences, kinds = batches.draw_sequences(seed=5, count=3, scale=0.1, proximal=True), ("k1", "k2", "k3", "low_var_kl")
    distances, corrections = (-1000.0, -89.0, 89.0, 1000.0), ("decoupled", "rollout", "none")
    for distance, advantage, off_policy, kind in product(distances, (-1.0, 0.0, 1.0), corrections, kinds):
        for s in sequences:
            s.rollout, s.reference = ([x + distance for x in s.current] for _ in range(2))
            s.proximal = [x - distance for x in s.current]
            s.advantage = advantage
        config = AlgorithmSection(
            advantage_estimator=estimator, off_policy=off_policy, kl_loss_type=kind, kl_loss_coef=0.1, use_unbiased_kl=True
        )
        batch = batches.packed(sequences, batches.weights_of(sequences, config), torch.float32)
        current = batches.currents(sequences, torch.float32)
        loss, metrics = PolicyLoss(config)(current, None, batch)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(torch.isfinite(value) for value in (loss, *metrics.values())), metrics
        assert torch.isfinite(current.grad).all()


def test_what_is_only_measured_cannot_poison_the_loss():
    config = AlgorithmSection(use_kl_loss=True, use_unbiased_kl=True)
    sequences = batches.draw_sequences(seed=1, count=5, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    results = []
    for reference_log_probs, entropy in (
        (batch.fields["ref_log_probs"], 1.0),
        (torch.full_like(batch.fields["weights"], -math.inf), math.inf),
    ):
        current = batches.currents(sequences)
        entropies = torch.full_like(current, entropy).requires_grad_()
        loss, metrics = PolicyLoss(config)(current, entropies, batch.with_fields(ref_log_probs=reference_log_probs))
        loss.backward()
        results.append((loss.detach(), current.grad))
        assert entropies.grad is None
    assert not torch.isfinite(metrics["kl_loss"])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_computed_with_in_float32(dtype):
    sequences = batches.draw_sequences(seed=1, count=5, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, AlgorithmSection()), torch.float32)
    half = batches.currents(sequences, dtype)
    loss, metrics = PolicyLoss(AlgorithmSection())(half, None, batch)
    exact, exact_metrics = PolicyLoss(AlgorithmSection())(half.detach().float(), None, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == exact.item() != 0.0
    assert metrics == exact_metrics


def test_metrics_are_detached_scalars():
    config = AlgorithmSection(kl_loss_coef=0.1, entropy_coef=0.1, use_opsm=True)
    sequences = batches.draw_sequences(seed=1, count=3, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    loss, metrics = PolicyLoss(config, batch_version=4)(batches.currents(sequences), batches.entropies(sequences), batch)
    assert loss.requires_grad
    assert loss.shape == ()
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_a_filler_adds_nothing_and_keeps_its_graph():
    batch = batches.plainly_packed([], [])
    current = torch.randn(batch.tokens.shape, requires_grad=True)
    loss, metrics = PolicyLoss(AlgorithmSection(), batch_version=4)(current, torch.rand(batch.tokens.shape), batch)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.all(current.grad == 0)
    assert all(value.item() == 0.0 for value in metrics.values())


def test_agreement_counts_only_sequences_wholly_of_the_batch_version():
    sequences = batches.draw_sequences(seed=2, count=12, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, AlgorithmSection()))
    counts = []
    for version in (3, 4, 5, 6):
        metrics = PolicyLoss(AlgorithmSection(), version)(batches.currents(sequences), None, batch)[1]
        wholly = [s for s in sequences if all(v == version for v, m in zip(s.versions, s.mask, strict=True) if m)]
        differences = [abs(p - r) for s in wholly for p, r, m in zip(s.proximal, s.rollout, s.mask, strict=True) if m]
        counts.append(len(differences))
        assert metrics["agreement_tokens"].item() == len(differences)
        assert metrics["agreement_abs_diff"].item() == pytest.approx(sum(differences), rel=1e-12)
    assert max(counts[:3]) > 0 == counts[3]
    assert sum(counts) < sum(sum(s.mask) for s in sequences)  # some sequences span versions
    assert "agreement_tokens" not in PolicyLoss(AlgorithmSection())(batches.currents(sequences), None, batch)[1]


@table(
    "config",
    [
        AlgorithmSection(),
        AlgorithmSection(off_policy="none"),
        AlgorithmSection(advantage_estimator="gspo", kl_loss_coef=0.1, use_unbiased_kl=True),
        AlgorithmSection(advantage_estimator="cispo", calculate_per_token_loss=True),
        AlgorithmSection(advantage_estimator="ppo", entropy_coef=0.01, loss_divisor=16),
    ],
)
def test_the_trainers_own_log_probs_stand_in_exactly_on_policy(config):
    for seed, proximal, unknown in product(range(3), (True, False), (range(5), (1, 3, 4))):
        drawn = batches.draw_sequences(seed, count=5, scale=0.3, proximal=proximal)
        sequences = [dataclasses.replace(s, rollout=s.proximal or s.current) for s in drawn]
        exact = batches.packed(sequences, batches.weights_of(sequences, config))
        gapped = batches.with_gaps(exact, sequences, unknown)
        found = []
        for batch in (exact, gapped):
            current = batches.currents(sequences)
            loss, metrics = PolicyLoss(config, batch_version=4)(current, batches.entropies(sequences), batch)
            loss.backward()
            found.append((loss, current.grad, metrics))
        (loss, gradient, metrics), (stood_in, gradient_of_it, metrics_of_it) = found
        assert gradient.abs().sum() > 0
        assert torch.equal(loss, stood_in) and torch.equal(gradient, gradient_of_it)
        missing = metrics.keys() - metrics_of_it.keys()
        assert {name for name in missing if not name.startswith("mismatch_")} == {"train_rollout_logprob_abs_diff"}
        agreement = {"agreement_abs_diff", "agreement_tokens"}
        assert all(torch.equal(metrics[name], value) for name, value in metrics_of_it.items() if name not in agreement)


def test_agreement_is_measured_where_the_rollouts_log_probs_are_known():
    sequences = batches.draw_sequences(seed=2, count=12, scale=0.3, proximal=True)
    config = AlgorithmSection()
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    metrics = PolicyLoss(config, 4)(batches.currents(sequences), None, batches.with_gaps(batch, sequences, range(6)))[1]
    known = batches.packed(sequences[6:], batches.weights_of(sequences[6:], config))
    alone = PolicyLoss(config, 4)(batches.currents(sequences[6:]), None, known)[1]
    assert metrics["agreement_tokens"].item() == alone["agreement_tokens"].item() > 0
    assert metrics["agreement_abs_diff"].item() == pytest.approx(alone["agreement_abs_diff"].item(), rel=1e-12)


def test_gaps_that_nobody_fills_are_no_numbers():
    sequences = batches.draw_sequences(seed=2, count=4, scale=0.3, proximal=False)
    config = AlgorithmSection(off_policy="rollout")
    batch = batches.with_gaps(batches.packed(sequences, batches.weights_of(sequences, config)), sequences, range(4))
    with pytest.raises(MissingField, match="rollout_log_probs"):
        PolicyLoss(config)(batches.currents(sequences), None, batch)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("weights", AlgorithmSection()),
        ("advantages", AlgorithmSection()),
        ("rollout_log_probs", AlgorithmSection()),
        ("rollout_log_probs", AlgorithmSection(off_policy="rollout")),
        ("ref_log_probs", AlgorithmSection(kl_loss_coef=0.1)),
    ],
)
def test_a_missing_field_is_named(field, config):
    sequences = batches.draw_sequences(seed=1, count=3, scale=0.3, proximal=True)
    batch = batches.packed(sequences, batches.weights_of(sequences, config))
    without = dataclasses.replace(batch, fields={name: x for name, x in batch.fields.items() if name != field})
    PolicyLoss(config, batch_version=4)(batches.currents(sequences), None, batch)
    with pytest.raises(MissingField, match=field) as error:
        PolicyLoss(config, batch_version=4)(batches.currents(sequences), None, without)
    assert error.value.field == field


def test_on_policy_objective_needs_no_rollout_log_probs():
    sequences = batches.draw_sequences(seed=1, count=3, scale=0.3, proximal=False)
    batch = batches.packed(sequences, batches.weights_of(sequences, AlgorithmSection()))
    kept = {name: batch.fields[name] for name in ("weights", "advantages")}
    _, metrics = PolicyLoss(AlgorithmSection(off_policy="none"))(batches.currents(sequences), None, dataclasses.replace(batch, fields=kept))
    assert metrics.keys() == {"loss", "pg_loss", "pg_clipfrac", "ppo_kl", "ois"}
