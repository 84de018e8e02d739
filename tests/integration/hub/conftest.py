"""A hub on loopback with a model, and a cache of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer

MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same again",
    "model.gguf": b"and again",
    "original/consolidated.safetensors": b"and again",
    "README.md": b"# A model",
}
"""What a repository of a model may hold."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub that names are looked up on; its cache is empty."""
    with HubServer() as server:
        for variable in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
