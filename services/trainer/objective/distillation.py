"""Distillation of the teachers' distributions, where they give more than the log-probs of the sampled tokens: `opd_top_k`.

A token has the k most probable entries of each of its teachers. All other entries count as one, for the teacher and for the policy, so that
what is compared are two distributions: the divergence is 0 where they are equal, and with k = V it is the KL of the whole ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.objective.loss import PolicyLoss
from services.trainer.objective.reduce import MaskedTokens, Metrics
from services.trainer.packing import BadSample, PackedBatch, places
from shared.runtime.telemetry import declare_metrics
from shared.schema.sample import LOG_PROBS as RANGE
from shared.schema.sample import Sample

declare_metrics("""
    train/opd_top_k_kl | nats | the KL to the teachers' distributions, over their entries and all others as one | with `opd_top_k`
""")

# Fields of a micro-batch with M teachers at most a sample: int64 [T, M k], float32 [T, M k], and the weight of each teacher, [T, M]
IDS, LOG_PROBS, SHARES = "teacher_top_ids", "teacher_top_log_probs", "teacher_top_shares"
SMALLEST_REST = 1e-6  # the probability of all other entries below which they are rounding: float32 has seven digits of the entries' sum


def top_k_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """Returns the KL of the policy from the teacher over k entries and all others together: [...], at least 0 but for rounding.

    Args:
        teacher, policy: log-probs of the same k entries, [..., k].

    Source: knowledge distillation, Hinton et al. 2015 (arXiv:1503.02531); on the policy's own samples, the forward KL of Agarwal et al.
    2024 (arXiv:2306.13649).
    """
    rest = 1.0 - teacher.exp().sum(-1)
    of_policy = (1.0 - policy.exp().sum(-1)).clamp(min=SMALLEST_REST)
    of_rest = rest.clamp(min=SMALLEST_REST) * (rest.clamp(min=SMALLEST_REST).log() - of_policy.log())
    return (teacher.exp() * (teacher - policy)).sum(-1) + torch.where(rest > SMALLEST_REST, of_rest, 0.0)


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of ``policy`` plus ``opd_top_k_coef`` times the mean of the teachers' `top_k_kl`, each with its weight.

    An instance is a `LossFunction` that an actor calls with the policy's log-probs of the field ``candidates`` as well. Metrics: those of
    the policy's loss, and opd_top_k_kl.
    """

    policy: PolicyLoss
    candidates = IDS

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, candidates: Tensor) -> tuple[Tensor, Metrics]:
        """Returns loss and metrics. ``candidates``: the policy's log-probs of ``batch.fields[IDS]``, [T, M k]. Raises MissingField."""
        loss, metrics = self.policy(log_probs, entropy, batch)
        tokens, shares = MaskedTokens(log_probs, batch), batch.fields[SHARES]
        shape = (*shares.shape, -1)
        kept = torch.where(tokens.mask[:, None], candidates.to(tokens.dtype), 0.0).view(shape)
        kl = (shares * top_k_kl(batch.fields[LOG_PROBS].to(tokens.dtype).view(shape), kept)).sum(-1)
        mean = tokens.mean(tokens.blank(kl))
        loss = loss + self.policy.config.opd_top_k_coef * mean
        metrics["opd_top_k_kl"] = mean.detach()
        return loss, metrics | {"loss": loss.detach()}


Entries = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]


def top_k_fields(samples: Sequence[Sample], k: int, vocabulary: int) -> dict[str, Tensor]:
    """Returns the fields of `services.trainer.objective.distillation` for samples that are packed in this order.

    Samples have as many teachers as their prompts name; where one has fewer than others, the rest weighs 0.

    Raises BadSample for a sample without the entries, with others than k a teacher and token, or of ids beyond the policy's ``vocabulary``.
    """
    entries = [_entries(sample, k, vocabulary) for sample in samples]
    most = max((len(shares) for _, _, shares in entries), default=1)
    total, spans = places(samples)
    ids, log_probs = np.zeros((total, most * k), np.int64), np.zeros((total, most * k), np.float32)
    shares_of = np.zeros((total, most), np.float32)
    for span, (own_ids, own_log_probs, shares) in zip(spans, entries, strict=True):
        ids[span, : own_ids.shape[1]], log_probs[span, : own_ids.shape[1]] = own_ids, own_log_probs
        shares_of[span, : len(shares)] = shares
    return {IDS: torch.from_numpy(ids), LOG_PROBS: torch.from_numpy(log_probs), SHARES: torch.from_numpy(shares_of)}


def _entries(sample: Sample, k: int, vocabulary: int) -> Entries:
    """Returns ids and log-probs, [R, M k], and the weights of the M teachers."""
    try:
        ids, log_probs, shares = (np.asarray(sample.attributes[name]) for name in (IDS, LOG_PROBS, SHARES))
    except KeyError:
        raise BadSample(sample.name, IDS, "the sample has none; with opd_top_k the servers of opd_teachers give them") from None
    wanted = (len(sample.response), shares.size * k)
    if ids.shape != wanted or log_probs.shape != wanted or shares.ndim != 1 or not shares.size:
        raise BadSample(sample.name, IDS, f"shapes {ids.shape} and {log_probs.shape}; expected {wanted}: opd_top_k = {k} a teacher")
    if ids.dtype.kind not in "iu" or ((ids < 0) | (ids >= vocabulary)).any():
        raise BadSample(sample.name, IDS, f"not ids from 0 to {vocabulary - 1}, the policy's tokens: is the teacher's vocabulary another?")
    least, most = RANGE
    if not ((log_probs >= least) & (log_probs <= most)).all() or not (np.isfinite(shares) & (shares >= 0)).all():
        raise BadSample(sample.name, LOG_PROBS, "not finite numbers, at most 0")
    return ids, log_probs, shares
