"""The store's answers, however they are cut on their way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.store import blobs
from shared.store.blobs import Answer, Answers

LARGE = b"\r\n$5\r\n-+:" * (blobs.BUFFER_BYTES // 4)
VALUES = st.none() | st.binary(max_size=40) | st.sampled_from([b"", b"\r\n", b"$-1\r\n", LARGE])


def answer_of(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def read(answers: Answers, data: bytes, size: int) -> list[Answer]:
    """Feeds data in pieces of at most so many bytes."""
    found: list[Answer] = []
    while data:
        count = min(len(answers.buffer), len(data), size)
        answers.buffer[:count] = data[:count]
        answers.filled(count)
        data = data[count:]
        found += answers
    return found


@given(st.lists(VALUES, max_size=8), st.integers(1, 64).map(lambda size: size**3))
def test_values_come_out_as_they_went_in(values: list[bytes | None], size: int) -> None:
    size = max(size, sum(len(value or b"") for value in values) // 500)  # not a large one byte by byte
    assert read(Answers(), b"".join(map(answer_of, values)), size) == values


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_buffer_is_used_again_without_mixing(size: int) -> None:
    answers = Answers()
    for value in (b"a" * 3000, b"", b"b" * 5000, b"c"):
        assert read(answers, answer_of(value) + b"+OK\r\n:12\r\n", size) == [value, b"OK", 12]


def test_refusals_are_the_libraries_errors() -> None:
    data = b"-NOPERM no access\r\n-LOADING it is\r\n-ERR else\r\n$1\r\nx\r\n"
    noperm, loading, other, value = read(Answers(), data, 5)
    assert isinstance(noperm, NoPermissionError)
    assert isinstance(loading, BusyLoadingError)
    assert type(other) is ResponseError
    assert str(other) == "ERR else"
    assert value == b"x"


def test_what_is_no_answer_is_a_broken_connection() -> None:
    with pytest.raises(RedisConnectionError, match='got "H"'):
        read(Answers(), b"HTTP/1.1 400\r\n", 100)
