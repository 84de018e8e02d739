"""A run whose model and data are named on the hub, through the command line."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.process.embedded_servers import free_port
from tests.integration.myxo.command import Myxo
from tests.support.hub_server import HubServer

ConfigFile = Callable[..., Path]

NAMED = {"model": {"hf_checkpoint": "org/model"}, "data": {"prompt_data": "hf:org/sums:train@[1:]"}}


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, myxo: Myxo, config_file: ConfigFile) -> Iterator[HubServer]:
    """A hub with the tiny model and the tests' sums, which the command line uses."""
    with HubServer() as server:
        server.commit("models", "org/model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
        config_file()
        server.commit("datasets", "org/sums", {"train.jsonl": (tmp_path / "prompts.jsonl").read_bytes()})
        myxo.environment = {key: value for key, value in myxo.environment.items() if not key.startswith("HF_")}
        myxo.environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": server.url}
        yield server


def test_a_run_keeps_the_commits_that_it_began_with(myxo: Myxo, config_file: ConfigFile, hub: HubServer, tmp_path: Path) -> None:
    config = config_file(**NAMED)
    code, shown, err = myxo.run("up", config, "--print-config")
    assert code == 0, err
    first = tomllib.loads(shown)
    assert first["model"]["hf_checkpoint"].startswith("hf:org/model@main=")
    assert first["data"]["prompt_data"][0].startswith("hf:org/sums@main=")
    assert first["data"]["prompt_data"][0].endswith(":train@[1:]")
    assert not (tmp_path / "runs").exists()
    code, out, err = myxo.run("up", config, standins=True)
    assert code == 0, f"{out}\n{err}"

    hub.commit("models", "org/model", {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b""})
    hub.commit("datasets", "org/sums", {"train.jsonl": b"{}\n"})
    hub.asked.clear()
    code, shown, err = myxo.run("up", config, "--print-config")
    assert (code, tomllib.loads(shown)) == (0, first), err
    assert hub.asked == []
    code, _, err = myxo.run("up", config, "--dry-run", "--fresh")
    assert code == 2
    assert "model.hf_checkpoint" in err


def test_names_without_a_network(myxo: Myxo, config_file: ConfigFile, hub: HubServer) -> None:
    config = config_file(**NAMED)
    code, out, err = myxo.run("up", config, environment={"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"})
    assert (code, out, len(err.splitlines())) == (2, "", 2), err
    assert "model.hf_checkpoint = 'hf:org/model'" in err
    assert "cannot be reached" in err
