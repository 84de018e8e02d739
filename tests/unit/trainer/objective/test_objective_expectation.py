"""Expected gradients, exactly: a softmax policy over a few tokens, of which every response is enumerated with its probability."""

import numpy as np
import torch
from torch import Tensor

from services.trainer.objective.loss import PolicyLoss
from services.trainer.packing import PackedBatch, pack
from shared.config.algorithm import AlgorithmSection
from tests.support.tables import table
from tests.support.train_samples import train_sample

TOKENS = 5


def policies(seed: int, nats: float) -> dict[str, Tensor]:
    """Logits of the policy being trained, of that at batch start, the rollout's and the reference's, ``nats`` from one another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(TOKENS, generator=generator, dtype=torch.float64)

    base = draw(1.0)
    return {name: base + draw(nats) for name in ("current", "proximal", "rollout", "reference")}


def every_response(logits: dict[str, Tensor], drawn_from: str, advantages: Tensor) -> tuple[Tensor, PackedBatch]:
    """One response of one token for each token, weighted by its probability under the policy that draws: the loss is its expectation."""
    found = {name: value.log_softmax(0) for name, value in logits.items()}
    weights = found[drawn_from].exp().tolist()
    samples = [
        train_sample([1], [token], [0], mask=np.ones(1, dtype=np.uint8), log_probs=found["rollout"][token : token + 1].numpy(), index=token)
        for token in range(TOKENS)
    ]
    batch = pack(samples, weights)

    def spread(values: Tensor) -> Tensor:  # a prompt of one token: the response's place is the first of two
        return torch.stack([values, torch.zeros_like(values)], 1).flatten()

    fields = {
        "advantages": spread(advantages),
        "rollout_log_probs": spread(found["rollout"]),
        "proximal_log_probs": spread(found["proximal"]),
        "ref_log_probs": spread(found["reference"]),
        "weights": spread(torch.tensor(weights, dtype=torch.float64)),
    }
    return spread(logits["current"].log_softmax(0)), batch.with_fields(**fields)


def gradient_of_loss(config: AlgorithmSection, logits: dict[str, Tensor], drawn_from: str, advantages: Tensor) -> Tensor:
    current = logits["current"].clone().requires_grad_()
    log_probs, batch = every_response(logits | {"current": current}, drawn_from, advantages)
    PolicyLoss(config)(log_probs, None, batch.with_fields(**{k: v.detach() for k, v in batch.fields.items()}))[0].backward()
    assert current.grad is not None
    return current.grad


def gradient_of_kl(logits: dict[str, Tensor]) -> Tensor:
    current = logits["current"].clone().requires_grad_()
    log_probs = current.log_softmax(0)
    (log_probs.exp() * (log_probs - logits["reference"].log_softmax(0))).sum().backward()
    assert current.grad is not None
    return current.grad


@table("kind", ["k1", "k3"])
@table("off_policy", ["decoupled", "rollout"])
def test_the_unbiased_kl_has_the_gradient_of_the_kl(kind: str, off_policy: str) -> None:
    config = AlgorithmSection(off_policy=off_policy, use_unbiased_kl=True, kl_loss_coef=1.0, kl_loss_type=kind)
    for seed in range(5):
        logits = policies(seed, 0.6)
        found = gradient_of_loss(config, logits, "rollout", torch.zeros(TOKENS, dtype=torch.float64))
        torch.testing.assert_close(found, gradient_of_kl(logits), rtol=1e-9, atol=1e-12)


def test_without_a_correction_the_policy_at_batch_start_counts_as_the_one_that_drew() -> None:
    config = AlgorithmSection(off_policy="none", use_unbiased_kl=True, kl_loss_coef=1.0)
    logits = policies(3, 0.6)
    found = gradient_of_loss(config, logits, "proximal", torch.zeros(TOKENS, dtype=torch.float64))
    torch.testing.assert_close(found, gradient_of_kl(logits), rtol=1e-9, atol=1e-12)
