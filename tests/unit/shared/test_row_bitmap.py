"""The k-th row that is used, over blocks and odd ends."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.data.filter_cache import RowBitmap


@given(st.integers(0, 20_000), st.sets(st.integers(0, 19_999), max_size=60), st.booleans())
def test_rows_and_counts_agree_with_a_list(size: int, some: set[int], invert: bool) -> None:
    out = set(range(size)) - some if invert else {row for row in some if row < size}
    used = np.ones(size, np.bool_)
    used[list(out)] = False
    bitmap, expected = RowBitmap.of(used), [row for row in range(size) if row not in out]
    assert len(bitmap) == len(expected)
    for index in {0, 1, len(expected) // 2, len(expected) - 1} & set(range(len(expected))):
        assert bitmap.row(index) == expected[index]
    for row in {0, size // 3, size, *some} & set(range(size + 1)):
        assert bitmap.below(row) == sum(1 for used_row in expected if used_row < row)
