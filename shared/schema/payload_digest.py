"""The reference to a payload: whoever writes blobs announces their sizes and their digest, and whoever reads them compares.

The digest is BLAKE3's, 16 bytes, keyed by the run's id: that of one run fits nothing of another. The key is no secret, and needs to be
none: the digest travels by another way than the blobs, in messages that only the account of who announces may publish, and nobody finds
other blobs of the same digest. So a payload cannot be changed once it was announced; what it holds is the word of who wrote it.

That asks for a cryptographic hash. xxHash would take a tenth of the time, but whoever knows its key finds other blobs of the same digest,
and all services of a run would have to know it. Among those that are cryptographic BLAKE3 is the fastest, six times as fast as BLAKE2b.
"""

import functools
from collections.abc import Iterable, Mapping

from blake3 import blake3

from shared.runtime.errors import BadMessage, PayloadChanged
from shared.schema.messages import Payload

DIGEST_BYTES = 16

MOST_BYTES = 256 << 20
"""The largest payload that is written or read: about 20 million tokens."""


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
