"""What a soak calls growing."""

import pytest

from tests.chaos.soak import growing


def test_what_grows_is_told_from_what_does_not():
    mib = 1 << 20
    flat = [100.0 * mib + (index % 3) * mib for index in range(40)]
    warming = [20.0 * mib] * 9 + [100.0 * mib] * 31
    leaking = [100.0 * mib + 4 * mib * index for index in range(40)]
    few = [36.0] * 20 + [39.0] * 20
    many = [36.0 + index for index in range(40)]
    series = {
        "memory of flat": flat,
        "memory of warming": warming,
        "memory of leaking": leaking,
        "descriptors of few": few,
        "descriptors of many": many,
        "keys in the store": [100.0] * 30 + [250.0] * 10,
        "queued task messages": [0.0] * 20 + [900.0] * 20,
    }
    assert set(growing(series)) == {"memory of leaking", "descriptors of many", "queued task messages"}
    with pytest.raises(ValueError, match="has 3 samples"):
        growing({"memory of flat": [1.0, 2.0, 3.0]})
