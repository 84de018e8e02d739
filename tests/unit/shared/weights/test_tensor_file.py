"""Safetensors files as bytes, held against the library that made the format."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as library

from shared.transfer import tensor_file
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles

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


def damaged(header: dict[str, object], data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


@pytest.mark.parametrize(
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
    ],
)
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(TensorFileBroken, match=r"x\.safetensors is no safetensors file"):
        TensorFiles([tmp_path / "x.safetensors"])
