"""Spoils bytes and values: what a broken, an old or a hostile sender could make of them. Everything comes from one seeded generator."""

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

EDGES = [0, 1, -1, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


ODD: list[Any] = [
    None, True, False, *EDGES, 0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    "", " ", "a", "a" * 300, "\0", "a\nb", "\x1b[2J", "\u202e", "\ud800", "..", "../..", "/etc/passwd", "-1", "1e999", "NaN",
    "<script>", "[red]",
    b"", b"\0", b"\xff" * 9, [], [None], [[]] * 9, [0] * 300, {}, {"": None}, {"a": {"a": {}}}, {"schema": 1}, deep(30), deep(300),
    {"dtype": "<i4", "shape": [1], "data": b"\1\0\0\0"}, {"dtype": "<i4", "shape": [2**62, 4], "data": b""},
    {"dtype": "|O", "shape": [1], "data": b"12345678"}, {"dtype": "<f4", "shape": [-1], "data": b"1234"},
    {"dtype": "<f4", "shape": [1, 1, 1], "data": b"\0\0\xc0\x7f"},
]  # fmt: skip


def spoiled_bytes(dice: random.Random, data: bytes) -> bytes:
    """Returns the bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 4])):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = dice.randrange(256)
            case 2:
                del changed[at : at + dice.choice([1, 2, 8, 64])]
            case 3:
                changed[at:at] = dice.randbytes(dice.choice([1, 2, 8, 64]))
            case 4:
                size = dice.choice([1, 2, 4, 8])
                changed[at : at + size] = (dice.choice(EDGES) % 256**size).to_bytes(size, dice.choice(["big", "little"]))
            case 5:
                other = dice.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + dice.randrange(1, 100)]
            case 6:
                del changed[at:]
    return bytes(changed)


def spoiled(dice: random.Random, value: Any) -> Any:
    """Returns a copy of a plain value in which one place holds something else, is missing, or is there twice."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        match dice.randrange(8):
            case 0:
                return {name: held for name, held in value.items() if name != key}
            case 1:
                return {**value, dice.choice(["more", "", "__class__", "kind", key]): dice.choice(ODD)}
            case _:
                return {**value, key: spoiled(dice, value[key])}
    if isinstance(value, list | tuple) and value and dice.random() < 0.9:
        at, held = dice.randrange(len(value)), list(value)
        match dice.randrange(6):
            case 0:
                return held[:at] + held[at + 1 :]
            case 1:
                return held[:at] + [held[at]] * dice.choice([2, 3, 100]) + held[at:]
            case _:
                return [*held[:at], spoiled(dice, held[at]), *held[at + 1 :]]
    return dice.choice(ODD)


def as_msgpack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass", default=str))


def as_json(value: Any) -> bytes:
    """JSON as Python writes it: NaN and lone surrogates are in it."""
    return json.dumps(value, default=str).encode()


def spoiled_text(dice: random.Random, encoded: bytes, read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> bytes:
    """Spoils an encoded value: as bytes, as a value, or both."""
    if (how := dice.randrange(4)) == 0:
        return spoiled_bytes(dice, encoded)
    value = read(encoded)
    for _ in range(dice.choice([1, 1, 1, 3])):
        value = spoiled(dice, value)
    try:
        encoded = write(value)
    except (ValueError, TypeError, OverflowError, RecursionError):  # it cannot be written in this format
        return spoiled_bytes(dice, encoded)
    return spoiled_bytes(dice, encoded) if how == 1 else encoded
