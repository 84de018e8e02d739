"""One rank's part in a push: its pipeline stage's export, and where it is the stage's source, the channel that carries it.

Engines that share the GPUs of trainers on several machines are reached through relays (`memory_relay`).
"""

import datetime
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from services.trainer.megatron import runtime
from services.trainer.megatron.gather_plan import GatherGroups, GatherPlan
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.weights.memory_relay import MemoryRelay, RelayedSender, StageChannel, relays_of
from services.trainer.weights.stage_export import StageExport
from shared.runtime.addresses import own_address
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_hashing import ManifestHasher
from shared.transfer.digest import TensorDigest, decoded_digests
from shared.transfer.group_channel import GroupSender
from shared.transfer.manifest import Manifest
from shared.transfer.memory_channel import MemorySender
from shared.transfer.weight_channel import ChannelBroken, ChannelSender

ChannelKind = Literal["group", "memory"]
SENDERS: dict[ChannelKind, Callable[[str, str, int, torch.device], ChannelSender]] = {"group": GroupSender, "memory": MemorySender}


class SentPush(NamedTuple):
    """One rank's part of a sent push. ``known``: the tensors' digests. ``error``: the reason if not everything was sent. ``manifests``: the
    channel → the id of its manifest, where this rank has one."""

    bytes: int
    known: dict[str, TensorDigest]
    error: str | None
    manifests: dict[str, str] = {}


def whole_push(parts: Sequence[Sequence[Any]]) -> SentPush:
    """Returns what the ranks have sent together, from each one's `SentPush`. Raises ChannelBroken where one has not sent everything."""
    sent = [SentPush(*part) for part in parts]
    if broken := [part.error for part in sent if part.error is not None]:
        raise ChannelBroken(broken[0])
    known = dict(item for part in sent for item in part.known.items())
    manifests = dict(item for part in sent for item in part.manifests.items())
    # what came from other ranks came as JSON
    return SentPush(sum(part.bytes for part in sent), known if len(sent) == 1 else decoded_digests(known), None, manifests)


class StageSender:
    """The sender of one stage. All ranks construct it together; every method but `abort` is a collective of all, on one thread.

    Args:
        seconds: the longest that a push may take. bucket_bytes, dtype: see `StageExport`.

    Attributes:
        machines: the address of each rank's machine, where each machine has memory channels of its own; else empty.
    """

    def __init__(self, model: MegatronModel, kind: ChannelKind, seconds: float, bucket_bytes: int, dtype: str | None = None) -> None:
        self.plan = GatherPlan(model, GatherGroups.own())
        self._kind, self._bucket_bytes, self._dtype = kind, bucket_bytes, dtype
        self._life = secrets.token_hex(4)  # a channel of an earlier process must not be mistaken for one of this
        self._exports: dict[bool, tuple[StageExport, ManifestHasher]] = {}
        self._channel: StageChannel | None = None
        self._relays: list[MemoryRelay] = []
        self.marks: dict[str, float] = {}
        """What the newest `send` has reached → when, monotonic seconds."""
        limit = datetime.timedelta(seconds=seconds + runtime.timeout_seconds())
        self._ranks = dist.new_group(backend="gloo", timeout=limit) if dist.get_world_size() > 1 else None
        told = self.agree([own_address(), self.plan.stage, self.plan.is_source])
        machines = [address for address, _, _ in told] if kind == "memory" else []
        self.machines = machines if len(set(machines)) > 1 else []
        self._sources = {stage: rank for rank, (_, stage, is_source) in enumerate(told) if is_source}

    def open(self, number: int, engine_ranks: Mapping[str, int]) -> list[WeightChannelAddress]:
        """Replaces the channels by new ones, one for each pipeline stage, and for each machine where they have memory of their own.

        Args:
            number: that of the push. engine_ranks: by machine, see `machines`; else under any one name.
        """
        self.drop()
        if self.machines:
            return self._open_on_machines(number, engine_ranks)
        addresses = []
        if self.plan.is_source:
            name = self._name(number, self.plan.stage)
            self._channel = SENDERS[self._kind](name, own_address(), 1 + sum(engine_ranks.values()), runtime.device())
            addresses = [self._channel.address.model_dump()]
        return self._all(addresses)

    def _open_on_machines(self, number: int, engine_ranks: Mapping[str, int]) -> list[WeightChannelAddress]:
        relays, rank, device = relays_of(self.machines, self._sources, engine_ranks), dist.get_rank(), runtime.device()
        machine, ways, stages = self.machines[rank], [], sorted(self._sources)
        readers = 1 + engine_ranks.get(machine, 0)
        if self.plan.is_source:
            name, others = self._name(number, self.plan.stage), len(relays[self.plan.stage])
            self._channel = local = MemorySender(name, machine, readers, device)
            if others:
                way = GroupSender(f"{name}-relays", machine, 1 + others, device)
                self._channel, ways = RelayedSender(local, way), [way.address.model_dump()]
        told = self.agree(ways)
        for stage in stages:
            if rank in relays[stage]:
                place = 1 + relays[stage].index(rank)
                source = WeightChannelAddress.model_validate(told[self._sources[stage]][0])
                local = MemorySender(f"{self._name(number, stage)}-at-{place}", machine, readers, device, purpose=1 + stage)
                self._relays.append(MemoryRelay(source, place, local))
        own = [self._channel] if self._channel is not None else []
        return self._all([channel.address.model_dump() for channel in (*own, *self._relays)])

    def _name(self, number: int, stage: int) -> str:
        return f"myxo-{self._life}-{number}-{stage}"

    def _all(self, addresses: list[Any]) -> list[WeightChannelAddress]:
        return [WeightChannelAddress.model_validate(address) for of_rank in self.agree(addresses) for address in of_rank]

    def join(self, seconds: float) -> None:
        """Waits for the engines. Raises ChannelBroken on the ranks whose channel was not joined."""
        for relay in self._relays:
            relay.begin_join(seconds)
        if self._channel is not None:
            self._channel.join(seconds)
        for relay in self._relays:
            relay.wait(seconds)

    def send(
        self,
        number: int,
        *,
        partial: bool,
        seconds: float,
        ask: Callable[[], None] = lambda: None,
        exported: Callable[[], None] = lambda: None,
    ) -> SentPush:
        """Exports and sends everything. Never raises for a channel that breaks: other ranks wait for this one in the export.

        Args:
            partial: without frozen parameters. ask: asks the replicas to receive; it is called at once, or once the first bucket has been
                issued where the engines begin at the channel's own word. exported: is called once no parameter is read any more; buckets
                may still be on their way.
        """
        (export, hasher), channel = self._export(partial), self._channel
        followed = isinstance(channel, ChannelSender) and channel.followed(export.manifest)
        if not followed:
            ask()
        self.marks = {}
        for relay in self._relays:
            relay.begin(number, seconds)
        error = None if channel is None else _error_of(lambda: channel.announce(number, export.manifest, seconds))
        hasher.begin()
        for index in range(len(export.manifest.buckets)):
            error = _send_bucket(export, hasher, None if error else channel, index) or error
            self.marks.setdefault("first_sent", time.monotonic())
            if followed and not index:
                ask()
        self.marks["issued"] = time.monotonic()
        exported()
        return self._finished(export.manifest, hasher, seconds, error)

    def _finished(self, manifest: Manifest, hasher: ManifestHasher, seconds: float, error: str | None) -> SentPush:
        """Waits until all that was issued is sent. ``error``: what broke the channel before that."""
        channel = self._channel
        if channel is not None and error is None:
            error = _error_of(lambda: channel.finish(hasher.poll))
        for relay in self._relays:
            error = _error_of(lambda passing=relay: passing.wait(seconds)) or error  # type: ignore[misc]
        self.marks["sent"] = time.monotonic()
        if channel is None or error is not None:
            return SentPush(0, {} if error is not None else hasher.digests(), error)
        return SentPush(manifest.nbytes, hasher.digests(), None, {channel.address.name: manifest.id})

    def held_by_all(self, push: int, digest: str, done: Callable[[], bool]) -> bool:
        """Returns whether every engine rank holds ``digest``, as they have said over this rank's channel; see `ChannelSender`.

        Where some of them have another channel, that is not known here.
        """
        return isinstance(self._channel, ChannelSender) and not self.machines and self._channel.held_by_all(push, digest, done)

    def agree(self, value: Any) -> list[Any]:
        """Returns ``value`` of every rank, in rank order, on every rank; JSON."""
        return [value] if self._ranks is None else runtime.gather_json(value, self._ranks)

    def abort(self, reason: str) -> None:
        """Ends the channel's waits, from any thread."""
        for end in (*([self._channel] if self._channel is not None else []), *self._relays):
            end.abort(reason)

    def drop(self) -> None:
        """Closes and drops the channels."""
        channel, self._channel = self._channel, None
        relays, self._relays = self._relays, []
        for end in (*([channel] if channel is not None else []), *relays):
            end.close()

    def close(self) -> None:
        self.drop()
        self.plan.groups.leave()
        if self._ranks is not None:
            dist.destroy_process_group(self._ranks)
            self._ranks = None

    def _export(self, partial: bool) -> tuple[StageExport, ManifestHasher]:
        if partial not in self._exports:
            export = StageExport(self.plan, self._bucket_bytes, dtype=self._dtype, skip_frozen=partial)
            self._exports[partial] = export, ManifestHasher(export.manifest, runtime.device())
        return self._exports[partial]


def _send_bucket(export: StageExport, hasher: ManifestHasher, channel: StageChannel | None, index: int) -> str | None:
    """Exports a bucket, and sends it where this rank has a channel. Returns the error that broke that, or None."""
    flat: torch.Tensor | None = None
    broken = None
    try:
        if channel is not None:
            flat = channel.buffer(index, export.manifest.buckets[index].nbytes)
    except ChannelBroken as error:
        broken = str(error)
    export.fill(index, flat)
    if channel is not None and flat is not None:
        broken = _error_of(lambda: channel.send(index, flat))
        hasher.take(index, flat)
    return broken


def _error_of(work: Callable[[], None]) -> str | None:
    """Returns the error that broke the channel, or None."""
    try:
        work()
    except ChannelBroken as error:
        return str(error)
    return None
