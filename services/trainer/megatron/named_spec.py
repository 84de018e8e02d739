"""Layers of a user's own module, which ``--spec MODULE NAME`` names.

The name is a spec, or a function that returns one: Megatron's ``ModuleSpec`` of every layer, or ``TransformerBlockSubmodules`` with those
of this rank's stage. A function gets what it asks for by name of ``config`` (Megatron's TransformerConfig), ``vp_stage``, ``architecture``
(the model's `Architecture`) and ``args``, which has the flags of the model and those given, for functions in slime's form
(args, config, vp_stage).

A layer must have the parameters of the model's family, since weights are loaded, exported and pushed by their names, and take packed
sequences. `services.trainer.megatron.spec.layer_spec` makes one to begin with.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from services.trainer.megatron.hf_weights import numbered_chunks, weights_of
from services.trainer.megatron.layer_modules import RMSNorm
from services.trainer.megatron.routing_replay import ReplayedLayer, ReplayedMoELayer
from shared.hooks.loading import load_object
from shared.model.architecture import Architecture
from shared.model.architecture_flags import flags_of
from shared.model.named_layers import FIELD
from shared.model.tensor_table import layer_rows
from shared.runtime.errors import ConfigError


def named_spec(
    spec: Sequence[str], architecture: Architecture, config: TransformerConfig, given: Mapping[str, Any], vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of this rank's pipeline stage.

    Args:
        spec: module and name. given: Megatron's flags as the config has them.

    Raises ConfigError: it cannot be imported, its function fails, or what it returns is no spec of so many layers.
    """
    module, name = spec
    value = f"{module} {name}"
    found = load_object(FIELD, value, module, name)
    if callable(found) and not isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        known = {
            "args": SimpleNamespace(**{**_plain(config), **flags_of(architecture), **given, "spec": list(spec)}),
            "config": config,
            "vp_stage": vp_stage,
            "architecture": architecture,
        }
        found = _called(found, known, value)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    if isinstance(found, ModuleSpec):
        found = TransformerBlockSubmodules(layer_specs=[found] * count)
    if not isinstance(found, TransformerBlockSubmodules) or len(found.layer_specs or []) != count:
        raise ConfigError(FIELD, value, f"a ModuleSpec, or TransformerBlockSubmodules of {count} layers; it gives {type(found).__name__}")
    return dataclasses.replace(found, layer_norm=found.layer_norm or RMSNorm)


def check_layers(spec: Sequence[str], chunks: Sequence[GPTModel], architecture: Architecture) -> None:
    """Compares the parameters of built layers with those of the model's family. Raises ConfigError where they differ, or where experts
    could not be told which tokens go to them."""
    value = " ".join(spec)
    for first, chunk in numbered_chunks(chunks, chunks[0].config):
        for number, layer in enumerate(chunk.decoder.layers, first):
            _check_layer(value, number, layer, architecture)


def _check_layer(value: str, number: int, layer: Any, architecture: Architecture) -> None:
    rows = layer_rows(architecture, number)
    has = {name for name, _ in weights_of(layer)}
    lacking = [row.megatron[0] for row in rows if has.isdisjoint(name.format(expert=0) for name in row.megatron)]
    experts = range(architecture.experts.count // layer.config.expert_model_parallel_size if architecture.experts else 1)
    unknown = sorted(has - {name.format(expert=expert) for row in rows for name in row.megatron for expert in experts})
    if lacking or unknown:
        differs = f"no {lacking[0]}" if lacking else f"{unknown[0]} besides"
        raise ConfigError(FIELD, value, f"layers with the parameters of {architecture.model_type}; layer {number} has {differs}")
    told = isinstance(layer, ReplayedLayer) and isinstance(layer.mlp, ReplayedMoELayer)
    if architecture.is_moe_layer(number) and not told:
        expected = f"a ReplayedLayer with a ReplayedMoELayer for experts, not {type(layer).__name__} with {type(layer.mlp).__name__}"
        raise ConfigError(FIELD, value, f"{expected} (services.trainer.megatron.routing_replay), in layer {number}")


def _plain(config: TransformerConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _called(function: Callable[..., Any], known: Mapping[str, Any], value: str) -> Any:
    parameters = inspect.signature(function).parameters.values()
    asked = [each.name for each in parameters if each.name in known]
    for each in parameters:
        needed = each.default is inspect.Parameter.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if needed and each.name not in known:
            raise ConfigError(FIELD, value, f"a function of {', '.join(known)}; it wants {each.name}")
    try:
        return function(**{name: known[name] for name in asked})
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(FIELD, value, f"a function that returns layers; it raised {type(error).__name__}: {error}") from error
