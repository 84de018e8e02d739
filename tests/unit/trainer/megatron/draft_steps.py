"""Checkpoints with draft layers, and what one rank does in the tests of their training."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.trainer.megatron.rank_steps import actor, exported, pushed, steps
from tests.unit.trainer.megatron.tiny import make_checkpoint


def make_drafted(kind: str, directory: Path, count: int = 1) -> Path:
    """Writes a tiny checkpoint with draft layers: each has the last layer's modules, with weights of its own."""
    make_checkpoint(kind, directory)
    config = json.loads((directory / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(5)

    def noise(tensor: Tensor) -> Tensor:
        return tensor + 0.05 * torch.randn(tensor.shape, generator=generator)

    for layer in range(last + 1, last + 1 + count):
        prefix = f"model.layers.{layer}."
        own = {prefix + name.split(".", 3)[3]: noise(t) for name, t in tensors.items() if name.startswith(f"model.layers.{last}.")}
        own |= {f"{prefix}{norm}.weight": noise(torch.ones(hidden)) for norm in ("enorm", "hnorm", "shared_head.norm")}
        own[f"{prefix}eh_proj.weight"] = 0.15 * torch.randn(hidden, 2 * hidden, generator=generator)
        own[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()
        tensors |= own
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    return directory


MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "shared_head.norm": "final_layernorm"}


def mimo_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with a draft layer behind two others as MiMo has them: by its names, the matrix for hidden states first."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("eh_proj.weight"):
            tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        if name.startswith(prefix := "model.layers.2.") and "embed_tokens" not in name and "shared_head.head" not in name:
            kind, _, end = name.removeprefix(prefix).rpartition(".")
            name = f"model.mtp_layers.0.{MIMO.get(kind, kind)}.{end}"
        found[name] = tensor
    return {name: tensor for name, tensor in found.items() if "layers.2." not in name}


def make_mimo(directory: Path) -> Path:
    """Writes a tiny Qwen2 with a draft layer, and below it the same model as a MiMo, whose directory is returned."""
    make_drafted("qwen2", directory)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    (target := directory / "mimo").mkdir()
    save_file(mimo_names(tensors), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}))
    return target


def train_drafts(hf_dir: Path, config: dict[str, Any], count: int = 2) -> dict[str, Any]:
    """Steps, and the weights after them as they are exported and pushed."""
    model = actor(hf_dir, **{"adam_eps": 1e-3, **config})
    results = steps(model, count)
    return {"steps": results, "weights": exported(model), "pushed": pushed(model)}
