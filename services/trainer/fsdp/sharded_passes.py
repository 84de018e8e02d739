"""Forward and backward passes of an FSDP2 model over this rank's micro-batches, with the functions of `services.trainer.backend.Passes`.

Every rank must pass the same number of micro-batches: each layer of each is a collective.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from services.trainer.fsdp import all_ranks
from services.trainer.fsdp.model import FsdpModel, Read
from services.trainer.fsdp.packed_attention import TokenRows
from services.trainer.packing import PackedBatch
from services.trainer.parallel.loss_function import BadLoss, LossFunction, MicroBatchesFailed, applied, asked_ids, read_head, reduce_reports
from services.trainer.parallel.runtime import anywhere, device
from shared.schema.kept_tokens import Kept


def log_probs(model: FsdpModel, batches: Sequence[PackedBatch], temperature: float, recorded: Any = None) -> list[Tensor]:
    """Returns the log-probability of every label, float32 [T] a micro-batch, without gradients. ``recorded`` gets, by the micro-batch's
    index, the experts that its tokens went through; None: it is not asked for."""
    model.train(False)

    def read(batch: PackedBatch, hidden: Tensor, weight: Tensor, rows: TokenRows | None) -> Tensor:
        labels, kept = _own(rows, model.labels(batch)[:, None], batch.kept)
        return model.head(weight).likelihood(hidden, labels, temperature, False, kept)[0][:, 0]

    return _without_gradients(model, [(batch, partial(read, batch)) for batch in batches], recorded)


def values(model: FsdpModel, batches: Sequence[PackedBatch]) -> list[Tensor]:
    """Returns a critic's values before each label, float32 [T] a micro-batch, without gradients."""
    model.train(False)
    return _without_gradients(model, [(batch, _value) for batch in batches])


def _without_gradients(model: FsdpModel, batches: Sequence[tuple[PackedBatch, Read]], recorded: Any = None) -> list[Tensor]:
    found = []
    with torch.no_grad():
        for index, (batch, read) in enumerate(batches):
            found.append(model.run(batch, read, recorded is not None))
            if recorded is not None:
                recorded[index] = model.replay.recorded()
    model.reshard()
    return found


def _own(rows: TokenRows | None, ids: Tensor, kept: Kept | None) -> tuple[Tensor, Kept | None]:
    """Returns ids and kept tokens of the rows that a rank reads, the ids on its device."""
    return (ids if rows is None else rows.of(ids)).to(device()), kept if rows is None else rows.kept(kept)


def _value(hidden: Tensor, weight: Tensor, _: object = None) -> Tensor:
    return F.linear(hidden.float(), weight.float())[:, 0]


def balanced_step(model: FsdpModel, batches: Sequence[PackedBatch]) -> None:
    """Returns None: experts are not balanced with this backend."""


def forward_backward(
    model: FsdpModel, batches: Sequence[PackedBatch], loss_fn: LossFunction, temperature: float, need_entropy: bool, balanced: None = None
) -> tuple[float, dict[str, float]]:
    """Adds the gradient of the summed loss to the zeroed gradients, summed over all ranks. Returns loss and metrics, summed likewise.

    Raises BadLoss: the loss function broke its contract. MicroBatchesFailed: it failed, on whichever rank.
    """
    model.train(True)
    reports, failed, seen = list[dict[str, Any]](), dict[int, Exception](), dict[int, tuple[Tensor, ...]]()
    for index, batch in enumerate(batches):
        model.keep_gathered(index < len(batches) - 1)
        found = model.run(batch, _read(model, batch, loss_fn, temperature, need_entropy))
        try:
            loss, metrics = applied(loss_fn, found, batch.to(device()))
            reports.append({"loss": loss.detach(), "metrics": metrics})
        except (torch.OutOfMemoryError, BadLoss):  # no single micro-batch's fault
            raise
        except Exception as error:
            failed[index], loss = error, found[0].sum() * 0
            seen[index] = tuple(tensor.detach() for tensor in found)
        (loss * dist.get_world_size()).backward()  # FSDP2 averages
    if anywhere(bool(failed)):
        raise MicroBatchesFailed(failed, lambda alone: _attempt(batches, seen, loss_fn, alone))
    return reduce_reports(reports, lambda sums, _: dist.all_reduce(sums, group=all_ranks.data_parallel()))


def loss_alone(model: FsdpModel, batch: PackedBatch, loss_fn: LossFunction, temperature: float, need_entropy: bool) -> float:
    """Returns the loss of one micro-batch, without gradients. A collective of all ranks."""
    model.train(True)
    found = model.run(batch, _read(model, batch, loss_fn, temperature, need_entropy))
    loss = float(applied(loss_fn, found, batch.to(device()))[0].detach())
    model.reshard()
    return loss


def _read(model: FsdpModel, batch: PackedBatch, loss_fn: LossFunction, temperature: float, need_entropy: bool) -> Read:
    """Returns what computes the loss function's arguments before the batch: tensors of T rows."""
    if model.value_head:
        return lambda hidden, weight, _: (_value(hidden, weight),)
    ids = asked_ids(loss_fn, batch, model.labels(batch))

    def read(hidden: Tensor, weight: Tensor, rows: TokenRows | None) -> tuple[Tensor, ...]:
        return read_head(model.head(weight), loss_fn, hidden, *_own(rows, ids, batch.kept), temperature, need_entropy)

    return read


def _attempt(batches: Sequence[PackedBatch], seen: Mapping[int, tuple[Tensor, ...]], loss_fn: LossFunction, alone: PackedBatch) -> None:
    """Computes the loss of one sequence from what the pass over its micro-batch has found: no rank waits for another in it."""
    for index, found in seen.items():
        whole = batches[index].tokens
        first = alone.tokens.storage_offset() - whole.storage_offset()
        if alone.tokens.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and 0 <= first < len(whole):
            rows = tuple(tensor[first : first + len(alone.tokens)].clone().requires_grad_() for tensor in found)
            applied(loss_fn, rows, alone.to(device()))
