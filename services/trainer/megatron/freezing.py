"""The choice of parameters that train (all, those that patterns name, or LoRA's adapters), and frozen weights beside the policy's."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.hf_weights import LocalParameter, parameters
from services.trainer.megatron.moe import GroupedExperts
from services.trainer.parallel.runtime import deadline, gather_json
from shared.model.architecture import Architecture
from shared.model.trainable_parameters import Freezing


def freeze(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing, lora: bool) -> None:
    """Freezes parameters that are not to train. This is a collective of all ranks, before gradients and optimizer are made.

    Args:
        lora: only adapters train.

    Raises:
        ConfigError: a pattern fits nothing, nothing is left to train, or Megatron could not compute the gradients; on every rank.
    """
    if lora:
        for parameter in [parameter for chunk in chunks for parameter in chunk.parameters()]:
            parameter.requires_grad_(getattr(parameter, "adapter", False))
    elif not freezing.nothing:
        _freeze_named(chunks, config, architecture, freezing)
    else:
        return
    for experts in [module for chunk in chunks for module in chunk.modules() if isinstance(module, GroupedExperts)]:
        experts.lay_together()
    if config.recompute_granularity is not None:
        for chunk in chunks:
            _let_gradients_begin(chunk)


def _freeze_named(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing) -> None:
    held = {_name(local, architecture): local for local in parameters(chunks, config, architecture) if _is_trained(local.parameter)}
    with deadline("the exchange of parameter names"):
        everywhere = gather_json(list(held))
    freezing.check(list(dict.fromkeys(name for each in everywhere for name in each)))
    for name, local in held.items():
        local.parameter.requires_grad_(freezing.trains(name))


def _name(local: LocalParameter, architecture: Architecture) -> str:
    """Returns a parameter's name; the last stage's copy of a tied embedding has the embedding's: they train together or not at all."""
    tied_copy = local.name == "output_layer.weight" and architecture.tied_embeddings
    return "embedding.word_embeddings.weight" if tied_copy else local.name


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)  # routers' biases are not among them: no gradient moves them


def _let_gradients_begin(chunk: GPTModel) -> None:
    """Lets inputs ask for gradients: a recomputed layer gets none unless its input asks for one, which the output of a frozen
    embedding does not, and then no adapter of the stage would train."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return

    def ask(module: torch.nn.Module, given: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()

    embedding.register_forward_hook(ask)
