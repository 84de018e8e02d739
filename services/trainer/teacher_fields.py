"""The teachers' distributions that come with samples (`algorithm.opd_top_k`), as fields of a micro-batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.objective.distillation import IDS, LOG_PROBS, SHARES
from services.trainer.packing import BadSample, places
from shared.schema.sample import LOG_PROBS as RANGE
from shared.schema.sample import Sample

Entries = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]


def top_k_fields(samples: Sequence[Sample], k: int) -> dict[str, Tensor]:
    """Returns the fields of `services.trainer.objective.distillation` for samples that are packed in this order.

    Samples have as many teachers as their prompts name; where one has fewer than others, the rest weighs 0.

    Raises BadSample for a sample without the entries, or with others than k a teacher and token.
    """
    entries = [_entries(sample, k) for sample in samples]
    most = max((len(shares) for _, _, shares in entries), default=1)
    total, spans = places(samples)
    ids, log_probs = np.zeros((total, most * k), np.int64), np.zeros((total, most * k), np.float32)
    shares_of = np.zeros((total, most), np.float32)
    for span, (own_ids, own_log_probs, shares) in zip(spans, entries, strict=True):
        ids[span, : own_ids.shape[1]], log_probs[span, : own_ids.shape[1]] = own_ids, own_log_probs
        shares_of[span, : len(shares)] = shares
    return {IDS: torch.from_numpy(ids), LOG_PROBS: torch.from_numpy(log_probs), SHARES: torch.from_numpy(shares_of)}


def _entries(sample: Sample, k: int) -> Entries:
    """Returns ids and log-probs, [R, M k], and the weights of the M teachers."""
    try:
        ids, log_probs, shares = (np.asarray(sample.attributes[name]) for name in (IDS, LOG_PROBS, SHARES))
    except KeyError:
        raise BadSample(sample.name, IDS, "the sample has none; with opd_top_k the servers of opd_teachers give them") from None
    wanted = (len(sample.response), shares.size * k)
    if ids.shape != wanted or log_probs.shape != wanted or shares.ndim != 1 or not shares.size:
        raise BadSample(sample.name, IDS, f"shapes {ids.shape} and {log_probs.shape}; expected {wanted}: opd_top_k = {k} a teacher")
    if ids.dtype.kind not in "iu" or (ids < 0).any():
        raise BadSample(sample.name, IDS, "not ids of tokens")
    least, most = RANGE
    if not ((log_probs >= least) & (log_probs <= most)).all() or not (np.isfinite(shares) & (shares >= 0)).all():
        raise BadSample(sample.name, LOG_PROBS, "not finite numbers, at most 0")
    return ids, log_probs, shares
