"""Splits of data sets by name: which files, which rows, and what is said where there are none."""

import io
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shared.config.data_sections import DataSection
from shared.config.run_config import RunConfig
from shared.data.media import MediaReader
from shared.data.rows import open_rows
from shared.hub import hub_resolve
from shared.runtime.errors import ConfigError
from tests.support.hub_server import HubServer
from tests.support.run_config import run_config
from tests.support.tiny_vision import png, write_tiny_vision_model

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: hard
  data_files:
  - split: train
    path: hard/*.parquet
---
"""


def parquet(**columns: list[Any]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def named(tmp_path: Path, *names: str) -> RunConfig:
    return hub_resolve.pinned(run_config(tmp_path, data={"prompt_data": list(names)}).absolute(tmp_path))


def rows(config: RunConfig) -> list[dict[str, Any]]:
    opened = open_rows(hub_resolve.local(config, hub_resolve.DATA).data.prompt_data or [], "data.prompt_data")
    return [opened[row] for row in range(len(opened))]


def refused(tmp_path: Path, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        hub_resolve.local(named(tmp_path, name), hub_resolve.DATA)
    assert caught.value.field == "data.prompt_data"
    assert "\n" not in str(caught.value)
    return caught.value.expected


def test_lines_stay_as_they_are(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"prompt": "1+1=", "metadata": {"a": 1}}\n\n{"prompt": "1+2=", "metadata": {"b": [2]}, "x": 1e400}'
    commit = hub.commit("datasets", "org/sums", {"train.jsonl": lines, "test.jsonl": b'{"prompt": "2+2="}\n', "extra.bin": b"large"})
    config = named(tmp_path, "hf:org/sums:train@[1:]*2", "hf:org/sums:test")
    assert [str(file) for file in config.data.prompt_data or ()] == [
        f"hf:org/sums@main={commit}:train@[1:]*2.0",
        f"hf:org/sums@main={commit}:test",
    ]
    found = rows(config)
    assert found == [{"prompt": "1+2=", "metadata": {"b": [2]}, "x": float("inf")}, {"prompt": "2+2="}]
    assert hub.downloads() == ["train.jsonl", "test.jsonl"]
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert rows(config) == found
    assert named(tmp_path, "hf:org/sums:train@[1:]*2", "hf:org/sums:test") == config
    assert hub.asked == []


def test_a_config_of_parquet_files(hub: HubServer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    hub.commit(
        "datasets",
        "org/sums",
        {
            "README.md": CARD,
            "main/train-0.parquet": parquet(prompt=[chat], label=[2], picture=[b"\x89PNG"]),
            "main/train-1.parquet": parquet(prompt=[chat] * 2, label=[3, None], picture=[b"", None]),
            "main/test-0.parquet": parquet(prompt=[chat], label=[4], picture=[b""]),
            "hard/0.parquet": parquet(prompt=["∑"], label=[5.5]),
        },
    )
    assert rows(named(tmp_path, "hf:org/sums/main:train")) == [{"prompt": chat, "label": label} for label in (2, 3, None)]
    assert hub.downloads() == ["README.md", "main/train-0.parquet", "main/train-1.parquet"]
    assert rows(named(tmp_path, "hf:org/sums/hard:train")) == [{"prompt": "∑", "label": 5.5}]
    assert "a config has to be named; it has main, hard: give hf:org/sums/main:train" in refused(tmp_path, "hf:org/sums:train")
    assert "it has no config 'main2'; it has main, hard: give hf:org/sums/main:train" in refused(tmp_path, "hf:org/sums/main2:train")
    assert "it has no split 'dev'; it has train, test: give hf:org/sums/main:train" in refused(tmp_path, "hf:org/sums/main:dev")
    assert "a split has to be named; it has train: give hf:org/sums/hard:train" in refused(tmp_path, "hf:org/sums/hard")


@pytest.mark.extra
def test_pictures_are_kept_and_sound_is_not(hub: HubServer, tmp_path: Path) -> None:
    import datasets  # a second, which no other test needs

    picture = png(20, 20)
    features = datasets.Features(
        {"problem": datasets.Value("string"), "images": [datasets.Image()], "sound": {"bytes": datasets.Value("binary")}}
    )
    row = {"problem": ["<image>?"], "images": [[{"bytes": picture, "path": "a.png"}]], "sound": [{"bytes": b"RIFF"}]}
    datasets.Dataset.from_dict(row, features=features).to_parquet(out := io.BytesIO())
    hub.commit("datasets", "org/geo3k", {"data/train-00000-of-00001.parquet": out.getvalue()})
    [read] = rows(named(tmp_path, "hf:org/geo3k:train"))
    assert read["problem"] == "<image>?" and read.keys() == {"problem", "images"}
    reader = MediaReader.of(seeing(tmp_path), DataSection(apply_chat_template=True, multimodal_keys={"image": "images"}))
    _, [given] = reader.separated(read["problem"], read)
    assert reader.data_of(given, tmp_path) == picture


def seeing(path: Path) -> Path:
    write_tiny_vision_model(path / "model", "qwen3_vl")
    return path / "model"


@pytest.mark.extra
def test_other_formats_are_read_too(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("datasets", "org/sums", {"data.csv": b"prompt,label\n1+1=,2\n"})
    assert rows(named(tmp_path, "hf:org/sums:train")) == [{"prompt": "1+1=", "label": 2}]


def test_what_cannot_be_read_is_told(hub: HubServer, tmp_path: Path) -> None:
    assert f"there is no dataset org/none on {hub.url}" in refused(tmp_path, "hf:org/none:train")
    hub.commit("datasets", "org/empty", {"README.md": b"# Nothing yet"})
    assert "it holds no files that `datasets` reads" in refused(tmp_path, "hf:org/empty:train")
    hub.commit("datasets", "org/script", {"script.py": b"raise SystemExit"})
    assert "try the hub's own conversion: hf:org/script@refs/convert/parquet:train" in refused(tmp_path, "hf:org/script:train")
    hub.commit("datasets", "org/broken", {"train.parquet": b"PAR1, but not really"})
    assert "its files cannot be read" in refused(tmp_path, "hf:org/broken:train")
    assert list((tmp_path / "hf" / "myxo").rglob("*.partial")) == []
    hub.commit("datasets", "org/gated", {"train.jsonl": b"{}\n"})
    hub.gated.add("org/gated")
    assert f"accept its terms at {hub.url}/datasets/org/gated" in refused(tmp_path, "hf:org/gated:train")
