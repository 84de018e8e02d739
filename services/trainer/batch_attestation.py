"""The trainer's account of a step: which tokens its ranks' micro-batches hold, and which of them are trained."""

from itertools import pairwise

import numpy as np

from services.trainer.batch_metrics import Sum
from services.trainer.batches import TrainBatch
from shared.schema.digests import TrainedSample, attest
from shared.schema.messages import Attestation
from shared.schema.sample import token_digest

_HALF = 1 << 32
"""A digest goes into the table in two halves, each exact in float64."""


def attestation_of(batch: TrainBatch, total: Sum) -> Attestation:
    """Returns the attestation of the whole batch, the same on every rank.

    Args:
        total: the sum of a table over the data-parallel ranks; a collective.
    """
    items, groups = batch.partition.items, batch.partition.batch.groups
    table = np.zeros((len(items), 4))  # of each sample: trained tokens, the oldest one's version, both halves of the digest
    for micro_batch in (micro_batch for step in batch.steps for micro_batch in step):
        packed = micro_batch.packed
        tokens, mask, versions = packed.tokens.numpy(), packed.loss_mask.numpy() > 0, packed.fields["versions"].numpy()
        for index, (start, end) in zip(micro_batch.indices, pairwise(packed.cu_seqlens.tolist()), strict=False):
            trained = versions[start:end][mask[start:end]]
            digest = token_digest(tokens[start:end])
            table[index] = len(trained), trained.min() if len(trained) else 0, digest // _HALF, digest % _HALF
    rows = zip(items, total(table).astype(np.int64).tolist(), strict=True)
    return attest(
        TrainedSample(groups[item.group].group, item.position, trained, oldest, high * _HALF + low)
        for item, (trained, oldest, high, low) in rows
    )
