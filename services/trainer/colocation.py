"""The trainer's side of taking turns with engines on its own GPUs (`colocate`). It decides whose turn it is.

Its turn begins when a batch is ready: the engines are put to sleep, then what this rank keeps in host memory comes back. It ends with the
push: moments and gradients leave the GPU, the engines have memory for weights and get them, the weights leave, the engines have the rest
of their memory and generate. Every rank makes the same calls in the same order; rank 0 speaks to the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import structlog
import torch

from services.trainer.actor import Actor
from services.trainer.control_client import ControlClient
from services.trainer.megatron.offload import Offload, Part
from services.trainer.megatron.runtime import together
from shared.bus.connection import TRANSIENT
from shared.config.run_config import RunConfig
from shared.runtime import devices
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.messages import Message, ServiceStatus, WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake

LASTS_SECONDS = 30.0
"""How long a replica sleeps after the last word from the trainer. A restart of the trainer takes about that long."""

RENEW_SECONDS = 4.0
POLL_INTERVAL_S = 0.2
LEAVE_SECONDS = 4.0
"""For the replicas to answer a trainer that is to stop."""


class ColocationScheduler:
    """See the module's docstring. Without ``colocate`` every call does nothing.

    Args:
        control: rank 0's; None on the other ranks.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None) -> None:
        self._config, self._control = config, control
        self.colocated = config.trainer.colocate
        self._offloads = devices.trainer_offloads(config)
        self._releases = devices.engines_release(config)
        self._offload: Offload | None = None
        self._held = False
        self._asleep = False  # of the engines, as rank 0 knows
        self._since = 0.0
        self._renewing: Any = None
        self._lost: set[str] = set()
        self._log: Any = structlog.get_logger()

    # --- a trainer's life

    def begin(self) -> None:
        """Before a model is loaded: the engines come up first, each sizes its cache by what is free, and then make room."""
        if self.colocated and not self._held:
            self._put_engines_to_sleep(awaited=self._config.rollout.rollout_replicas if self._releases else 0)
            self._held = True

    def attach(self, actor: Actor) -> None:
        """The model is loaded. Before the first order."""
        if self._offloads:
            self._offload = Offload(actor.model, actor.optimizer)

    def end(self) -> None:
        """The trainer leaves: whoever sleeps is woken, if it can be told so. Rank 0's alone, and no collective."""
        if self._asleep:
            self._wake_engines(LEAVE_SECONDS)
        self._held = False

    # --- turns

    def take(self) -> None:
        """Begins the trainer's turn, if it is not its turn already. A collective."""
        if not self.colocated or self._held:
            return
        with together("the beginning of the trainer's turn"):
            self._put_engines_to_sleep(awaited=0)
        self._held = True
        if self._offload is not None:
            started = time.monotonic()
            with together("the weights' way back to the GPU"):
                self._offload.to_device()
            if self._control is not None:
                self._log.info("brought_back", seconds=round(time.monotonic() - started, 3))

    def give(self) -> None:
        """Ends the trainer's turn without a push, if it is its turn. A collective."""
        if not self._held:
            return
        self._make_room("optimizer", "weights")
        if self._control is not None:
            self._wake_engines(self._config.weights.push_timeout)
        self._held = False

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """The body pushes and returns when nothing reads the weights any more; then the engines' turn begins. A collective.

        A push that was not made, or failed, ends the turn as well: engines that hold a version go on with it.
        """
        if not self.colocated:
            yield
            return
        self.take()
        self._make_room("optimizer")
        yield
        self.give()

    def prepare(self) -> None:
        """Rank 0, before it orders a push: the engines sleep."""
        self._put_engines_to_sleep(awaited=0)

    def call_off(self) -> None:
        """Rank 0: what `prepare` was for does not come."""
        if self._asleep and not self._held:
            self._wake_engines(self._config.weights.push_timeout)

    def lost(self) -> set[str]:
        """Replicas that have lost their weights since this was last asked."""
        lost, self._lost = self._lost, set()
        return lost

    def _make_room(self, *parts: Part) -> None:
        if self._offload is None:
            return
        started, moved = time.monotonic(), [part for part in parts if part not in self._offload.away]
        with together("the way to host memory"):
            freed = sum([self._offload.to_host(part) for part in moved])
        if self._control is not None:
            self._log.info("offloaded", parts=moved, bytes=freed, seconds=round(time.monotonic() - started, 3))

    # --- rank 0 and the replicas

    def _put_engines_to_sleep(self, awaited: int) -> None:
        """Returns once every engine of the run is out of the way.

        Args:
            awaited: replicas that have to be there. Raises DeadlineExceeded where they do not come.
        """
        control = self._control
        if control is None or self._asleep:
            return
        started = time.monotonic()
        stopping = control.stopping
        if self._releases and not stopping:
            self._await_engines(awaited)
        deadline = LEAVE_SECONDS if stopping else self._config.weights.push_timeout
        control.gauges({"turn": 1.0})
        control.call(control.service.announce(), deadline)
        asleep = control.call(self._ask_all("sleep", deadline), deadline + POLL_INTERVAL_S)
        self._lost |= {one.replica for one in asleep if isinstance(one, WeightsAsleep) and one.version < 0}
        self._renewing = control.begin(self._renew())
        self._asleep, self._since = True, time.monotonic()
        with contextlib.suppress(MyxoError, *TRANSIENT):
            control.look()
        self._log.info("turn_taken", replicas=len(asleep), seconds=round(time.monotonic() - started, 3), free_bytes=_free())

    def _wake_engines(self, deadline: float) -> None:
        control = self._control
        assert control is not None  # of rank 0
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        self._asleep, started = False, time.monotonic()
        control.gauges({"turn": 0.0})
        try:
            awake = control.call(self._ask_all("wake", deadline), deadline + POLL_INTERVAL_S)
        except MyxoError as error:  # they wake by themselves when they hear nothing more
            self._log.warning("replicas_not_woken", error=str(error))
            return
        held = started - self._since
        control.gauges({"turn_seconds": held})
        seconds = round(time.monotonic() - started, 3)
        self._log.info("turn_given", replicas=len(awake), held=round(held, 3), seconds=seconds, free_bytes=_free())

    def _await_engines(self, count: int) -> None:
        """An engine that is coming up must have done so: it would take memory in the middle of the trainer's turn."""
        control = self._control
        assert control is not None  # of rank 0
        limit = self._config.rollout.engine_start_timeout
        end = time.monotonic() + limit
        while not control.stopping:
            cards = control.call(self._cards(), limit)
            starting = [card.instance for card in cards if card.state == "starting"]
            if not starting and len(cards) >= count:
                return
            if time.monotonic() > end:
                missing = f"{count - len(cards)} more rollout services" if len(cards) < count else f"the engines of {', '.join(starting)}"
                raise DeadlineExceeded("colocated engines that are up", missing, limit, "the trainer stops")
            time.sleep(POLL_INTERVAL_S)

    async def _cards(self) -> list[ServiceStatus]:
        assert self._control is not None  # of rank 0
        return [card for card in await self._control.service.registry.alive("rollout") if card.state != "stopping"]

    async def _ask_all(self, verb: str, deadline: float) -> list[Message]:
        """Asks every replica at once. One that does not answer is named, and the others go on without it."""
        assert self._control is not None  # of rank 0
        bus, subjects = self._control.service.bus, self._control.service.subjects
        request = WeightsSleep(lasts=LASTS_SECONDS, deadline=deadline) if verb == "sleep" else WeightsWake(deadline=deadline)
        reply = WeightsAsleep if verb == "sleep" else WeightsReady

        async def ask(instance: str) -> Message | None:
            subject = subjects.replica_weights(instance, verb)
            try:
                answer: Message = await bus.request(subject, request, reply, deadline=deadline, awaited_from=instance, patient=False)
            except MyxoError as error:
                self._log.warning("turn_unanswered", verb=verb, replica=instance, error=str(error))
                return None
            return answer

        answers = await asyncio.gather(*(ask(card.instance) for card in await self._cards()))
        return [answer for answer in answers if answer is not None]

    async def _renew(self) -> None:
        """Tells the replicas that the turn goes on, those too that have come since it began. Runs until cancelled."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with contextlib.suppress(MyxoError, *TRANSIENT):
                await self._ask_all("sleep", LASTS_SECONDS)


def _free() -> int | None:
    """Bytes of this rank's GPU that nobody has; None without one, and before this process uses it."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None
