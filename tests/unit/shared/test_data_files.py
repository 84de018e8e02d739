"""Files as a config names them: path, slice, weight; as text, as a table, and there and back again."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.preflight.data_checks import check_files
from myxo.preflight.inspection import Inspection
from myxo.run import config_toml
from myxo.run.run_directory import RunDirectory
from shared.config import flags
from shared.config.config_reading import parse as parse_config
from shared.config.run_config import RunConfig, changes
from shared.data.data_files import DataFile, parse
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
    assert parse_config(tomllib.loads(config_toml.dump(config))) == config
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
