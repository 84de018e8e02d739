"""Names on the hub, as configs give them."""

from pathlib import Path

import pytest

from shared.hub import hub_names
from shared.hub.hub_names import HubName
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


@table(
    ("text", "name"),
    [
        ("hf:Qwen/Qwen3-0.6B", HubName("model", "Qwen/Qwen3-0.6B")),
        ("hf:gpt2@v1.0", HubName("model", "gpt2", "v1.0")),
        ("hf:a/b@refs/pr/1", HubName("model", "a/b", "refs/pr/1")),
        (f"hf:a/b@{COMMIT}", HubName("model", "a/b", COMMIT, COMMIT)),
        (f"hf:a/b@main={COMMIT}", HubName("model", "a/b", "main", COMMIT)),
    ],
)
def test_models(text: str, name: HubName) -> None:
    assert hub_names.model(text) == name
    assert str(name) == text
    assert hub_names.model(Path(text)) == name


@table(
    ("text", "name"),
    [
        ("hf:openai/gsm8k/main:train", HubName("dataset", "openai/gsm8k", config="main", split="train")),
        ("hf:a/b:test", HubName("dataset", "a/b", split="test")),
        ("hf:squad:validation", HubName("dataset", "squad", split="validation")),
        ("hf:a/b", HubName("dataset", "a/b")),
        ("hf:a/b/20220301.en@v2:train", HubName("dataset", "a/b", "v2", None, "20220301.en", "train")),
        (f"hf:a/b@refs/convert/parquet={COMMIT}:train", HubName("dataset", "a/b", "refs/convert/parquet", COMMIT, None, "train")),
    ],
)
def test_data_sets(text: str, name: HubName) -> None:
    assert hub_names.dataset(text) == name
    assert str(name) == text


def test_a_pinned_name_remembers_what_was_asked_for() -> None:
    name = hub_names.model("hf:a/b@v1").pinned(COMMIT)
    assert str(name) == f"hf:a/b@v1={COMMIT}"
    assert str(name.unpinned) == "hf:a/b@v1"
    assert str(hub_names.model(f"hf:a/b@{COMMIT}").unpinned) == f"hf:a/b@{COMMIT}"


@table(
    ("section", "field", "value", "form"),
    [
        ("model", "hf_checkpoint", "hf:", "hf:ORG/NAME"),
        ("model", "hf_checkpoint", "hf:a/b:train", "hf:ORG/NAME"),
        ("model", "hf_checkpoint", "hf:a/b/c", "hf:ORG/NAME"),
        ("trainer", "critic_load", "hf:a b", "hf:ORG/NAME"),
        ("data", "prompt_data", "hf:a/b:train[:10%]", "hf:ORG/NAME:SPLIT"),
        ("eval", "eval_prompt_data", "hf:a/b@:train", "hf:ORG/NAME:SPLIT"),
        ("sft", "sft_data", "hf:a/b/c/d:train", "hf:ORG/NAME:SPLIT"),
    ],
)
def test_what_is_no_name_is_refused_by_field(tmp_path: Path, section: str, field: str, value: str, form: str) -> None:
    with pytest.raises(ConfigError, match=form) as caught:
        run_config(tmp_path, **{section: {field: value}})
    assert caught.value.field == f"{section}.{field}"


def test_a_local_path_wins_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    read = {
        text: str(hub_names.model_path(Path(text), tmp_path))
        for text in ("models/tiny", "Qwen/Qwen3-0.6B@v1", "a/b/c", "tiny", "hf:gpt2", "/x/y")
    }
    assert read == {
        "models/tiny": f"{tmp_path}/models/tiny",
        "Qwen/Qwen3-0.6B@v1": "hf:Qwen/Qwen3-0.6B@v1",
        "a/b/c": f"{tmp_path}/a/b/c",
        "tiny": f"{tmp_path}/tiny",
        "hf:gpt2": "hf:gpt2",
        "/x/y": "/x/y",
    }


def test_names_stay_names_when_paths_are_made_absolute(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        model={"hf_checkpoint": "org/model"},
        data={"prompt_data": ["hf:org/data:train@[0:100]*0.5", "b.jsonl"]},
        sft={"sft_data": "hf:a/b:c"},
    ).absolute(tmp_path)
    values = config.model_dump(mode="json")
    assert values["model"]["hf_checkpoint"] == "hf:org/model"
    assert values["data"]["prompt_data"] == ["hf:org/data:train@[0:100]*0.5", f"{tmp_path}/b.jsonl"]
    assert values["sft"]["sft_data"] == ["hf:a/b:c"]
    assert type(config).model_validate(values) == config
