"""What cannot be done with 8-bit weights is refused before the start, by name."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from myxo.preflight import CHECKS, TRAINS
from myxo.preflight.engine_checks import check_engine_model
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.model_checks import check_actor, check_awareness, check_quantization
from shared.config import devices
from shared.model.engine_checkpoint import quantized, with_engine_checkpoint
from shared.model.quantization import engine_bytes, quantization_in_engines, quantization_of
from shared.runtime.errors import ConfigError
from shared.view.alarms import mismatch_remedy
from tests.support.converting import quantized_checkpoint, to_8_bits
from tests.support.run_config import SERVED, run_config
from tests.support.tables import table


@pytest.fixture(scope="module")
def eight_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_8_bits(tiny_model, tmp_path_factory.mktemp("eight") / "model", 16)


@pytest.fixture(scope="module")
def four_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_checkpoint(tiny_model, tmp_path_factory.mktemp("four") / "model", "int4")


def said(directory: Path, model: Path, **sections: dict[str, Any]) -> list[str]:
    sections.setdefault("model", {})["hf_checkpoint"] = str(model)
    inspection = Inspection(run_config(directory, **sections))
    found = [*check_quantization(inspection), *check_awareness(inspection), *check_actor(inspection)]
    return [f"note: {one.text}" if isinstance(one, Note) else str(one) for one in found]


def test_a_run_with_them_says_so_and_is_taken(eight_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    (note,) = said(tmp_path, eight_bits)
    assert note.startswith("note: engines get each version in blocks of 8-bit floats")
    assert said(tmp_path, tiny_model) == []


@table(
    ("sections", "words"),
    [
        ({"trainer": {"trainer_backend": "torch"}}, "trainer.trainer_backend = 'torch': megatron"),
        ({"trainer": {"lora_rank": 4}}, "trainer.lora_rank = 4: 0: adapters"),
        (SERVED, "plain weights, and rollout.rollout_precision = checkpoint, with tinker.tinker_endpoint"),
        ({"rollout": {"rollout_num_gpus_per_engine": 8}}, "which 8 ranks of an engine cannot divide into whole blocks of 16"),
    ],
)
def test_what_does_not_go_with_them(sections: dict[str, Any], words: str, eight_bits: Path, tmp_path: Path) -> None:
    assert any(words in one for one in said(tmp_path, eight_bits, **sections))


@pytest.mark.parametrize("kind", ["eight", "four"])
def test_engines_list_of_plain_modules_is_the_files(kind: str, eight_bits: Path, four_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Engines go by the list: a plain matrix that it lacks would be whatever lies in memory, and a push to it would be lost."""
    shutil.copytree(eight_bits if kind == "eight" else four_bits, broken := tmp_path / "broken")
    module, config = "model.layers.1.self_attn.o_proj", json.loads((broken / "config.json").read_text())
    entry, field = config["quantization_config"], "modules_to_not_convert" if kind == "eight" else "ignore"
    before = list(entry[field])
    entry[field] = [*before, r"re:.*layers\.1\.self_attn\.o_proj$"] if kind == "four" else [*before, module]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"quantization_config.{field} = '{module}': modules without"):
        quantization_of(broken)
    tensors = {name: one for name, one in load_file(broken / "model.safetensors").items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = load_file(tiny_model / "model.safetensors")[f"{module}.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(broken, mixed := tmp_path / "mixed")
    assert f"{module}.weight" not in quantization_of(mixed).names  # type: ignore[union-attr]
    config["quantization_config"][field] = before
    shutil.copytree(broken, unlisted := tmp_path / "unlisted")
    (unlisted / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{field}.*{module} among them: the files have it plain"):
        quantization_of(unlisted)


def test_parameters_are_those_that_packed_numbers_stand_for(eight_bits: Path, four_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Disk and memory are planned by them: the trainer starts from the plain numbers."""

    def parameters(directory: Path) -> int:
        size = Inspection(run_config(tmp_path, model={"hf_checkpoint": str(directory)})).model_size
        assert size is not None
        return size.parameters

    plain = parameters(tiny_model)
    assert parameters(four_bits) == parameters(eight_bits) == plain


@pytest.mark.parametrize(("capability", "taken"), [(7.0, False), (8.0, False), (8.9, True), (9.0, True), (10.0, False), (12.0, False)])
def test_gpus(capability: float, taken: bool, eight_bits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [9.0, capability])
    assert taken != any("compute capability" in one for one in said(tmp_path, eight_bits))


def test_blocks_that_older_gpus_lack(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [9.0])
    for given in ({"fp8_recipe": "mxfp8"}, {"fp4": "e2m1"}):
        assert "MXFP8 and NVFP4 want GPUs of compute capability 10.0 or more" in said(tmp_path, tiny_model, trainer={"megatron": given})[0]
    caches = list(check_engine_model(Inspection(run_config(tmp_path, rollout={"sglang": {"kv_cache_dtype": "nvfp4"}}))))
    assert "auto, bf16, fp8_e4m3 or fp8_e5m2" in str(caches[0])
    caches = list(check_engine_model(Inspection(run_config(tmp_path, rollout={"sglang": {"kv_cache_dtype": "fp8_e4m3"}}))))
    assert [type(one) for one in caches] == [Note]


FLAG, GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"


@table(
    ("trainer", "model", "words"),
    [
        ({"quantization_aware": True}, "four", None),
        ({"train_env_vars": {FLAG: "1", GROUP: "32"}}, "four", None),
        ({"train_env_vars": {FLAG: "1", GROUP: "128"}}, "four", f"{GROUP} = '128': 32, the groups of model.hf_checkpoint"),
        ({"quantization_aware": True}, "eight", "trainer.quantization_aware = True: false, or a model.hf_checkpoint in groups of 4-bit"),
        ({"train_env_vars": {FLAG: "1"}}, "plain", f"{FLAG} = True: false, or a model.hf_checkpoint in groups of 4-bit integers"),
        ({"quantization_aware": True, "megatron": {"transformer_impl": "transformer_engine"}}, "four", "transformer_impl = local"),
        ({"lora_rank": 4}, "four", "trainer.lora_rank = 4: 0: adapters"),
    ],
)
def test_quantization_awareness(
    trainer: dict[str, Any], model: str, words: str | None, eight_bits: Path, four_bits: Path, tiny_model: Path, tmp_path: Path
) -> None:
    found = said(tmp_path, {"eight": eight_bits, "four": four_bits, "plain": tiny_model}[model], trainer=trainer)
    refused = [one for one in found if not one.startswith("note")]
    assert refused == [] if words is None else any(words in one for one in refused)
    assert CHECKS[check_awareness] == TRAINS, "a version of such a run is evaluated in plain numbers"


def test_the_alarm_names_the_remedy_of_the_precision(eight_bits: Path, four_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    def remedy(model: Path, **sections: dict[str, Any]) -> str:
        return mismatch_remedy(run_config(tmp_path, model={"hf_checkpoint": str(model)}, **sections), "BISECT")

    assert "quantization_aware" in remedy(four_bits) and "BISECT" in remedy(four_bits, trainer={"quantization_aware": True})
    assert "8-bit weights" in remedy(eight_bits) and "BISECT" in remedy(tiny_model)
    assert "kv_cache_dtype" in remedy(tiny_model, rollout={"sglang": {"kv_cache_dtype": "fp8_e4m3"}})


@pytest.mark.parametrize("precision", ["int4", pytest.param("fp8", marks=pytest.mark.extra)])
def test_a_plain_checkpoint_in_fewer_bits(precision: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned from headers is what engines start from, which several make once; what it takes in memory is the same."""
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    config = run_config(tmp_path, model={"hf_checkpoint": str(tiny_model)}, rollout={"rollout_precision": precision})
    planned = quantization_in_engines(tiny_model, precision)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(with_engine_checkpoint, [config, config])
    made = first.model.hf_checkpoint
    assert made == second.model.hf_checkpoint and (made.name, made.parent.parent.parent) == (tiny_model.name, tmp_path / "cache")
    found = quantization_of(made)
    assert planned is not None and found == planned and found.entry == planned.entry
    assert engine_bytes(made) == engine_bytes(tiny_model, precision)
    with pytest.raises(ConfigError, match=rf"rollout_precision = '{precision}': checkpoint: .* is quantized already"):
        quantization_in_engines(made, precision)


def test_what_cannot_be_in_fewer_bits(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    (note,) = said(tmp_path, tiny_model, rollout={"rollout_precision": "int4"}, trainer={"quantization_aware": True})
    assert note.startswith("note: engines get each version in groups of 4-bit integers, by rollout_precision = int4")
    assert any("whole blocks of 128" in one for one in said(tmp_path, tiny_model, rollout={"rollout_precision": "fp8"}))
    with pytest.raises(ConfigError, match=r"rollout_precision = 'fp8': checkpoint with external_engines"):
        run_config(tmp_path, rollout={"rollout_precision": "fp8", "external_engines": ["http://127.0.0.1:1"]})
    broken, name = tmp_path / "broken", "model.layers.0.mlp.up_proj.weight"
    shutil.copytree(tiny_model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    config = run_config(tmp_path, model={"hf_checkpoint": str(broken)}, rollout={"rollout_precision": "int4"})
    with pytest.raises(ConfigError, match="finite numbers of 16 or 32 bits"):
        with_engine_checkpoint(config)
    save_file({name: tensors[name][:, :40].contiguous()}, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"columns that groups of 32 divide, for rollout.rollout_precision = int4"):
        quantization_in_engines(broken, "int4")


def test_where_the_converter_is_not_the_error_says_what_to_give(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of the rollout service has none."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="No module named 'services.trainer'\n"))
    with pytest.raises(ConfigError, match=r"a model that `myxo convert` has made; here that failed: No module named 'services.trainer'"):
        quantized(tiny_model, tmp_path / "made", "fp8")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"fp8": "hybrid"}, "8-bit floats want GPUs of compute capability 8.9"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "MXFP8 and NVFP4 want GPUs of compute capability 10.0"),
    ],
)
def test_training_in_8_bits(flags: dict[str, str], words: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and by an older GPU's name: before the start."""
    found = [one for one in said(tmp_path, tiny_model, trainer={"megatron": flags, "train_device": "cpu"}) if "megatron.fp" in one]
    assert "on a CPU" in found[0]
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [8.0])
    (found, *_) = said(tmp_path, tiny_model, trainer={"megatron": flags, "train_device": "cuda"})
    assert "megatron.fp8" in found and words.split(": ")[0] in found
