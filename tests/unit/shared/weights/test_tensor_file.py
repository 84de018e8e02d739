"""Safetensors files as bytes, held against the library that made the format."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as library

from shared.transfer import tensor_file
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles
from tests.support.tables import table

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
