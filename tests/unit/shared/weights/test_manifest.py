"""What arrives as a manifest: read as it was laid out, or refused."""

import json

import pytest

from shared.runtime.errors import BadMessage
from shared.transfer.digest import decoded_digests
from shared.transfer.manifest import Manifest, lay_out


def test_a_manifest_travels() -> None:
    made = lay_out([("a", "bfloat16", (2, 3)), ("b", "uint8", ()), ("c", "float32", (0,))], 100, "adapter", 0.5)
    assert Manifest.decode(made.encoded) == made


def encoded(buckets: object, kind: object = "weights", scale: object = 1.0) -> bytes:
    return json.dumps({"kind": kind, "scale": scale, "buckets": buckets}).encode()


GOOD = ["a", "float32", [2]]


@pytest.mark.parametrize(
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
