"""The contract of loss functions, and what a backend's passes report of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.packing import PackedBatch
from services.trainer.parallel.likelihood import OutputHead, restrict
from services.trainer.parallel.runtime import device, gather_json
from shared.runtime.errors import MyxoError
from shared.schema.kept_tokens import Kept

# ``(log_probs [T], entropy [T] or None, batch) -> (loss, metrics)``; both float32, on the model's device, entropy only if it was asked
# for. The loss is a scalar that depends on ``log_probs``, the metrics are scalars, the same names in every micro-batch. Losses, metrics
# and gradients are summed over micro-batches and data-parallel ranks: per-token weights must already hold the denominators. A critic's
# loss function takes ``values [T]`` in place of the log-probs, and no entropy. A function whose attribute ``takes_logits`` is true is
# called as ``(logits [T, V / tensor-parallel ranks], batch)``, in the model's dtype and divided by the temperature; where the ranks do not
# divide the vocabulary, the last rows of the last ones are padding. A function with an attribute ``candidates`` names a field [T, C] of
# the micro-batch, ids of tokens, and gets their log-probs [T, C] as its last argument. Whatever the layout, a loss function sees whole
# sequences in the pack's order. Ranks that share a model or a sequence compute the same loss; it counts once.
LossFunction = Callable[[Tensor, Tensor | None, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


class BadLoss(MyxoError):
    """A loss function broke its contract (see :data:`LossFunction`)."""


class MicroBatchesFailed(MyxoError):
    """Micro-batches failed in a pass, on one rank or several; all ranks have come to its end, and its gradients mean nothing.

    Args:
        errors: what this rank's micro-batches failed of, by their indices. attempt: makes the same pass for one micro-batch on this rank
            alone, and raises what it raises.
    """

    def __init__(self, errors: Mapping[int, Exception], attempt: Callable[[PackedBatch], object]) -> None:
        self.errors, self.attempt = errors, attempt
        first = next(iter(errors.values()), None)
        super().__init__("a micro-batch of another rank failed" if first is None else f"{type(first).__name__}: {first}")


def checked(loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what a loss function has returned, metrics without their graphs. Raises BadLoss."""
    if loss.dim() or not loss.requires_grad:
        raise BadLoss(f"loss_fn returned a loss of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}; "
                      "expected a scalar that depends on its first argument")  # fmt: skip
    return loss, {name: value.detach() for name, value in metrics.items()}


def asked_ids(loss_fn: LossFunction, batch: PackedBatch, labels: Tensor) -> Tensor:
    """Returns the ids whose log-probs a loss function reads, int64 [T, 1 + C]: the labels [T], and its candidates."""
    field = getattr(loss_fn, "candidates", None)
    return labels[:, None] if field is None else torch.cat([labels[:, None], batch.fields[field].to(labels.device)], 1)


def read_head(
    head: OutputHead, loss_fn: LossFunction, inputs: Tensor, ids: Tensor, kept: Kept | None, temperature: float, need_entropy: bool
) -> tuple[Tensor, ...]:
    """Returns the arguments before the batch that a loss function reads of the output layer: tensors of as many rows as ``inputs``.

    Args:
        inputs: [n, hidden size]. ids: of these rows, see `asked_ids`. kept: theirs, as `OutputHead.likelihood` takes them.
    """
    if getattr(loss_fn, "takes_logits", False):
        logits = head.logits(inputs)
        restrict(logits, kept, slice(0, len(logits)), head.vocabulary)
        return (logits / temperature,)
    found, entropy = head.likelihood(inputs, ids, temperature, need_entropy, kept)
    return (found[:, 0], *([] if entropy is None else [entropy]), *([found[:, 1:]] if ids.size(1) > 1 else []))


def applied(loss_fn: LossFunction, found: Sequence[Tensor], batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and metrics of a micro-batch. ``found``: what `read_head` has read for it, or a critic's values. Raises BadLoss."""
    call: Callable[..., tuple[Tensor, dict[str, Tensor]]] = loss_fn
    if getattr(loss_fn, "takes_logits", False):
        return checked(*call(found[0], batch))
    candidates = found[-1:] if getattr(loss_fn, "candidates", None) is not None else ()
    entropy = found[1] if len(found) == 2 + len(candidates) else None
    return checked(*call(found[0], entropy, batch, *candidates))


def reduce_reports(reports: list[dict[str, Any]], share: Callable[[Tensor, bool], None]) -> tuple[float, dict[str, float]]:
    """Returns the sum of all ranks' losses and metrics, on each of them.

    Args:
        reports: of this rank's micro-batches; none where it has no part of the model that computes a loss.
        share: sums a tensor, in place, over the ranks that report other micro-batches than this one, and gives the sum to all.

    Raises:
        BadLoss: the micro-batches, or the ranks, do not report the same metrics.
    """
    # Ranks with different names would add up different things, or wait for one another: compare before reducing.
    own = sorted({tuple(sorted(report["metrics"])) for report in reports})
    found = {tuple(names) for each in gather_json(own) for names in each}
    if len(found) != 1:
        raise BadLoss(f"loss_fn must report the same metrics in every micro-batch and on every rank; here: {own}")
    (names,) = found
    sums = torch.zeros(1 + len(names), dtype=torch.float32, device=device())
    for report in reports:
        sums += torch.stack([report["loss"].float(), *(report["metrics"][name].float() for name in names)])
    share(sums, bool(reports))
    loss, *totals = sums.tolist()
    return loss, dict(zip(names, totals, strict=True))
