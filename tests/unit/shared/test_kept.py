"""The k-th row that is kept, over blocks and odd ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.data.row_bitmap import RowMarks


@given(st.integers(0, 20_000), st.sets(st.integers(0, 19_999), max_size=60), st.booleans())
def test_rows_and_counts_agree_with_a_list(size: int, some: set[int], invert: bool) -> None:
    out = set(range(size)) - some if invert else {row for row in some if row < size}
    marks = RowMarks(size)
    for row in out:
        marks.leave_out(row)
    kept, expected = marks.kept(), [row for row in range(size) if row not in out]
    assert len(kept) == len(expected)
    for index in {0, 1, len(expected) // 2, len(expected) - 1} & set(range(len(expected))):
        assert kept.row(index) == expected[index]
    for row in {0, size // 3, size, *some} & set(range(size + 1)):
        assert kept.below(row) == sum(1 for one in expected if one < row)
