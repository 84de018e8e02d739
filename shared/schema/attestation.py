"""What the trainer says that it trained, in one digest: it makes it of the tokens that its ranks have read, the audit of the ledger.

Of a batch every sample counts that has a trained token: no filter took it out, and its mask, without tokens older than the batch's
``mask_below``, is not 0 everywhere.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shared.schema.messages import Attestation, SampleMeta

DIGEST_BYTES = 16

NOTHING_OLD = -1
"""The oldest version of a step in which no token was trained."""


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample of a batch: its group's id and its position there; ``trained`` tokens, the oldest of version ``oldest``; `token_digest`."""

    group: str
    position: int
    trained: int
    oldest: int
    digest: int


def attest(samples: Iterable[TrainedSample]) -> Attestation:
    """Returns the attestation of a batch's samples, in the batch's order; those without a trained token are left out."""
    trained = [sample for sample in samples if sample.trained]
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for sample in trained:
        found.update(f"{sample.group}/{sample.position}/{sample.digest:016x};".encode())
    return Attestation(
        oldest=min((sample.oldest for sample in trained), default=NOTHING_OLD),
        samples=len(trained),
        tokens=sum(sample.trained for sample in trained),
        digest=found.hexdigest(),
    )


def attest_scored(groups: Iterable[tuple[str, Sequence[SampleMeta], Collection[int]]], mask_below: int) -> Attestation:
    """Returns the attestation of a batch as it follows from what was scored.

    Args:
        groups: in the batch's order: each one's id, its samples, and the positions of those that a filter took out of the loss.
    """
    return attest(
        _as_trained(group, position, meta, mask_below)
        for group, samples, removed in groups
        for position, meta in enumerate(samples)
        if position not in removed
    )


def _as_trained(group: str, position: int, meta: SampleMeta, mask_below: int) -> TrainedSample:
    spans = meta.spans or ((meta.oldest, meta.trained),)
    fresh = [(version, tokens) for version, tokens in spans if version >= mask_below and tokens]
    oldest = min((version for version, _ in fresh), default=NOTHING_OLD)
    return TrainedSample(group, position, sum(tokens for _, tokens in fresh), oldest, meta.digest)
