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


NORMS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "mimo": (
        *("model.mtp_layers.0.", "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
        {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True},
    ),
    "qwen3_next": (
        *("mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
        {"num_nextn_predict_layers": None},
    ),
}
"""Of a family: prefixes of the draft layer's names and of its own parameters', these parameters, and what its config has besides."""


def family_names(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with a draft layer behind two others as a family has them: by its names, and MiMo's matrix for states first."""
    layer, prefix, names, _ = FAMILIES[family]
    own, found = dict(zip(NORMS, names, strict=True)), {}
    for name, tensor in tensors.items():
        if family == "mimo" and name.endswith("eh_proj.weight"):
            tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        if not name.startswith("model.layers.2."):
            found[name] = tensor
        elif (kind := name.removeprefix("model.layers.2.").removesuffix(".weight")) in own:
            found[f"{prefix}{own[kind]}.weight"] = tensor
        elif kind not in ("embed_tokens", "shared_head.head"):
            found[name.replace("model.layers.2.", layer)] = tensor
    return found


def make_family(family: str, kind: str, directory: Path) -> Path:
    """Writes a tiny model with a draft layer, and below it the same model as one of another family, whose directory is returned."""
    make_drafted(kind, directory)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    (target := directory / family).mkdir()
    save_file(family_names(family, tensors), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | FAMILIES[family][3]))
    return target


def train_drafts(hf_dir: Path, config: dict[str, Any], count: int = 2) -> dict[str, Any]:
    """Steps, and the weights after them as they are exported and pushed."""
    model = actor(hf_dir, **{"adam_eps": 1e-3, **config})
    results = steps(model, count)
    return {"steps": results, "weights": exported(model), "pushed": pushed(model)}
