"""The parallel layout of a model over the ranks of a world (docs/layouts.md), and its divisibility checks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shared.config.trainer_section import TrainerSection
from shared.model.architecture import Architecture
from shared.runtime.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """The division of the model and the data among the world's ranks.

    Args:
        tensor: ranks that share each weight matrix. pipeline: stages of layers. context: ranks that share a sequence.
        expert: ranks that share the experts of a layer, from among the tensor-, context- and data-parallel ranks.
        sequence_parallel: also split norms and residuals over ``tensor``.
        virtual_pipeline: model chunks of each rank, if several.
        expert_tensor: ranks that share each expert's matrices; None for Myxo's choice: none where ``expert`` distributes
            whole experts, else ``tensor``. See :attr:`expert_tensor_size`.
        vocabulary_multiple: each rank's part of the vocabulary is a multiple of it; see :meth:`padded_vocabulary`.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    virtual_pipeline: int | None = None
    expert_tensor: int | None = None
    vocabulary_multiple: int = 1

    def padded_vocabulary(self, vocab_size: int) -> int:
        """Returns the rows of embedding and output layer. Those beyond ``vocab_size`` are zero, and no token: they have no logits, no
        gradient, and no place in an export."""
        multiple = self.vocabulary_multiple * self.tensor
        return -(-vocab_size // multiple) * multiple

    @property
    def chunks(self) -> int:
        """Returns the number of model chunks of each rank, several in interleaved pipelines."""
        return self.virtual_pipeline or 1

    @property
    def expert_tensor_size(self) -> int:
        """Returns how many ranks share each expert's matrices."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor

    @classmethod
    def of(cls, trainer: TrainerSection) -> "ParallelLayout":
        """Returns the layout that a run's config asks for."""
        found = -(-_stages(trainer.megatron) // trainer.pipeline_model_parallel_size)
        return cls(
            tensor=trainer.tensor_model_parallel_size,
            pipeline=trainer.pipeline_model_parallel_size,
            context=trainer.context_parallel_size,
            expert=trainer.expert_model_parallel_size,
            # the torch backend needs no such choice: tokens are split behind the layers
            sequence_parallel=(trainer.sequence_parallel or trainer.trainer_backend == "torch") and trainer.tensor_model_parallel_size > 1,
            virtual_pipeline=trainer.virtual_pipeline_model_parallel_size or (found if found > 1 else None),
            expert_tensor=trainer.expert_tensor_parallel_size,
            vocabulary_multiple=trainer.make_vocab_size_divisible_by,
        )

    def world_problems(self, world_size: int) -> Iterator[ConfigError]:
        """Yields why the world cannot be divided like this."""
        replica = self.tensor * self.pipeline * self.context
        if world_size % replica:
            yield ConfigError(
                "trainer.tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size",
                f"{self.tensor} x {self.pipeline} x {self.context}",
                f"a divisor of the world size, {world_size}",
            )
            return
        stage = world_size // self.pipeline
        if stage % self.expert:
            yield ConfigError("trainer.expert_model_parallel_size", self.expert, f"a divisor of {stage}, the ranks of a stage")
        elif stage % (self.expert * self.expert_tensor_size):
            yield ConfigError(
                "trainer.expert_tensor_parallel_size",
                self.expert_tensor_size,
                f"a divisor of {stage // self.expert}: the {stage} ranks of a stage, by expert_model_parallel_size, {self.expert}",
            )


UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Megatron's settings of pipelines whose stages differ in size; with one of them, Megatron itself checks the division."""


def _stages(given: Mapping[str, Any]) -> int:
    """Returns how many stages a pipeline's layout in Megatron's notation has, chunks of ranks counted apart; 0 where none is given."""
    text = (given.get("pipeline_model_parallel_layout") or "").replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.count("|") + 1 if text else 0


def stage_layers(a: Architecture, layout: ParallelLayout, given: Mapping[str, Any]) -> list[int]:
    """Returns the layers of each pipeline stage, also where the first or last one is given its own number."""
    first, last = (
        given.get(f"decoder_{end}_pipeline_num_layers") or given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")
    )
    counts = [first] if first and layout.pipeline > 1 else []
    ending = [last] if last and layout.pipeline > 1 else []
    between = layout.pipeline - len(counts) - len(ending)
    left = a.num_layers - sum(counts) - sum(ending)
    even, more = divmod(left, between) if between else (0, 0)
    return [*counts, *(even + (index < more) for index in range(between)), *ending]


def division_problems(
    architecture: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any] | None = None
) -> Iterator[ConfigError]:
    """Yields, with the numbers, why the layout cannot divide the architecture.

    Args:
        overrides: fields of Megatron's TransformerConfig as given; those of an uneven pipeline count.
    """
    divided = {
        "attention heads": architecture.num_attention_heads,
        "key/value heads": architecture.num_key_value_heads,
        "MLP channels": architecture.ffn_hidden_size,
        "linear attention's key heads": 0 if architecture.linear is None else architecture.linear.linear_num_key_heads,
        "MLP channels of the shared experts": 0 if architecture.experts is None else architecture.experts.shared_ffn_hidden_size,
    }
    if undivided := [f"{size} {what}" for what, size in divided.items() if size % layout.tensor]:
        yield ConfigError("trainer.tensor_model_parallel_size", layout.tensor, f"a divisor of the model's {', '.join(undivided)}")
    yield from _pipeline_problems(architecture, layout, overrides or {})
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield from _sequence_problems(architecture)
    yield from _expert_problems(architecture, layout)
    heads = 0 if architecture.linear is None else architecture.linear.linear_num_key_heads
    if heads % layout.tensor == 0 and heads // layout.tensor % layout.context:
        wanted = f"a divisor of {heads // layout.tensor}, the key heads of linear attention on a tensor-parallel rank, which it divides"
        yield ConfigError("trainer.context_parallel_size", layout.context, wanted)
    yield from _indexer_problems(architecture, layout, overrides or {})


def _sequence_problems(a: Architecture) -> Iterator[ConfigError]:
    if a.latent is not None:
        reason = "the projections to low ranks are whole on every tensor-parallel rank, and trained right only so"
    elif a.experts is not None:
        reason = "Megatron trains experts with tensor parallelism only so"
    else:
        return
    yield ConfigError("trainer.sequence_parallel", False, f"true; {reason}")


def _expert_problems(a: Architecture, layout: ParallelLayout) -> Iterator[ConfigError]:
    size, tensor_size = "trainer.expert_model_parallel_size", "trainer.expert_tensor_parallel_size"
    if a.experts is None:
        if layout.expert > 1:
            yield ConfigError(size, layout.expert, f"1; {a.model_type} has no experts")
        if layout.expert_tensor not in (None, 1, layout.tensor):
            yield ConfigError(tensor_size, layout.expert_tensor, f"none; {a.model_type} has no experts")
        return
    if a.experts.count % layout.expert:
        yield ConfigError(size, layout.expert, f"a divisor of its {a.experts.count} experts")
    if a.biases and layout.expert_tensor_size > 1:
        yield ConfigError(tensor_size, layout.expert_tensor_size, f"1; each expert of {a.model_type} has biases, and is whole on a rank")
    if a.experts.ffn_hidden_size % layout.expert_tensor_size:
        wanted = f"a divisor of the {a.experts.ffn_hidden_size} MLP channels of an expert"
        yield ConfigError(tensor_size, layout.expert_tensor_size, wanted)


def _indexer_problems(a: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any]) -> Iterator[ConfigError]:
    if a.indexer is None:
        return
    if any(overrides.get(name) for name in UNEVEN if not name.startswith("num_layers_in_")):
        return  # Megatron itself sizes the stages
    starts = list(accumulate(stage_layers(a, layout, overrides), initial=0))[:-1]
    if layout.chunks > 1:
        starts = list(range(0, a.num_layers, max(a.num_layers // (layout.pipeline * layout.chunks), 1)))
    if late := [start for start in starts if not a.has_indexer(start)]:
        begin = [layer for layer in range(1, a.num_layers) if a.has_indexer(layer)]
        wanted = f"stages that begin with layers of {begin} (from 0), which choose their keys; those that begin with {late} share a choice"
        yield ConfigError("trainer.pipeline_model_parallel_size", layout.pipeline, wanted)


def _pipeline_problems(a: Architecture, layout: ParallelLayout, overrides: Mapping[str, Any]) -> Iterator[ConfigError]:
    uneven = {name: overrides[name] for name in UNEVEN if overrides.get(name)}
    sized = {name: value for name, value in uneven.items() if name.startswith("num_layers_in_")}
    if uneven and layout.pipeline == 1:
        name = next(iter(uneven))
        yield ConfigError(f"trainer.megatron.{name}", uneven[name], "not given; pipeline_model_parallel_size is 1")
    elif not uneven and a.num_layers % layout.pipeline:
        last = a.num_layers - (layout.pipeline - 1) * -(-a.num_layers // layout.pipeline)
        uneven_fit = f"; or --decoder-last-pipeline-num-layers {last} for the last stage" if last > 0 else ""
        yield ConfigError("trainer.pipeline_model_parallel_size", layout.pipeline, f"a divisor of its {a.num_layers} layers{uneven_fit}")
    elif not uneven:
        yield from _chunk_problems(layout, {f"each of the {layout.pipeline} stages": a.num_layers // layout.pipeline})
    elif len(sized) == len(uneven):  # otherwise Megatron itself sizes the stages
        yield from _sized_problems(a, layout, sized)
    elif (stages := _stages(uneven)) and stages != (several := layout.pipeline * layout.chunks):
        wanted = f"{layout.pipeline} stages, or {several} where virtual_pipeline_model_parallel_size is {layout.chunks}"
        yield ConfigError("trainer.megatron.pipeline_model_parallel_layout", overrides[UNEVEN[-1]], f"{wanted}; it has {stages}")


def _sized_problems(a: Architecture, layout: ParallelLayout, sized: dict[str, int]) -> Iterator[ConfigError]:
    """Yields what is wrong with a pipeline whose first or last stage is given its own number of layers."""
    left, stages = a.num_layers - sum(sized.values()), layout.pipeline - len(sized)
    fits = left == 0 if stages == 0 else left > 0 and left % stages == 0
    if fits:
        yield from _chunk_problems(layout, {**sized, **({"the other stages": left // stages} if stages else {})})
    else:
        name, value = next(iter(sized.items()))
        named = ", ".join(f"{name} = {value}" for name, value in sized.items())
        wanted = f"so that {left} of {a.num_layers} layers divide over {stages} more stages ({named})"
        yield ConfigError(f"trainer.megatron.{name}", value, wanted)


def _chunk_problems(layout: ParallelLayout, stages: Mapping[str, int]) -> Iterator[ConfigError]:
    """Yields the first of the stages, name → layers, that the model chunks of a rank do not divide."""
    for name, layers in stages.items():
        if layers % layout.chunks:
            wanted = f"a divisor of {layers}, the layers of {name}"
            yield ConfigError("trainer.virtual_pipeline_model_parallel_size", layout.chunks, wanted)
            return
