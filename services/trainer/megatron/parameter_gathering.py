"""The gathering of Megatron's parameters under Hugging Face's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import LocalParameter, parameters
from services.trainer.parallel.gather_plan import GatherPlan, GatherUnit
from services.trainer.parallel.runtime import deadline, device, gather_json, timeout_seconds
from shared.model.tensor_table import TensorSource, parameter_sources


@dataclass(frozen=True)
class GatherGroups:
    """The groups that an export gathers over. ``tensor``, ``expert_tensor``: this rank's; ``world``: all ranks, None for torch's own."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    world: dist.ProcessGroup | None = None
    made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def of_training(cls) -> "GatherGroups":
        """Returns the groups that the training uses, for exports that training waits for."""
        return cls(parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group())

    @classmethod
    def own(cls) -> "GatherGroups":
        """Makes groups for exports that run beside the training: collectives of one group must not come from two threads.

        A collective of all ranks.
        """
        training = cls.of_training()
        if dist.get_world_size() == 1:
            return training
        made: list[dist.ProcessGroup] = []
        limit = timedelta(seconds=timeout_seconds())

        def again(group: dist.ProcessGroup) -> dist.ProcessGroup:
            """Returns a new group of the same ranks; every rank makes all of them, in the same order."""
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

    def sharing(self, local: LocalParameter) -> dist.ProcessGroup:
        """Returns the group of the ranks that share a parameter."""
        return self.expert_tensor if ".experts." in local.name else self.tensor

    def leave(self) -> None:
        """Ends the groups that `own` has made."""
        for group in self.made:
            dist.destroy_process_group(group)
        self.made.clear()


class MegatronGatherPlan(GatherPlan):
    """The gathering of Megatron's parameters. All ranks construct it together.

    No rank ever holds more than one bucket besides its own shards: the ranks that share a parameter gather it on the first of them, which
    hands it to its destination. Parameters are read when an export runs, any number of times.

    Args:
        groups: those to gather over; the training's own if None.

    Attributes:
        local: what this rank holds, by the names of the units.
    """

    def __init__(self, model: MegatronModel, groups: GatherGroups | None = None) -> None:
        self.model: MegatronModel = model
        self.groups = groups or GatherGroups.of_training()
        held = list(parameters(model.modules, model.config, model.architecture))
        self._adapters = model.adapters
        adapters = [part for pair in self._adapters.values() for part in pair]
        self.local = {local.name: local for local in [*held, *adapters]}
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        shapes = dict(tensor for local in adapters for tensor in local.recipe.tensors)
        with deadline("the exchange of parameter names"):
            reported = gather_json([self.stage, [local.name for local in held], _frozen(held), shapes])
        self._stage_of = [stage for stage, _, _, _ in reported]
        self.holders = _holders(reported)
        self.source = self._stage_of.index(self.stage)
        self.units = gather_units(parameter_sources(model.architecture), [names for _, names, _, _ in reported])
        adapter_sources = {name: TensorSource(((name, tuple(shape)),)) for *_, each in reported for name, shape in each.items()}
        self.adapter_units = gather_units(adapter_sources, [list(each) for *_, each in reported])
        self.frozen = frozenset(name for _, _, names, _ in reported for name in names)

    def leave(self) -> None:
        self.groups.leave()

    def deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None = None
    ) -> list[Tensor] | None:
        if not unit.experts:
            return self._deliver(unit, destination, dtypes, targets)
        if targets is None and dist.get_rank() == destination:
            targets = _empty(unit, dtypes)
        for index, one in enumerate(unit.experts):
            self._deliver(one, destination, dtypes, None if targets is None else [target[index] for target in targets])
        return targets

    def _deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None
    ) -> list[Tensor] | None:
        is_destination = dist.get_rank() == destination
        owner = destination if destination in self.holders[unit.name] else unit.owner
        parts = self.parts(unit, owner)
        if parts is None and is_destination:
            targets = _empty(unit, dtypes) if targets is None else targets
            for target in targets:
                dist.recv(target, src=owner, group=self.groups.world)
        elif parts is not None and is_destination:
            if targets is None:
                return [part.reshape(shape).to(dtype) for part, (_, shape), dtype in zip(parts, unit.tensors, dtypes, strict=True)]
            for target, part in zip(targets, parts, strict=True):
                target.view(part.shape).copy_(part)
        elif parts is not None:
            for part, dtype in zip(parts, dtypes, strict=True):
                dist.send(part.to(dtype).contiguous(), dst=destination, group=self.groups.world)
        return targets

    def parts(self, unit: GatherUnit, owner: int | None = None) -> list[Tensor] | None:
        local, owner = self.local.get(unit.name), unit.owner if owner is None else owner
        if local is None or owner not in dist.get_process_group_ranks(local.group):
            return None
        whole = self._whole(local, owner)
        parts = None if whole is None else local.recipe.parts(whole, self.model.architecture)
        for index, (name, shape) in enumerate(unit.tensors):
            if name in self._adapters:
                a, b = (self._whole(part, owner) for part in self._adapters[name])
                if parts is not None and a is not None and b is not None:  # all on the same rank; computed in float32, rounded once
                    weight, scale = parts[index].reshape(shape), self.model.lora.scale if self.model.lora else 0.0
                    parts[index] = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
        return parts

    def is_whole(self, unit: GatherUnit) -> bool:
        local = self.local.get(unit.name)
        if local is None or unit.experts or not local.recipe.is_view or any(name in self._adapters for name, _ in unit.tensors):
            return False
        return unit.owner == dist.get_rank() and local.split_dimension is None

    def _whole(self, local: LocalParameter, owner: int) -> Tensor | None:
        """Returns the unsplit parameter on one rank of its group, None on the others."""
        shard, dimension = local.parameter.detach(), local.split_dimension
        is_owner = dist.get_rank() == owner
        if dimension is None:
            return shard if is_owner else None
        group = self.groups.sharing(local)
        shards = [torch.empty_like(shard) for _ in range(group.size())] if is_owner else None
        dist.gather(shard.contiguous(), shards, group=group, group_dst=dist.get_group_rank(group, owner))
        return local.recipe.unshard(shards, dimension) if shards is not None else None


def _empty(unit: GatherUnit, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device()) for (_, shape), dtype in zip(unit.tensors, dtypes, strict=True)]


def plan_of(model: MegatronModel, apart: bool) -> MegatronGatherPlan:
    return MegatronGatherPlan(model, GatherGroups.own() if apart else None)


def _holders(reported: Sequence[Sequence[Any]]) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for rank, (_, names, _, adapters) in enumerate(reported):
        for name in dict.fromkeys([*names, *adapters]):
            holders.setdefault(name, []).append(rank)
    return holders


def _frozen(held: Sequence[LocalParameter]) -> list[str]:
    return [local.name for local in held if isinstance(local.parameter, torch.nn.Parameter) and not local.parameter.requires_grad]


def gather_units(sources: Mapping[str, TensorSource], held: Sequence[Sequence[str]]) -> list[GatherUnit]:
    """Returns the units to be sent with their owners, in the order of ``sources``.

    Args:
        held: by rank, the global names of the parameters that it holds.
    """
    position = {name: index for index, name in enumerate(sources)}
    owners: dict[str, int] = {}
    chosen: dict[TensorSource, str] = {}
    for rank, names in enumerate(held):
        for name in names:
            if name not in owners:
                # the last pipeline stage's copy of a tied embedding becomes the same tensors as the first stage's
                chosen.setdefault(sources[name], name)
                owners[name] = rank
    units: dict[Any, list[GatherUnit]] = {}
    for made, name in sorted(chosen.items(), key=lambda item: position[item[1]]):
        if made.expert is None:
            units[name] = [GatherUnit(name, owners[name], made.tensors, made.float32)]
        else:
            part = tuple((tensor, shape[1:]) for tensor, shape in made.tensors)
            units.setdefault(made.tensors, []).append(GatherUnit(name, owners[name], part, made.float32))
    return [found[0] if isinstance(key, str) else replace(found[0], tensors=key, experts=tuple(found)) for key, found in units.items()]
