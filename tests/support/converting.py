"""``myxo convert`` in this process, which stays as it was: the command hides GPUs and warnings from its own."""

import warnings
from pathlib import Path

import pytest

from services.trainer import convert_command


def convert(source: Path, target: Path, *options: str) -> int:
    """Returns the exit code."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return convert_command.main([str(source), str(target), *options])


def quantized_checkpoint(source: Path, target: Path, to: str, *options: str) -> Path:
    """Makes a checkpoint with weights of fewer bits; returns its directory."""
    assert convert(source, target, "--to", to, *options) == 0
    return target


def to_8_bits(source: Path, target: Path, block: int, *options: str) -> Path:
    """Makes a checkpoint in blocks of 8-bit floats; returns its directory."""
    return quantized_checkpoint(source, target, "fp8-block", "--block", str(block), str(block), *options)
