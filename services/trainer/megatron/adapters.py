"""LoRA's adapters as parameters of their own: under PEFT's names, written and loaded in PEFT's format.

:class:`.gather_plan.GatherPlan` gathers them like any other parameter, for an export of them alone or merged into their matrices.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import LocalParameter, Recipe, recipe
from services.trainer.megatron.lora import layers
from shared.model.lora_targets import Lora
from shared.runtime.errors import ConfigError

DIRECTORY = "adapter"
"""The directory beside a merged model that holds its adapters in PEFT's format."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

Adapters = dict[str, tuple[LocalParameter, LocalParameter]]
"""The Hugging Face name of a matrix → this rank's parts of its ``a`` and ``b``, whose own names are PEFT's."""


def adapters_of(model: MegatronModel) -> Adapters:
    """Returns the adapters of this rank's pipeline stage, in the order of the layers; none without LoRA."""
    found: Adapters = {}
    for layer, linear in layers(model.modules, model.config) if model.lora is not None else ():
        pairs = linear.adapter.pairs if hasattr(linear, "adapter") else {}
        for matrix in recipe(f"{layer}.weight", model.architecture).names:
            if (pair := pairs.get(matrix.split(".")[-2])) is not None:
                found[matrix] = _local(matrix, "A", pair.a), _local(matrix, "B", pair.b)
    return found


def _local(matrix: str, part: str, parameter: torch.nn.Parameter) -> LocalParameter:
    name, shape = f"base_model.model.{matrix.removesuffix('.weight')}.lora_{part}.weight", list(parameter.shape)
    alone = LocalParameter(name, parameter, Recipe(()))
    if (dimension := alone.split_dimension) is not None:
        shape[dimension] *= alone.group.size()
    return LocalParameter(name, parameter, Recipe(((name, tuple(shape)),)))


@torch.no_grad()
def silence_adapters(model: MegatronModel) -> None:
    """Zeroes every adapter's ``b``, so that the model computes what its base would."""
    for _, b in adapters_of(model).values():
        b.parameter.zero_()


@torch.no_grad()
def load_adapters(model: MegatronModel, directory: Path) -> None:
    """Takes the adapters from a directory in PEFT's format, whatever layout wrote it.

    Raises:
        ConfigError: they cannot be read, or are not those of this model.
    """
    path = directory / WEIGHTS
    try:
        with safe_open(path, framework="pt") as held:
            for local in [part for pair in adapters_of(model).values() for part in pair]:
                (_, shape), whole = local.recipe.tensors[0], held.get_tensor(local.name)
                if tuple(whole.shape) != shape:
                    raise ConfigError(f"{path}:{local.name}", tuple(whole.shape), f"shape {shape}")
                local.parameter.copy_(local.shard(whole))
    except (OSError, SafetensorError) as error:
        raise ConfigError("trainer.lora_rank", str(path), f"a readable file with the adapters of this model ({error})") from error


def peft_config(names: Iterable[str], lora: Lora, base: Path) -> dict[str, Any]:
    """Returns the content of PEFT's config of adapters. ``names``: PEFT's. ``base``: the Hugging Face checkpoint that they belong to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
