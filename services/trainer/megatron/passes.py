"""Forward and backward passes of a model over this rank's micro-batches, in Megatron's schedule for its pipeline."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from services.trainer.megatron.attention import uses_dense_batches
from services.trainer.megatron.draft import DraftStep
from services.trainer.megatron.expert_balance import BalancedStep, BalancedTokens, trained_lengths
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.moe import stage_routing
from services.trainer.megatron.packed_sequences import ModelInput, StageRouting, model_input
from services.trainer.packing import PackedBatch, pack
from services.trainer.parallel.loss_function import BadLoss, LossFunction, MicroBatchesFailed, applied, asked_ids, read_head, reduce_reports
from services.trainer.parallel.runtime import anywhere, device, round_up


def log_probs(
    model: MegatronModel, batches: Sequence[PackedBatch], temperature: float, recorded: dict[int, dict[int, Tensor]] | None = None
) -> list[Tensor]:
    """Returns the log-probability of every label under the model, float32 [T] a micro-batch, on every rank that shares the model.

    Args:
        recorded: gets the choices of this rank's routers by the index of the micro-batch, by layer, in host memory.
    """
    routing: dict[int, StageRouting] | None = None if recorded is None else {}

    def likelihood(hidden: Tensor, given: ModelInput) -> Tensor:
        return given.whole(model.head.likelihood(model.head.inputs(hidden), given.labels[:, None], temperature, False, given.kept)[0][:, 0])

    found = _read(model, batches, likelihood, routing)
    if recorded is not None:
        for index, each in (routing or {}).items():
            recorded[index] = {layer: chosen.cpu() for layer, chosen in (each.recorded or {}).items()}
    return found


def values(model: MegatronModel, batches: Sequence[PackedBatch]) -> list[Tensor]:
    """Returns a critic's values before each label, float32 [T] a micro-batch, on every rank that shares the model."""
    return _read(model, batches, lambda output, given: given.whole(output.squeeze(1)))


def forward_backward(
    model: MegatronModel,
    batches: Sequence[PackedBatch],
    loss_fn: LossFunction,
    temperature: float,
    need_entropy: bool,
    balanced: BalancedStep | None = None,
) -> tuple[float, dict[str, float]]:
    """Adds the gradient of the summed loss to the (zeroed) gradient buffers, reduced over the data-parallel ranks.

    The gradient of draft layers that train is added as well; their loss is a metric.

    Args:
        balanced: gets what the routers find; its losses are added to the gradient, and are metrics.

    Returns:
        Loss and metrics, summed over micro-batches and data-parallel ranks; the same on every rank.

    Raises:
        BadLoss: ``loss_fn`` broke its contract.
    """
    model.train(True)
    drafts = DraftStep.begun(model, batches, model.draft_scale) if model.architecture.trained_drafts else None
    compute = _loss(model, loss_fn, temperature, need_entropy, drafts)
    loss, metrics = reduce_reports(_run(model, batches, compute, forward_only=False, balanced=balanced), _share)
    if balanced is not None:
        layers = sum(model.architecture.is_moe_layer(index) for index in range(model.architecture.num_layers))
        metrics |= balanced.averages(layers, device())
    return loss, metrics


def balanced_step(model: MegatronModel, batches: Sequence[PackedBatch]) -> BalancedStep | None:
    """Begins the balancing of the experts over these micro-batches; None where there is none. A collective of the data-parallel ranks."""
    if model.balancing is None:
        return None
    return BalancedStep.begun(model.balancing, [trained_lengths(batch.cu_seqlens, batch.loss_mask)[1] for batch in batches], device())


def loss_alone(model: MegatronModel, batch: PackedBatch, loss_fn: LossFunction, temperature: float, need_entropy: bool) -> float | None:
    """Returns the loss of one micro-batch, without gradients; None on ranks that have not the model's last stage.

    Only the ranks that share the model take part. None of its errors is caught.
    """
    model.train(True)
    results = _Pass(model, [batch], _loss(model, loss_fn, temperature, need_entropy), True).run()
    return float(results[0][0]) if results else None


def _loss(
    model: MegatronModel, loss_fn: LossFunction, temperature: float, need_entropy: bool, drafts: DraftStep | None = None
) -> Callable[[Tensor, ModelInput, PackedBatch], tuple[Tensor, dict[str, Tensor]]]:
    def compute(output: Tensor, given: ModelInput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = applied(loss_fn, _outputs(model, output, given, batch, loss_fn, temperature, need_entropy), batch)
        if drafts is None:
            return loss, metrics
        of_drafts, more = drafts.loss(model, output, given, batch, temperature)
        return loss + (of_drafts - of_drafts.detach()), metrics | more

    return compute


def _outputs(
    model: MegatronModel,
    output: Tensor,
    given: ModelInput,
    batch: PackedBatch,
    loss_fn: LossFunction,
    temperature: float,
    need_entropy: bool,
) -> list[Tensor]:
    """Returns what a loss function reads of the whole pack, from this rank's output of the last stage."""
    if model.value_head:
        return [given.whole(output.squeeze(1))]
    head, ids = model.head, asked_ids(loss_fn, batch, batch.labels)
    inputs = head.inputs(output)
    if ids.size(1) == 1 or given.back is None:
        found = read_head(head, loss_fn, inputs, given.own(ids, 0), given.kept, temperature, need_entropy)
        return [given.whole(tensor) for tensor in found]
    # sequences that share a place may ask for other tokens there
    return list(read_head(head, loss_fn, given.whole(inputs), ids, None, temperature, need_entropy))


def _read(
    model: MegatronModel,
    batches: Sequence[PackedBatch],
    read: Callable[[Tensor, ModelInput], Tensor],
    recorded: dict[int, StageRouting] | None = None,
) -> list[Tensor]:
    """Returns ``read`` of the last stage's outputs, float32 [T] a micro-batch, without gradients, on all stages."""
    model.train(False)
    with torch.no_grad():
        results: list[Tensor] = _run(model, batches, lambda output, given, _: read(output, given), forward_only=True, recorded=recorded)
    if model.layout.pipeline == 1:
        return results
    results = results or [torch.empty(batch.tokens.numel(), dtype=torch.float32, device=device()) for batch in batches]
    for result in results:
        _from_last_stage(result)
    return results


def _run(
    model: MegatronModel,
    batches: Sequence[PackedBatch],
    on_output: Callable[..., Any],
    forward_only: bool,
    recorded: dict[int, StageRouting] | None = None,
    balanced: BalancedStep | None = None,
) -> list[Any]:
    """Returns the results of ``on_output`` on the last pipeline stage, nothing on the others.

    Raises MicroBatchesFailed on all ranks, where none shares a model or a sequence with another: in the middle of a pass such ranks cannot
    leave one another.
    """
    layout, failed = model.layout, dict[int, Exception]()
    meeting = balanced is not None and "global_aux_loss" in balanced.balancing.coefficients  # in every layer
    if meeting or layout.tensor * layout.pipeline * layout.context * layout.expert > 1:
        return _Pass(model, batches, on_output, forward_only, None, recorded, balanced).run()
    results = _Pass(model, batches, on_output, forward_only, failed, recorded, balanced).run()
    if anywhere(bool(failed)):
        raise MicroBatchesFailed(failed, lambda batch: _Pass(model, [batch], on_output, True).run())
    return results


@dataclass
class _Pass:
    """A pass of ranks that meet at most at its end. In the place of a micro-batch that fails comes a filler.

    Args:
        failed: gets the errors, by index; None: they are raised. The others are as in `_run`.
    """

    model: MegatronModel
    batches: Sequence[PackedBatch]
    on_output: Callable[..., Any]
    forward_only: bool
    failed: dict[int, Exception] | None = None
    recorded: dict[int, StageRouting] | None = None
    balanced: BalancedStep | None = None
    inputs: dict[int, tuple[ModelInput, PackedBatch]] = field(default_factory=dict)  # each of the rank's chunks asks for them

    def run(self) -> list[Any]:
        """Returns what `_run` does."""
        model, count = self.model, len(self.batches)
        if model.layout.chunks > 1:  # the interleaved schedule needs a multiple of the number of stages
            count = round_up(count, model.config.microbatch_group_size_per_vp_stage)
        model.config.finalize_model_grads_func = _finalize
        order = [*range(len(self.batches), count), *range(len(self.batches))]  # fillers first, whose gradients are not of all parameters
        sources = [iter(order) for _ in model.chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=self._step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=list(model.chunks),
            num_microbatches=count,
            seq_length=max(batch.tokens.numel() for batch in self.batches),
            micro_batch_size=1,
            forward_only=self.forward_only,
            collect_non_loss_data=self.forward_only,
        )
        return results[-len(self.batches) :]

    def _step(self, source: Iterator[int], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        index = next(source)
        output = self._attempt(index, lambda: self._forward(index, chunk), lambda: self._forward(len(self.batches), chunk))
        return output, partial(self._finish, index)

    def _forward(self, index: int, chunk: torch.nn.Module) -> Tensor:
        given, _ = self._prepared(index)
        output: Tensor = chunk(given.tokens, given.positions, None, packed_seq_params=given.sequences)
        return output

    def _finish(self, index: int, output: Tensor, non_loss_data: bool = False) -> Any:
        """Returns what Megatron wants of the last stage's output: a loss, a count of tokens and a report, or ``non_loss_data``."""
        result = None
        if index < len(self.batches) and not (self.failed and index in self.failed):
            result = self._attempt(index, lambda: self.on_output(output.squeeze(0), *self._prepared(index)), lambda: None)
        if non_loss_data:
            return result
        count = torch.zeros((), dtype=torch.int, device=device())  # Megatron's denominator, which `_finalize` leaves out
        if result is None:
            # what `on_output` applies has a gradient, too: a reduction that overlaps the last micro-batch waits for that of each parameter
            named = self.model.modules[-1].named_parameters() if self.failed else ()
            rest = [one.sum() for name, one in named if one.requires_grad and not name.startswith("decoder.")]
            return sum(rest, output.sum()) * 0, count, None
        loss, metrics = result
        return loss, count, {"loss": loss.detach(), "metrics": metrics}

    def _attempt(self, index: int, work: Callable[[], Any], instead: Callable[[], Any]) -> Any:
        if self.failed is None:
            return work()
        try:
            return work()
        except (torch.OutOfMemoryError, BadLoss):  # no single micro-batch's fault
            raise
        except Exception as error:
            self.failed.setdefault(index, error)
            return instead()

    def _prepared(self, index: int) -> tuple[ModelInput, PackedBatch]:
        if index not in self.inputs:
            model, layout = self.model, self.model.layout
            batch = self.batches[index] if index < len(self.batches) else pack((), ())  # a filler
            dense, group = uses_dense_batches(model.config.params_dtype), parallel_state.get_context_parallel_group()
            given = model_input(batch, layout, dense, device(), group, model.least_saved)
            routing = stage_routing(batch, given, model.architecture, self.recorded is not None)
            if self.recorded is not None and routing is not None:
                self.recorded[index] = routing
            given.sequences.routing = routing
            if batch.kept is not None:
                places = given.own(torch.arange(batch.tokens.numel(), device=device()), -1)
                given.kept = batch.kept.at(places.cpu().numpy())
            given.sequences.balanced = None if self.balanced is None else _balanced_tokens(self.balanced, batch, given)
            self.inputs[index] = given, batch.to(device())
        return self.inputs[index]


def _finalize(chunks: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
    finalize_model_grads(chunks, None, **options)


def _balanced_tokens(step: BalancedStep, batch: PackedBatch, given: ModelInput) -> BalancedTokens:
    numbers, lengths = trained_lengths(batch.cu_seqlens, batch.loss_mask)
    of_tokens = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.diff().long().cpu())
    group = parallel_state.get_tensor_model_parallel_group()  # which part the tokens wherever experts are
    own = given.own(of_tokens.to(device()), -1).chunk(group.size())[group.rank()]
    members = (own[None] == torch.tensor(numbers, dtype=torch.int64, device=device())[:, None]).float()
    return BalancedTokens(step, members, torch.tensor(lengths, dtype=torch.float32, device=device()))


def _share(sums: Tensor, reported: bool) -> None:
    """Sums what this rank has ``reported`` over the data-parallel ranks, and sends the sums to all stages."""
    if reported:  # context-parallel ranks have the same ones
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=False))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        _from_last_stage(sums)


def _from_last_stage(tensor: Tensor) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(tensor, group=group, group_src=group.size() - 1)
