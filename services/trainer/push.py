"""Pushing weights to rollout replicas: prepare, pause, buckets, commit; whoever fails is left out and the others go on.

The requests travel over the bus on the link's thread, the collective runs on a thread of its own, so a dead peer ends in a named error
within the deadline. A replica that misses a step is aborted (it fences itself) and the push is made again to those that remain.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from services.trainer.collective import CollectiveThread
from services.trainer.link import Link, now
from services.trainer.weights_group import WeightsGroup, flatten, own_address
from shared.embedded import free_port
from shared.errors import DeadlineExceeded, MyxoError
from shared.messages import (
    Accepted,
    Message,
    ServiceCard,
    WeightsAbort,
    WeightsBucket,
    WeightsCommit,
    WeightsLive,
    WeightsOffer,
    WeightsPause,
    WeightsPrepare,
    WeightsReady,
)

Buckets = Iterator[list[tuple[str, Any]]]

OFFER_SECONDS = 5.0
"""How long a replica has to say that it can take a version."""

BACK_OFF_SECONDS = 2.0
BACK_OFF_MOST = 60.0
"""A replica that failed a push is offered the next one after 2, 4, … seconds, 60 at most."""


@dataclass(frozen=True)
class Target:
    """A replica to push to: its name, which life of its engine, and the engine's ranks in the group."""

    instance: str
    incarnation: str
    ranks: int


@dataclass(frozen=True)
class PushResult:
    """What a push did. ``stall``: seconds of it in which replicas were paused."""

    version: int
    replicas: list[str]
    seconds: float
    stall: float
    bytes: int


class PeerFailure(MyxoError):
    """Some replicas failed a step of the push."""

    def __init__(self, step: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(f"{step}: " + "; ".join(f"{name}: {reason}" for name, reason in failures.items()))


class Pusher:
    """Rank 0's side of pushes; the other ranks only take part in the export.

    Args:
        backend: ``gloo`` or ``nccl``. timeout: seconds for one push in all.
    """

    def __init__(self, link: Link, backend: str, timeout: float) -> None:
        self._link, self._backend, self._timeout = link, backend, timeout
        self._group: WeightsGroup | None = None
        self._members: tuple[Target, ...] = ()
        self._collective = CollectiveThread("weights")
        self._joining: Future[WeightsGroup] | None = None
        self._life = secrets.token_hex(4)  # a group of an earlier life must not be taken for one of this
        self._numbers = itertools.count()
        self._served: dict[str, tuple[str, int]] = {}  # instance → (incarnation, version) that it confirmed to us
        self._failures: dict[str, tuple[int, float]] = {}  # instance → (in a row, not before)
        self._log: Any = structlog.get_logger()

    def behind(self, version: int) -> list[Target]:
        """Replicas that do not serve ``version`` yet and may be offered it now."""
        return [Target(card.instance, card.incarnation, card.ranks) for card in self._link.replicas if self._is_behind(card, version)]

    def _is_behind(self, card: ServiceCard, version: int) -> bool:
        served = card.version
        incarnation, confirmed = self._served.get(card.instance, ("", -1))
        if incarnation == card.incarnation:  # the card may be older than the commit; a fenced replica has a new incarnation
            served = max(served, confirmed)
        _, not_before = self._failures.get(card.instance, (0, 0.0))
        return served < version and time.monotonic() >= not_before

    def push(self, version: int, targets: list[Target], buckets: Buckets) -> PushResult | None:
        """Sends every bucket to the targets. Drains ``buckets`` whatever happens: other ranks take part in making them.

        Returns None when no replica ended up serving the version; failures are logged and backed off, not raised.
        """
        started, deadline = time.monotonic(), time.monotonic() + self._timeout
        members = tuple(sorted(targets, key=lambda target: target.instance))
        paused_at, sent = started, 0
        step = "prepare"
        members = self._willing(version, members, deadline)
        if not members:
            for _ in buckets:
                pass
            return None
        try:
            self._join(version, members, deadline)
            step = "pause"
            paused_at = time.monotonic()
            self._each(members, "pause", lambda _, left: WeightsPause(version=version, deadline=left), Accepted, deadline)
            step = "receive"
            for bucket in buckets:
                sent += self._send(version, members, bucket, deadline)
            step = "commit"
            committed = self._commit(version, members, deadline)
        except (MyxoError, RuntimeError, FutureTimeout) as error:
            self._give_up(version, members, step, error)
            for _ in buckets:
                pass
            return None
        ended = time.monotonic()
        result = PushResult(version, committed, ended - started, ended - paused_at, sent)
        if committed:
            self._link.weights_live(WeightsLive(version=version, replicas=committed, seconds=result.seconds, bytes=sent, at=now()))
        return result if committed else None

    def close(self) -> None:
        self._leave()
        self._collective.abandon()

    # --- steps

    def _willing(self, version: int, members: tuple[Target, ...], deadline: float) -> tuple[Target, ...]:
        """Those that say they can take the version now. A group is built with nobody else: its other members would wait for the dead."""
        end = min(deadline, time.monotonic() + OFFER_SECONDS)
        try:
            self._each(members, "offer", lambda _, __: WeightsOffer(version=version), WeightsReady, end)
        except PeerFailure as error:
            self._log.warning("offer_declined", version=version, replicas=error.failures)
            self._blame(error.failures)
            return tuple(target for target in members if target.instance not in error.failures)
        return members

    def _join(self, version: int, members: tuple[Target, ...], deadline: float) -> None:
        """Everyone is in the group: the one there is, or a new one where membership has changed."""
        if members == self._members and self._group is not None:
            joined: Future[WeightsGroup] | None = None
            name, port, address = self._group.name, 0, ""
        else:
            self._leave()
            name, port, address = f"myxo-{self._life}-{next(self._numbers)}", free_port(), own_address()
            world = 1 + sum(target.ranks for target in members)
            seconds = max(1.0, deadline - time.monotonic())
            joined = self._joining = self._collective.submit(lambda: WeightsGroup(name, address, port, world, self._backend, seconds))
        ranks = dict(zip(members, itertools.accumulate((target.ranks for target in members), initial=1), strict=False))
        world = 1 + sum(target.ranks for target in members)

        def offer(target: Target, left: float) -> Message:
            return WeightsPrepare(
                version=version,
                group=name,
                backend=self._backend,
                master_address=address,
                master_port=port,
                rank=ranks[target],
                world_size=world,
                deadline=left,
            )

        self._each(members, "prepare", offer, WeightsReady, deadline)
        if joined is not None:
            self._group = joined.result(max(0.1, deadline - time.monotonic()))
            self._members, self._joining = members, None

    def _send(self, version: int, members: tuple[Target, ...], bucket: list[tuple[str, torch.Tensor]], deadline: float) -> int:
        """One bucket: the announcement on the bus and the broadcast beside it."""
        group = self._group
        assert group is not None  # _join has made it
        names, tensors = [name for name, _ in bucket], [tensor for _, tensor in bucket]
        flat = flatten(tensors)
        broadcast = self._collective.submit(lambda: group.broadcast(flat))

        def announce(_: Target, left: float) -> Message:
            return WeightsBucket(
                version=version,
                group=group.name,
                names=names,
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
                shapes=[list(tensor.shape) for tensor in tensors],
                deadline=left,
            )

        self._each(members, "receive", announce, Accepted, deadline)
        broadcast.result(max(0.1, deadline - time.monotonic()))
        return flat.numel()

    def _commit(self, version: int, members: tuple[Target, ...], deadline: float) -> list[str]:
        """Whoever commits serves; whoever does not is fenced, and the push stands for the others."""
        try:
            self._each(members, "commit", lambda _, left: WeightsCommit(version=version, deadline=left), Accepted, deadline)
            failures: dict[str, str] = {}
        except PeerFailure as error:
            failures = error.failures
            self._give_up(version, tuple(target for target in members if target.instance in failures), "commit", error)
        committed = [target for target in members if target.instance not in failures]
        for target in committed:
            self._served[target.instance] = (target.incarnation, version)
            self._failures.pop(target.instance, None)
        return [target.instance for target in committed]

    def _give_up(self, version: int, members: tuple[Target, ...], step: str, error: Exception) -> None:
        """Aborts the push at these replicas and leaves the group; the guilty ones are offered the next push later."""
        failures = error.failures if isinstance(error, PeerFailure) else {target.instance: str(error) for target in members}
        self._log.warning("push_failed", version=version, step=step, error=str(error), replicas=sorted(failures))
        self._blame(failures)
        for target in members:
            self._served.pop(target.instance, None)
        self._leave()
        try:
            self._each(
                members, "abort", lambda _, __: WeightsAbort(version=version, reason=f"{step}: {error}"), Accepted, time.monotonic() + 10
            )
        except PeerFailure as silent:
            self._log.warning("abort_unanswered", version=version, error=str(silent))

    def _blame(self, names: Iterable[str]) -> None:
        """These are not offered anything for a while, longer each time."""
        for name in names:
            count = self._failures.get(name, (0, 0.0))[0] + 1
            self._failures[name] = (count, time.monotonic() + min(BACK_OFF_MOST, BACK_OFF_SECONDS * 2 ** (count - 1)))

    def _leave(self) -> None:
        group, self._group, self._members = self._group, None, ()
        joining, self._joining = self._joining, None
        if joining is not None:
            # a group that waits for members who may never come: should they come after all, it is closed again
            joining.add_done_callback(_close)
            self._collective.abandon()
        if group is None:
            return
        try:
            self._collective.submit(group.close).result(10)
        except (RuntimeError, FutureTimeout) as error:
            # a collective that a dead peer left hanging: its thread ends with the group's own timeout, a new one takes over
            self._log.warning("group_left_hanging", group=group.name, error=str(error))
            self._collective.abandon()

    # --- the bus

    def _each(
        self,
        members: tuple[Target, ...],
        verb: str,
        message: Callable[[Target, float], Message],
        reply: type[Message],
        deadline: float,
    ) -> None:
        """Asks every member at once. Raises PeerFailure naming those that declined or did not answer in time."""
        left = max(0.1, deadline - time.monotonic())
        bus, subjects = self._link.service.bus, self._link.service.subjects

        async def ask(target: Target) -> str | None:
            subject = subjects.replica_weights(target.instance, verb)
            try:
                await bus.request(subject, message(target, left), reply, deadline=left, whom=target.instance, patient=False)
            except MyxoError as error:
                return str(error)
            return None

        async def ask_all() -> list[str | None]:
            return await asyncio.gather(*(ask(target) for target in members))

        try:
            answers = self._link.call(ask_all(), left)
        except DeadlineExceeded as error:
            raise PeerFailure(verb, {target.instance: str(error) for target in members}) from error
        failures = {target.instance: answer for target, answer in zip(members, answers, strict=True) if answer is not None}
        if failures:
            raise PeerFailure(verb, failures)


def _close(late: Future[WeightsGroup]) -> None:
    if late.exception() is None:
        late.result().close()
