"""The leaves of `shared.transfer.digest` on a GPU, at its memory's speed: one program a leaf. Triton, which comes with torch for CUDA.

XXH3 of 64 bits with seed 0, for inputs of exactly `LEAF_BYTES`. Such an input is 64 blocks of 16 stripes of 64 bytes. Within a block the
stripes' contributions to the eight accumulators are sums, so they are taken all at once; between blocks the accumulators are scrambled. In
the last block the last stripe has a key of its own, and no scrambling follows. Source: the xxHash specification, doc/xxhash_spec.md, XXH3.

No torch here: tensors are made of the ones that are handed in.
"""

from typing import Any

import triton
import triton.language as tl

from shared.transfer.digest import LEAF_BYTES

BLOCK_WORDS = 128
BLOCKS = LEAF_BYTES // (8 * BLOCK_WORDS)

# the default secret of XXH3, 192 bytes
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
AVALANCHE = 0x165667919E3779F9
# where the parts of the kernel's table of constants begin, in words
_LAST, _SCRAMBLE, _MERGE, _START, _SCALARS = (tl.constexpr(at) for at in (128, 256, 264, 272, 280))


def _secret(at: int, words: int = 8) -> list[int]:
    return [int.from_bytes(SECRET[at + 8 * i : at + 8 * i + 8], "little") for i in range(words)]


def constants() -> list[int]:
    """Returns the constants that the kernel reads beside the data, as signed 64-bit integers.

    Keys of a block's 16 stripes (128 words), of the last block's (128), of the scrambling (8), of the merging (8), the accumulators' first
    values (8), and three factors.
    """
    block = [word for stripe in range(16) for word in _secret(8 * stripe)]
    last = block[:-8] + _secret(len(SECRET) - 64 - 7)
    start = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]
    scalars = [LEAF_BYTES * PRIME64_1 % 2**64, AVALANCHE, PRIME32_1]
    words = block + last + _secret(len(SECRET) - 64) + _secret(11) + start + scalars
    return [word - 2**64 if word >= 2**63 else word for word in words]


@triton.jit
def _word(flat, first, length, offset, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns eight bytes of a leaf; bytes after its end count as zeros."""
    if WHOLE:
        return tl.load((flat + first + offset).to(tl.pointer_type(tl.int64)))
    held = tl.minimum(tl.maximum(length - offset, 0), 8)
    word = tl.load((flat + first + offset).to(tl.pointer_type(tl.int64)), mask=held > 0, other=0)
    return tl.where(held == 8, word, word & ((tl.full(held.shape, 1, tl.int64) << (8 * tl.minimum(held, 7))) - 1))


@triton.jit
def _gathered(flat, first, length, block, keys, stripe, lane, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what a block's 16 stripes add to the accumulators: int64 [8]."""
    offset = block * 1024 + stripe * 64
    key = _word(flat, first, length, offset + lane * 8, WHOLE) ^ keys
    product = (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)
    crossed = _word(flat, first, length, offset + (lane ^ 1) * 8, WHOLE)
    return tl.sum(product + crossed, axis=0)


@triton.jit
def _hashed(flat, first, length, table, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    stripe = tl.arange(0, 16)[:, None]
    lane = tl.arange(0, 8)[None, :]
    eight = tl.arange(0, 8)
    keys = tl.load(table + stripe * 8 + lane)
    scramble = tl.load(table + _SCRAMBLE + eight)
    prime = tl.load(table + _SCALARS + 2)
    acc = tl.load(table + _START + eight)
    for block in range(BLOCKS - 1):
        acc += _gathered(flat, first, length, block, keys, stripe, lane, WHOLE)
        acc = (acc ^ ((acc >> 47) & 0x1FFFF) ^ scramble) * prime
    acc += _gathered(flat, first, length, BLOCKS - 1, tl.load(table + _LAST + stripe * 8 + lane), stripe, lane, WHOLE)
    mixed = (acc ^ tl.load(table + _MERGE + eight)).to(tl.uint64, bitcast=True)
    even, odd = tl.split(tl.reshape(mixed, (4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    total = tl.sum(folded.to(tl.int64, bitcast=True), axis=0) + tl.load(table + _SCALARS)
    total = (total ^ ((total >> 37) & 0x7FFFFFF)) * tl.load(table + _SCALARS + 1)
    return total ^ ((total >> 32) & 0xFFFFFFFF)


@triton.jit
def _kernel(flat, places, table, out, BLOCKS: tl.constexpr, LEAF: tl.constexpr):  # type: ignore[no-untyped-def]
    leaf = tl.program_id(0)
    first, length = tl.load(places + leaf * 2), tl.load(places + leaf * 2 + 1)
    if length == LEAF:
        tl.store(out + leaf, _hashed(flat, first, length, table, BLOCKS, True))
    else:
        tl.store(out + leaf, _hashed(flat, first, length, table, BLOCKS, False))


_tables: dict[Any, Any] = {}


def leaves(flat: Any, table: Any) -> Any:
    """Returns a bucket's leaf digests, on its device, in the current stream's order: int64 [leaves], the bits of unsigned integers.

    Args:
        flat: uint8 [bytes], on a GPU, as `shared.transfer.manifest` lays tensors out. table: int64 [leaves, 2], of `leaf_table`, there,
        too.
    """
    if table.device not in _tables:
        _tables[table.device] = table.new_tensor(constants())
    out = table.new_empty(len(table))
    if len(table):
        _kernel[(len(table),)](flat, table, _tables[table.device], out, BLOCKS, LEAF_BYTES, num_warps=1)
    return out
