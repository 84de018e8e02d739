"""Distillation of teachers' distributions, against divergences of whole distributions."""

import dataclasses

import numpy as np
import pytest
import torch

from services.trainer.objective.distillation import IDS, LOG_PROBS, SHARES, DistillationLoss, top_k_fields, top_k_kl
from services.trainer.objective.loss import PolicyLoss
from services.trainer.packing import BadSample, pack
from shared.config.algorithm import AlgorithmSection
from tests.support.tables import table
from tests.support.train_samples import train_sample

VOCABULARY = 7


def distributions(seed, *shape, nats=1.5):
    generator = torch.Generator().manual_seed(seed)
    return (nats * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(-1)


def kl(teacher, policy):
    return (teacher.exp() * (teacher - policy)).sum(-1)


def test_all_entries_give_the_kl_of_the_distributions():
    teacher, policy = distributions(0, 20), distributions(1, 20)
    torch.testing.assert_close(top_k_kl(teacher, policy), kl(teacher, policy), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_other_entries_count_as_one(k):
    teacher, logits = distributions(2, 20), distributions(3, 20).clone().requires_grad_()
    policy = logits.log_softmax(-1)
    entries, ids = teacher.topk(k)

    def coarse(given):
        rest = torch.log1p(-given.gather(1, ids).exp().sum(-1, keepdim=True))
        return torch.cat([given.gather(1, ids), rest], 1)

    found, wanted = top_k_kl(entries, policy.gather(1, ids)), kl(coarse(teacher), coarse(policy))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert (found <= kl(teacher, policy) + 1e-12).all()  # what is not told apart cannot differ


@table("k", [1, 4, VOCABULARY])
@table("dtype", [torch.float32, torch.float64])
def test_a_teacher_that_is_the_policy_teaches_nothing(k, dtype):
    logits = distributions(4, 20).to(dtype).requires_grad_()
    policy = logits.log_softmax(-1)
    entries, ids = policy.detach().topk(k)
    found = top_k_kl(entries, policy.gather(1, ids))
    torch.testing.assert_close(found, torch.zeros(20, dtype=dtype), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.abs().max() < 1e-5


def taught(index, response, entries, mask=None):
    """A sample with several teachers' entries: of each (share, ids [R, k], log-probs [R, k])."""
    attributes = {
        IDS: np.concatenate([ids for _, ids, _ in entries], 1).astype(np.int32),
        LOG_PROBS: np.concatenate([found for _, _, found in entries], 1).astype(np.float32),
        SHARES: np.array([share for share, _, _ in entries], np.float32),
    }
    changes = {} if mask is None else {"mask": np.array(mask, np.uint8)}
    return train_sample([1, 2], response, index=index, attributes=attributes, **changes)


def test_the_loss_is_the_policys_and_the_mean_kl_to_each_teacher():
    config = AlgorithmSection(use_opd=True, opd_type="sglang", opd_teachers={"a": "http://a"}, opd_top_k=3, opd_top_k_coef=0.5)
    lengths, masks = (3, 2), ([1, 0, 1], [1, 1])
    teachers = [[(0.25, distributions(5, 3)), (0.75, distributions(6, 3))], [(1.0, distributions(7, 2))]]
    tops = [[(share, *(x.numpy() for x in reversed(found.topk(3)))) for share, found in of_sample] for of_sample in teachers]
    samples = [taught(i, range(n), top, mask) for i, (n, top, mask) in enumerate(zip(lengths, tops, masks, strict=True))]
    weights = [0.3, 0.1]
    batch = pack(samples, weights).with_fields(**top_k_fields(samples, 3, VOCABULARY))
    assert batch.fields[IDS].shape == (9, 6)
    advantages = torch.linspace(-1, 1, 9) * batch.loss_mask
    batch = batch.with_fields(advantages=advantages)
    logits = distributions(8, 9).requires_grad_()
    policy = logits.log_softmax(-1)
    own = policy.gather(1, batch.labels[:, None] % VOCABULARY)[:, 0]
    loss, metrics = DistillationLoss(PolicyLoss(config))(own, None, batch, policy.gather(1, batch.fields[IDS]))

    expected, spans = 0.0, [range(1, 4), range(6, 8)]
    for of_sample, span, mask, weight in zip(tops, spans, masks, weights, strict=True):
        for at, place in enumerate(span):
            for share, ids, found in of_sample:
                entries = torch.as_tensor(found[at].astype(np.float32).astype(np.float64))
                expected = expected + weight * mask[at] * share * top_k_kl(entries, policy[place, torch.as_tensor(ids[at])])
    alone, _ = PolicyLoss(config)(own, None, batch)
    torch.testing.assert_close(loss, alone + 0.5 * expected, rtol=1e-6, atol=1e-9)
    assert metrics["opd_top_k_kl"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["loss"].item() == pytest.approx(loss.item())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(alone + 0.5 * expected, logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8)
    assert not gradient[[0, 2, 4, 5, 8]].any()  # prompts, the masked token, ends


def test_what_the_mask_excludes_does_not_reach_the_loss():
    config = AlgorithmSection(use_opd=True, opd_type="sglang", opd_teachers={"a": "http://a"}, opd_top_k=2, off_policy="none")
    sample = taught(0, [3, 4], [(1.0, np.array([[0, 1], [2, 3]]), np.log([[0.5, 0.25], [0.5, 0.25]]))], mask=[1, 0])
    batch = pack([sample], [1.0]).with_fields(**top_k_fields([sample], 2, VOCABULARY), advantages=torch.zeros(4))
    candidates = torch.full((4, 2), torch.nan, dtype=torch.float64)
    candidates[1] = torch.tensor([0.5, 0.25]).log()
    candidates.requires_grad_()
    loss, _ = DistillationLoss(PolicyLoss(config))(torch.zeros(4, dtype=torch.float64, requires_grad=True), None, batch, candidates)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert not candidates.grad[[0, 2, 3]].any()


def test_a_rank_without_samples_has_the_same_fields():
    fields = top_k_fields([], 4, VOCABULARY)
    assert {name: tuple(values.shape) for name, values in fields.items()} == {IDS: (2, 4), LOG_PROBS: (2, 4), SHARES: (2, 1)}


@table(
    ("change", "words"),
    [
        ({IDS: None}, "the sample has none"),
        ({IDS: np.zeros((2, 3), np.int32)}, "expected \\(2, 2\\): opd_top_k = 2"),
        ({IDS: np.full((2, 2), -1, np.int32)}, "not ids"),
        ({IDS: np.zeros((2, 2), np.float32)}, "not ids"),
        ({IDS: np.full((2, 2), VOCABULARY, np.int32)}, "the policy's tokens: is the teacher's vocabulary another"),
        ({LOG_PROBS: np.full((2, 2), np.nan, np.float32)}, "not finite numbers"),
        ({LOG_PROBS: np.full((2, 2), 0.5, np.float32)}, "at most 0"),
        ({SHARES: np.array([-1.0], np.float32)}, "not finite numbers"),
        ({SHARES: np.zeros(0, np.float32)}, "expected"),
    ],
)
def test_entries_that_do_not_fit_are_refused(change, words):
    sample = taught(0, [3, 4], [(1.0, np.zeros((2, 2)), np.full((2, 2), -1.0))])
    attributes = {name: value for name, value in {**sample.attributes, **change}.items() if value is not None}
    with pytest.raises(BadSample, match=words):
        top_k_fields([dataclasses.replace(sample, attributes=attributes)], 2, VOCABULARY)
