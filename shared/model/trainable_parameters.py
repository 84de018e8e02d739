"""The parameters that train: those that patterns over their names leave, and low-rank adapters (LoRA, Hu et al. 2021)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config.trainer_section import ALL_LINEAR, TrainerSection
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.tensor_table import layer_rows, sizes
from shared.runtime.errors import ConfigError, nearest

ONLY_TRAIN, FREEZE = "trainer.only_train_params_name_list", "trainer.freeze_params_name_list"


@dataclass(frozen=True)
class Freezing:
    """Regular expressions, looked for anywhere in Megatron's global parameter names (as ``decoder.layers.7.mlp.linear_fc1.weight``).

    Args:
        only_train: if there are some, parameters that none of them is found in are frozen. freeze: so are those that one of these is
            found in.
    """

    only_train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()

    @classmethod
    def of(cls, trainer: TrainerSection) -> "Freezing":
        """Returns the patterns of a run's config."""
        return cls(tuple(trainer.only_train_params_name_list), tuple(trainer.freeze_params_name_list))

    @property
    def nothing(self) -> bool:
        return not self.only_train and not self.freeze

    def trains(self, name: str) -> bool:
        chosen = not self.only_train or any(re.search(pattern, name) for pattern in self.only_train)
        return chosen and not any(re.search(pattern, name) for pattern in self.freeze)

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a pattern that is found in none of the model's ``names``, where nothing would train, and where Megatron
        could not compute the gradients."""
        for field, patterns in ((ONLY_TRAIN, self.only_train), (FREEZE, self.freeze)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    shown = ", ".join([*names[:2], *names[-2:]])
                    raise ConfigError(field, pattern, f"found in the name of a parameter, as Megatron has them: {shown}")
        if not any(map(self.trains, names)):
            field = FREEZE if self.freeze else ONLY_TRAIN
            raise ConfigError(field, list(self.freeze or self.only_train), "patterns that leave something to train; all is frozen")
        self._check_biases(names)

    def _check_biases(self, names: Sequence[str]) -> None:
        """Refuses a bias that trains beside a frozen weight: Megatron (0.16) silently gives it no gradient."""
        known = set(names)
        for name in names:
            weight = re.sub(r"\.bias(\d*)$", r".weight\1", name)
            if weight != name and weight in known and self.trains(name) and not self.trains(weight):
                field = FREEZE if self.freeze else ONLY_TRAIN
                raise ConfigError(field, list(self.freeze or self.only_train), f"frozen or trained together: {name} and {weight}")


_ADAPTABLE = re.compile(
    r"(self_attention\.linear_\w+|mlp\.(shared_experts\.)?linear_fc[12]|mlp\.experts\.local_experts\.\{expert\}\.linear_fc[12])\.weight"
)
"""Megatron's names of matrices that can be adapted, as rows of the table have them."""


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

    def matrices(self, architecture: Architecture) -> list[str]:
        """Returns PEFT's names of the model's matrices that are adapted."""
        return [name for name in _projections(architecture)[0] if self.takes(name)]

    def check_targets(self, known: list[str], what: str) -> None:
        """Raises ConfigError for a target that is none of the ``known`` matrices, or of a pair of which engines drop one alone."""
        for name in self.targets:
            if name != ALL_LINEAR and name not in known:
                raise ConfigError("trainer.target_modules", name, f"{what}: {nearest(name, known)}")
        if "q_a_proj" in known and self.takes("q_a_proj") != self.takes("kv_a_proj_with_mqa"):
            raise ConfigError("trainer.target_modules", list(self.targets), "q_a_proj and kv_a_proj_with_mqa together, or neither")

    def check(self, architecture: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any]) -> None:
        """Raises ConfigError where the model has no such matrices, or they cannot be adapted.

        Args:
            overrides: fields of Megatron's TransformerConfig as given.
        """
        field, given = "trainer.target_modules", list(self.targets)
        if overrides.get("transformer_impl") == "transformer_engine":
            raise ConfigError("trainer.lora_rank", self.rank, "none; Transformer Engine's layers take no adapters here")
        if architecture.linear is not None:
            reason = f"none; adapters are not implemented for {architecture.model_type}, which has linear attention"
            raise ConfigError("trainer.lora_rank", self.rank, reason)
        known, of_experts = _projections(architecture)
        if architecture.stacked_experts and ALL_LINEAR in self.targets:
            wanted = f"some of {', '.join(known)}; {architecture.model_type} keeps its experts in tensors of all of them, without adapters"
            raise ConfigError(field, given, wanted)
        self.check_targets(known, f"a matrix of {architecture.model_type}")
        if any(self.takes(name) for name in of_experts):
            self._check_experts(architecture, layout, overrides)
        if self.takes("gate_up_proj") and "gate_up_proj" in known and layout.tensor > 1:
            fit = [name for name in known if name != "gate_up_proj"]
            wanted = f"only {', '.join(fit)} with tensor parallelism; {architecture.model_type} keeps gate and up in one matrix"
            raise ConfigError(field, given, wanted)

    def _check_experts(self, architecture: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any]) -> None:
        if layout.expert_tensor_size not in (1, layout.tensor):
            # Megatron's gradient norm counts what several ranks hold whole once for each tensor-parallel group
            wanted = f"1 or {layout.tensor} (the tensor-parallel size) with adapters on experts"
            raise ConfigError("trainer.expert_tensor_parallel_size", layout.expert_tensor_size, wanted)
        shared = architecture.experts is not None and architecture.experts.shared_ffn_hidden_size
        if shared and overrides.get("moe_shared_expert_overlap"):
            raise ConfigError("trainer.megatron.moe_shared_expert_overlap", True, "false with adapters on shared experts")

    def parameters(self, architecture: Architecture, layout: ParallelLayout, layers: Iterable[int]) -> tuple[int, int]:
        """Returns how many parameters the adapters of some layers have on one rank, without and of experts."""
        word, counts = sizes(architecture), [0, 0]
        for layer in layers:
            for row in layer_rows(architecture, layer):
                shapes = [[word[each] for each in words] for name, words in row.tensors if self.takes(projection(name))]
                if not _ADAPTABLE.fullmatch(row.megatron[0]):
                    continue
                ranks = layout.expert_tensor_size if row.per_expert else layout.tensor
                by_inputs = row.megatron[0].endswith(("linear_proj.weight", "linear_fc2.weight"))
                size = sum(inputs // ranks + outputs if by_inputs else inputs + outputs // ranks for outputs, inputs in shapes)
                times = architecture.experts.count // layout.expert if architecture.experts and row.per_expert else 1
                counts[row.per_expert] += self.rank * size * times
        return counts[0], counts[1]


def projection(matrix: str) -> str:
    """Returns PEFT's name of a matrix with this Hugging Face name, as ``q_proj``."""
    return matrix.split(".")[-2]


def _projections(architecture: Architecture) -> tuple[list[str], set[str]]:
    """Returns PEFT's names of the model's matrices that can be adapted, and of those that layers of experts have."""
    known: dict[str, None] = {}
    of_experts: set[str] = set()
    for layer in range(architecture.num_layers):
        for row in layer_rows(architecture, layer):
            if _ADAPTABLE.fullmatch(row.megatron[0]) and not row.stacked:
                names = [projection(name) for name, _ in row.tensors]
                known.update(dict.fromkeys(names))
                of_experts.update(names if "experts" in row.megatron[0] else ())
    return list(known), of_experts
