"""The plan of gathering: which rank sends which parameter, and how it is made whole. Every export of the model uses it."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.parallel.runtime import deadline, gather_json, timeout_seconds
from services.trainer.parallel.trained_model import TrainedModel

Bucket = list[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class GatherUnit:
    """One parameter of the trainer's model, one matrix of an adapter, or the parameters of all experts that one tensor holds, in an export.

    Args:
        name: the parameter's global name. owner: global rank that gathers it: the lowest that holds a part.
        tensors: Hugging Face names and shapes that it becomes. float32: whether it stays float32 in a model of another dtype.
        experts: the units of a tensor of all experts, in their order; each becomes a part of it along the first dimension. ``name`` and
            ``owner`` are then the first one's.
    """

    name: str
    owner: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    float32: bool = False
    experts: tuple["GatherUnit", ...] = ()

    @property
    def parameters(self) -> tuple["GatherUnit", ...]:
        return self.experts or (self,)

    def dtype(self, model: torch.dtype) -> torch.dtype:
        return torch.float32 if self.float32 else model

    def nbytes(self, model: torch.dtype) -> int:
        return sum(prod(shape) for _, shape in self.tensors) * self.dtype(model).itemsize


class GatherPlan(ABC):
    """The parameters that this rank holds, and the ranks that send each. All ranks construct it together.

    Attributes:
        stage: this rank's pipeline stage. source: the global rank that sends this stage's weights to the engines. units: of the whole
            model, with adapters merged into it. adapter_units: LoRA's adapters alone. frozen: names of the parameters that no
            optimizer updates. holders: by unit, the ranks that hold it or a part.
    """

    model: TrainedModel
    stage: int
    source: int
    units: list[GatherUnit]
    adapter_units: list[GatherUnit]
    frozen: frozenset[str]
    holders: Mapping[str, Sequence[int]]
    _stage_of: list[int]
    _own: Mapping[tuple[int, ...], dist.ProcessGroup] = {}

    def form_own_groups(self, training: Iterable[dist.ProcessGroup]) -> None:
        """Forms this rank's groups once more, for exports beside the training: collectives of one group must not come from two threads.

        A collective of all ranks.
        """
        ranks = [dist.get_process_group_ranks(group) for group in (*training, _world())]
        limit, own = timedelta(seconds=timeout_seconds()), dict[tuple[int, ...], dist.ProcessGroup]()
        with deadline("the forming of the groups that weights are exported over"):
            for members in sorted({tuple(members) for each in gather_json(ranks) for members in each if len(members) > 1}):
                if (group := dist.new_group(list(members), timeout=limit)) != dist.GroupMember.NON_GROUP_MEMBER:
                    own[members] = group
        self._own = own

    def group(self, training: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
        """Returns the group to gather over in the place of the training's; None: of all ranks."""
        training = training or _world()
        return self._own.get(tuple(dist.get_process_group_ranks(training)), training)

    def leave(self) -> None:
        """Ends the groups that the plan has formed."""
        for group in self._own.values():
            dist.destroy_process_group(group)
        self._own = {}

    @property
    def is_source(self) -> bool:
        """Returns whether this rank sends its stage's weights to the engines."""
        return self.source == dist.get_rank()

    def of_stage(self) -> list[GatherUnit]:
        """Returns the units that the ranks of this pipeline stage send in a push: the adapters alone, where the model has some."""
        units = self.units if self.model.lora is None else self.adapter_units
        return [unit for unit in units if self._stage_of[unit.owner] == self.stage]

    def is_frozen(self, unit: GatherUnit) -> bool:
        return all(one.name in self.frozen for one in unit.parameters)

    def buckets(self, bucket_bytes: int, dtype: torch.dtype | None = None, kept: Container[str] = ()) -> Iterator[Bucket]:
        """Yields the whole model in its dtype (routers' biases in float32), in the order of its layers; tied embeddings come once.

        A collective: every rank iterates to the end. All get the same names; rank 0 gets full tensors on its device, the
        others None. A tensor may be a view of the live parameter: read it before the next optimizer step.

        Args:
            bucket_bytes: a bucket holds at most this much, unless a single parameter is larger. dtype: instead of the model's; but for
                ``kept`` tensors.
        """
        for units in self.divided(bucket_bytes):
            yield self.bucket(units, dtype, kept=kept)

    def divided(self, bucket_bytes: int, of: Container[str] | None = None) -> list[list[GatherUnit]]:
        """Returns the units of each bucket. ``of``: names of the units that are wanted; all if None."""
        buckets: list[list[GatherUnit]] = []
        size = 0
        for unit in self.units if of is None else [unit for unit in self.units if unit.name in of]:
            nbytes = unit.nbytes(self.model.dtype)
            if not buckets or size + nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(unit)
            size += nbytes
        return buckets

    def bucket(
        self, units: Sequence[GatherUnit], dtype: torch.dtype | None = None, destination: int = 0, kept: Container[str] = ()
    ) -> Bucket:
        """Returns one bucket as `buckets` does, with the tensors on ``destination``. A collective of that rank and those that hold them."""
        bucket: Bucket = []
        for unit in units:
            dtypes = [unit.dtype(self.model.dtype if dtype is None or name in kept else dtype) for name, _ in unit.tensors]
            with deadline(f"the export of {unit.name}"), torch.no_grad():
                tensors = self.deliver(unit, destination, dtypes)
            bucket += [(name, tensors[index] if tensors else None) for index, (name, _) in enumerate(unit.tensors)]
        return bucket

    @abstractmethod
    def deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None = None
    ) -> list[Tensor] | None:
        """Hands a parameter's Hugging Face tensors to one rank. A collective of that rank and those that share the parameter with it, or
        where it holds no part of it with the unit's owner.

        Args:
            destination: global rank. dtypes: in which the tensors travel. targets: on the destination, where they are put.

        Returns them on the destination, None elsewhere. Without ``targets`` they may be views of the live parameter.
        """

    @abstractmethod
    def parts(self, unit: GatherUnit, owner: int | None = None) -> list[Tensor] | None:
        """Returns a parameter's Hugging Face tensors on its owner, with adapters laid over them, and None elsewhere.

        Args:
            owner: a rank that holds it, in the place of the unit's.

        A collective of the ranks that share the parameter. The tensors may be views of the live parameter, in other than row-major order
        and of more dimensions than the tensors have; their elements come in the tensors' order.
        """

    @abstractmethod
    def is_whole(self, unit: GatherUnit) -> bool:
        """Returns whether this rank owns a parameter and need not gather it: `parts` are then views that stay valid."""


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
