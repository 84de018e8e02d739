"""Which rank has which parameter to give away, and how it is made whole: what every export of the model is built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.megatron.adapters import Adapters
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import LocalParameter, Recipe, parameters, recipe
from services.trainer.megatron.runtime import deadline, gather_json, timeout_seconds
from shared.model.architecture import Architecture
from shared.model.tensor_table import hf_tensors


@dataclass(frozen=True)
class GatherUnit:
    """One Megatron parameter on its way out.

    Args:
        name: the parameter's global name. owner: global rank that gathers it: the lowest that holds a part.
        tensors: Hugging Face names and shapes that it becomes. float32: kept so whatever the model's dtype.
    """

    name: str
    owner: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    float32: bool = False

    def dtype(self, model: torch.dtype) -> torch.dtype:
        return torch.float32 if self.float32 else model


@dataclass(frozen=True)
class GatherGroups:
    """The groups that an export gathers over. ``tensor``, ``expert_tensor``: of this rank; ``world``: all ranks, None for torch's own."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    world: dist.ProcessGroup | None = None
    made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def of_training(cls) -> GatherGroups:
        """Those that the training uses: for exports that training waits for."""
        return cls(parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group())

    @classmethod
    def own(cls) -> GatherGroups:
        """Groups of their own, for exports that run beside the training: collectives of one group must not come from two threads.

        A collective of all ranks.
        """
        training = cls.of_training()
        if dist.get_world_size() == 1:
            return training
        made: list[dist.ProcessGroup] = []
        limit = timedelta(seconds=timeout_seconds())

        def again(group: dist.ProcessGroup) -> dist.ProcessGroup:
            """The same ranks in a group of their own; every rank makes all of them, in the same order."""
            own, result = dist.get_process_group_ranks(group), group
            for ranks in sorted({tuple(ranks) for ranks in gather_json(own)}):
                if len(ranks) > 1 and (new := dist.new_group(list(ranks), timeout=limit)) != dist.GroupMember.NON_GROUP_MEMBER:
                    made.append(new)
                    result = new
            return result

        with deadline("the forming of the groups that weights are exported over"):
            tensor, expert_tensor = again(training.tensor), again(training.expert_tensor)
            world = dist.new_group(timeout=limit)
        return cls(tensor, expert_tensor, world, [*made, world])

    def of(self, local: LocalParameter) -> dist.ProcessGroup:
        """The ranks that share a parameter."""
        return self.expert_tensor if ".experts." in local.name else self.tensor

    def leave(self) -> None:
        """Ends those that `own` has made."""
        for group in self.made:
            dist.destroy_process_group(group)
        self.made.clear()


class GatherPlan:
    """What this rank holds of the model, and who gives what away. All ranks construct it together."""

    def __init__(self, model: MegatronModel, groups: GatherGroups) -> None:
        self.model, self.groups = model, groups
        self.adapters = Adapters(model)
        self._local = {p.name: p for p in parameters(model.modules, model.config, model.architecture)}
        own_stage = parallel_state.get_pipeline_model_parallel_rank()
        with deadline("the exchange of parameter names"):
            told = gather_json([own_stage, list(self._local), self._frozen()])
        self.stage = own_stage
        self.sources = [min(rank for rank, (its, _, _) in enumerate(told) if its == stage) for stage in range(model.layout.pipeline)]
        self._stage_of = [stage for stage, _, _ in told]
        self.shipments = plan(model.architecture, [names for _, names, _ in told])
        self.frozen = frozenset(name for _, _, names in told for name in names)

    @property
    def source(self) -> int:
        """The global rank that sends this stage's weights to the engines."""
        return self.sources[self.stage]

    @property
    def is_source(self) -> bool:
        """Whether that is this rank."""
        return self.source == dist.get_rank()

    def of_stage(self, stage: int) -> list[GatherUnit]:
        """What is given away by the ranks of a pipeline stage."""
        return [shipment for shipment in self.shipments if self._stage_of[shipment.owner] == stage]

    def parts(self, shipment: GatherUnit) -> list[Tensor] | None:
        """A parameter's Hugging Face tensors on its owner, None elsewhere; adapters are laid over them. A collective of the ranks that
        share it.

        They may be views of the live parameter, in other than row-major order and of more dimensions than the tensors have; their elements
        come in the tensors' order.
        """
        local = self._local.get(shipment.name)
        if local is None or dist.get_global_rank(local.group, 0) != shipment.owner:
            return None
        whole = self._whole(local)
        parts = None if whole is None else local.recipe.parts(whole, self.model.architecture)
        if not self.adapters.adapt(local.recipe.hf_names):
            return parts
        with torch.no_grad():
            return self.adapters.merged(shipment.tensors, parts, self.groups.of(local))

    def is_whole(self, shipment: GatherUnit) -> bool:
        """Whether this rank owns a parameter and need not gather it: `parts` are views that stay good."""
        local = self._local.get(shipment.name)
        if local is None or self.adapters.adapt(local.recipe.hf_names):
            return False
        return shipment.owner == dist.get_rank() and local.split_dimension is None

    def _whole(self, local: LocalParameter) -> Tensor | None:
        """The unsplit parameter on the first rank of its group, None on the others."""
        shard, dimension = local.parameter.detach(), local.split_dimension
        first = local.group.rank() == 0
        if dimension is None:
            return shard if first else None
        group = self.groups.of(local)
        shards = [torch.empty_like(shard) for _ in range(group.size())] if first else None
        dist.gather(shard.contiguous(), shards, group=group, group_dst=0)
        return local.recipe.unshard(shards, dimension) if shards is not None else None

    def _frozen(self) -> list[str]:
        parameters = {name: local.parameter for name, local in self._local.items() if isinstance(local.parameter, torch.nn.Parameter)}
        return [name for name, parameter in parameters.items() if not parameter.requires_grad]


def plan(architecture: Architecture, held: Sequence[Sequence[str]]) -> list[GatherUnit]:
    """What is shipped, in the model's order, and by whom.

    Args:
        held: by rank, the global names of the parameters that it holds.
    """
    shapes = hf_tensors(architecture)
    position = {name: index for index, name in enumerate(shapes)}
    owners: dict[str, int] = {}
    shipped: dict[Recipe, str] = {}
    for rank, names in enumerate(held):
        for name in names:
            if name not in owners:
                # the last pipeline stage's copy of a tied embedding becomes the same tensors as the first stage's
                shipped.setdefault(recipe(name, architecture), name)
                owners[name] = rank
    return [
        GatherUnit(name, owners[name], tuple((hf_name, shapes[hf_name]) for hf_name in made.hf_names), made.float32)
        for made, name in sorted(shipped.items(), key=lambda item: position[item[0].hf_names[0]])
    ]
