"""The optimizer step against plain PyTorch, and what it does when something is wrong."""

import math
from types import SimpleNamespace

import pytest
import torch

from services.trainer.parallel.loss_function import BadLoss, MicroBatchesFailed
from shared.config.trainer_section import LearningRateSchedule
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import exported, share, steps, weighted_loss
from tests.unit.trainer.megatron.test_layouts import assert_steps
from tests.unit.trainer.megatron.tiny import pack, sequences


def negative_log_likelihood(log_probs, entropy, batch):
    assert entropy is None
    return -(batch.loss_mask * log_probs).sum() / 50, {}


def reference_steps(hf_dir, micro_batches, *, lr, clip, betas, eps, weight_decay):
    """The same updates with the Hugging Face model, autograd's entropy and torch's AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(hf_dir).float()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}], lr=lr, betas=betas, eps=eps
    )
    history = []
    for batches in micro_batches:
        adam.zero_grad()
        total = 0.0
        for batch in batches:
            log_probs, entropies = [], []
            for tokens, labels in zip(
                batch.tokens.split(batch.cu_seqlens.diff().tolist()), batch.labels.split(batch.cu_seqlens.diff().tolist()), strict=True
            ):
                distribution = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
                log_probs.append(distribution.gather(1, labels[:, None]).squeeze(1))
                entropies.append(-(distribution.exp() * distribution).sum(1))
            loss, _ = weighted_loss(torch.cat(log_probs), torch.cat(entropies), batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        adam.step()
        history.append(SimpleNamespace(loss=total, grad_norm=norm))
    return history, {name: p.detach() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen2", pytest.param("llama", marks=pytest.mark.extra)])
def test_steps_equal_plain_pytorch(kind, make_actor, hf):
    settings = {"lr": 2e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 0.8}
    actor = make_actor(kind, **settings)
    data = [share(actor, seed) for seed in range(3)]
    expected, weights = reference_steps(hf(kind), data, lr=2e-3, clip=0.8, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert_steps(steps(actor, 3), expected)
    for name, tensor in exported(actor).items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0)


def test_micro_batches_only_divide_the_work(make_actor):
    seqs = sequences(8, seed=21)
    whole = make_actor("qwen3").train_step([pack(seqs)], weighted_loss, need_entropy=True)
    parts = [pack(seqs[:1]), pack(seqs[1:5]), pack(seqs[5:])]
    split = make_actor("qwen3").train_step(parts, weighted_loss, need_entropy=True)
    assert split.loss == pytest.approx(whole.loss, abs=1e-5)
    assert split.grad_norm == pytest.approx(whole.grad_norm, abs=1e-4)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-5)


@pytest.mark.parametrize(
    ("distributed", "poison"),
    [
        (True, math.nan),
        (False, math.inf),
        *(pytest.param(*case, marks=pytest.mark.extra) for case in ((True, math.inf), (False, math.nan))),
    ],
)
def test_a_loss_that_is_not_finite_changes_nothing(poison, distributed, make_actor):
    clean = steps(make_actor("qwen3", use_distributed_optimizer=distributed), 2)
    actor = make_actor("qwen3", use_distributed_optimizer=distributed)
    first = steps(actor, 1)
    before = exported(actor)

    def broken(log_probs, entropy, batch):
        loss, metrics = weighted_loss(log_probs, entropy, batch)
        return loss * poison, metrics

    skipped = actor.train_step(share(actor, 5), broken, need_entropy=True)
    assert skipped.skipped is not None and "loss" in skipped.skipped
    assert not math.isfinite(skipped.loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(actor).items())
    assert [*first, *steps(actor, 1, first=1)] == clean


def test_a_gradient_that_is_not_finite_changes_nothing(make_actor):
    actor = make_actor("qwen3")
    before = exported(actor)

    def explodes(log_probs, entropy, batch):
        return (log_probs * 0).sum() + (log_probs.sum() * 0).sqrt(), {}  # 0, with derivative 0/0

    result = actor.train_step(share(actor, 0), explodes)
    assert result.loss == 0.0
    assert result.skipped is not None and "norm" in result.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(actor).items())
    assert steps(actor, 2) == steps(make_actor("qwen3"), 2)


def test_no_clipping_at_zero(make_actor):
    free = steps(make_actor("qwen3", clip_grad=0.0), 2)
    high = steps(make_actor("qwen3", clip_grad=1e9), 2)
    assert free == high
    assert steps(make_actor("qwen3", clip_grad=0.01, adam_eps=1e-3), 2)[1].loss != free[1].loss


def test_reset_makes_a_fresh_optimizer_over_the_present_weights(make_actor, tmp_path):
    actor = make_actor("qwen3", lr=1e-2)
    for _ in range(3):
        actor.train_step(share(actor, 7), negative_log_likelihood)
    actor.save_hf(tmp_path / "warm")
    actor.reset_optimizer(LearningRateSchedule(5e-4, warmup_steps=2))
    continued = steps(actor, 3)
    fresh = steps(rank_steps.actor(tmp_path / "warm", lr=5e-4, lr_warmup_iters=2), 3)
    assert [step.lr for step in continued] == [2.5e-4, 5e-4, 5e-4]
    for ours, theirs in zip(continued, fresh, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "complaint"),
    [
        (lambda log_probs, entropy, batch: (log_probs, {}), "scalar"),
        (lambda log_probs, entropy, batch: (log_probs.detach().sum(), {}), "depends on its first argument"),
    ],
)
def test_a_loss_function_that_breaks_its_contract_is_refused(loss_fn, complaint, make_actor):
    actor = make_actor("qwen3")
    with pytest.raises(BadLoss, match=complaint):
        actor.train_step(share(actor, 0), loss_fn)


def test_metrics_must_have_the_same_names_in_every_micro_batch(make_actor):
    actor = make_actor("qwen3")
    calls = iter(range(10))

    def changing(log_probs, entropy, batch):
        return log_probs.sum(), {f"metric_{next(calls)}": log_probs.sum()}

    with pytest.raises(BadLoss, match="same metrics"):
        actor.train_step(share(actor, 0), changing)


def test_a_last_micro_batch_that_fails_is_reported_where_the_reduction_overlaps_it(make_actor):
    """Megatron waits for a gradient of each parameter in a step's last micro-batch, also of those that the loss alone reads."""
    actor = make_actor("qwen3", megatron={"overlap_grad_reduce": True}, recompute=True)
    last = share(actor, 0)[-1].tokens

    def fails(log_probs, entropy, batch):
        if torch.equal(batch.tokens.cpu(), last):
            raise ZeroDivisionError
        return weighted_loss(log_probs, entropy, batch)

    for _ in range(2):  # Megatron counts the gradients of the first step, and compares those of later ones
        with pytest.raises(MicroBatchesFailed):
            actor.train_step(share(actor, 0), fails, need_entropy=True)
    expected = steps(make_actor("qwen3", recompute=True), 1)
    assert_steps(steps(actor, 1), expected)


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.extra)])
def test_without_its_moments_an_optimizer_is_one_that_has_just_begun(distributed, make_actor, tmp_path):
    actor = make_actor("qwen3", use_distributed_optimizer=distributed)
    steps(actor, 2)
    actor.save_hf(tmp_path / "between")
    actor.optimizer.reset_moments()
    begun = rank_steps.actor(tmp_path / "between", use_distributed_optimizer=distributed)
    assert steps(actor, 1, first=2) == steps(begun, 1, first=2)
    for name, tensor in exported(begun).items():
        torch.testing.assert_close(exported(actor)[name], tensor, atol=1e-7, rtol=0)
