"""Digests of what the store holds and of what was trained.

The reference to a payload: whoever writes blobs announces their sizes and their digest, and whoever reads them compares. The digest is
BLAKE3's, 16 bytes, keyed by the run's id: that of one run fits nothing of another. The key is no secret, and needs to be none: the digest
travels by another way than the blobs, in messages that only the account of who announces may publish, and no one finds other blobs of the
same digest. So a payload cannot be changed once it was announced; what it holds is the word of who wrote it. That asks for a cryptographic
hash, of which BLAKE3 is the fastest, six times as fast as BLAKE2b: whoever knows xxHash's key, and all services would have to, finds other
blobs of the same digest.

The attestation: the trainer makes it of the tokens that its ranks have read, the audit of the ledger. Of a batch every sample counts that
has a trained token: no filter took it out, and its mask, without tokens older than the batch's ``mask_below``, is not 0 everywhere.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from shared.runtime.errors import BadMessage, PayloadChanged
from shared.schema.messages import Attestation, Payload, SampleMeta

DIGEST_BYTES = 16
MOST_BYTES = 256 << 20  # The largest payload that is written or read: about 20 million tokens


def payload_digest(run: str, blobs: Iterable[bytes]) -> str:
    """Returns the digest of a payload's blobs in their order, each with its length: 32 hexadecimal digits."""
    found = blake3(key=_key(run))
    for blob in blobs:
        found.update(len(blob).to_bytes(8, "little"))
        found.update(blob)
    return found.hexdigest(DIGEST_BYTES)


@functools.cache
def _key(run: str) -> bytes:
    return blake3(run.encode()).digest()


def reference(run: str, blobs: Mapping[str, bytes], tokens: Iterable[int] = ()) -> Payload:
    """Returns the reference to blobs, by key. Raises BadMessage where they are over `MOST_BYTES`.

    Args:
        tokens: the length of each sample, as in `Payload`.
    """
    sizes = tuple(map(len, blobs.values()))
    payload = Payload(keys=list(blobs), bytes=sum(sizes), sizes=sizes if len(sizes) > 1 else (), tokens=tuple(tokens))
    blob_limits(payload)
    return payload.model_copy(update={"digest": payload_digest(run, blobs.values())})


def blob_limits(payload: Payload) -> tuple[int, ...]:
    """Returns how many bytes of each blob are read at most. Raises BadMessage where the reference's own figures do not fit."""
    sizes = payload.sizes or (payload.bytes,)
    if len(sizes) != len(payload.keys) or sum(sizes) != payload.bytes or min(sizes) < 0:
        raise BadMessage(f"a payload of {payload.bytes} bytes at {payload.keys[0]} whose {len(payload.keys)} blobs have the sizes {sizes}")
    if payload.bytes > MOST_BYTES:
        raise BadMessage(f"a payload of {payload.bytes} bytes at {payload.keys[0]}; the most is {MOST_BYTES}")
    return sizes


def check_payload(run: str, payload: Payload, blobs: Iterable[bytes]) -> None:
    """Raises PayloadChanged where the blobs are not those that were announced."""
    if (found := payload_digest(run, blobs)) != payload.digest:
        announced = f"{payload.digest} was announced" if payload.digest else "none was announced"
        raise PayloadChanged(f"the store's payload at {payload.keys[0]} has the digest {found}; {announced}: it was overwritten or damaged")


NOTHING_OLD = -1  # The oldest version of a step in which no token was trained


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
