"""One rank's part in a push: its pipeline stage's export, and where it is the stage's source, the lane that carries it."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.trainer.megatron import runtime
from services.trainer.megatron.gather_plan import GatherGroups, GatherPlan
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.weights.adapter_stage import AdapterExport
from services.trainer.weights.group_channel import GroupWeightChannel
from services.trainer.weights.stage_export import StageExport
from services.trainer.weights.weight_channel import WeightChannel, WeightChannelBroken
from shared.schema.messages import WeightsLane
from shared.transfer.bucket_hashing import Hasher
from shared.transfer.digest import TensorDigest

LaneKind = Literal["group", "memory"]


@dataclass(frozen=True)
class Sent:
    """What one rank has sent of a push. ``known``: the tensors, by their digests. ``error``: why not everything went out."""

    bytes: int
    known: dict[str, TensorDigest]
    error: str | None


class Sender:
    """All ranks construct it together; every method but `abort` is a collective of all of them, called on one thread.

    Args:
        kind: of the lanes. seconds: a push may take. bucket_bytes, dtype: see `StageExport`.
    """

    def __init__(self, model: MegatronModel, kind: LaneKind, seconds: float, bucket_bytes: int, dtype: str | None = None) -> None:
        self.cargo = GatherPlan(model, GatherGroups.own())
        self._kind, self._seconds, self._bucket_bytes, self._dtype = kind, seconds, bucket_bytes, dtype
        self._life = secrets.token_hex(4)  # a lane of an earlier life must not be taken for one of this
        self._exports: dict[bool, StageExport | AdapterExport] = {}
        self._lane: WeightChannel | None = None
        self._hasher = Hasher(_to_device)
        limit = datetime.timedelta(seconds=seconds + runtime.timeout_seconds())
        self._talk = dist.new_group(backend="gloo", timeout=limit) if dist.get_world_size() > 1 else None

    def open(self, number: int, engine_ranks: int) -> list[WeightsLane]:
        """Makes new lanes in the place of what there were: one for each pipeline stage. ``number``: of the push."""
        self.drop()
        addresses = []
        if self.cargo.is_source:
            self._lane = self._made(f"myxo-{self._life}-{number}-{self.cargo.stage}", 1 + engine_ranks)
            addresses = [self._lane.address().model_dump()]
        return [WeightsLane.model_validate(one) for told in self.agree(addresses) for one in told]

    def join(self, seconds: float) -> None:
        """Waits for the engines. Raises LaneBroken on the ranks whose lane was not joined."""
        if self._lane is not None:
            self._lane.join(seconds)

    def stream(self, number: int, *, partial: bool, seconds: float) -> Sent:
        """Exports and sends everything. Never raises for a lane that breaks: other ranks wait for this one in the export.

        Args:
            partial: without what is frozen. Returns before the last buckets have arrived: see `finish`.
        """
        export, lane, sent = self._export(partial), self._lane, 0
        error = None if lane is None else _broken(lambda: lane.announce(number, export.manifest, seconds))
        for index, bucket in enumerate(export.manifest.buckets):
            flat: torch.Tensor | None = None
            try:
                if lane is not None and error is None:
                    flat = lane.buffer(index, bucket.nbytes)
            except WeightChannelBroken as broken:
                error = str(broken)
            export.fill(index, flat)
            if lane is not None and flat is not None:
                error = _broken(lambda i=index, full=flat: lane.send(i, full))  # type: ignore[misc]
                self._hasher.take(bucket, flat)
                sent += bucket.nbytes
        return Sent(sent, {}, error)

    def finish(self, sent: Sent) -> Sent:
        """Waits until everything has left. Whatever went wrong is in `Sent.error`."""
        error = sent.error
        if self._lane is not None and error is None:
            error = _broken(self._lane.finish)
        return Sent(sent.bytes, self._hasher.known() if error is None else {}, error)

    def agree(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on every rank; JSON."""
        return [value] if self._talk is None else runtime.gather_json(value, self._talk)

    def abort(self, reason: str) -> None:
        """Ends what the lane waits for, from any thread."""
        if self._lane is not None:
            self._lane.abort(reason)

    def drop(self) -> None:
        """Lets go of the lane."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()

    def close(self) -> None:
        self.drop()
        self.cargo.groups.leave()
        if self._talk is not None:
            dist.destroy_process_group(self._talk)
            self._talk = None

    def _export(self, partial: bool) -> StageExport | AdapterExport:
        if partial not in self._exports and self.cargo.adapters.lora is not None:
            self._exports[partial] = AdapterExport(self.cargo, self._bucket_bytes)
        elif partial not in self._exports:
            self._exports[partial] = StageExport(self.cargo, self._bucket_bytes, dtype=self._dtype, skip_frozen=partial)
        return self._exports[partial]

    def _made(self, name: str, world_size: int) -> WeightChannel:
        if self._kind == "memory":
            from services.trainer.weights.memory_channel import MemoryWeightChannel

            return MemoryWeightChannel(name, world_size, self._seconds)
        return GroupWeightChannel(name, world_size, "nccl" if runtime.device().type == "cuda" else "gloo", self._seconds)


def _broken(work: Callable[[], None]) -> str | None:
    """What broke, if the lane did."""
    try:
        work()
    except WeightChannelBroken as error:
        return str(error)
    return None


def _to_device(table: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(table).to(runtime.device())
