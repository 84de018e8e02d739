"""Rows of JSONL and Parquet files, and of several in a row; whatever is wrong is told with file and line."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.data.data_files import parse
from shared.data.rows import JsonlRows, ParquetRows, open_rows
from shared.runtime.errors import ConfigError

FIELD = "data.prompt_data"


def write(path: Path, numbers: range) -> Path:
    rows = [{"number": number} for number in numbers]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_slices_of_files_follow_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", range(5)), write(tmp_path / "b.parquet", range(10, 20))
    named = (f"{first}@[1:3]", f"{second}@[-2:]", f"{first}", f"{second}@[:1]")
    rows = open_rows([parse(text) for text in named], FIELD)
    assert [rows[row]["number"] for row in range(len(rows))] == [1, 2, 18, 19, 0, 1, 2, 3, 4, 10]
    assert [rows.where(row) for row in (0, 2, 4)] == [f"{first}:2", f"{second}:9", f"{first}:1"]


def test_a_slice_without_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", range(5))
    with pytest.raises(ConfigError, match="the slice is empty: the file has 5 rows") as caught:
        open_rows([parse(f"{path}@[7:9]")], FIELD)
    assert (caught.value.field, caught.value.value) == (FIELD, f"{path}@[7:9]")


LINES = st.lists(st.sampled_from(['{"a": 1}\n', "\n", " \t\r\n", '{"long": "' + "x" * 99 + '"}\n']), max_size=60)


@given(LINES, st.integers(1, 9), st.data())
def test_a_sparse_index_finds_every_row(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], entries: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("sparse") / "rows.jsonl"
    path.write_text("".join(written) + '{"last": 1}')
    expected = [(number, json.loads(line)) for number, line in enumerate([*written, '{"last": 1}'], start=1) if line.strip()]
    rows = JsonlRows(path, FIELD, entries=entries)
    assert len(rows) == len(expected)
    for row in data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20)):
        assert (int(rows.where(row).rpartition(":")[2]), rows[row]) == expected[row]
    assert [rows[row] for row in range(len(rows))] == [entry for _, entry in expected]


def test_two_threads_get_the_rows_that_they_ask_for(tmp_path: Path) -> None:
    """The buffer publishes prompts in a thread, and keeps those of groups that ended without samples in another."""
    rows = JsonlRows(write(tmp_path / "a.jsonl", range(50_000)), FIELD)
    order = [row * 7919 % 50_000 for row in range(3_000)]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda asked: [rows[row]["number"] for row in asked], (order, order[::-1]))
    assert list(found) == [order, order[::-1]]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", range(50_000))
    rows = JsonlRows(path, FIELD)
    path.write_text('{"number": 0}\n')
    with pytest.raises(ConfigError, match="has become shorter"):
        rows[40_000]


@given(st.integers(1, 40), st.integers(1, 50), st.lists(st.integers(0, 39), max_size=10))
def test_parquet_rows_are_read_in_any_order(tmp_path_factory: pytest.TempPathFactory, size: int, group: int, asked: list[int]) -> None:
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    entries = [{"prompt": f"é{row}", "label": row / 2, "metadata": {"level": row, "tags": ["a"] * (row % 3)}} for row in range(size)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), path, row_group_size=group)
    rows = ParquetRows(path, FIELD)
    assert len(rows) == size
    for row in asked:
        assert rows[row % size] == entries[row % size]
    assert rows.where(0) == f"{path}:1"


def test_parquet_batches_and_categories(tmp_path: Path) -> None:
    numbers = pyarrow.array([str(row % 7) for row in range(5000)]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": numbers}), tmp_path / "a.parquet", row_group_size=700)
    rows = ParquetRows(tmp_path / "a.parquet", FIELD)
    assert [rows[row]["prompt"] for row in (0, 1023, 1024, 4999)] == [str(row % 7) for row in (0, 1023, 1024, 4999)]


def test_numbers_of_32_and_16_bits_are_those_that_were_written(tmp_path: Path) -> None:
    """A label of 0.1 was 0.10000000149011612."""
    kinds = {"float32": pyarrow.float32(), "float16": pyarrow.float16(), "float64": pyarrow.float64()}
    table = pyarrow.table(
        {name: pyarrow.array(np.array([0.1, 0.0], name), kind, mask=np.array([False, True])) for name, kind in kinds.items()}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = ParquetRows(tmp_path / "a.parquet", FIELD)
    assert rows[0] == dict.fromkeys(kinds, 0.1) and rows[1] == dict.fromkeys(kinds)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """The last one was taken."""
    table = pyarrow.Table.from_arrays([pyarrow.array(["1"]), pyarrow.array(["2"])], names=["label", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="the column 'label' is there twice"):
        ParquetRows(tmp_path / "a.parquet", FIELD)


@pytest.mark.parametrize("content", [b"", b'{"prompt": "a"}\n', b"PAR1" + b"\0" * 60 + b"PAR1"])
def test_what_is_no_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a readable Parquet file") as caught:
        ParquetRows(path, FIELD)
    assert (caught.value.field, caught.value.value) == (FIELD, str(path))


def test_a_parquet_file_cut_short_or_empty_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(3000))
    content = bytearray(path.read_bytes())
    content[100:2000] = bytes(1900)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        ParquetRows(path, FIELD)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(ConfigError, match="holds no row"):
        ParquetRows(path, FIELD)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", range(3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow: pip install 'myxo\[parquet\]'"):
        ParquetRows(path, FIELD)


def lines(tmp_path: Path, text: str | bytes) -> JsonlRows:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return JsonlRows(path, "data.prompt_data")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_read_in_any_order_and_know_their_line(tmp_path: Path, end: str) -> None:
    read = lines(tmp_path, end.join(["", '{"a": 1}', "", '{"a": "β"}', '{"a": 3}']))
    assert len(read) == 3
    assert [read[row]["a"] for row in (2, 0, 1, 0)] == [3, 1, "β", 1]
    assert [read.where(row) for row in range(3)] == [f"{tmp_path}/prompts.jsonl:{line}" for line in (2, 4, 5)]


def test_a_last_line_counts_with_or_without_its_end(tmp_path: Path) -> None:
    assert len(lines(tmp_path, '{"a": 1}\n{"a": 2}')) == len(lines(tmp_path, '{"a": 1}\n{"a": 2}\n')) == 2


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_line_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no line"):
        lines(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            JsonlRows(path, "data.prompt_data")
        assert caught.value.field == "data.prompt_data"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1}\n{"a": ', "not JSON"),
        (b'{"a": 1}\n[1]', "expected a JSON object, found a list"),
        (b'{"a": 1}\n{"a": "\xff"}', r"not UTF-8: .* at byte 7 of the line; if it is Latin-1: iconv"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    read = lines(tmp_path, text)
    assert read[0] == {"a": 1}
    with pytest.raises(ConfigError, match=words) as caught:
        read[1]
    assert str(caught.value.value).endswith("prompts.jsonl:2")


def test_a_missing_key_is_told_with_the_keys_that_are_there(tmp_path: Path) -> None:
    read = lines(tmp_path, '{"question": "1+1", "answer": 2}')
    entry = read.entry(0)
    assert entry.text("question", "data.input_key") == "1+1"
    with pytest.raises(ConfigError, match=r"has no key 'prompt'; its keys are \['answer', 'question'\]") as caught:
        entry.text("prompt", "data.input_key")
    assert caught.value.field == "data.prompt_data:prompt"
    with pytest.raises(ConfigError, match="expected text, found 2"):
        entry.text("answer", "data.label_key")
