"""The trainer's side of sharing its GPUs with engines (`colocate`, `lend_gpus`). It decides which of them has the memory.

Trainer and engines have it in turns. Once a batch is ready the engines are offloaded, then what this rank keeps in host
memory is onloaded. With a push it goes back: moments and gradients are offloaded, the engines onload their weights and take the push, the
trainer's weights are offloaded, the engines onload the rest and generate. Every rank makes the same calls in the same order; only
rank 0 sends requests to the replicas.

GPUs that are lent (`lend_gpus`) go to engines only while the trainer waits for a batch. It keeps weights and optimizer where they are, and
gives the memory of its activations alone.

Storages are moved, not tensors: Megatron's parameters and gradients are views of a few large buffers, and much else refers to such
views. A storage is emptied in place and filled again, so that every view of it is valid afterwards, with the same bits.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import structlog
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.backend import ScheduledOptimizer
from services.trainer.control_client import ControlClient
from services.trainer.parallel.runtime import together
from services.trainer.parallel.trained_model import TrainedModel
from services.trainer.weights.pusher import ABSENCE_SECONDS
from shared.bus.connection import TRANSIENT
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.telemetry import declare_metrics
from shared.schema.messages import Message
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake

Part = Literal["optimizer", "weights"]


class _Storage:
    """One storage: on its device, or as a copy in host memory. ``keeps``: whether its content is kept; gradients' is not."""

    def __init__(self, tensor: Tensor, keeps: bool) -> None:
        self._storage, self._keeps = tensor.untyped_storage(), keeps
        self.nbytes = self._storage.nbytes()
        self._host: Tensor | None = None  # stays allocated after an onload: pinning memory takes longer than the copy

    def copy_out(self) -> None:
        if not self._keeps:
            return
        if self._host is None:
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._storage.device.type == "cuda")
        self._host.copy_(_bytes_of(self._storage), non_blocking=True)

    def empty(self) -> None:
        self._storage.resize_(0)

    def fill(self) -> None:
        self._storage.resize_(self.nbytes)
        content = _bytes_of(self._storage)
        if self._host is None:
            content.zero_()
        else:
            content.copy_(self._host, non_blocking=True)


class Offload:
    """One rank's part of a model and its optimizer. Everything is on the device at first.

    Two parts: ``weights``, which a push reads, and ``optimizer``: its moments, its float32 weights, and the gradients, which are not
    kept. No method is a collective: each rank moves its own part.
    """

    def __init__(self, model: TrainedModel, optimizer: ScheduledOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._away: dict[Part, list[_Storage]] = {}
        self._known: dict[tuple[int, bool], _Storage] = {}

    @property
    def away(self) -> frozenset[Part]:
        """Returns the parts that are in host memory now."""
        return frozenset(self._away)

    def to_host(self, part: Part) -> int:
        """Moves a part to host memory unless it is there already. Returns the bytes freed on the device."""
        if part in self._away:
            return 0
        self._model.readers.wait("offloading")
        if part == "optimizer":
            self._optimizer.zero_gradients()
        found = list(self._storages(part))
        for storage in found:
            storage.copy_out()
        _synchronize()
        for storage in found:
            storage.empty()
        self._away[part] = found
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # back to the device's allocator, so that an engine can use it
        return sum(storage.nbytes for storage in found)

    def to_device(self) -> None:
        """Moves everything back to the device."""
        for storage in [one for part in self._away.values() for one in part]:
            storage.fill()
        self._away.clear()
        _synchronize()

    def _storages(self, part: Part) -> Iterator[_Storage]:
        """Yields each storage of a part on the model's device once. In float32 an optimizer updates views of the weights, which stay
        theirs."""
        device = self._model.weight_tensors()[0].device
        weights = {_key(tensor): (tensor, True) for tensor in self._model.live_tensors()}
        held: dict[int, tuple[Tensor, bool]] = {}
        for tensor, keeps in weights.values() if part == "weights" else self._optimizer.live_tensors(self._model):
            if part == "weights" or _key(tensor) not in weights:
                held.setdefault(_key(tensor), (tensor, keeps))
        for key, (tensor, keeps) in held.items():
            if tensor.device == device and (nbytes := tensor.untyped_storage().nbytes()):
                known = self._known.get((key, keeps))
                if known is None or known.nbytes != nbytes:
                    known = self._known[key, keeps] = _Storage(tensor, keeps)
                yield known


def _key(tensor: Tensor) -> int:
    """Returns a key that identifies the storage while it lives; the holder of the key must keep the storage alive."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


declare_metrics("""
    onloaded | | 1 while the trainer has the GPUs that it shares with engines | with `colocate`
    onloaded_seconds | s | for which it had them last | with `colocate`
    lent_seconds_total | s | for which the trainer's GPUs were lent to engines | with `lend_gpus`
    handed_back_seconds | s | that engines took last to give lent GPUs back, which the batch waited for | with `lend_gpus`
    handed_back_seconds_max | s | the longest of these | with `lend_gpus`
""")

Answer = TypeVar("Answer", bound=Message)

# The time that a replica stays offloaded after the last request of the trainer. A restart of the trainer takes about that long
LASTS_SECONDS = 30.0
RENEW_SECONDS = 4.0
POLL_INTERVAL_S = 0.2
LEAVE_SECONDS = 4.0  # the time that the replicas have to answer a trainer that is to stop


class ColocationScheduler:
    """Gives the GPUs' memory to the trainer or to the engines. Without ``colocate`` every call does nothing.

    Args:
        control: rank 0's; None on the other ranks. lent: the replicas that it lends to, where the run has others besides; ``config`` is
            then as they have it. Without them all replicas are colocated.

    Attributes:
        engines_offloaded: rank 0's record.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None, lent: Collection[str] = ()) -> None:
        self._config, self._control, self._lent = config, control, frozenset(lent)
        self.colocated = config.trainer.colocate
        self._offloads = devices.trainer_offloads(config)
        self._releases = devices.engines_release(config)
        self._offload: Offload | None = None
        self._onloaded = False
        self.engines_offloaded = False
        self._since = self._lent_since = self._longest = 0.0
        self._renewing: Future[None] | None = None
        self._lost: set[str] = set()
        self._log: Any = structlog.get_logger()

    # --- from start to stop

    def begin(self) -> None:
        """Waits, before a model is loaded, until the engines are up (each sizes its cache by the free memory), and offloads them."""
        if self.colocated and not self._onloaded:
            count = len(self._lent) or self._config.rollout.rollout_replicas
            self.offload_engines(awaited=count if self._releases else 0)
            self._onloaded = True

    def attach(self, actor: Actor) -> None:
        """Takes the loaded model, before the first command."""
        if self._offloads:
            self._offload = Offload(actor.model, actor.optimizer)

    def end(self) -> None:
        """Onloads the offloaded engines that can be reached, since the trainer stops. Only rank 0 does this; it is no collective."""
        if self.engines_offloaded:
            self._onload_engines(LEAVE_SECONDS)
        self._onloaded = False

    # --- on all ranks

    def onload(self) -> None:
        """Offloads the engines and brings the trainer back to the GPU, if it is not there already. A collective."""
        if not self.colocated or self._onloaded:
            return
        with together("the offloading of the engines"):
            self.offload_engines()
        self._onloaded = True
        if self._offload is not None:
            started = time.monotonic()
            with together("the weights' way back to the GPU"):
                self._offload.to_device()
            if self._control is not None:
                self._log.info("onloaded", seconds=round(time.monotonic() - started, 3))

    def offload(self) -> None:
        """Gives the GPU to the engines without a push, if the trainer has it and does not only lend it. A collective."""
        if self._onloaded and not self._lent:
            self._give_gpus()

    def _give_gpus(self) -> None:
        self._make_room("optimizer", "weights")
        if self._control is not None:
            self._onload_engines(self._config.weights.push_timeout)
        self._onloaded = False

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """Gives the engines the GPU after the body, which pushes and returns when nothing reads the weights any more. A collective.

        They also get it after a push that was not made, or failed: engines that hold a version continue with it.
        """
        if self.colocated:
            self.onload()
            self._make_room("optimizer")
        yield
        if self.colocated:
            self._give_gpus()

    def _make_room(self, *parts: Part) -> None:
        if self._lent and torch.cuda.is_initialized():
            with together("the release of memory"):
                torch.cuda.empty_cache()
        if self._offload is None:
            return
        started, moved = time.monotonic(), [part for part in parts if part not in self._offload.away]
        with together("the way to host memory"):
            freed = sum([self._offload.to_host(part) for part in moved])
        if self._control is not None:
            self._log.info("offloaded", parts=moved, bytes=freed, seconds=round(time.monotonic() - started, 3))

    # --- on rank 0: the replicas

    def offload_engines(self, awaited: int = 0) -> None:
        """Returns once every engine of the run is offloaded; rank 0 also calls it before it commands a push.

        Args:
            awaited: replicas that have to be there. Raises DeadlineExceeded where they do not come.
        """
        control = self._control
        if control is None or self.engines_offloaded:
            return
        started, stopping = time.monotonic(), control.stopping
        if self._releases and not stopping:
            self._await_engines(control, awaited)
        deadline = LEAVE_SECONDS if stopping else self._config.weights.push_timeout
        control.gauges({"onloaded": 1.0})
        control.call(control.service.announce(), deadline)
        asleep = control.call(self._ask_all(control, _sleep(deadline), WeightsAsleep), deadline + POLL_INTERVAL_S)
        self._lost |= {answer.replica for answer in asleep if answer.version < 0}
        self._renewing = control.begin(self._renew(control))
        self.engines_offloaded, self._since = True, time.monotonic()
        if not self._lent:  # the batch waits for these
            with contextlib.suppress(MyxoError, *TRANSIENT):
                control.look()
        seconds = time.monotonic() - started
        if self._lent_since:
            self._longest = max(self._longest, seconds)
            control.service.metrics.add("lent_seconds", started - self._lent_since)
            control.gauges({"handed_back_seconds": seconds, "handed_back_seconds_max": self._longest})
        self._log.info("engines_offloaded", replicas=len(asleep), seconds=round(seconds, 3), free_bytes=_free())

    def call_off(self) -> None:
        """Records that the push for which the engines were offloaded does not come."""
        if self.engines_offloaded and not self._onloaded:
            self._onload_engines(self._config.weights.push_timeout)

    def lost(self) -> set[str]:
        """Returns the replicas that have lost their weights since this was last called."""
        lost, self._lost = self._lost, set()
        return lost

    def _onload_engines(self, deadline: float) -> None:
        control = self._control
        assert control is not None  # rank 0 only
        if self._renewing is not None:
            self._renewing.cancel()
        self.engines_offloaded, started = False, time.monotonic()
        control.gauges({"onloaded": 0.0})
        try:
            awake = control.call(self._ask_all(control, WeightsWake(deadline=deadline), WeightsReady), deadline + POLL_INTERVAL_S)
        except MyxoError as error:  # they onload by themselves when no further request comes
            self._log.warning("engines_not_onloaded", error=str(error))
            return
        self._lent_since = time.monotonic() if self._lent else 0.0
        onloaded, seconds = started - self._since, time.monotonic() - started
        control.gauges({"onloaded_seconds": onloaded})
        timing = {"trained": round(onloaded, 3), "seconds": round(seconds, 3)}
        self._log.info("engines_onloaded", replicas=len(awake), free_bytes=_free(), **timing)

    def _await_engines(self, control: ControlClient, count: int) -> None:
        """Waits for engines that are starting: they would take memory while the trainer has the GPU."""
        limit = self._config.rollout.engine_start_timeout
        end = time.monotonic() + limit
        while not control.stopping:
            replicas = control.call(self._replicas(control), limit)
            starting = [status.instance for status in replicas if status.state == "starting"]
            if not starting and len(replicas) >= count:
                return
            if time.monotonic() > end:
                missing = f"the engines of {', '.join(starting)}"
                if len(replicas) < count:
                    missing = f"{count - len(replicas)} more rollout services"
                if self._lent and not count:  # it trains on: the engine may find no memory, and is started again then
                    return self._log.warning("engines_not_up", missing=missing, seconds=limit)
                raise DeadlineExceeded("colocated engines that are up", missing, limit, "the trainer stops")
            time.sleep(POLL_INTERVAL_S)

    async def _ask_all(self, control: ControlClient, request: WeightsSleep | WeightsWake, reply: type[Answer]) -> list[Answer]:
        service, answers = control.service, list[Answer]()
        verb = "sleep" if isinstance(request, WeightsSleep) else "wake"

        async def ask(instance: str) -> None:
            subject = service.subjects.replica_weights(instance, verb)
            try:
                seconds = request.deadline
                asking = service.bus.request(subject, request, reply, deadline=seconds, awaited_from=instance, absence=ABSENCE_SECONDS)
                answers.append(await asking)
            except MyxoError as error:
                self._log.warning("replica_unanswered", verb=verb, replica=instance, error=str(error))

        await asyncio.gather(*(ask(status.instance) for status in await self._replicas(control)))
        return answers

    async def _replicas(self, control: ControlClient) -> list[ServiceStatus]:
        alive = [status for status in await control.service.registry.alive("rollout") if status.state != "stopping"]
        return [status for status in alive if not self._lent or status.instance in self._lent]

    async def _renew(self, control: ControlClient) -> None:
        """Asks the replicas to stay offloaded, including those that have come since. Runs until cancelled."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with contextlib.suppress(MyxoError, *TRANSIENT):
                await self._ask_all(control, _sleep(LASTS_SECONDS), WeightsAsleep)


def _sleep(deadline: float) -> WeightsSleep:
    return WeightsSleep(lasts=LASTS_SECONDS, deadline=deadline)


def _free() -> int | None:
    """Returns the free bytes of this rank's GPU; None without one, and before this process uses it."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None
