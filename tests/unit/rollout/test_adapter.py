"""An adapter over an engine's own checkpoint: plain maths, and errors before anything is handed out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.rollout.engine.receiver.receiver import merged
from shared.runtime.errors import BadMessage, ConfigError
from shared.transfer.manifest import Manifest, lay_out

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def adapter(dtype: torch.dtype = torch.float32, rank: int = 3) -> tuple[Manifest, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    shapes = {f"{Q}.lora_A": (rank, 8), f"{Q}.lora_B": (12, rank), f"{DOWN}.lora_B": (8, rank), f"{DOWN}.lora_A": (rank, 20)}
    tensors = {f"base_model.model.{name}.weight": torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    return manifest_of(tensors), tensors


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    slots = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]
    return lay_out(slots, 400, "adapter", 0.5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """In two files, with an index and a tensor that no adapter is for."""
    random = torch.Generator().manual_seed(2)
    files = {"a.safetensors": {f"{Q}.weight": (12, 8), "model.norm.weight": (8,)}, "b.safetensors": {f"{DOWN}.weight": (8, 20)}}
    for file, shapes in files.items():
        save_file({name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}, tmp_path / file)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_the_base_with_the_scaled_product(dtype: torch.dtype, checkpoint: Path) -> None:
    from safetensors.torch import load_file

    manifest, tensors = adapter(dtype)
    base = load_file(checkpoint / "a.safetensors") | load_file(checkpoint / "b.safetensors")
    found = dict(merged(manifest, tensors, checkpoint))
    assert list(found) == [f"{Q}.weight", f"{DOWN}.weight"]
    for name, tensor in found.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        product = tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double()
        expected = base[name].double() + 0.5 * product
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected, atol=1e-5, rtol=0)


def test_one_file_without_an_index_is_read_too(tmp_path: Path) -> None:
    base = {f"{Q}.weight": torch.randn(12, 8), f"{DOWN}.weight": torch.randn(8, 20)}
    save_file(base, tmp_path / "model.safetensors")
    manifest, tensors = adapter()
    silent = {name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}
    assert all(torch.equal(tensor, base[name]) for name, tensor in merged(manifest, silent, tmp_path))


def test_half_an_adapter_and_one_of_another_shape_are_refused(checkpoint: Path) -> None:
    _, tensors = adapter()
    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("down_proj.lora_B.weight")}
    with pytest.raises(BadMessage, match=r"lacks .*down_proj.lora_B"):
        next(merged(manifest_of(half), half, checkpoint))
    wide = {**tensors, f"base_model.model.{DOWN}.lora_A.weight": torch.zeros(3, 21)}
    with pytest.raises(BadMessage, match=r"down_proj.weight of shape \(8, 20\)"):
        next(merged(manifest_of(wide), wide, checkpoint))  # although the first matrix would fit
    with pytest.raises(BadMessage, match="no name of PEFT's"):
        next(merged(manifest_of({"model.norm.weight": torch.zeros(8)}), {}, checkpoint))


def test_a_checkpoint_without_the_matrix_is_refused_with_its_name(checkpoint: Path, tmp_path: Path) -> None:
    manifest, tensors = adapter()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {f"{Q}.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"hf_checkpoint.*down_proj"):
        next(merged(manifest, tensors, checkpoint))
    (checkpoint / "a.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=r"hf_checkpoint.*readable"):
        next(merged(manifest, tensors, checkpoint))
