"""What arrives as a manifest: read as it was laid out, or refused."""

import json

import pytest
import torch

from shared.runtime.errors import BadMessage
from shared.transfer.bucket_ring import BucketRing
from shared.transfer.digest import decoded_digests
from shared.transfer.manifest import Manifest, lay_out, lay_out_units
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
