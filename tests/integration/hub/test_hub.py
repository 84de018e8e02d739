"""Models and splits of data sets by name: what is downloaded and pinned, and what is said where that does not work."""

import errno
import io
import json
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.data_sections import DataSection
from shared.config.run_config import RunConfig
from shared.data.media import MediaReader
from shared.data.rows import open_rows
from shared.hub import hub_client, hub_resolve
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from tests.integration.hub.conftest import MODEL
from tests.support.hub_server import HubServer
from tests.support.run_config import run_config, values
from tests.support.tiny_vision import png, write_tiny_vision_model


def named(tmp_path: Path, name: str = "org/model") -> RunConfig:
    return run_config(tmp_path, model={"hf_checkpoint": name}).absolute(tmp_path)


def refused(tmp_path: Path, name: str = "org/model") -> str:
    """The error of a name that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        hub_resolve.local(hub_resolve.pinned(named(tmp_path, name)))
    assert caught.value.field == "model.hf_checkpoint"
    assert "\n" not in str(caught.value)
    return caught.value.expected


def test_only_what_is_needed_is_downloaded_and_only_once(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.commit("models", "org/model", MODEL)
    config = hub_resolve.pinned(named(tmp_path))
    assert str(config.model.hf_checkpoint) == f"hf:org/model@main={commit}"
    buffer = hub_resolve.for_service(config, "buffer").model.hf_checkpoint
    assert sorted(path.name for path in buffer.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    directory = hub_resolve.for_service(config, "rollout").model.hf_checkpoint
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (directory / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert directory == tmp_path / "hf" / "hub" / "models--org--model" / "snapshots" / commit
    hub.asked.clear()
    assert hub_resolve.for_service(config, "trainer").model.hf_checkpoint == directory
    assert hub_resolve.for_service(config, "reward") is config
    assert hub.asked == []


@pytest.mark.extra
def test_a_frozen_models_service_downloads_its_model_alone_and_a_gateway_no_weights(hub: HubServer, tmp_path: Path) -> None:
    commits = {name: hub.commit("models", f"org/{name}", MODEL) for name in ("model", "judge")}
    models = {"judge": {"hf_checkpoint": "org/judge"}}
    given = run_config(tmp_path, model={"hf_checkpoint": "org/model"}, rollout={**values(tmp_path)["rollout"], "models": models})
    config = hub_resolve.pinned(given.absolute(tmp_path))
    assert str(config.rollout.models["judge"].hf_checkpoint) == f"hf:org/judge@main={commits['judge']}"
    gateway = hub_resolve.for_service(config, "gateway")
    found = [gateway.model.hf_checkpoint, gateway.rollout.models["judge"].hf_checkpoint]
    assert [path is not None and path.is_dir() and not (path / "model.safetensors").exists() for path in found] == [True, True]
    directory = hub_resolve.for_service(config.of_engines("judge"), "rollout").model.hf_checkpoint
    assert (directory / "model.safetensors").is_file() and commits["judge"] in str(directory)
    assert not list((tmp_path / "hf").rglob("models--org--model/**/model.safetensors"))


@pytest.mark.extra
def test_chat_templates_of_a_folder_are_downloaded_too(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("models", "org/model", {**MODEL, "additional_chat_templates/tool_use.jinja": b"T", "onnx/tokenizer.json": b"{}"})
    directory = hub_resolve.for_service(hub_resolve.pinned(named(tmp_path)), "buffer").model.hf_checkpoint
    assert (directory / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"T"
    assert not (directory / "onnx").exists()


def test_of_several_weight_files_the_index_says_which(hub: HubServer, tmp_path: Path) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": b"x" * number for number in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    beside = {name: content for name, content in MODEL.items() if name != "model.safetensors"}
    hub.commit("models", "org/model", {**beside, **shards, "consolidated.safetensors": b"again", "model.safetensors.index.json": index})
    config = hub_resolve.pinned(named(tmp_path))
    directory = hub_resolve.local(config).model.hf_checkpoint
    assert sorted(path.name for path in directory.glob("*.safetensors")) == sorted(shards)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert hub_resolve.local(config).model.hf_checkpoint == directory
    assert (directory / "model-00002-of-00002.safetensors").is_file()


def test_a_branch_that_moves_does_not_move_a_run(hub: HubServer, tmp_path: Path) -> None:
    old = hub.commit("models", "org/model", MODEL)
    config = hub_resolve.pinned(named(tmp_path))
    (tmp_path / runs.FROZEN).write_text(config.model_dump_json())
    hub_resolve.local(config)
    new = hub.commit("models", "org/model", {**MODEL, "model.safetensors": b"trained on"})
    assert str(hub_resolve.pinned(named(tmp_path)).model.hf_checkpoint) == f"hf:org/model@main={new}"
    again = hub_resolve.pinned(named(tmp_path), hub_resolve.pins_in(tmp_path))
    assert str(again.model.hf_checkpoint) == f"hf:org/model@main={old}"
    assert (hub_resolve.local(again).model.hf_checkpoint / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    other = hub_resolve.pinned(named(tmp_path, f"org/model@{new}"), hub_resolve.pins_in(tmp_path))
    assert str(other.model.hf_checkpoint) == f"hf:org/model@{new}"


async def test_the_bus_tells_the_commits_of_a_run(hub: HubServer, tmp_path: Path, bus: Bus, run_name: str) -> None:
    commit = hub.commit("models", "org/model", MODEL)
    config = named(tmp_path)
    config = hub_resolve.pinned(config.model_copy(update={"run": config.run.model_copy(update={"name": run_name})}))
    await runs.create(bus, config, None)
    assert hub_resolve.pins(await runs.load(bus, run_name)) == {"hf:org/model": f"hf:org/model@main={commit}"}


def test_what_is_in_the_cache_needs_no_network(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("models", "org/model", MODEL)
    hub.commit("models", "org/model", {**MODEL, "config.json": b"[]"}, branch="v1")
    config = hub_resolve.pinned(named(tmp_path))
    directory = hub_resolve.local(config).model.hf_checkpoint
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_resolve.pinned(named(tmp_path)) == config
    assert hub_resolve.local(config).model.hf_checkpoint == directory
    line = refused(tmp_path, "org/model@v1")
    assert "HF_HUB_OFFLINE is set, and the cache " in line
    assert f"{tmp_path}/hf" in line
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert hub_resolve.pinned(named(tmp_path)) == config
    (directory / "model.safetensors").unlink()
    assert "cannot be reached" in refused(tmp_path)


def test_no_network_is_told_at_once(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    began = time.monotonic()
    line = refused(tmp_path)
    assert time.monotonic() - began < 10
    assert line.startswith(f"{endpoint} cannot be reached (")
    assert "; nor is there a directory org/model here; give a directory, or run `myxo up CONFIG --dry-run` where there is a network" in line


def test_a_hub_that_keeps_silent_is_given_up(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "REQUEST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached" in refused(tmp_path)
    monkeypatch.setattr(hub_client, "REQUEST_SECONDS", 60)
    monkeypatch.setattr(hub_client, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "no answer within" in refused(tmp_path)


def test_names_and_revisions_that_there_are_not(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("models", "org/model", MODEL)
    line = refused(tmp_path, "org/modell")
    assert (
        f"there is no model org/modell on {hub.url} (or it is private: then set HF_TOKEN); nor is there a directory org/modell here" in line
    )
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "the account of HF_TOKEN may not see it" in refused(tmp_path, "org/modell")
    assert f"the model org/model has no revision 'v9' on {hub.url}" in refused(tmp_path, "org/model@v9")
    assert "there is no model a--b/c" in refused(tmp_path, "a--b/c")


def test_a_gated_model_needs_a_token(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("models", "org/model", MODEL)
    hub.gated.add("org/model")
    assert f"gated, and no HF_TOKEN is set: accept its terms at {hub.url}/org/model" in refused(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "the account of HF_TOKEN has no access" in refused(tmp_path)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert hub_resolve.local(hub_resolve.pinned(named(tmp_path))).model.hf_checkpoint.is_dir()


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("model.safetensors", "the repository holds no *.safetensors (but .bin, .gguf)"),
        ("tokenizer.json", "the repository holds no tokenizer.json"),
        ("config.json", "the repository holds no config.json"),
    ],
)
def test_a_repository_without_what_a_run_needs(hub: HubServer, tmp_path: Path, absent: str, words: str) -> None:
    hub.commit("models", "org/model", {name: content for name, content in MODEL.items() if name != absent})
    assert words in refused(tmp_path)
    assert hub.downloads() == []


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("models", "org/model", MODEL)
    hub.cut["model.safetensors"] = 1000
    directory = hub_resolve.local(hub_resolve.pinned(named(tmp_path))).model.hf_checkpoint
    assert (directory / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert len([line for line in hub.asked if line.startswith("GET") and line.endswith("/model.safetensors")]) == 2


@pytest.mark.extra
def test_where_xet_is_blocked_plain_http_is_used(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(hub_client, "XET_STALL_SECONDS", 0.3)
    hub.commit("models", "org/model", MODEL)
    hub.over_xet.add("model.safetensors")
    directory = hub_resolve.local(hub_resolve.pinned(named(tmp_path))).model.hf_checkpoint
    assert (directory / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert any("xet-read-token" in line for line in hub.asked)


def test_a_file_in_the_cache_that_is_not_whole_comes_again(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("models", "org/model", MODEL)
    config = hub_resolve.pinned(named(tmp_path))
    directory = hub_resolve.local(config).model.hf_checkpoint
    (directory / "model.safetensors").resolve().write_bytes(b"cut")
    (directory / "config.json").unlink()
    assert (hub_resolve.local(config).model.hf_checkpoint / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_where_a_download_of_config_and_tokenizer_broke_off_the_rest_comes_next_time(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("models", "org/model", MODEL)
    config, fetch = hub_resolve.pinned(named(tmp_path)), hub_client._Transfer._fetch
    for absent in ("tokenizer_config.json", "tokenizer.json"):

        def broken(transfer: hub_client._Transfer, absent: str = absent) -> None:
            if transfer.file == absent:
                raise OSError(errno.EIO, "broke off")
            fetch(transfer)

        with monkeypatch.context() as breaking, pytest.raises(ConfigError, match="broke off"):
            breaking.setattr(hub_client._Transfer, "_fetch", broken)
            hub_resolve.for_service(config, "buffer")
    directory = hub_resolve.for_service(config, "buffer").model.hf_checkpoint
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_room_is_looked_for_before(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("models", "org/model", MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=6999))
    place = tmp_path / "hf" / "hub"
    assert refused(tmp_path) == f"7.0 kB to download, and {place} has 7.0 kB free; set HF_HOME to a directory with room"
    assert "model.safetensors" not in hub.downloads()


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


def named_data(tmp_path: Path, *names: str) -> RunConfig:
    return hub_resolve.pinned(run_config(tmp_path, data={"prompt_data": list(names)}).absolute(tmp_path))


def rows(config: RunConfig) -> list[dict[str, Any]]:
    opened = open_rows(hub_resolve.local(config, hub_resolve.DATA).data.prompt_data or [], "data.prompt_data")
    return [opened[row] for row in range(len(opened))]


def refused_data(tmp_path: Path, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        hub_resolve.local(named_data(tmp_path, name), hub_resolve.DATA)
    assert caught.value.field == "data.prompt_data"
    assert "\n" not in str(caught.value)
    return caught.value.expected


def test_lines_stay_as_they_are(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"prompt": "1+1=", "metadata": {"a": 1}}\n\n{"prompt": "1+2=", "metadata": {"b": [2]}, "x": 1e400}'
    commit = hub.commit("datasets", "org/sums", {"train.jsonl": lines, "test.jsonl": b'{"prompt": "2+2="}\n', "extra.bin": b"large"})
    config = named_data(tmp_path, "hf:org/sums:train@[1:]*2", "hf:org/sums:test")
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
    assert named_data(tmp_path, "hf:org/sums:train@[1:]*2", "hf:org/sums:test") == config
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
    assert rows(named_data(tmp_path, "hf:org/sums/main:train")) == [{"prompt": chat, "label": label} for label in (2, 3, None)]
    assert hub.downloads() == ["README.md", "main/train-0.parquet", "main/train-1.parquet"]
    assert rows(named_data(tmp_path, "hf:org/sums/hard:train")) == [{"prompt": "∑", "label": 5.5}]
    assert "a config has to be named; it has main, hard: give hf:org/sums/main:train" in refused_data(tmp_path, "hf:org/sums:train")
    assert "it has no config 'main2'; it has main, hard: give hf:org/sums/main:train" in refused_data(tmp_path, "hf:org/sums/main2:train")
    assert "it has no split 'dev'; it has train, test: give hf:org/sums/main:train" in refused_data(tmp_path, "hf:org/sums/main:dev")
    assert "a split has to be named; it has train: give hf:org/sums/hard:train" in refused_data(tmp_path, "hf:org/sums/hard")


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
    [read] = rows(named_data(tmp_path, "hf:org/geo3k:train"))
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
    assert rows(named_data(tmp_path, "hf:org/sums:train")) == [{"prompt": "1+1=", "label": 2}]


def test_what_cannot_be_read_is_told(hub: HubServer, tmp_path: Path) -> None:
    assert f"there is no dataset org/none on {hub.url}" in refused_data(tmp_path, "hf:org/none:train")
    hub.commit("datasets", "org/empty", {"README.md": b"# Nothing yet"})
    assert "it holds no files that `datasets` reads" in refused_data(tmp_path, "hf:org/empty:train")
    hub.commit("datasets", "org/script", {"script.py": b"raise SystemExit"})
    assert "try the hub's own conversion: hf:org/script@refs/convert/parquet:train" in refused_data(tmp_path, "hf:org/script:train")
    hub.commit("datasets", "org/broken", {"train.parquet": b"PAR1, but not really"})
    assert "its files cannot be read" in refused_data(tmp_path, "hf:org/broken:train")
    assert list((tmp_path / "hf" / "myxo").rglob("*.partial")) == []
    hub.commit("datasets", "org/gated", {"train.jsonl": b"{}\n"})
    hub.gated.add("org/gated")
    assert f"accept its terms at {hub.url}/datasets/org/gated" in refused_data(tmp_path, "hf:org/gated:train")
