"""Low-rank adapters (LoRA, Hu et al. 2021): the matrices that they are laid on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.trainer_section import ALL_LINEAR, TrainerSection
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.tensor_table import layer_rows
from shared.runtime.errors import ConfigError, nearest


@dataclass(frozen=True)
class Lora:
    """The low-rank adaptation of a model.

    Args:
        rank: of the products that are added. alpha: they are scaled by alpha / rank. targets: PEFT's names of the matrices, as
            ``q_proj``, or ``all-linear`` alone for all that can be adapted.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @classmethod
    def of(cls, trainer: TrainerSection) -> "Lora | None":
        """Returns the adapters of a run's config; None if it has none."""
        return None if trainer.lora_rank is None else cls(trainer.lora_rank, trainer.lora_alpha, tuple(trainer.target_modules))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def takes(self, projection: str) -> bool:
        return ALL_LINEAR in self.targets or projection in self.targets

    def check(self, architecture: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any]) -> None:
        """Raises ConfigError where the model has no such matrices, or they cannot be adapted.

        Args:
            overrides: fields of Megatron's TransformerConfig as given.
        """
        field, given = "trainer.target_modules", list(self.targets)
        if overrides.get("transformer_impl") == "transformer_engine":
            raise ConfigError("trainer.lora_rank", self.rank, "none; Transformer Engine's layers take no adapters here")
        known, of_experts = _projections(architecture)
        plain = [name for name in known if name not in of_experts]
        for name in self.targets:
            if name in of_experts or (name == ALL_LINEAR and of_experts):
                wanted = f"only {', '.join(plain)}; layers of experts take no adapters here"
                raise ConfigError(field, given, wanted)
            if name != ALL_LINEAR and name not in known:
                raise ConfigError(field, name, f"a matrix of {architecture.model_type}: {nearest(name, known)}")
        if self.takes("gate_up_proj") and "gate_up_proj" in known and layout.tensor > 1:
            fit = [name for name in plain if name != "gate_up_proj"]
            wanted = f"only {', '.join(fit)} with tensor parallelism; {architecture.model_type} keeps gate and up in one matrix"
            raise ConfigError(field, given, wanted)


def projection(matrix: str) -> str:
    """Returns PEFT's name of a matrix with this Hugging Face name, as ``q_proj``."""
    return matrix.split(".")[-2]


def _projections(architecture: Architecture) -> tuple[list[str], set[str]]:
    """Returns PEFT's names of the model's matrices that could be adapted, and of those that layers of experts have."""
    known: dict[str, None] = {}
    of_experts: set[str] = set()
    for layer in range(architecture.num_layers):
        for row in layer_rows(architecture, layer):
            names = [projection(name) for name, _ in row.tensors]
            if re.fullmatch(r"(self_attention\.linear_\w+|mlp\.linear_fc[12])\.weight", row.megatron[0]):
                known.update(dict.fromkeys(names))
            elif "experts" in row.megatron[0]:
                of_experts.update(names)
    return list(known), of_experts
