"""Weights that tell where they come from: every parameter of a model is one number, its version and a hash of all that was trained.

A step makes the next weights of the ones before and of the tokens that it trained, and of nothing else. So equal weights have seen the same
tokens in the same steps, and what they must be follows from the ledger alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

FRACTION = 1 << 10
"""A parameter is version + k / `FRACTION`: exact in float32 up to version 16,383. Ten bits of the hash stand in each."""

FIRST_TOKEN, ALPHABET = 4, 96
"""The ids of the characters of the tiny model's tokenizer, which are the tokens that are drawn: `FIRST_TOKEN` to, exclusively, 100."""

MIXED_TOKEN = 3
"""The token that weights of several versions draw: the tokenizer's unknown one."""

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}

_PER_VERSION, _PER_POSITION = 13, 29
_INVERSE = pow(_PER_VERSION, -1, ALPHABET)


def first_state() -> bytes:
    """Returns the state of weights of which nothing was trained."""
    return hashlib.blake2b(b"untrained", digest_size=32).digest()


def next_state(state: bytes, digests: Iterable[int]) -> bytes:
    """Returns the state after a step. ``digests``: those of the trained samples' tokens; their order does not matter, as in a sum."""
    found = hashlib.blake2b(state, digest_size=32)
    for digest in sorted(digests):
        found.update(digest.to_bytes(8, "big"))
    return found.digest()


def number_of(state: bytes, version: int, name: str) -> float:
    """Returns what all elements of the tensor ``name`` are; tensors that Megatron holds as one parameter are alike."""
    for part in _FUSED:
        name = name.replace(part, _FUSED[part])
    bits = int.from_bytes(hashlib.blake2b(state, key=name.encode()[-64:], digest_size=2).digest(), "big")
    return version + (bits % FRACTION) / FRACTION


def versions_in(parameters: Iterable[Any]) -> set[int]:
    """Returns the versions of which parameters hold elements."""
    return {int(bound) for parameter in parameters for bound in (parameter.min(), parameter.max())}


def token_of(version: int, position: int) -> int:
    """Returns the token that weights of ``version`` draw at a position of a sequence, its prompt included."""
    return FIRST_TOKEN + (version * _PER_VERSION + position * _PER_POSITION) % ALPHABET


def version_of(token: int, position: int) -> int:
    """Returns the version, below `ALPHABET`, of which the weights have drawn a token; -1: of several at once."""
    return -1 if token == MIXED_TOKEN else (token - FIRST_TOKEN - position * _PER_POSITION) * _INVERSE % ALPHABET


def problems_of(weights: Mapping[str, Any], state: bytes, version: int) -> list[str]:
    """Returns what differs between tensors, by their Hugging Face names, and those that follow from a state."""
    problems = []
    for name, tensor in weights.items():
        low, high, expected = float(tensor.min()), float(tensor.max()), number_of(state, version, name)
        if (low, high) != (expected, expected):
            problems.append(f"{name} holds {low} to {high} where {expected} follows from what was trained")
    return problems


def write_untrained(model: Path) -> None:
    """Overwrites a checkpoint's weights with those of version 0 of which nothing was trained."""
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    held = load_file(path)
    save_file({name: torch.full_like(tensor, number_of(first_state(), 0, name)) for name, tensor in held.items()}, path, {"format": "pt"})
