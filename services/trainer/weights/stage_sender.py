"""One rank's part in a push: its pipeline stage's export, and where it is the stage's source, the channel that carries it.

Colocated engines on several machines: each machine has a memory channel of each pipeline stage. A stage's source fills the channel of its
own machine. A rank on each other machine, its *relay*, takes the same buckets from the source over a group channel, and fills the channel
there. Relays work on threads of their own: a rank may be the source of one stage and the relay of another, and the export of the one must
not wait for the other.
"""

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.backend import gather_plan
from services.trainer.parallel import runtime
from services.trainer.parallel.gather_plan import GatherPlan, GatherUnit
from services.trainer.parallel.runtime import deadline, device
from services.trainer.parallel.trained_model import TrainedModel
from shared.model.quantization import Quantization
from shared.runtime.addresses import own_address
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_ring import ManifestHasher, slot_view, torch_dtype
from shared.transfer.digest import TensorDigest, decoded_digests
from shared.transfer.group_channel import GroupReceiver, GroupSender, on_stream
from shared.transfer.manifest import RAMP_PART, Bucket, Kind, Manifest, Slot, TensorSpec, lay_out_units, loaded_together, unit_bytes
from shared.transfer.memory_channel import MemorySender
from shared.transfer.quantizer import all_quantized
from shared.transfer.weight_channel import ChannelBroken, ChannelSender, TransferDeadline, abort_channel

Unit = TypeVar("Unit")


@dataclass
class _Copies:
    """The copies of one bucket into one buffer that need no other rank; they are the same at every push."""

    buffer: int
    targets: list[Tensor]
    sources: list[Tensor]


class StageExport:
    """The export of the whole weights, or of LoRA's adapters alone: engines apply them to the checkpoint that training started from.

    Args:
        bucket_bytes: the most of a bucket, unless one parameter is larger. dtype: torch's name of the sent dtype; None: as trained.
        skip_frozen: whether to leave out parameters that no optimizer updates. quantization: of the engines' checkpoint; its matrices are
            quantized here, on the device of the weights.
    """

    def __init__(
        self,
        plan: GatherPlan,
        bucket_bytes: int,
        *,
        dtype: str | None = None,
        skip_frozen: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        self._plan, self._quantization = plan, quantization
        groups = loaded_together(plan.of_stage(), lambda unit: unit.tensors[0][0])
        held = [group for group in groups if not (skip_frozen and all(map(plan.is_frozen, group)))]
        lora = plan.model.lora
        trained = (dtype if lora is None else None) or str(plan.model.dtype).removeprefix("torch.")

        def specs(group: list[GatherUnit]) -> list[TensorSpec]:
            plain = [(name, "float32" if unit.float32 else trained, shape) for unit in group for name, shape in unit.tensors]
            return plain if quantization is None else [spec for one in plain for spec in quantization.specs(*one)]

        held = send_order(held, [unit_bytes(specs(group)) for group in held], bucket_bytes)
        kind: tuple[Kind, float] = ("weights", 1.0) if lora is None else ("adapter", lora.scale)
        self.manifest: Manifest = lay_out_units(map(specs, held), bucket_bytes, *kind, ramped=True)
        units = (unit for group in held for unit in group)
        counted = ((unit, len(specs([unit]))) for unit in units)
        self._units = [list(_units_of(bucket, counted)) for bucket in self.manifest.buckets]
        self._copies: dict[int, _Copies] = {}

    @torch.no_grad()
    def fill(self, index: int, flat: Tensor | None) -> None:
        """Puts bucket ``index`` into ``flat``: uint8 [its size] on the source; None elsewhere, and where its channel is broken.

        A collective of the stage's ranks.
        """
        copies = self._own_copies(index, flat) if flat is not None else None
        waiting: list[tuple[Tensor, tuple[Slot, ...]]] = []  # matrices, and the slots of their parts
        for unit, slots in self._units[index]:
            if self._is_quantized(unit):
                waiting += self._gathered(unit, slots, flat)
                if sum(matrix.numel() for matrix, _ in waiting) >= MOST_WAITING:
                    self._fill_quantized(waiting, flat)
                    waiting = []
                continue
            if copies is not None and self._plan.is_whole(unit):
                continue
            with deadline(f"the export of {unit.name}"):
                targets = [_target(flat, slot) for slot in slots] if self._plan.is_source else None
                self._plan.deliver(unit, self._plan.source, [torch_dtype(slot.dtype) for slot in slots], targets)
        self._fill_quantized(waiting, flat)
        if copies is not None and copies.targets:
            torch._foreach_copy_(copies.targets, copies.sources)

    def _is_quantized(self, unit: GatherUnit) -> bool:
        return self._quantization is not None and any(name in self._quantization.names for name, _ in unit.tensors)

    def _gathered(self, unit: GatherUnit, slots: tuple[Slot, ...], flat: Tensor | None) -> Iterator[tuple[Tensor, tuple[Slot, ...]]]:
        """Yields the unit's matrices that are to be quantized, with their slots; puts its other tensors into theirs."""
        assert self._quantization is not None
        dtype, places = unit.dtype(self._plan.model.dtype), iter(slots)
        with deadline(f"the export of {unit.name}"):
            whole = self._plan.deliver(unit, self._plan.source, [dtype] * len(unit.tensors))
        if whole is None or flat is None:
            return
        for (name, _), tensor in zip(unit.tensors, whole, strict=True):
            if name in self._quantization.names:
                yield tensor, tuple(next(places) for _ in self._quantization.format.endings)
            else:
                slot_view(flat, next(places)).copy_(tensor)

    def _fill_quantized(self, waiting: list[tuple[Tensor, tuple[Slot, ...]]], flat: Tensor | None) -> None:
        if not waiting or flat is None or self._quantization is None:
            return
        made = all_quantized([matrix for matrix, _ in waiting], self._quantization.format)
        targets = [slot_view(flat, slot) for _, slots in waiting for slot in slots]
        parts = [part.view(target.shape) for target, part in zip(targets, (part for parts in made for part in parts), strict=True)]
        torch._foreach_copy_(targets, parts)

    def _own_copies(self, index: int, flat: Tensor) -> _Copies:
        found = self._copies.get(index)
        if found is None or found.buffer != flat.data_ptr():
            found = self._copies[index] = _Copies(flat.data_ptr(), [], [])
            for unit, slots in self._units[index]:
                if self._plan.is_whole(unit) and not self._is_quantized(unit):
                    parts = self._plan.parts(unit)
                    assert parts is not None  # views of a parameter that this rank owns
                    found.sources += parts
                    found.targets += [slot_view(flat, slot).view(part.shape) for part, slot in zip(parts, slots, strict=True)]
        return found


MOST_WAITING = 1 << 26  # the numbers of gathered matrices that wait to be quantized together


def send_order(units: Sequence[Unit], sizes: Sequence[int], bucket_bytes: int) -> list[Unit]:
    """Returns the units with the large ones, an embedding for example, in the middle: a push begins and ends with small buckets."""
    large = [unit for unit, nbytes in zip(units, sizes, strict=True) if nbytes > bucket_bytes * RAMP_PART]
    small = [unit for unit, nbytes in zip(units, sizes, strict=True) if nbytes <= bucket_bytes * RAMP_PART]
    middle = len(small) // 2
    return [*small[:middle], *large, *small[middle:]]


def _target(flat: Tensor | None, slot: Slot) -> Tensor:
    return slot_view(flat, slot) if flat is not None else torch.empty(slot.shape, dtype=torch_dtype(slot.dtype), device=device())


def _units_of(bucket: Bucket, units: Iterator[tuple[GatherUnit, int]]) -> Iterator[tuple[GatherUnit, tuple[Slot, ...]]]:
    first = 0
    while first < len(bucket.slots):
        unit, count = next(units)
        slots = bucket.slots[first : first + count]
        first += len(slots)
        yield unit, slots


MARGIN_SECONDS = 5.0  # the seconds beyond its deadline that a relay has to end: it checks its deadline itself


def relays_of(machines: Sequence[str], sources: Mapping[int, int], engines: Mapping[str, int]) -> dict[int, list[int]]:
    """Returns the ranks that relay each pipeline stage, in the order of machines: one on each that has engines and not the stage's source.

    A machine's ranks relay stages by turns, first those that are no stage's source.

    Args:
        machines: the address of each rank's. sources: by stage, the rank that sends it. engines: by machine, the ranks of its engines.
    """
    relays: dict[int, list[int]] = {stage: [] for stage in sources}
    for machine in dict.fromkeys(machines):
        here = [rank for rank, address in enumerate(machines) if address == machine]
        here.sort(key=lambda rank: rank in sources.values())  # stable
        foreign = [stage for stage in sorted(sources) if machines[sources[stage]] != machine and engines.get(machine)]
        for turn, stage in enumerate(foreign):
            relays[stage].append(here[turn % len(here)])
    return relays


class RelayedSender:
    """The source's end of one stage: it fills the memory of its own machine, and sends the same to the relays.

    Its methods are those of a `ChannelSender` that `StageSender` calls.

    Args:
        local: of this machine's engines. relays: to the other machines' relays.
    """

    def __init__(self, local: MemorySender, relays: GroupSender) -> None:
        self._local, self._relays = local, relays
        self.address = local.address

    def join(self, seconds: float) -> None:
        with self._breaking_both():
            self._relays.join(seconds)
            self._local.join(seconds)

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        with self._breaking_both():
            self._relays.announce(push, manifest, seconds)
            self._local.announce(push, manifest, seconds)

    def buffer(self, index: int, nbytes: int) -> Tensor:
        with self._breaking_both():
            return self._local.buffer(index, nbytes)

    def send(self, index: int, flat: Tensor) -> None:
        with self._breaking_both():  # the relays get a copy: the engines may be done with the bucket before it has arrived there
            copy = self._relays.buffer(index, flat.numel())
            copy.copy_(flat)
            self._relays.send(index, copy)
            self._local.send(index, flat)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        with self._breaking_both():
            self._relays.finish(meanwhile)
            self._local.finish(meanwhile)

    @contextlib.contextmanager
    def _breaking_both(self) -> Iterator[None]:
        """Ends both channels where the body breaks one: the others would wait for what does not come."""
        try:
            yield
        except ChannelBroken as error:
            self.abort(str(error))
            raise

    def abort(self, reason: str) -> None:
        self._relays.abort(reason)
        self._local.abort(reason)

    def close(self) -> None:
        self._relays.close()
        self._local.close()


class MemoryRelay:
    """A relay's end of one stage: what comes from the source goes into the memory of this machine.

    Args:
        source: of the channel to the relays. rank: this one's in it, from 1. local: to this machine's engines.
    """

    def __init__(self, source: WeightChannelAddress, rank: int, local: MemorySender) -> None:
        self._source, self._local = source, local
        self._receiver = GroupReceiver(source, rank, local.device)
        self._stream = torch.cuda.Stream(local.device) if local.device.type == "cuda" else None
        self._working: Future[None] | None = None
        self.address = local.address

    def begin_join(self, seconds: float) -> None:
        """Begins to join the source's channel and to wait for the engines."""

        def join() -> None:
            self._receiver.join(TransferDeadline(seconds))
            self._local.join(seconds)

        self._begin(join, "join")

    def begin(self, push: int, seconds: float) -> None:
        """Begins to pass on a push."""
        self._begin(lambda: self._pass_on(push, seconds), "relay")

    def wait(self, seconds: float) -> None:
        """Returns once what was begun is done. Raises ChannelBroken."""
        if self._working is None:
            return
        try:
            self._working.result(seconds + MARGIN_SECONDS)
        except TimeoutError:
            raise ChannelBroken(f"the relay of channel {self._source.name} did not end within {seconds + MARGIN_SECONDS:g} s") from None

    def abort(self, reason: str) -> None:
        """Ends what is under way, from any thread."""
        self._local.abort(reason)
        self._receiver.close()

    def close(self) -> None:
        """Leaves both channels."""
        self._receiver.close()
        self._local.close()

    def _begin(self, work: Callable[[], None], name: str) -> None:
        def done() -> None:
            try:
                with on_stream(self._stream):
                    if self._stream is not None:
                        torch.cuda.set_device(self._local.device)  # of this thread
                    work()
            except MyxoError as error:
                reason = self._local.broken or str(error)  # this end's own is the cause, whatever it was met by
                self.abort(reason)
                abort_channel(self._source, reason)  # the source would wait for this end until its deadline
                raise ChannelBroken(reason) from error

        self._working = run_in_thread(done, f"{name}-{self._source.name}")

    def _pass_on(self, push: int, seconds: float) -> None:
        deadline = TransferDeadline(seconds)
        manifest = self._receiver.manifest(push, deadline)
        self._local.announce(push, manifest, seconds)
        for index, bucket in enumerate(manifest.buckets):
            taken = self._receiver.take(index, bucket.nbytes, deadline)
            flat = self._local.buffer(index, bucket.nbytes)
            flat.copy_(taken)
            self._receiver.release(index)
            self._local.send(index, flat)
        self._receiver.finish(deadline)
        self._local.finish()


StageChannel = ChannelSender | RelayedSender


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
    pushes = [SentPush(*part) for part in parts]
    if broken := [part.error for part in pushes if part.error is not None]:
        raise ChannelBroken(broken[0])
    known = dict(item for part in pushes for item in part.known.items())
    manifests = dict(item for part in pushes for item in part.manifests.items())
    # what came from other ranks came as JSON
    return SentPush(sum(part.bytes for part in pushes), known if len(pushes) == 1 else decoded_digests(known), None, manifests)


class StageSender:
    """The sender of one stage. All ranks construct it together; every method but `abort` and `held_by_all` is a collective of all.

    Args:
        seconds: the longest that a push may take. bucket_bytes, dtype, quantization: see `StageExport`.

    Attributes:
        machines: the address of each rank's machine, where each machine has memory channels of its own; else empty.
    """

    def __init__(
        self,
        model: TrainedModel,
        kind: ChannelKind,
        seconds: float,
        bucket_bytes: int,
        dtype: str | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.plan: GatherPlan = gather_plan(model, apart=True)
        self._kind, self._bucket_bytes, self._dtype, self._quantization = kind, bucket_bytes, dtype, quantization
        self._life = secrets.token_hex(4)  # a channel of an earlier process must not be mistaken for one of this
        self._exports: dict[bool, tuple[StageExport, ManifestHasher]] = {}
        self._channel: StageChannel | None = None
        self._relays: list[MemoryRelay] = []
        self.marks: dict[str, float] = {}  # what the newest `send` has reached → when, monotonic seconds
        limit = datetime.timedelta(seconds=seconds + runtime.timeout_seconds())
        self._ranks = dist.new_group(backend="gloo", timeout=limit) if dist.get_world_size() > 1 else None
        everyone = self.agree([own_address(), self.plan.stage, self.plan.is_source])
        machines = [address for address, _, _ in everyone] if kind == "memory" else []
        self.machines = machines if len(set(machines)) > 1 else []
        self._sources = {stage: rank for rank, (_, stage, is_source) in enumerate(everyone) if is_source}

    def open(self, number: int, engine_ranks: Mapping[str, int]) -> list[WeightChannelAddress]:
        """Replaces the channels by new ones, one for each pipeline stage, and for each machine where they have memory of their own.

        Args:
            number: that of the push. engine_ranks: by machine, see `machines`; else under any one name.
        """
        self.drop()
        if self.machines:
            return self._open_on_machines(number, engine_ranks)
        if self.plan.is_source:
            name = self._name(number, self.plan.stage)
            self._channel = SENDERS[self._kind](name, own_address(), 1 + sum(engine_ranks.values()), runtime.device())
        return self._all()

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
        everyone = self.agree(ways)
        for stage in stages:
            if rank in relays[stage]:
                place = 1 + relays[stage].index(rank)
                source = WeightChannelAddress.model_validate(everyone[self._sources[stage]][0])
                local = MemorySender(f"{self._name(number, stage)}-at-{place}", machine, readers, device, purpose=1 + stage)
                self._relays.append(MemoryRelay(source, place, local))
        return self._all()

    def _name(self, number: int, stage: int) -> str:
        return f"myxo-{self._life}-{number}-{stage}"

    @property
    def _ends(self) -> list[StageChannel | MemoryRelay]:
        return [*([] if self._channel is None else [self._channel]), *self._relays]

    def _all(self) -> list[WeightChannelAddress]:
        everyone = self.agree([end.address.model_dump() for end in self._ends])
        return [WeightChannelAddress.model_validate(address) for addresses in everyone for address in addresses]

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
        for end in self._ends:
            end.abort(reason)

    def drop(self) -> None:
        """Closes and drops the channels."""
        ends, self._channel, self._relays = self._ends, None, []
        for end in ends:
            end.close()

    def close(self) -> None:
        self.drop()
        self.plan.leave()
        if self._ranks is not None:
            dist.destroy_process_group(self._ranks)
            self._ranks = None

    def _export(self, partial: bool) -> tuple[StageExport, ManifestHasher]:
        if partial not in self._exports:
            size, dtype, quantization = self._bucket_bytes, self._dtype, self._quantization
            export = StageExport(self.plan, size, dtype=dtype, skip_frozen=partial, quantization=quantization)
            self._exports[partial] = export, ManifestHasher(export.manifest, runtime.device())
        return self._exports[partial]


def _send_bucket(export: StageExport, hasher: ManifestHasher, channel: StageChannel | None, index: int) -> str | None:
    flat, broken = None, None
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
    try:
        work()
    except ChannelBroken as error:
        return str(error)
    return None
