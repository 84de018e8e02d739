"""The benchmark of deltas trains, writes, puts together and compares."""

import pytest

from benchmarks import weight_delta


@pytest.mark.extra
def test_a_step_of_the_quick_start() -> None:
    (row,) = weight_delta.measure("quickstart", 1)
    assert (row["xor_rebuilt"], row["overwrite_rebuilt"]) == ("bit-equal", "bit-equal")
    assert row["xor_bytes"] < 0.75 * row["full_bytes"] and row["changed"] > 0.9  # float32: all elements move, the leading bytes do not
    assert "| quickstart | float32 | 0.0001 | 1 |" in weight_delta.table([row])
