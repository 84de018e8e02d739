"""A model with a layer that drafts, MiMo's, predictable by construction: its layers add little, so a token depends on the one before it.
The draft guesses as well as its last norm is the policy's own; a policy that changes is one with other signs there."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.tiny_model import PRINTABLE, character_tokenizer

DRAFT_NORM = "model.mtp_layers.0.final_layernorm.weight"
NORM = "model.norm.weight"
ADDED = 0.005
"""How much of what a layer computes it adds."""


@dataclass(frozen=True)
class DraftingShape:
    """Sizes; ``sharpness``: the standard deviation of logits, by which the likeliest token is more or less likely."""

    hidden: int = 32
    layers: int = 2
    heads: int = 4
    groups: int = 2
    intermediate: int = 48
    vocabulary: int = 67
    positions: int = 512
    sharpness: float = 2.5
    dtype: torch.dtype = torch.float32


def signs(shape: DraftingShape, flipped: float, seed: int = 1) -> Tensor:
    """Returns a norm of which a share is ``flipped``, the same ones for a larger share."""
    order = torch.rand(shape.hidden, generator=torch.Generator().manual_seed(seed))
    return torch.where(order < flipped, -1.0, 1.0).to(shape.dtype)


def write_drafting_model(path: Path, shape: DraftingShape, device: str = "cpu") -> dict[str, Tensor]:
    """Writes the checkpoint, with a tokenizer of characters, and returns its tensors."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        initializer_range=0.3 if shape.hidden < 256 else 0.02,
    )
    with torch.device(device):
        tensors = {name: tensor.to(shape.dtype) for name, tensor in Qwen2ForCausalLM(config).state_dict().items()}
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name].mul_(ADDED)
    tensors["model.embed_tokens.weight"].normal_()
    tensors["lm_head.weight"].normal_(std=shape.sharpness / shape.hidden**0.5)
    draft, last, eye = "model.mtp_layers.0.", f"model.layers.{shape.layers - 1}.", torch.eye(shape.hidden, dtype=shape.dtype)
    tensors |= {name.replace(last, draft): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    ones = torch.ones(shape.hidden, dtype=shape.dtype)
    tensors |= {f"{draft}{name}_layernorm.weight": ones.clone() for name in ("token", "hidden", "final")}
    tensors[f"{draft}input_proj.weight"] = torch.cat([torch.zeros_like(eye), eye], dim=1)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines are on the same GPU
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    written["torch_dtype"] = written["dtype"] = str(shape.dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(written))
    character_tokenizer(PRINTABLE[: min(len(PRINTABLE), shape.vocabulary - 4)]).save_pretrained(path)
    return tensors


def of_policy(tensors: dict[str, Tensor], norm: Tensor, draft: Tensor | None) -> dict[str, Tensor]:
    """Returns a version with another policy; ``draft``: the norm that its draft has learned, None: without the layers that draft."""
    changed = tensors | {NORM: norm} | ({} if draft is None else {DRAFT_NORM: draft})
    return {name: changed[name] for name in sorted(changed) if draft is not None or "mtp_layers" not in name}
