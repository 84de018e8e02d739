"""What ``--spec MODULE NAME`` stands for: the layers of the model's family, or those of a user's own module.

A model's layers follow from its family (docs/models.md). Megatron's own specs and slime's for single models say nothing more, or need what
is not here; any other module is imported by the trainer (`services.trainer.megatron.spec`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.config.flag_table import has_engine
from shared.runtime.errors import ConfigError

FIELD = "trainer.spec"

_SLIME = "slime_plugins."
_OF_SLIME = {
    "slime_plugins.models.glm4": "glm4",
    "slime_plugins.models.glm5.glm5": "glm_moe_dsa",
    "slime_plugins.models.minimax_m2": "minimax_m2",
    "slime_plugins.models.qwen3_next": "qwen3_next",
    "slime_plugins.models.qwen3_5": "qwen3_5",
}  # slime's modules of layers → the family here that has the same

_MEGATRON = "megatron.core."
_OF_MEGATRON = "megatron.core.models.gpt.gpt_layer_specs"
_LOCAL = frozenset({"get_gpt_layer_local_spec", "get_gpt_layer_local_submodules"})
_OF_ENGINE = frozenset(
    {"get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_with_transformer_engine_submodules", "get_gpt_decoder_block_spec"}
)


def is_own_module(spec: Sequence[str], model_type: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a module of the user's has the layers; otherwise they are those of the model's family.

    Args:
        spec: module and name, or nothing. model_type: Hugging Face's name of the family. given: Megatron's flags as the config has them.

    Raises ConfigError: layers that are not here, or that need what is not installed or not asked for.
    """
    if not spec:
        return False
    module, name = spec
    value = f"{module} {name}"
    if module.startswith(_SLIME):
        if (family := _OF_SLIME.get(module)) != model_type and not (family == "qwen3_5" and model_type.startswith(family)):
            wanted = f"none: slime's layers are those of its {family or module.rpartition('.')[2]}, and {model_type} has its own here"
            raise ConfigError(FIELD, value, wanted)
        return False
    if not module.startswith(_MEGATRON):
        return True
    if module != _OF_MEGATRON or name not in _LOCAL | _OF_ENGINE:
        wanted = f"none: {model_type} has layers of its own, and Megatron's others are for models that are not here"
        raise ConfigError(FIELD, value, wanted)
    engine = given.get("transformer_impl", "local") == "transformer_engine"
    if name in _OF_ENGINE and not has_engine():
        raise ConfigError(FIELD, value, f"none, or {_OF_MEGATRON} get_gpt_layer_local_spec: Transformer Engine is not installed")
    if engine != (name in _OF_ENGINE):
        kind = "transformer_engine" if name in _OF_ENGINE else "local"
        raise ConfigError(FIELD, value, f"none, or {kind} for trainer.megatron.transformer_impl")
    return False
