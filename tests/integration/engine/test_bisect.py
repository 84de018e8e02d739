"""``myxo bisect`` with a real engine and a real trainer: it names each of five planted faults, and nothing where there is none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from myxo.commands import bisect
from myxo.main import main
from services.rollout.engine import layer_scoring as engine_capture
from services.trainer import trainer_layers as trainer_capture
from shared.config import config_reading
from tests.support.converting import to_8_bits
from tests.support.run_config import run_config, write_jsonl
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint

TEXT = "".join(PRINTABLE[1 + (7 * place) % (VOCAB - 6)] for place in range(40))
Weights = dict[str, Tensor]


def prepared(directory: Path, kind: str, layers: int = 2, precision: str = "checkpoint", **trainer: Any) -> Path:
    """Writes a model and the config of a run of it; returns the config's file."""
    sizes = {} if precision == "checkpoint" else {"intermediate_size": 64}  # groups of 32 divide it
    make_checkpoint(kind, directory / "model", num_hidden_layers=layers, **sizes)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(directory / "model")
    write_jsonl(directory / "prompts.jsonl")
    trainer = {"train_device": "cpu", "train_dtype": "float32", **trainer}
    config = run_config(directory, trainer=trainer, rollout={"rollout_device": "cpu", "rollout_precision": precision})
    (directory / "run.toml").write_text(config_reading.dump(config))
    return directory / "run.toml"


def faulty(directory: Path, entries: dict[str, Any], change: Callable[[Weights], None] = lambda _: None) -> Path:
    """Writes the engine's checkpoint: the model's with other entries in its config.json, and changed weights."""
    target = directory / "faulty"
    shutil.copytree(directory / "model", target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **entries}))
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the trainer's side in this process, which has imported torch: the engine is one of its own anyway."""

    def run(what: str, module: str, directory: Path, deadline: float) -> None:
        if what == "engine":
            engine_capture.main([str(directory)])
        else:
            trainer_capture.rank(directory)

    monkeypatch.setattr(bisect, "run", run)


def reported(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["bisect", *words, "--prompt", TEXT, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.extra(each=True)
def test_a_wrong_epsilon_is_named_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepared(tmp_path, "qwen3")
    code, report = reported([str(config), "--engine-checkpoint", str(faulty(tmp_path, {"rms_norm_eps": 1e-5}))], capsys)
    first = report["origins"][0]
    assert (code, first["name"]) == (1, "layers.0.attention_norm")
    assert report["causes"][0]["kind"] == "norm epsilon" and "rms_norm_eps is 1e-05 for the engine" in report["causes"][0]["evidence"]


@pytest.mark.extra(each=True)
@pytest.mark.usefixtures("in_process")
def test_a_wrong_rope_scaling_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepared(tmp_path, "qwen3", trainer_backend="torch")
    theta = json.loads((tmp_path / "model" / "config.json").read_text())["rope_parameters"]["rope_theta"]
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": theta}}
    code, report = reported([str(config), "--engine-checkpoint", str(faulty(tmp_path, rope))], capsys)
    assert (code, report["origins"][0]["name"]) == (1, "layers.0.q")
    assert report["causes"][0]["kind"] == "rope" and "rope_parameters is" in report["causes"][0]["evidence"]
    assert report["others"] == ["rope"]  # the second layer's queries


@pytest.mark.extra
@pytest.mark.usefixtures("in_process")
def test_faults_of_weights_are_named_each_in_its_own_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepared(tmp_path, "qwen3_moe", layers=4)

    def change(weights: Weights) -> None:
        for name in [name for name in weights if ".layers.0.mlp.experts.1." in name]:
            other = name.replace(".experts.1.", ".experts.2.")
            weights[name], weights[other] = weights[other].clone(), weights[name].clone()
        for name in [name for name in weights if ".layers.1." in name]:
            weights[name] += 1e-3 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
        weights["model.layers.2.self_attn.o_proj.weight"][16:32, 32:64] *= 1.37  # what the scale of another block makes of it

    code, report = reported([str(config), "--engine-checkpoint", str(faulty(tmp_path, {}, change))], capsys)
    found = [one["name"] for one in report["origins"]]
    assert (code, found) == (1, ["layers.0.mlp_output", "layers.1.attention_norm", "layers.2.attention_output"])
    kinds = [report["causes"][0]["kind"], *report["others"]]
    assert kinds == ["swapped experts", "another version", "block scale"]
    assert "experts 1, 2" in report["causes"][0]["evidence"]


@pytest.mark.extra(each=True)
@pytest.mark.usefixtures("in_process")
def test_an_engine_in_fewer_bits_is_as_the_run_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = reported([str(prepared(tmp_path, "qwen3", precision="int4", quantization_aware=True))], capsys)
    assert (code, report["origins"]) == (0, []) and report["log_probs"]["max"] < 1e-3


@pytest.mark.extra
def test_two_tensor_parallel_ranks_and_an_engine_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "actor_num_gpus_per_node": 2}
    code, report = reported([str(prepared(tmp_path, "qwen3_moe", **layout))], capsys)
    assert (code, report["origins"], report["not_compared"]) == (0, [], [])
    assert {one["name"] for one in report["differences"]} >= {"layers.1.experts", "layers.1.router_logits", "final_norm"}


@pytest.mark.extra(each=True)
@pytest.mark.usefixtures("in_process")
def test_the_scale_of_another_block_is_named_in_an_engine_with_8_bit_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepared(tmp_path, "qwen3")
    target = to_8_bits(tmp_path / "model", tmp_path / "8-bit", 8)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight_scale_inv"][2, 3] *= 16
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    code, report = reported([str(config), "--engine-checkpoint", str(target)], capsys)
    assert (code, [one["name"] for one in report["origins"]]) == (1, ["layers.1.attention_output"])
    cause = report["causes"][0]
    assert cause["kind"] == "block scale" and "rows 16 to 23, columns 24 to 31 is the trainer's times 16" in cause["evidence"]
