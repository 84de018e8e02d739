"""Files of data: as a config names them, the order of their rows, and the progress of reading."""

import io
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from myxo.preflight.data_checks import check_files
from myxo.preflight.inspection import Inspection
from myxo.run.run_directory import RunDirectory
from shared.config import config_reading, flags
from shared.config.config_reading import parse as parse_config
from shared.config.run_config import RunConfig, changes
from shared.data import rows
from shared.data.data_files import DataFile, parse
from shared.data.rows import FeistelPermutation, MixedOrder, ReadProgress
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import table

ENDS = st.none() | st.integers(-30, 30)
FILES = st.builds(DataFile, st.text("ab.@[]:*2/ ", min_size=1).map(Path), ENDS, ENDS, st.floats(1e-3, 1e3, allow_nan=False) | st.just(1.0))


@table(
    ("text", "expected"),
    [
        ("a.jsonl", DataFile(Path("a.jsonl"))),
        ("a.jsonl@[1:3]", DataFile(Path("a.jsonl"), 1, 3)),
        ("a.jsonl@[-3:]", DataFile(Path("a.jsonl"), -3, None)),
        ("a.jsonl@[:-2]*0.5", DataFile(Path("a.jsonl"), None, -2, 0.5)),
        ("a.jsonl@[:]", DataFile(Path("a.jsonl"))),
        ("a.jsonl*2", DataFile(Path("a.jsonl"), weight=2.0)),
        ("odd*2@[:]*1", DataFile(Path("odd*2"))),
        ("at@home/a.jsonl", DataFile(Path("at@home/a.jsonl"))),
    ],
)
def test_text_names_path_slice_and_weight(text: str, expected: DataFile) -> None:
    assert parse(text) == expected


@given(FILES)
def test_text_reads_back_the_same(file: DataFile) -> None:
    if "@[" not in str(file.path):
        assert parse(str(file)) == file


@given(st.integers(0, 40), ENDS, ENDS)
def test_a_slice_is_pythons(length: int, start: int | None, stop: int | None) -> None:
    assert list(DataFile(Path("a"), start, stop).rows(length)) == list(range(length))[start:stop]


def test_a_single_plain_path_is_a_list_of_one(tmp_path: Path) -> None:
    for given_value in ("/a.jsonl", ["/a.jsonl"], [{"path": "/a.jsonl"}], "/a.jsonl@[:]", [{"path": "/a.jsonl", "weight": 1}]):
        config = run_config(tmp_path, data={"prompt_data": given_value})
        assert config.data.prompt_data == [DataFile(Path("/a.jsonl"))]
        assert '"prompt_data":["/a.jsonl"]' in config.model_dump_json()


def test_lists_keep_their_form_in_json_toml_and_paths(tmp_path: Path) -> None:
    entries = ["a.jsonl", {"path": "b.parquet@[2:-1]", "weight": 2.5}, "/c.jsonl*3"]
    config = run_config(tmp_path, data={"prompt_data": entries}, eval={"eval_prompt_data": ["a.jsonl@[:3]"]})
    expected = [DataFile(Path("a.jsonl")), DataFile(Path("b.parquet"), 2, -1, 2.5), DataFile(Path("/c.jsonl"), weight=3.0)]
    assert config.data.prompt_data == expected
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert parse_config(tomllib.loads(config_reading.dump(config))) == config
    absolute = config.absolute(Path("/base"))
    assert [str(file) for file in absolute.data.prompt_data or ()] == ["/base/a.jsonl", "/base/b.parquet@[2:-1]*2.5", "/c.jsonl@[:]*3.0"]
    assert [str(file) for item in absolute.eval.eval_prompt_data or () for file in item.path] == ["/base/a.jsonl@[:3]"]


def test_flags_name_one_file_or_several(tmp_path: Path) -> None:
    def config(words: str) -> RunConfig:
        nested: dict[str, Any] = values(tmp_path)
        for section, fields in flags.parse(words.split()).items():
            nested.setdefault(section, {}).update(fields)
        return parse_config(nested)

    assert config("--prompt-data /x.jsonl").data.prompt_data == [DataFile(Path("/x.jsonl"))]
    assert config("--prompt-data=/x.jsonl").data.prompt_data == [DataFile(Path("/x.jsonl"))]
    several = config("--prompt-data /x.jsonl /y.jsonl@[1:5]*2 --lr 1").data.prompt_data
    assert several == [DataFile(Path("/x.jsonl")), DataFile(Path("/y.jsonl"), 1, 5, 2.0)]
    assert config("--eval-prompt-data none").eval.eval_prompt_data is None
    with pytest.raises(ConfigError, match="--prompt-data = '': needs a value"):
        config("--prompt-data --lr 1")


@table(
    ("section", "value", "words"),
    [
        ("data", [], "at least one file"),
        ("data", 3, "is no file"),
        ("data", "a.jsonl@[1]", "no slice of rows"),
        ("data", "a.jsonl@[a:b]", "no slice of rows"),
        ("data", "a.jsonl@[1:2:3]", "no slice of rows"),
        ("data", "a.jsonl@[1:2]*x", "no slice of rows"),
        ("data", "a.jsonl*0", "a number over 0"),
        ("data", [{"path": "a.jsonl", "weight": "2"}], "a number over 0"),
        ("data", [{"path": "a.jsonl", "weight": -1}], "a number over 0"),
        ("data", [{"path": "a.jsonl*2", "weight": 2}], "a weight already"),
        ("data", [{"path": "a.jsonl", "wieght": 2}], "is no file"),
        ("data", "", "names no file"),
        ("eval", "a.jsonl*2", "has a weight"),
    ],
)
def test_what_names_no_file_is_refused_by_field(tmp_path: Path, section: str, value: object, words: str) -> None:
    field = {"data": "prompt_data", "eval": "eval_prompt_data"}[section]
    with pytest.raises(ConfigError, match=words) as caught:
        run_config(tmp_path, **{section: {field: value}})
    assert caught.value.field == f"{section}.{field}"
    assert caught.value.value == value


def test_each_file_must_be_there_and_none_may_lie_in_the_runs_state(tmp_path: Path) -> None:
    config = run_config(tmp_path, data={"prompt_data": [str(tmp_path / "a.jsonl"), f"{tmp_path}/runs/test/logs/b.jsonl@[1:]"]})
    with pytest.raises(ConfigError, match=r"data\.prompt_data = .*b\.jsonl.* --fresh removes"):
        RunDirectory(config.run.root).refuse_input_in_state(config)
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert [problem.value for problem in check_files(Inspection(config))] == [f"{tmp_path}/runs/test/logs/b.jsonl"]


def test_other_slices_and_weights_are_another_run(tmp_path: Path) -> None:
    old, new = (run_config(tmp_path, data={"prompt_data": f"/a.jsonl@[{start}:]"}) for start in (1, 2))
    assert changes(old, old) == []
    assert changes(old, new) == ["data.prompt_data: ['/a.jsonl@[1:]'] → ['/a.jsonl@[2:]']"]


# --- the order of rows is a function of the running number alone

SIZES, SEEDS = st.integers(1, 300), st.integers(0, 2**31)


def one_file(size: int, shuffle: bool, seed: int) -> MixedOrder:
    return MixedOrder([size], [1.0], shuffle, seed)


@given(SIZES, SEEDS, st.booleans())
def test_every_epoch_uses_every_row_once(size: int, seed: int, shuffle: bool) -> None:
    order = one_file(size, shuffle, seed)
    for epoch in range(3):
        assert sorted(order.row(epoch * size + place) for place in range(size)) == list(range(size))


@given(SIZES, SEEDS, st.lists(st.integers(0, 200), max_size=20))
def test_a_row_does_not_depend_on_what_was_asked_before(size: int, seed: int, numbers: list[int]) -> None:
    order = one_file(size, True, seed)
    assert [order.row(number) for number in numbers] == [one_file(size, True, seed).row(number) for number in numbers]


def test_without_shuffling_rows_come_in_file_order() -> None:
    order = one_file(3, False, 1)
    assert [order.row(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    rows = [tuple(one_file(20, True, seed).row(epoch * 20 + place) for place in range(20)) for seed in (1, 5) for epoch in range(2)]
    assert len({*rows, tuple(range(20))}) == 5


def test_orders_are_what_they_always_were() -> None:
    # a run resumed under a newer version continues with the prompts that it would have had
    assert [one_file(10, True, 42).row(number) for number in range(12)] == [8, 7, 2, 4, 5, 0, 9, 6, 1, 3, 2, 3]
    assert [FeistelPermutation(1 << 40, 7)[place] for place in range(3)] == [227134629944, 944323139396, 358413424437]


@given(SIZES, SIZES, SEEDS, st.booleans(), st.integers(0, 200))
def test_files_of_weight_one_are_one_file(first: int, second: int, seed: int, shuffle: bool, number: int) -> None:
    mixed = MixedOrder([first, second], [1.0, 1.0], shuffle, seed)
    assert mixed.row(number) == one_file(first + second, shuffle, seed).row(number)


WEIGHED_FILES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 2.75])), min_size=1, max_size=4)


def mixed_order(files: list[tuple[int, float]], shuffle: bool, seed: int) -> MixedOrder:
    sizes, weights = [size for size, _ in files], [weight for _, weight in files]
    assume(any(sizes) and all(round(size * weight) or not size for size, weight in files))
    return MixedOrder(sizes, weights, shuffle, seed)


@given(WEIGHED_FILES, st.booleans(), SEEDS)
def test_an_epoch_holds_of_each_file_what_its_weight_says(files: list[tuple[int, float]], shuffle: bool, seed: int) -> None:
    order = mixed_order(files, shuffle, seed)
    drawn: Counter[int] = Counter()
    for epoch in range(4):
        rows = [order.row(epoch * order.epoch_size + place) for place in range(order.epoch_size)]
        drawn.update(rows)
        first = 0
        for size, weight in files:
            assert sum(first <= row < first + size for row in rows) == round(size * weight)
            times = [drawn[row] for row in range(first, first + size)]
            assert not times or max(times) - min(times) <= 1, "each of a file as often as the others, to within one"
            first += size


@given(WEIGHED_FILES, SEEDS, st.lists(st.integers(0, 200), max_size=20))
def test_a_mixed_order_goes_on_at_any_number(files: list[tuple[int, float]], seed: int, numbers: list[int]) -> None:
    order = mixed_order(files, True, seed)
    assert [order.row(number) for number in numbers] == [mixed_order(files, True, seed).row(number) for number in numbers]


def test_half_of_a_file_is_followed_by_its_other_half() -> None:
    order = MixedOrder([4, 2], [0.5, 1.0], False, 1)
    assert [order.row(number) for number in range(12)] == [0, 1, 4, 5, 2, 3, 4, 5, 0, 1, 4, 5]


def test_a_weight_that_draws_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight 0\.1 of 3 prompts rounds to none"):
        MixedOrder([3], [0.1], False, 1)


# --- progress of long reading: a bar on a terminal, lines elsewhere, nothing where it is soon done


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("patience", [0, 3600])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_long_work(monkeypatch: pytest.MonkeyPatch, terminal: bool, patience: float) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(rows, "PATIENCE_SECONDS", patience)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with ReadProgress("indexing a.jsonl", 4000) as progress:
        progress.at(1000)
        progress.at(4000)
    shown = screen.getvalue()
    if patience:
        assert not shown
    elif terminal:
        assert "indexing a.jsonl" in shown
    else:
        assert shown == "myxo: indexing a.jsonl: 1,000 of 4,000 (25%)\n", "and the next line in ten seconds only"
