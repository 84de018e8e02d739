"""A tensor's change between two versions: small, and bit-equal when laid over the older one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.errors import BadMessage
from shared.transfer import weight_checkpoint
from shared.transfer.weight_checkpoint import apply_delta, encode_delta

ENCODINGS = pytest.mark.parametrize("encoding", ["xor", "overwrite", "magnitude", "auto"])


MAGNITUDE = encode_delta(np.zeros(4, np.uint8), np.ones(4, np.uint8), 4, "magnitude")


def bf16(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


@ENCODINGS
@given(data=st.data(), item=st.sampled_from([1, 2, 4, 8]), length=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_any_bits_come_back(encoding: weight_checkpoint.DeltaEncoding, data: st.DataObject, item: int, length: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, length * item, dtype=np.uint8)
    new = old.copy()
    for place in data.draw(st.lists(st.integers(0, length * item - 1), max_size=6)):
        new[place] = random.integers(0, 256)
    parts, target = encode_delta(old, new, item, encoding), old.copy()
    if parts:
        apply_delta(target, parts, item)
    assert np.array_equal(target, new) and bool(parts) == (not np.array_equal(old, new))


@ENCODINGS
def test_tensors_of_several_chunks(encoding: weight_checkpoint.DeltaEncoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checkpoint, "CHUNK_BYTES", 64)
    monkeypatch.setattr(weight_checkpoint, "BLOCK", 5)
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 1000, dtype=np.uint8)
    new = np.where(random.random(1000) < 0.1, random.integers(0, 256, 1000), old).astype(np.uint8)
    target = old.copy()
    apply_delta(target, encode_delta(old, new, 4, encoding), 4)
    assert np.array_equal(target, new)


@ENCODINGS
def test_a_small_step_of_bfloat16_is_a_small_change(encoding: weight_checkpoint.DeltaEncoding) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal(200_000) * 0.02
    old, new = bf16(weights), bf16(weights + 1e-6 * random.choice([-1, 1], len(weights)))
    parts = encode_delta(old, new, 2, encoding)
    most = 0.08 if encoding in ("xor", "overwrite") else 0.025
    assert sum(part.nbytes for part in parts.values()) < most * len(old)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "made of nothing"),
        ({"xor": np.zeros(3, np.uint8)}, "cannot be unpacked"),
        ({"values": np.zeros(3, np.uint8)}, r"made of \['values'\]"),
        (encode_delta(np.zeros(400, np.uint8), np.ones(400, np.uint8), 4, "xor"), "at most 40 fit"),
        (encode_delta(np.zeros(20, np.uint8), np.ones(20, np.uint8), 4, "xor"), "20 bytes for a tensor of 40"),
        (encode_delta(np.zeros(48, np.uint8), np.repeat([0, 1], [44, 4]).astype(np.uint8), 4, "magnitude"), "element 11 of 10"),
        (MAGNITUDE | {"steps": MAGNITUDE["near"]}, "1 bytes of elements of 4"),
        (MAGNITUDE | {"far": encode_delta(np.zeros(8, np.uint8), np.ones(8, np.uint8), 1, "xor")["xor"]}, "1 of 0 long ones"),
        (encode_delta(np.zeros(48, np.uint8), np.repeat([0, 1], [44, 4]).astype(np.uint8), 4, "overwrite"), "element 11 of 10|beyond"),
    ],
)
def test_what_does_not_fit_is_refused(parts: weight_checkpoint.DeltaParts, message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        apply_delta(np.zeros(40, np.uint8), parts, 4)
