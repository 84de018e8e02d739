"""Draft layers (multi-token prediction, DeepSeek-V3 2024, section 2.2), trained beside the policy.

A draft layer takes the policy's hidden state of token t, behind its last norm, and the embedding of token t + 1, and predicts token t + 2
with the policy's output layer; the next draft layer takes its output and the embedding of token t + 2. All that it takes of the policy is
detached: the policy's gradient, its norm and its clipping are those of a run without draft layers. Sequences of a pack are kept apart, as
in the policy's layers, and a target never lies in another sequence. Only tokens that are trained are targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from services.trainer.megatron.packed_sequences import ModelInput, PackedSequences
from services.trainer.megatron.spec import ReplicatedLinear, norm_of
from services.trainer.packing import PackedBatch
from services.trainer.parallel.runtime import device
from shared.model.architecture import Architecture

NONE = -1  # in the place of a token whose embedding is zeros


class DraftLayer(MegatronModule):
    """One draft layer, under Megatron's names.

    Args:
        spec: of its transformer layer. number: that layer's in the model, from 1. vp_stage: which of the rank's model chunks has it.
    """

    def __init__(self, config: TransformerConfig, architecture: Architecture, spec: ModuleSpec, number: int, vp_stage: int | None) -> None:
        super().__init__(config)
        self._states_first = architecture.mimo_drafts  # in what the matrix that joins the two takes, not the embeddings
        hidden, norm = config.hidden_size, partial(norm_of(architecture), config, config.hidden_size, config.layernorm_epsilon)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = ReplicatedLinear(2 * hidden, hidden, config=config, init_method=config.init_method)
        own = number - get_transformer_layer_offset(config, vp_stage)  # Megatron adds the offset
        self.transformer_layer = build_module(spec, config=config, layer_number=own, vp_stage=vp_stage)
        self.final_layernorm = norm()

    def forward(self, hidden: Tensor, embedded: Tensor, sequences: PackedSequences, rotary: Tensor | None) -> Tensor:
        """Returns the states that the output layer takes, of those of the policy and the embeddings of later tokens, [U, 1, H] each."""
        both = [self.enorm(embedded), self.hnorm(hidden)]
        joined, _ = self.eh_proj(torch.cat(both[::-1] if self._states_first else both, -1))
        output, _ = self.transformer_layer(joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=sequences)
        normed: Tensor = self.final_layernorm(output)
        return normed


class DraftLayers(MegatronModule):
    """The draft layers of a model, on its last stage."""

    def __init__(self, config: TransformerConfig, architecture: Architecture, specs: Sequence[ModuleSpec], vp_stage: int | None) -> None:
        super().__init__(config)
        layers = (DraftLayer(config, architecture, spec, number, vp_stage) for number, spec in enumerate(specs, config.num_layers + 1))
        self.layers = torch.nn.ModuleList(layers)
        for parameter in self.parameters():
            parameter.draft = True  # the optimizer clips its gradient apart

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Returns Megatron's sharded state, each layer under a name of its own."""
        found, layers = dict[str, Any](), list[Any](self.layers)
        for index, layer in enumerate(layers):
            found |= layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata)
        return found


def later(batch: PackedBatch, per_token: Tensor, by: int) -> Tensor:
    """Returns what stands ``by`` places later in the same sequence, of a pack's [T]; 0 where the sequence has ended."""
    ends = batch.cu_seqlens.long()
    ends = torch.repeat_interleave(ends[1:], ends.diff())
    places = torch.arange(len(per_token), device=per_token.device) + by
    return torch.where(places < ends, per_token[places.clamp(max=len(per_token) - 1)], 0)


@dataclass(frozen=True)
class DraftStep:
    """The draft layers' loss in one optimizer step: their mean negative log-likelihood of the trained tokens, times ``scale``.

    Args:
        layers: of this rank, None where it has not the last stage. embedding: this rank's rows of the policy's, on the last stage.
        tokens: of the step that each layer predicts, over all micro-batches and data-parallel ranks.
    """

    layers: DraftLayers | None
    embedding: Tensor | None
    tokens: tuple[float, ...]
    scale: float

    @classmethod
    def begun(cls, model: Any, batches: Sequence[PackedBatch], scale: float) -> "DraftStep":
        """Counts the step, and brings the embedding to the last stage. A collective of all ranks. ``model``: a `MegatronModel`."""
        depths = range(model.architecture.trained_drafts)
        own = [float(sum(later(batch, batch.loss_mask, depth + 1).sum() for batch in batches)) for depth in depths]
        total = torch.tensor(own, dtype=torch.float64, device=device())
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=False))
        layers: DraftLayers | None = getattr(model.modules[-1], "mtp", None)
        return cls(layers, _embedding(model, layers is not None), tuple(max(count, 1.0) for count in total.tolist()), scale)

    def loss(
        self, model: Any, output: Tensor, given: ModelInput, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch, and its part of the step's metrics.

        Args:
            output: the policy's hidden states of this rank, [U, H]. given, batch: the micro-batch.
        """
        assert self.layers is not None and self.embedding is not None
        head = replace(model.head, weight=model.head.weight.detach())
        sequences = replace(given.sequences, routing=None, balanced=None)
        rotary = _rotary(model.modules[-1], sequences) if model.architecture.latent is None else None
        hidden = output.detach().unsqueeze(1)
        loss, right = torch.zeros((), device=output.device), torch.zeros((), device=output.device)
        for depth, layer in enumerate(self.layers.layers):
            following = later(batch, batch.labels, depth)
            if model.architecture.mimo_drafts:  # engines give it zeros at the first place
                following = following.index_fill(0, batch.cu_seqlens[:-1].long(), NONE)
            embedded = self._embedded(model, given.own(following, NONE))
            hidden = layer(hidden, embedded, sequences, rotary)
            targets = given.own(later(batch, batch.labels, depth + 1), 0)
            found, best = head.likelihood_and_best(head.inputs(hidden.squeeze(1)), targets[:, None], temperature)
            weights = later(batch, batch.loss_mask, depth + 1) / self.tokens[depth] / len(self.layers.layers)
            loss = loss - (weights * given.whole(found.squeeze(1))).sum()
            right = right + (weights * given.whole(best)).sum()
        return self.scale * loss, {"mtp_loss": loss.detach(), "mtp_accuracy": right}

    @torch.no_grad()
    def _embedded(self, model: Any, ids: Tensor) -> Tensor:
        """Returns the embeddings [U, 1, H] of ids [U], zeros of `NONE`; this rank's part of them under sequence parallelism."""
        assert self.embedding is not None
        group, rows = parallel_state.get_tensor_model_parallel_group(), self.embedding.size(0)
        local = ids - group.rank() * rows
        held = (local >= 0) & (local < rows)
        found = F.embedding(torch.where(held, local, 0), self.embedding).mul_(held[:, None]).unsqueeze(1)
        if model.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(found, group=group)
        return reduce_from_tensor_model_parallel_region(found, group=group)


def _embedding(model: Any, is_last: bool) -> Tensor | None:
    """Returns the policy's embedding on the ranks that have the last stage, None elsewhere. A collective of the pipeline's ranks."""
    group = parallel_state.get_pipeline_model_parallel_group()
    first, last = model.modules[0], model.modules[-1]
    if group.size() == 1:
        return first.embedding.word_embeddings.weight.detach()
    if model.architecture.tied_embeddings:
        return last.shared_embedding_or_output_weight().detach() if is_last else None
    if group.rank() == 0:
        dist.send(first.embedding.word_embeddings.weight.detach(), group=group, group_dst=group.size() - 1)
    if not is_last:
        return None
    found = torch.empty_like(last.output_layer.weight)
    dist.recv(found, group=group, group_src=0)
    return found


def _rotary(module: Any, sequences: PackedSequences) -> Tensor:
    embedding = module.rotary_pos_emb
    length = embedding.get_rotary_seq_len(None, module.decoder, None, module.config, sequences)
    rotary: Tensor = embedding(length, packed_seq=True, cp_group=sequences.cp_group)
    return rotary
