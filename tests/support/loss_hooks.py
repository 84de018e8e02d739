"""Losses of a user's own that fail for some samples, or for all."""

from typing import Any

import torch
from torch import Tensor

MARK = 7
"""A token that the loss cannot bear."""


def fails_for_a_token(args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> Tensor:
    """Fails for a micro-batch that holds `MARK`, as an index error of a kernel would, without a word about which sample it was."""
    if bool((batch["tokens"] == MARK).any()):
        raise IndexError("index out of range in self")
    return _log_likelihood(batch, logits, sum_of_sample_mean)


def is_nan_for_a_token(args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> Tensor:
    """Gives no number for a micro-batch that holds `MARK`."""
    return _log_likelihood(batch, logits, sum_of_sample_mean) * (torch.nan if bool((batch["tokens"] == MARK).any()) else 1.0)


def _log_likelihood(batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> Tensor:
    of_label = torch.log_softmax(logits[0].float(), -1).gather(1, batch["labels"][:, None]).squeeze(1)
    loss: Tensor = -sum_of_sample_mean(of_label)
    return loss


def fails_always(args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> Tensor:
    """Fails for whatever it gets."""
    raise IndexError("index out of range in self")
