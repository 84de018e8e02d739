"""Which parameters train: all, those that patterns name, or LoRA's adapters alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.runtime import deadline, gather_json
from services.trainer.megatron.weights import LocalParameter, parameters
from shared.errors import ConfigError
from shared.model.architecture import Architecture

ONLY_TRAIN, FREEZE = "trainer.only_train_params_name_list", "trainer.freeze_params_name_list"


@dataclass(frozen=True)
class Freezing:
    """Regular expressions, looked for anywhere in Megatron's global parameter names (as ``decoder.layers.7.mlp.linear_fc1.weight``).

    Args:
        only_train: if there are some, parameters that none of them is found in are frozen. freeze: so are those that one of these is
            found in.

    Raises:
        ConfigError: one is no regular expression.
    """

    only_train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, patterns in ((ONLY_TRAIN, self.only_train), (FREEZE, self.freeze)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ConfigError(field, pattern, f"a regular expression ({error})") from error

    @property
    def nothing(self) -> bool:
        return not self.only_train and not self.freeze

    def trains(self, name: str) -> bool:
        chosen = not self.only_train or any(re.search(pattern, name) for pattern in self.only_train)
        return chosen and not any(re.search(pattern, name) for pattern in self.freeze)

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a pattern that is found in none of the model's ``names``, and where nothing would train."""
        for field, patterns in ((ONLY_TRAIN, self.only_train), (FREEZE, self.freeze)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    shown = ", ".join([*names[:2], *names[-2:]])
                    raise ConfigError(field, pattern, f"found in the name of a parameter, as Megatron has them: {shown}")
        if not any(map(self.trains, names)):
            field = FREEZE if self.freeze else ONLY_TRAIN
            raise ConfigError(field, list(self.freeze or self.only_train), "patterns that leave something to train; all is frozen")


def freeze(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing, lora: bool) -> None:
    """Freeze what is not to train. A collective of all ranks, before gradients and optimizer are made.

    Args:
        lora: only adapters train.

    Raises:
        ConfigError: a pattern fits nothing, nothing is left to train, or Megatron could not compute the gradients; on every rank.
    """
    if lora:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.requires_grad_(getattr(parameter, "adapter", False))
    elif not freezing.nothing:
        held = {_name(local, architecture): local for local in parameters(chunks, config, architecture) if _is_trained(local.parameter)}
        with deadline("the exchange of parameter names"):
            everywhere = gather_json(list(held))
        names = list(dict.fromkeys(name for each in everywhere for name in each))
        freezing.check(names)
        _check_biases(names, freezing)
        for name, local in held.items():
            local.parameter.requires_grad_(freezing.trains(name))
    else:
        return
    for chunk in chunks if config.recompute_granularity is not None else ():
        _let_gradients_begin(chunk)


def _name(local: LocalParameter, architecture: Architecture) -> str:
    """The last pipeline stage's copy of a tied embedding goes by the embedding's name: they train together or not at all."""
    tied_copy = local.name == "output_layer.weight" and architecture.tied_embeddings
    return "embedding.word_embeddings.weight" if tied_copy else local.name


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)  # routers' biases are none: no gradient moves them


def _check_biases(names: Sequence[str], freezing: Freezing) -> None:
    """Megatron's linear layer with a frozen weight (0.16) gives its bias no gradient, and says nothing."""
    for name in names:
        weight = re.sub(r"\.bias(\d*)$", r".weight\1", name)
        if weight != name and weight in names and freezing.trains(name) and not freezing.trains(weight):
            field = FREEZE if freezing.freeze else ONLY_TRAIN
            raise ConfigError(field, list(freezing.freeze or freezing.only_train), f"frozen or trained together: {name} and {weight}")


def _let_gradients_begin(chunk: GPTModel) -> None:
    """A layer that is computed again in the backward pass gets no gradient unless its input asks for one, which the output of a frozen
    embedding does not: all adapters of the stage would stay as they are."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return

    def ask(module: torch.nn.Module, given: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()

    embedding.register_forward_hook(ask)
