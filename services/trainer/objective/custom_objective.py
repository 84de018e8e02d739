"""The user's own functions in the objective, under slime's signatures: their arguments, and the use of their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.objective.advantage import Advantages
from services.trainer.objective.reduce import MaskedTokens, Metrics
from services.trainer.packing import PackedBatch
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookFailed, HookSample, load, paths
from shared.runtime.tasks import defined_at, error_text
from shared.runtime.telemetry import allow_users


class Responses:
    """The places of the responses in a micro-batch of S samples; F is the sum of their lengths R.

    total_lengths, response_lengths: ints [S]. loss_masks: [R] of each, floats.
    """

    def __init__(self, batch: PackedBatch) -> None:
        sequences = list(pairwise(batch.cu_seqlens.tolist()))
        spans = [start + torch.nonzero(batch.loss_mask[start : end - 1].cumsum(0)).flatten() for start, end in sequences]  # from the first
        self.total_lengths = [end - start for start, end in sequences]
        self.response_lengths = [span.numel() for span in spans]
        self._places = torch.cat(spans).to(batch.loss_mask.device)
        self.size = self._places.numel()  # F
        self._tokens = batch.tokens.numel()
        self.loss_masks = self.lists(batch.loss_mask)

    def flat(self, values: Tensor) -> Tensor:
        """Returns the responses' part of ``values`` [T], end to end: [F]. Differentiable."""
        return values[self._places]

    def lists(self, values: Tensor) -> list[Tensor]:
        """Returns each sample's response in ``values`` [T]: [R] each. Differentiable."""
        return list(self.flat(values).split(self.response_lengths))

    def packed(self, values: Tensor) -> Tensor:
        """Returns ``values`` [F] in their places in the pack, 0 elsewhere: [T]. Differentiable."""
        return values.new_zeros(self._tokens).index_copy(0, self._places, values)


LOSS = "algorithm.custom_loss_function_path"
ADVANTAGE = "algorithm.custom_advantage_function_path"
REDUCER = "algorithm.custom_pg_loss_reducer_function_path"
TIS = "algorithm.custom_tis_function_path"
REWARDS = "algorithm.custom_reward_post_process_path"


@dataclass(frozen=True)
class CustomFunctions:
    """The user's functions that a run names.

    Args:
        args: the run's config as the functions get it. functions: by the field that names them. paths: theirs, for messages.
    """

    args: Any = None
    paths: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> "CustomFunctions":
        """Imports the functions. Raises ConfigError for one that cannot be imported."""
        named = paths(config, "trainer")
        return cls(Arguments(config), named, {name: load(name, path) for name, path in named.items()})

    def __contains__(self, name: str) -> bool:
        """Returns whether the run names a function in this field."""
        return name in self.functions

    def weighted(self, pg: Tensor, start: Tensor, rollout: Tensor, tokens: MaskedTokens) -> tuple[Tensor, Metrics]:
        """Returns the per-token loss as ``custom_tis_function_path`` weighs and masks it, [T], and its metrics.

        Tokens that its masks leave out are 0; denominators stay unchanged. A metric of one number a token is averaged like the loss,
        a single number counts for every token.
        """
        responses = Responses(tokens.batch)
        given = self.call(
            TIS,
            args=self.args,
            pg_loss=responses.flat(pg),
            train_log_probs=responses.lists(start),
            rollout_log_probs=responses.lists(rollout),
            loss_masks=responses.loss_masks,
            total_lengths=responses.total_lengths,
            response_lengths=responses.response_lengths,
        )
        if not isinstance(given, tuple) or len(given) != 3:
            raise self.refused(TIS, f"gave {_kind(given)}; expected (pg_loss, masks, metrics)")
        loss, masks, metrics = given
        flat = self._numbers(TIS, "pg_loss", loss, responses.size)
        kept = self._numbers(TIS, "masks", torch.cat(list(masks)) if isinstance(masks, list | tuple) else masks, responses.size)
        means = {}
        for name, values in dict(metrics or {}).items():
            of_token = torch.as_tensor(values, dtype=tokens.dtype, device=flat.device).detach()
            of_token = of_token.expand(responses.size) if of_token.dim() == 0 else of_token
            allow_users([f"train/{name}"])
            means[str(name)] = tokens.mean(tokens.blank(responses.packed(self._numbers(TIS, str(name), of_token, responses.size))))
        return tokens.blank(responses.packed(flat)) * tokens.blank(responses.packed(kept.to(flat.dtype))).detach(), means

    def reduced(self, pg: Tensor, tokens: MaskedTokens, per_token: bool) -> Tensor:
        """Returns the per-token loss [T] as ``custom_pg_loss_reducer_function_path`` reduces it: in slime and here a sum over the
        micro-batch's samples (or, ``per_token``, its tokens), which is yet to be divided by the number of the optimizer step's.
        """
        responses = Responses(tokens.batch)
        reduce = self.call(REDUCER, responses.total_lengths, responses.response_lengths, responses.loss_masks, per_token)
        if not callable(reduce):
            raise self.refused(REDUCER, f"gave {_kind(reduce)}; expected a function")
        total = self._called(REDUCER, reduce, responses.flat(pg))
        if not isinstance(total, Tensor) or total.dim():
            raise self.refused(REDUCER, f"its function gave {_kind(total)}; expected a tensor of one number")
        if not total.requires_grad:  # it left every token out; the backward pass needs a graph
            total = total + 0.0 * pg.sum()
        return total

    def advantages(self, masks: Sequence[Tensor], data: Mapping[str, Sequence[Any]]) -> Advantages:
        """Returns the ``advantages`` and, if set, ``returns`` that ``custom_advantage_function_path`` sets: [R] of each sample.

        Args:
            masks: bool [R] of each of this rank's samples. data: the other entries of ``rollout_data``, lists of tensors [R] or numbers.
        """
        rollout_data: dict[str, Any] = {
            **{field: _copied(values) for field, values in data.items()},
            "loss_masks": _copied(masks),
            "response_lengths": [mask.numel() for mask in masks],
        }
        self.call(ADVANTAGE, self.args, rollout_data)
        found = {field: self._per_sample(field, rollout_data.get(field), masks) for field in ("advantages", "returns")}
        if found["advantages"] is None:
            raise self.refused(ADVANTAGE, "set no rollout_data['advantages']")
        return Advantages(found["advantages"], found["returns"])

    def post_processed(self, samples: Sequence[HookSample]) -> tuple[list[float], list[float]]:
        """Returns what ``custom_reward_post_process_path`` makes of a whole batch: rewards to be shown, and others to be trained by."""
        given = self.call(REWARDS, self.args, list(samples))
        if not isinstance(given, tuple) or len(given) != 2:
            raise self.refused(REWARDS, f"gave {_kind(given)}; expected (raw_rewards, rewards)")
        try:
            raw, rewards = ([float(value) for value in values] for values in given)
        except (TypeError, ValueError) as error:
            raise self.refused(REWARDS, f"gave {error}; expected two lists of numbers") from None
        for name, values in (("raw_rewards", raw), ("rewards", rewards)):
            if len(values) != len(samples) or not np.isfinite(values).all():
                raise self.refused(REWARDS, f"{name}: {len(values)} for {len(samples)} samples, or some are not finite")
        return raw, rewards

    def call(self, field: str, *args: Any, **keywords: Any) -> Any:
        """Returns the result of a field's function. Raises HookFailed for whatever it raises."""
        return self._called(field, self.functions[field], *args, **keywords)

    def _called(self, field: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            raise HookFailed(field, self.paths[field], error_text(error, function)) from error

    def refused(self, field: str, reason: str) -> HookFailed:
        """Returns the error of a function that fails, or gives what does not fit."""
        return HookFailed(field, self.paths[field], f"{reason}{defined_at(self.functions[field])}")

    def _numbers(self, field: str, what: str, values: object, size: int) -> Tensor:
        if not isinstance(values, Tensor) or values.shape != (size,):
            shape = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
            raise self.refused(field, f"{what} is {_kind(values)} {shape}; expected a tensor [{size}], one number a response token")
        return values

    def _per_sample(self, field: str, values: Any, masks: Sequence[Tensor]) -> list[Tensor] | None:
        if values is None:
            return None
        tensors = [torch.as_tensor(value).detach().cpu().double() for value in values]
        if len(tensors) != len(masks):
            raise self.refused(ADVANTAGE, f"{field}: {len(tensors)} arrays for {len(masks)} samples")
        for index, (tensor, mask) in enumerate(zip(tensors, masks, strict=True)):
            if tensor.shape != mask.shape:
                problem = f"{field} of sample {index}: shape {tuple(tensor.shape)} for {mask.numel()} response tokens"
                raise self.refused(ADVANTAGE, problem)
            if not torch.isfinite(tensor[mask]).all():
                raise self.refused(ADVANTAGE, f"{field} of sample {index} is not finite on every trained token")
        return [torch.where(mask, tensor, 0.0) for tensor, mask in zip(tensors, masks, strict=True)]


@dataclass(frozen=True)
class CustomLoss:
    """The loss of ``custom_loss_function_path``: ``f(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)``.

    An instance is a `LossFunction` that an actor calls with logits. ``logits``: [1, T, V / tp], divided by the temperature. ``batch``: a
    dict with ``tokens``, ``labels`` and ``loss_mask`` [T], ``cu_seqlens``, ``total_lengths``, ``response_lengths``, ``loss_masks`` and each
    per-token field of the micro-batch as a list of [R]; ``log_probs``, slime's name, is the same as ``proximal_log_probs``.
    ``sum_of_sample_mean(x)`` with x [F] (responses end to end) or [T] is this micro-batch's part of the batch's mean under the configured
    reducer. The loss is added up over micro-batches and ranks, and so are metrics.
    """

    custom: CustomFunctions
    takes_logits = True

    def __call__(self, logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """Returns the function's loss and metrics. Raises HookFailed, MissingField."""
        weights, responses = MaskedTokens(batch.loss_mask, batch).weights, Responses(batch)

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            packed = values if values.shape == batch.tokens.shape else responses.packed(values)
            return (weights * torch.where(batch.loss_mask > 0, packed, 0.0)).sum()

        fields = {name: responses.lists(field) for name, field in batch.fields.items()}
        if "proximal_log_probs" in fields:
            fields["log_probs"] = fields["proximal_log_probs"]
        whole = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask, "cu_seqlens": batch.cu_seqlens}
        lengths = {"total_lengths": responses.total_lengths, "response_lengths": responses.response_lengths}
        view = {**fields, **whole, **lengths, "loss_masks": responses.loss_masks}
        given = self.custom.call(LOSS, self.custom.args, view, logits.unsqueeze(0), sum_of_sample_mean)
        loss, metrics = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not isinstance(loss, Tensor) or loss.dim() or not isinstance(metrics, Mapping):
            raise self.custom.refused(LOSS, f"gave {_kind(given)}; expected (loss, metrics)")
        numbers = {str(name): torch.as_tensor(value, device=loss.device).detach().float() for name, value in metrics.items()}
        allow_users(f"train/{name}" for name in numbers)
        if not loss.requires_grad:  # no token of this micro-batch counts; the backward pass needs a graph
            loss = loss + 0.0 * logits[0, 0]
        return loss, {"loss": loss.detach(), **numbers}


def _copied(values: Sequence[Any]) -> list[Any]:
    """Returns the values with tensors copied in float64: a function may write into them."""
    return [value.to(torch.float64, copy=True) if isinstance(value, Tensor) else value for value in values]


def _kind(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
