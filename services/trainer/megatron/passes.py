"""Forward and backward passes of a model over this rank's micro-batches, in Megatron's schedule for its pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from services.trainer.megatron.attention import uses_dense_batches
from services.trainer.megatron.likelihood import VocabularySlice, log_probs_and_entropy
from services.trainer.megatron.model import Model
from services.trainer.megatron.packed import ModelInput, model_input
from services.trainer.megatron.runtime import device
from services.trainer.packing import PackedBatch
from shared.errors import MyxoError

LossFunction = Callable[[Tensor, Tensor | None, PackedBatch], tuple[Tensor, dict[str, Tensor]]]
"""``(log_probs [T], entropy [T] or None, batch) -> (loss, metrics)``; both float32, on the model's device, entropy only if
it was asked for. The loss is a scalar that depends on ``log_probs``, the metrics are scalars, the same names in every
micro-batch. Losses, metrics and gradients are summed over micro-batches and data-parallel ranks: per-token weights must
already hold the denominators."""


class BadLoss(MyxoError):
    """A loss function broke its contract (see :data:`LossFunction`)."""


@dataclass(frozen=True)
class Sums:
    """What the loss function returned, summed over micro-batches and data-parallel ranks; the same on every rank."""

    loss: float
    metrics: dict[str, float]


def log_probs(model: Model, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
    """Log-probability of every label under the model, float32 [T] a micro-batch, on every rank that shares the model."""
    model.train(False)

    def read(logits: Tensor, given: ModelInput, batch: PackedBatch) -> Tensor:
        return _likelihood(model, logits, given, batch, temperature, need_entropy=False)[0]

    with torch.no_grad():
        results: list[Tensor] = _run(model, batches, read, forward_only=True)
    if model.layout.pipeline == 1:
        return results
    results = results or [torch.empty(batch.tokens.numel(), dtype=torch.float32, device=device()) for batch in batches]
    for result in results:
        _from_last_stage(result)
    return results


def forward_backward(
    model: Model, batches: Sequence[PackedBatch], loss_fn: LossFunction, temperature: float, need_entropy: bool
) -> Sums:
    """Add the gradient of the summed loss to the (zeroed) gradient buffers, reduced over the data-parallel ranks.

    Raises:
        BadLoss: ``loss_fn`` broke its contract.
    """
    model.train(True)

    def compute(logits: Tensor, given: ModelInput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        likelihood, entropy = _likelihood(model, logits, given, batch, temperature, need_entropy)
        loss, metrics = loss_fn(likelihood, entropy, batch)
        if loss.dim() or not loss.requires_grad:
            raise BadLoss(f"loss_fn returned a loss of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}; "
                          "expected a scalar that depends on the log-probs")  # fmt: skip
        return loss, {name: value.detach() for name, value in metrics.items()}

    return _reduce(_run(model, batches, compute, forward_only=False))


def _run(
    model: Model, batches: Sequence[PackedBatch], on_logits: Callable[..., Any], forward_only: bool
) -> list[Any]:
    """Results of ``on_logits`` on the last pipeline stage, nothing on the others."""
    dense = uses_dense_batches(model.config.params_dtype)
    multiple = model.layout.tensor if model.layout.sequence_parallel else 1

    def step(source: Iterator[PackedBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(source)
        given = model_input(batch, multiple, dense, device())
        batch = batch.to(device())
        output = chunk(given.tokens, given.positions, None, packed_seq_params=given.sequences)

        def finish(logits: Tensor, non_loss_data: bool = False) -> Any:
            result = on_logits(logits.squeeze(0), given, batch)
            if non_loss_data:
                return result
            loss, metrics = result
            # the token count is Megatron's denominator, which `finalize` leaves out
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach(), "metrics": metrics}

        return output, finish

    def finalize(chunks: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
        finalize_model_grads(chunks, None, **options)

    model.config.finalize_model_grads_func = finalize
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=list(model.chunks),
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.numel() for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _likelihood(
    model: Model, logits: Tensor, given: ModelInput, batch: PackedBatch, temperature: float, need_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """``logits``: [T + padding, rows of this rank]."""
    if given.padding:
        logits = logits[: -given.padding]
    group = parallel_state.get_tensor_model_parallel_group()
    vocabulary = VocabularySlice.of(group, logits.size(1), model.architecture.vocab_size)
    return log_probs_and_entropy(logits, batch.labels, vocabulary, temperature, need_entropy)


def _reduce(reports: list[dict[str, Any]]) -> Sums:
    """Sum the last stage's reports over the data-parallel ranks, and tell all stages.

    Raises:
        BadLoss: the micro-batches, or the ranks, do not report the same metrics.
    """
    names = sorted(reports[0]["metrics"]) if reports else []
    agreed = all(sorted(report["metrics"]) == names for report in reports)
    # Ranks with different names would add up different things, or wait for one another: compare before reducing.
    mark = float(zlib.crc32("\n".join(names).encode())) if agreed else -1.0
    marks = torch.tensor([mark, -mark] if reports else [-torch.inf] * 2, dtype=torch.float64, device=device())
    count = torch.tensor([float(len(names))], dtype=torch.float64, device=device())
    marks = torch.cat([marks, count])
    dist.all_reduce(marks, op=dist.ReduceOp.MAX)
    if not agreed or marks[0] != -marks[1] or marks[0] < 0:
        raise BadLoss(f"loss_fn must report the same metrics in every micro-batch and on every rank; here: {names}")
    sums = torch.zeros(1 + int(marks[2]), dtype=torch.float32, device=device())
    for report in reports:
        sums += torch.stack([report["loss"].float(), *(report["metrics"][name].float() for name in names)])
    if reports:
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        _from_last_stage(sums)
        names = _names_from_last_stage(names)
    loss, *values = sums.tolist()
    return Sums(loss, dict(zip(names, values, strict=True)))


def _from_last_stage(tensor: Tensor) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(tensor, group=group, group_src=group.size() - 1)


def _names_from_last_stage(names: list[str]) -> list[str]:
    encoded = "\n".join(names).encode()
    size = torch.tensor([len(encoded)], device=device())
    _from_last_stage(size)
    letters = torch.zeros(int(size), dtype=torch.uint8, device=device())
    if len(encoded) == int(size) and encoded:
        letters.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    _from_last_stage(letters)
    text = bytes(letters.tolist()).decode()
    return text.split("\n") if text else []
