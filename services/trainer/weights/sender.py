"""One rank's part in a push: its pipeline stage's export, and where it is the stage's source, the channel that carries it."""

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
from shared.schema.messages import WeightChannelAddress
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
        kind: of the channels. seconds: a push may take. bucket_bytes, dtype: see `StageExport`.
    """

    def __init__(self, model: MegatronModel, kind: LaneKind, seconds: float, bucket_bytes: int, dtype: str | None = None) -> None:
        self.cargo = GatherPlan(model, GatherGroups.own())
        self._kind, self._seconds, self._bucket_bytes, self._dtype = kind, seconds, bucket_bytes, dtype
        self._life = secrets.token_hex(4)  # a channel of an earlier life must not be taken for one of this
        self._exports: dict[bool, StageExport | AdapterExport] = {}
        self._channel: WeightChannel | None = None
        self._hasher = Hasher(_to_device)
        limit = datetime.timedelta(seconds=seconds + runtime.timeout_seconds())
        self._talk = dist.new_group(backend="gloo", timeout=limit) if dist.get_world_size() > 1 else None

    def open(self, number: int, engine_ranks: int) -> list[WeightChannelAddress]:
        """Makes new channels in the place of what there were: one for each pipeline stage. ``number``: of the push."""
        self.drop()
        addresses = []
        if self.cargo.is_source:
            self._channel = self._made(f"myxo-{self._life}-{number}-{self.cargo.stage}", 1 + engine_ranks)
            addresses = [self._channel.address().model_dump()]
        return [WeightChannelAddress.model_validate(one) for told in self.agree(addresses) for one in told]

    def join(self, seconds: float) -> None:
        """Waits for the engines. Raises LaneBroken on the ranks whose channel was not joined."""
        if self._channel is not None:
            self._channel.join(seconds)

    def stream(self, number: int, *, partial: bool, seconds: float) -> Sent:
        """Exports and sends everything. Never raises for a channel that breaks: other ranks wait for this one in the export.

        Args:
            partial: without what is frozen. Returns before the last buckets have arrived: see `finish`.
        """
        export, channel, sent = self._export(partial), self._channel, 0
        error = None if channel is None else _broken(lambda: channel.announce(number, export.manifest, seconds))
        for index, bucket in enumerate(export.manifest.buckets):
            flat: torch.Tensor | None = None
            try:
                if channel is not None and error is None:
                    flat = channel.buffer(index, bucket.nbytes)
            except WeightChannelBroken as broken:
                error = str(broken)
            export.fill(index, flat)
            if channel is not None and flat is not None:
                error = _broken(lambda i=index, full=flat: channel.send(i, full))  # type: ignore[misc]
                self._hasher.take(bucket, flat)
                sent += bucket.nbytes
        return Sent(sent, {}, error)

    def finish(self, sent: Sent) -> Sent:
        """Waits until everything has left. Whatever went wrong is in `Sent.error`."""
        error = sent.error
        if self._channel is not None and error is None:
            error = _broken(self._channel.finish)
        return Sent(sent.bytes, self._hasher.known() if error is None else {}, error)

    def agree(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on every rank; JSON."""
        return [value] if self._talk is None else runtime.gather_json(value, self._talk)

    def abort(self, reason: str) -> None:
        """Ends what the channel waits for, from any thread."""
        if self._channel is not None:
            self._channel.abort(reason)

    def drop(self) -> None:
        """Lets go of the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

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
    """What broke, if the channel did."""
    try:
        work()
    except WeightChannelBroken as error:
        return str(error)
    return None


def _to_device(table: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(table).to(runtime.device())
