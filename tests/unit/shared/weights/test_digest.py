"""Manifests say where tensors lie; digests do not depend on it."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.errors import BadMessage
from shared.transfer import digest
from shared.transfer.bucket_ring import ManifestHasher
from shared.transfer.manifest import ALIGNMENT, ITEM_BYTES, Manifest, lay_out, lay_out_units
from tests.support.tables import table

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=12).map(
    lambda drawn: [(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(drawn)]
)


def digest_of(manifest: Manifest, content: dict[str, bytes]) -> str:
    hasher = ManifestHasher(manifest, torch.device("cpu"))
    for index, bucket in enumerate(manifest.buckets):
        flat = np.random.default_rng(0).integers(0, 256, bucket.nbytes).astype(np.uint8)  # between the tensors lies anything
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.nbytes] = np.frombuffer(content[slot.name], np.uint8)
        hasher.take(index, torch.from_numpy(flat))
    return digest.version_digest(hasher.digests())


@given(specs, st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_digest_does_not_depend_on_the_buckets(drawn: list[tuple[str, str, tuple[int, ...]]], one: int, other: int) -> None:
    content = {slot.name: np.random.default_rng(1).bytes(slot.nbytes) for slot in lay_out(drawn, one).slots()}
    found = digest_of(lay_out(drawn, one), content)
    assert found == digest_of(lay_out(list(reversed(drawn)), other), content)
    name, dtype, shape = drawn[0]
    changed = bytes([content[name][0] ^ 1, *content[name][1:]])
    assert found != digest_of(lay_out(drawn, one), content | {name: changed})
    assert found != digest_of(lay_out([(name, dtype, (*shape, 1)), *drawn[1:]], one), content)  # the same bytes in another shape


def test_leaves_are_xxh3_of_what_is_filled_up_with_zeros() -> None:
    data = np.random.default_rng(2).bytes(digest.LEAF_BYTES + 5)
    leaves = [data[: digest.LEAF_BYTES], data[digest.LEAF_BYTES :].ljust(digest.LEAF_BYTES, b"\0")]
    hashes = b"".join(xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves)
    assert digest.of_bytes(data) == xxhash.xxh3_64_intdigest(hashes)


@given(specs, st.integers(1, 20_000))
def test_a_manifest_comes_back_as_it_was(drawn: list[tuple[str, str, tuple[int, ...]]], bucket_bytes: int) -> None:
    manifest = lay_out(drawn, bucket_bytes, "adapter", 0.5)
    again = Manifest.decode(manifest.encoded)
    assert again == manifest and again.id == manifest.id
    assert [(slot.name, slot.dtype, slot.shape) for slot in manifest.slots()] == drawn
    for bucket in manifest.buckets:
        assert len(bucket.slots) == 1 or bucket.nbytes <= bucket_bytes
        ends = [0, *(slot.offset + slot.nbytes for slot in bucket.slots)]
        assert all(slot.offset % ALIGNMENT == 0 and slot.offset >= end for slot, end in zip(bucket.slots, ends, strict=False))


def test_what_comes_together_shares_a_bucket() -> None:
    units = [[(f"{unit}.{part}", "float32", (64,)) for part in range(3)] for unit in range(4)]
    manifest = lay_out_units(units, 1800)
    assert [[slot.name[0] for slot in bucket.slots] for bucket in manifest.buckets] == [["0"] * 3 + ["1"] * 3, ["2"] * 3 + ["3"] * 3]


@table("damaged", [b"", b"{}", b'{"kind":"weights","scale":1,"buckets":[[]]}', b'{"scale":1,"buckets":[[["a"]]]}'])
def test_a_manifest_that_cannot_be_read_is_refused(damaged: bytes) -> None:
    with pytest.raises(BadMessage, match="manifest of weights"):
        Manifest.decode(damaged)
