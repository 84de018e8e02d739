"""Manifests, digests and files of tensors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as library

from shared.runtime.errors import BadMessage
from shared.transfer import digest, tensor_file
from shared.transfer.bucket_ring import BucketRing, ManifestHasher
from shared.transfer.digest import decoded_digests
from shared.transfer.manifest import ALIGNMENT, ITEM_BYTES, Manifest, lay_out, lay_out_units
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles
from tests.support.tables import table


def test_a_manifest_travels() -> None:
    made = lay_out([("a", "bfloat16", (2, 3)), ("b", "uint8", ()), ("c", "float32", (0,))], 100, "adapter", 0.5)
    assert Manifest.decode(made.encoded) == made


def encoded(buckets: object, kind: object = "weights", scale: object = 1.0) -> bytes:
    return json.dumps({"kind": kind, "scale": scale, "buckets": buckets}).encode()


GOOD = ["a", "float32", [2]]


@table(
    "bad",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        encoded([]).replace(b'"buckets"', b'"other"'),
        encoded([[]]),
        encoded([[GOOD]], kind="other"),
        encoded([[GOOD]], kind=["weights"]),
        encoded([[GOOD]], scale=float("nan")),
        encoded([[GOOD]], scale=float("inf")),
        encoded([[GOOD]], scale=10**400),
        encoded([[GOOD]], scale="x"),
        encoded([[GOOD, GOOD]]),
        encoded([[GOOD], [GOOD]]),
        encoded([[["a", "float32", [-2]]]]),
        encoded([[["a", "float32", [2.0]]]]),
        encoded([[["a", "float32", ["2"]]]]),
        encoded([[["a", "float32", [True]]]]),
        encoded([[["a", "float32", 2]]]),
        encoded([[["a", "float32", "22"]]]),
        encoded([[["a", "float32", [2**62, 2**62]]]]),
        encoded([[["a", "float32", [2**40, 2**40]]]]),
        encoded([[["a", "float32", [1] * 1000]]]),
        encoded([[["a", "complex", [2]]]]),
        encoded([[["a", ["float32"], [2]]]]),
        encoded([[["", "float32", [2]]]]),
        encoded([[["a\n", "float32", [2]]]]),
        encoded([[["\ud800", "float32", [2]]]]),
        encoded([[[1, "float32", [2]]]]),
        encoded([[["a", "float32"]]]),
        encoded({"a": GOOD}),
    ],
)
def test_what_is_no_manifest_is_a_bad_message(bad: bytes) -> None:
    with pytest.raises(BadMessage, match="manifest of weights that cannot be read"):
        Manifest.decode(bad)


def test_digests_that_travelled_are_those_of_tensors() -> None:
    assert decoded_digests({"a": ["float32", [2], 7]})["a"] == ("float32", (2,), 7)
    for bad in (
        ["float32", [2], -1],
        ["float32", [2], 2**64],
        ["float32", [2], 1.0],
        ["x", [2], 1],
        ["float32", [-2], 1],
        ["float32", [2]],
    ):
        with pytest.raises((TypeError, ValueError)):
            decoded_digests({"a": bad})


def test_a_ramped_layout_begins_and_ends_with_small_buckets() -> None:
    units = [[(f"{number}", "uint8", (256,))] for number in range(64)]
    plain, ramped = lay_out_units(units, 256 * 16), lay_out_units(units, 256 * 16, ramped=True)
    assert [len(bucket.slots) for bucket in plain.buckets] == [16, 16, 16, 16]
    assert [len(bucket.slots) for bucket in ramped.buckets] == [4, 8, 16, 16, 10, 5, 4, 1]
    assert [slot.name for slot in ramped.slots()] == [slot.name for slot in plain.slots()]


@table("sizes", [[], [1], [100], [100, 1], [1, 100, 1], [3, 3, 3]])
def test_a_ramped_layout_holds_everything(sizes: list[int]) -> None:
    units = [[(f"{number}", "uint8", (size,))] for number, size in enumerate(sizes)]
    made = lay_out_units(units, 10, ramped=True)
    assert [slot.name for slot in made.slots()] == [str(number) for number in range(len(sizes))]


def test_buffers_are_as_large_as_the_buckets_that_take_them() -> None:
    ring = BucketRing(torch.device("cpu"))
    wide = lay_out([(f"{number}", "uint8", (size,)) for number, size in enumerate([256, 512, 256, 256, 1024, 256])], 1)
    assert ring.reserve(wide) and [len(buffer) for buffer in ring.buffers] == [1024, 512, 256, 256]
    assert not ring.reserve(lay_out([("a", "uint8", (512,)), ("b", "uint8", (512,))], 1))
    assert ring.reserve(lay_out([("a", "uint8", (512,)), ("b", "uint8", (768,))], 1))
    assert [len(buffer) for buffer in ring.buffers] == [1024, 768, 256, 256] and not ring.reserve(wide)


def test_what_an_engine_loads_only_as_one_shares_a_bucket():
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_a_proj.weight", "o_proj.weight")]
    names += [f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in (1, 0)] + [
        "model.layers.2.self_attn.q_a_proj.weight"
    ]
    made = lay_out([(name, "float32", (64,)) for name in names], 1)
    shared = [tuple(slot.name.removeprefix("model.layers.") for slot in bucket.slots) for bucket in made.buckets]
    assert shared == [
        ("0.self_attn.o_proj.weight",),
        ("1.self_attn.o_proj.weight",),
        ("1.self_attn.q_a_proj.weight", "1.self_attn.kv_a_proj_with_mqa.weight"),
        ("0.self_attn.q_a_proj.weight", "0.self_attn.kv_a_proj_with_mqa.weight"),
        ("2.self_attn.q_a_proj.weight",),
    ]


# --- manifests say where tensors lie; digests do not depend on it

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


# --- safetensors files as bytes, held against the library that made the format

ARRAYS = {
    "a": np.arange(3, dtype=np.int8),
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "c": np.zeros((0, 4), dtype=np.int64),
    "d": np.array(True),
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {name: (str(array.dtype), array.shape, array.reshape(-1).view(np.uint8)) for name, array in ARRAYS.items()}
    assert tensor_file.write(path, tensors) == path.stat().st_size
    for name, array in library.load_file(path).items():
        assert array.dtype == ARRAYS[name].dtype and np.array_equal(array, ARRAYS[name])


def test_what_the_library_writes_is_read_and_changed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    library.save_file(ARRAYS, path)
    file = TensorFiles([path], writable=True)
    assert file.tensors == {name: (str(array.dtype), array.shape) for name, array in ARRAYS.items()}
    assert np.array_equal(file["b"].view(np.float32).reshape(2, 3), ARRAYS["b"])
    file["b"].view(np.float32)[4] = 7.5
    assert library.load_file(path)["b"][1, 1] == 7.5


def raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def damaged(header: dict[str, object], data: bytes) -> bytes:
    return raw(json.dumps(header).encode(), data)


def entry(shape: object, offsets: object = (0, 8)) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}


@table(
    "content",
    [
        b"",
        b"short",
        (10**9).to_bytes(8, "little") + b"{}",
        damaged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),  # torn
        damaged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"123456789"),
        damaged({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
        damaged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"12345678"),  # outside
        damaged({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
        damaged({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"12345678"),
        damaged({"a": 3}, b""),
        (2**63).to_bytes(8, "little") + b"{}",
        raw(b"[" * 1_000_000),  # nested deeper than the stack
        raw(b'{"a":' * 1_000_000),
        raw(b'{"__metadata__":' + b"[" * 500 + b"]" * 500 + b"}"),
        raw(b"[]"),
        raw(b"null"),
        raw(b"\xff\xfe"),
        raw(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', b"12345678"),
        raw(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}', b"12345678"),
        raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', b"12345678"),
        damaged(entry([2.0]), b"12345678"),
        damaged(entry(["2"]), b"12345678"),
        damaged(entry([True, 2]), b"12345678"),
        damaged(entry([2**62, 2**62]), b"12345678"),
        damaged(entry([1] * 40 + [2]), b"12345678"),
        damaged(entry([2**62] * 100_000), b"12345678"),
        damaged(entry([2], [0.0, 8.0]), b"12345678"),
        damaged(entry([2], [0, 8, 8]), b"12345678"),
        damaged(entry([2], [0, 2**64]), b"12345678"),
        damaged(entry([0], [2**40, 2**40]), b""),
        damaged({"b": entry([2])["a"], **entry([2])}, b"12345678"),  # two tensors in the same bytes
        damaged({**entry([2]), "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, b"12345678"),
        damaged({"a\0b": entry([2])["a"]}, b"12345678"),
        damaged({"a\nb": entry([2])["a"]}, b"12345678"),
        damaged({"\ud800": entry([2])["a"]}, b"12345678"),
        damaged({"": entry([2])["a"]}, b"12345678"),
        damaged({"x" * 1001: entry([2])["a"]}, b"12345678"),
    ],
)
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(TensorFileBroken, match=r"x\.safetensors is no safetensors file"):
        TensorFiles([tmp_path / "x.safetensors"])


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((tensor_file.HEADER_LIMIT + 1).to_bytes(8, "little"))
        file.truncate(tensor_file.HEADER_LIMIT * 2)
    with pytest.raises(TensorFileBroken, match="should be its header"):
        TensorFiles([path])


def test_a_link_is_followed_only_where_that_is_said(tmp_path: Path) -> None:
    library.save_file(ARRAYS, tmp_path / "blob")
    link = tmp_path / "x.safetensors"
    link.symlink_to(tmp_path / "blob")
    with pytest.raises(TensorFileBroken, match="symbolic link"):
        TensorFiles([link])
    assert TensorFiles([link], links=True).tensors.keys() == ARRAYS.keys()
