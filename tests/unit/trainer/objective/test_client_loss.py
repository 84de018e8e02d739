"""The losses that clients name are those that are documented, by their formulas in plain numbers."""

import math

import numpy as np
import torch

from services.trainer.command_worker import packed
from services.trainer.objective.policy_gradient import ClientLoss, token_losses
from tests.support.tables import table

P, Q, A, W = [-0.5, -2.0, -1.0], [-1.0, -1.0, -3.0], [1.0, -2.0, 0.5], [1.0, 0.0, 2.5]
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
R = [math.exp(p - q) for p, q in zip(P, Q, strict=True)]


def clip(value: float) -> float:
    return min(max(value, 0.8), 1.2)


FORMULAS = {
    "cross_entropy": ({}, [-w * p for w, p in zip(W, P, strict=True)], [-w for w in W]),
    "importance_sampling": ({}, [-r * a for r, a in zip(R, A, strict=True)], [-r * a for r, a in zip(R, A, strict=True)]),
    "ppo": (
        BOUNDS,
        [-min(r * a, clip(r) * a) for r, a in zip(R, A, strict=True)],
        [-r * a if r * a <= clip(r) * a else 0.0 for r, a in zip(R, A, strict=True)],
    ),
    "cispo": (BOUNDS, [-clip(r) * a * p for r, a, p in zip(R, A, P, strict=True)], [-clip(r) * a for r, a in zip(R, A, strict=True)]),
    "dro": (
        {"beta": 0.1},
        [-(a * p - 0.05 * (p - q) ** 2) for p, q, a in zip(P, Q, A, strict=True)],
        [-(a - 0.1 * (p - q)) for p, q, a in zip(P, Q, A, strict=True)],
    ),
}


@table("loss", FORMULAS)
def test_value_and_gradient(loss: str) -> None:
    config, values, gradient = FORMULAS[loss]
    log_probs = torch.tensor(P, requires_grad=True)
    fields = {"logprobs": torch.tensor(Q), "advantages": torch.tensor(A), "weights": torch.tensor(W)}
    found = token_losses(loss, config, log_probs, fields)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.tensor(values))
    torch.testing.assert_close(log_probs.grad, torch.tensor(gradient))


@table("loss", FORMULAS)
def test_a_rank_without_datums_trains_nothing(loss: str) -> None:
    log_probs = torch.tensor([-12.0, -12.0], requires_grad=True)
    found, _ = ClientLoss(loss, FORMULAS[loss][0])(log_probs, None, packed([]))
    found.backward()
    assert found.item() == 0.0 and not log_probs.grad.any()


def test_every_token_of_a_datum_is_trained() -> None:
    numbers = {"logprobs": np.array(Q, np.float32), "advantages": np.array(A, np.float32)}
    batch = packed([{"tokens": np.arange(3, dtype=np.int32), "target_tokens": np.arange(3, dtype=np.int32), **numbers}])
    found, _ = ClientLoss("dro", {"beta": 0.1})(torch.tensor(P), None, batch)
    torch.testing.assert_close(found, torch.tensor(sum(FORMULAS["dro"][1])))
