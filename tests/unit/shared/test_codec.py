"""The wire codec, and the store's answers: whatever comes in is read or refused."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.store import blobs
from shared.store.blobs import Answer, Answers
from tests.support.tables import table

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4).filter(
            lambda mapping: mapping.keys() != {"dtype", "shape", "data"}
        )
    ),
    max_leaves=12,
)
ARRAYS = st.sampled_from(sorted(codec.ARRAY_DTYPES)).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


@given(PLAIN)
def test_plain_data_comes_back(value: object) -> None:
    assert codec.unpack(codec.pack(value)) == value


@given(ARRAYS)
def test_arrays_come_back_with_dtype_shape_and_every_bit(array: np.ndarray) -> None:
    back = codec.unpack(codec.pack({"inside": [array]}))["inside"][0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_an_array_is_read_as_a_view_of_the_received_bytes() -> None:
    back = codec.unpack(codec.pack(np.arange(1000, dtype=np.int32)))
    assert not back.flags.owndata
    assert not back.flags.writeable


@table(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(20, dtype=np.int32)[::3],
        np.arange(4, dtype=">i4"),
        np.array(7, dtype=np.int64),
    ],
)
def test_arrays_of_any_layout_travel_in_row_order(array: np.ndarray) -> None:
    back = codec.unpack(codec.pack(array))
    np.testing.assert_array_equal(back, array)
    assert back.dtype.str in codec.ARRAY_DTYPES


def test_numpy_scalars_travel_as_numbers() -> None:
    assert codec.unpack(codec.pack([np.int64(3), np.float32(0.5)])) == [3, 0.5]


@table("value", [object(), {1, 2}, 2**64, -(2**63) - 1, np.zeros(2, np.float16), np.zeros(2, bool), np.array(["a"]), np.array([None])])
def test_what_does_not_travel_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        codec.pack({"field": value})


@table(
    "broken",
    [
        {"dtype": "<i4", "shape": [3], "data": b"\0" * 8},
        {"dtype": "<i4", "shape": [2, 2], "data": b"\0" * 12},
        {"dtype": "<i4", "shape": [-1], "data": b"\0" * 4},
        {"dtype": "<i4", "shape": [-2, -1], "data": b"\0" * 8},
        {"dtype": "<i4", "shape": [1.0], "data": b"\0" * 4},
        {"dtype": "<i4", "shape": 1, "data": b"\0" * 4},
        {"dtype": "<i4", "shape": [1], "data": "text"},
        {"dtype": "<i4", "shape": [2**62, 4], "data": b""},
        {"dtype": "|O", "shape": [1], "data": b"\0" * 8},
        {"dtype": "<U1", "shape": [1], "data": b"\0" * 4},
        {"dtype": ["<i4"], "shape": [1], "data": b"\0" * 4},
        {"dtype": None, "shape": [0], "data": b""},
    ],
)
def test_a_malformed_array_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        codec.unpack(msgpack.packb({"array": broken}))


@given(st.binary(max_size=64) | PLAIN.map(codec.pack).map(lambda data: data[:-1]) | PLAIN.map(codec.pack).map(lambda data: data + b"\0"))
def test_bytes_from_anywhere_are_read_or_refused(data: bytes) -> None:
    try:
        codec.unpack(data)
    except BadMessage as error:
        assert str(error)


@given(PLAIN)
def test_trailing_bytes_are_refused(value: object) -> None:
    with pytest.raises(BadMessage):
        codec.unpack(codec.pack(value) + b"\x01")


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(BadMessage):
        codec.unpack(b"\x91" * 5000 + b"\xc0")


@pytest.mark.parametrize(
    ("opening", "item"),
    [(b"\xdd", b"\x80"), (b"\xdd", b"\x90"), (b"\xdd", b"\x91\xc0"), (b"\xdd", b"\x81\xa0\xc0"), (b"\xdd", b"\x05")],
    ids=["empty maps", "empty lists", "lists", "maps", "numbers"],
)
def test_what_unpacks_to_far_more_than_it_was_sent_in_is_refused(opening: bytes, item: bytes) -> None:
    """Eight megabytes of empty maps would take five hundred and sixty."""
    count = (2 << 20) // len(item)
    with pytest.raises(BadMessage, match="far more memory than they were sent in"):
        codec.unpack(opening + count.to_bytes(4, "big") + item * count)


def test_what_nobody_could_unpack_is_not_taken_for_what_travels() -> None:
    """A task with it would be dropped by whoever takes it, and its group would never end."""
    for value, taken in (({"cases": [[1, 2]] * 225_000}, False), ([{}] * 400_000, False), ({"mask": [1] * 800_000}, True)):
        if taken:
            assert codec.unpack(codec.pack(value)) == value and codec.exact_size(value) == len(codec.pack(value))
        else:
            with pytest.raises(BadMessage, match="far more memory than they were sent in"):
                codec.exact_size(value)


def test_lists_of_numbers_beside_the_arrays_have_room() -> None:
    """What a generate function may put into the metadata: a number for each of a sample's tokens."""
    value = {"metadata": {"teacher_log_probs": [-0.5] * 500_000, "mask": [1, 0] * 100_000}}
    assert codec.unpack(codec.pack(value)) == value


def test_what_is_not_counted_could_not_take_more_than_its_room() -> None:
    """Of a byte nothing takes more than an empty map in a list: a list of those, of the most bytes that are not counted, has room."""

    def maps(size: int) -> bytes:
        return b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x80" * (size - 5)

    room = codec._Room(codec.COUNTED_FROM)
    assert msgpack.unpackb(maps(codec.COUNTED_FROM), object_hook=room.map, list_hook=room.list) == codec.unpack(maps(codec.COUNTED_FROM))
    with pytest.raises(BadMessage, match="far more memory"):
        codec.unpack(maps(2 * codec.COUNTED_FROM))


# --- the store's answers, however they are cut on their way

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
