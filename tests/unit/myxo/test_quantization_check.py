"""What cannot be done with 8-bit weights is refused before the start, by name."""

from pathlib import Path
from typing import Any

import pytest

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.model_checks import check_actor, check_quantization
from shared.config import devices
from tests.support.converting import to_8_bits
from tests.support.run_config import run_config


@pytest.fixture(scope="module")
def eight_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_8_bits(tiny_model, tmp_path_factory.mktemp("eight") / "model", 16)


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
