"""What cannot be done with 8-bit weights is refused before the start, by name."""

from pathlib import Path
from typing import Any

import pytest

from myxo.preflight.engine_checks import check_engine_model
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.model_checks import check_actor, check_quantization
from shared.config import devices
from shared.view.alarms import mismatch_remedy
from tests.support.converting import quantized_checkpoint, to_8_bits
from tests.support.run_config import run_config


@pytest.fixture(scope="module")
def eight_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_8_bits(tiny_model, tmp_path_factory.mktemp("eight") / "model", 16)


@pytest.fixture(scope="module")
def four_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_checkpoint(tiny_model, tmp_path_factory.mktemp("four") / "model", "int4")


def said(directory: Path, model: Path, **sections: dict[str, Any]) -> list[str]:
    sections.setdefault("model", {})["hf_checkpoint"] = str(model)
    inspection = Inspection(run_config(directory, **sections))
    found = [*check_quantization(inspection), *check_actor(inspection)]
    return [f"note: {one.text}" if isinstance(one, Note) else str(one) for one in found]


def test_a_run_with_them_says_so_and_is_taken(eight_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    (note,) = said(tmp_path, eight_bits)
    assert note.startswith("note: engines get each version in blocks of 8-bit floats")
    assert said(tmp_path, tiny_model) == []


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"trainer_backend": "torch"}}, "trainer.trainer_backend = 'torch': megatron"),
        ({"trainer": {"lora_rank": 4}}, "trainer.lora_rank = 4: 0: adapters"),
        ({"rollout": {"rollout_num_gpus_per_engine": 8}}, "which 8 ranks of an engine cannot divide into whole blocks of 16"),
    ],
)
def test_what_does_not_go_with_them(sections: dict[str, Any], words: str, eight_bits: Path, tmp_path: Path) -> None:
    assert any(words in one for one in said(tmp_path, eight_bits, **sections))


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


@pytest.mark.parametrize(
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


def test_the_alarm_names_the_remedy_of_the_precision(eight_bits: Path, four_bits: Path, tiny_model: Path, tmp_path: Path) -> None:
    def remedy(model: Path, **sections: dict[str, Any]) -> str:
        return mismatch_remedy(run_config(tmp_path, model={"hf_checkpoint": str(model)}, **sections), "BISECT")

    assert "quantization_aware" in remedy(four_bits) and "BISECT" in remedy(four_bits, trainer={"quantization_aware": True})
    assert "8-bit weights" in remedy(eight_bits) and "BISECT" in remedy(tiny_model)
    assert "kv_cache_dtype" in remedy(tiny_model, rollout={"sglang": {"kv_cache_dtype": "fp8_e4m3"}})
