"""``myxo init``: the config that it writes can be run."""

import json
from pathlib import Path

import pytest

from shared.config import config_reading
from shared.config.eval_views import eval_views
from tests.integration.myxo.command import Myxo


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(300)))
    return path


def test_a_config_for_a_model_and_a_file(tmp_path: Path, tiny_model: Path, rows: Path, myxo: Myxo) -> None:
    path = tmp_path / "first.toml"
    words = ["init", tiny_model, rows, "-o", path, "--name", "first"]
    code, out, err = myxo.run(*words)
    assert code == 0, err
    assert f"myxo up {path}" in out
    config = config_reading.load(path)
    [trained], [held] = config.data.prompt_data or [], eval_views(config)[0].files
    assert (config.data.input_key, config.data.label_key, config.reward.rm_type) == ("question", "answer", "math_verify")
    assert (trained.path, len(trained.rows(300)), held.path, len(held.rows(300))) == (rows, 270, rows, 30)
    assert not set(trained.rows(300)) & set(held.rows(300))
    written = path.read_text()
    code, _, err = myxo.run(*words, "--rm-type", "exact")
    assert (code, path.read_text()) == (2, written)
    assert "--force" in err
    assert myxo.run(*words, "--rm-type", "exact", "--force")[0] == 0
    assert config_reading.load(path).reward.rm_type == "exact"


@pytest.mark.parametrize(("words", "field"), [(["/nowhere", None], "MODEL"), ([None, "/nowhere.jsonl"], "DATA")])
def test_what_is_not_there(tmp_path: Path, tiny_model: Path, rows: Path, myxo: Myxo, words: list[str | None], field: str) -> None:
    path = tmp_path / "first.toml"
    code, _, err = myxo.run("init", words[0] or tiny_model, words[1] or rows, "-o", path)
    assert (code, path.exists()) == (2, False)
    assert field in err
