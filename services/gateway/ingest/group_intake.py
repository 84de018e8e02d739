"""Hands finished groups from outside into the run: each takes the place of a group that the buffer has admitted.

A group is leased from the queue of tasks as a replica leases it, gets the producer's samples, and is reported as generated. So the
buffer's admission is the back-pressure: without a task there is no room. The producer's id is bound to the run's group before anything is
published, in the store: whoever sends the same group again, here or to another gateway, has it told of the same group of the run, of which
the buffer takes one outcome. A gateway that dies in between leaves a task that another worker may take: then the first of the two counts.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from services.gateway.ingest.group_body import FinishedGroup, GroupLimits, parse_group
from services.gateway.wire.turn_refused import TurnRefused
from shared.bus import runs
from shared.bus.bus_errors import StreamFull
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.data.tokenizer import Tokenizer
from shared.hooks.sample_agreement import compared
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.metric_specs import MetricSpec, declare_metrics
from shared.runtime.service_base import Service
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.messages import Generated, Task
from shared.store.payload_store import StoreFull

declare_metrics(
    MetricSpec("groups_ingested", "groups", "[made elsewhere](ingest.md) and taken in", counter=True),
)

BINDING_SECONDS = 7 * 24 * 3600
"""For as long the producer's id of a group is known."""

PUBLISH_SECONDS = 30.0

RETRY_S = 2.0
"""After how many seconds a producer may try again that finds no room."""


@dataclass(frozen=True)
class Binding:
    """The group of the run that a producer's group became. ``digest``: of the producer's body."""

    group: str
    attempt: int
    digest: str

    def encode(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def decode(cls, data: bytes) -> "Binding":
        return cls(**json.loads(data))


class GroupIntake:
    """The door for groups of one gateway."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self._service, self._config, self._tokenizer = service, service.config, tokenizer
        self._queue = WorkQueue(service.bus, task_consumer(service.run, service.config.bus, TRAIN), Task)
        self._in_hand: set[str] = set()  # the producers' ids
        self._special, self._doubted = tokenizer.special_tokens, set[str]()
        self._taking = 0
        self._vocabulary = 0

    async def described(self) -> dict[str, object]:
        """Returns what a producer has to know of the run."""
        limits, rollout = await self._limits(), self._config.rollout
        return {
            "run": self._service.run,
            "version": limits.live,
            "max_staleness": rollout.max_staleness,
            "rollouts": rollout.n_samples_per_prompt,
            "min_rollouts": rollout.fewest_rollouts,
            "vocabulary": limits.vocabulary,
            "longest_sample": self._config.longest_sample,
            "environments": self._config.reward.environment_names(),
        }

    async def take(self, read: Callable[[], Awaitable[bytes]]) -> dict[str, object]:
        """Hands a group in. Returns what became of it: its id in the run, and whether it was there before. Raises TurnRefused.

        Args:
            read: reads the body; it is not read where there is no room for it.
        """
        self._check_stopping()
        if self._service.held_back or self._taking >= self._config.ingest.ingest_concurrency:
            raise _no_room(self._service.held_back or f"{self._taking} groups are in hand")
        self._taking += 1
        try:
            body = await read()
            group = await asyncio.to_thread(parse_group, body, await self._limits(), self._decoded, self._special)
            await asyncio.to_thread(self._doubt, group)
            async with self._held(group.id):
                return await self._handed_in(group, blake3(body).hexdigest(16))
        except (StoreFull, StreamFull) as error:
            raise _no_room(str(error)) from None
        except DeadlineExceeded as error:
            raise TurnRefused(503, str(error), code="unavailable", retry_after_s=RETRY_S) from None
        finally:
            self._taking -= 1

    def _doubt(self, group: FinishedGroup) -> None:
        """Logs once, by field, what of samples from outside looks wrong."""
        for sample in group.samples:
            _, _, doubts = compared(sample, None, (), self._tokenizer.decode, self._special)
            for field in doubts.keys() - self._doubted:
                self._doubted.add(field)
                self._service.log.warning("sample_doubtful", group=group.id, sample=sample.index, field=field, error=doubts[field])

    def _check_stopping(self) -> None:
        """Raises TurnRefused once this gateway is asked to stop: it waits for no task any more."""
        if self._service.stopping.is_set():
            raise TurnRefused(503, "this gateway stops; another goes on", code="gateway_stopping", retry_after_s=RETRY_S)

    @contextlib.asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[None]:
        if name in self._in_hand:
            raise _in_hand(name)
        self._in_hand.add(name)
        try:
            yield
        finally:
            self._in_hand.discard(name)

    async def _handed_in(self, group: FinishedGroup, digest: str) -> dict[str, object]:
        key = self._service.subjects.ingest_key(group.id)
        if (known := await self._binding(key)) is not None:
            return await self._again(group, known, digest)
        lease = await self._task()
        async with lease.held():
            binding = Binding(lease.message.group, lease.message.attempt, digest)
            try:
                report = await asyncio.to_thread(self._report, group, binding)
                await self._bind(key, group, binding)
            except TurnRefused:
                await lease.hand_back()
                raise
            await self._publish(key, report)
        await lease.ack()
        return {"id": group.id, "group": binding.group, "repeated": False}

    async def _again(self, group: FinishedGroup, known: Binding, digest: str) -> dict[str, object]:
        """Answers for a group that came before; publishes it once more where nobody knows whether that was done."""
        if known.digest != digest:
            raise TurnRefused(409, f"another group came as {group.id}, and became {known.group}", field="id", code="id_taken")
        key = self._service.subjects.ingest_key(group.id)
        [done] = await self._service.store.commands("whether a group is in", [("GET", f"{key}:in")])
        if done is None:
            await self._publish(key, await asyncio.to_thread(self._report, group, known))
        return {"id": group.id, "group": known.group, "repeated": True}

    async def _task(self) -> MessageLease[Task]:
        """Returns the lease of a task whose place a group takes. Raises TurnRefused where the run admits none in time."""
        patience = self._config.ingest.ingest_wait
        end = time.monotonic() + patience
        while (seconds := end - time.monotonic()) > 0:
            self._check_stopping()
            if leases := await self._queue.fetch(1, min(seconds, 1.0)):
                return leases[0]
        if await runs.phase(self._service.bus, self._service.run) in runs.ENDS:
            raise TurnRefused(410, "the run has ended", code="run_ended")
        raise _no_room(f"the run admitted none within {patience:g} s")

    def _report(self, group: FinishedGroup, binding: Binding) -> tuple[dict[str, bytes], Generated]:
        """Returns the blobs of a group, by key, and the message that refers to them. Raises TurnRefused for a group that is too large."""
        names, now, part_of = self._service.subjects, time.time(), uuid.uuid4().hex
        samples = [replace(sample, group=binding.group) for sample in group.samples]
        encoded = sample_codec.encode(samples, self._config.store.blob_bytes)
        blobs = {names.payload_key(binding.group, binding.attempt, part, part_of): blob for part, blob in enumerate(encoded)}
        try:
            return blobs, Generated(
                group=binding.group,
                attempt=binding.attempt,
                payload=reference(self._service.run, blobs, [sample.length for sample in samples]),
                samples=[sample.meta() for sample in samples],
                rollouts=sample_codec.rollouts(samples),
                replica=self._service.instance,
                environment=group.environment,
                started=now,
                ended=now,
            )
        except BadMessage as error:
            raise TurnRefused(413, str(error), field="tokens", code="too_large") from None

    async def _publish(self, key: str, report: tuple[dict[str, bytes], Generated]) -> None:
        """Stores the samples before their reference travels, and notes that it does."""
        (blobs, message), service = report, self._service
        await service.store.write(blobs)
        subject = service.subjects.generated(message.environment)
        await service.bus.publish(subject, message, msg_id=uuid.uuid4().hex, deadline=PUBLISH_SECONDS)
        await service.store.commands("that a group is in", [("SET", f"{key}:in", "1", "EX", BINDING_SECONDS)])
        service.metrics.add("groups_ingested")
        service.log.info("group_ingested", group=message.group, attempt=message.attempt, samples=len(message.samples))

    async def _bind(self, key: str, group: FinishedGroup, binding: Binding) -> None:
        """Binds a producer's id to a group of the run. Raises TurnRefused where another gateway did, a moment ago."""
        wanted = ("SET", key, binding.encode(), "NX", "EX", BINDING_SECONDS)
        await self._service.store.commands("the binding of a group", [wanted])
        if await self._binding(key) != binding:
            raise _in_hand(group.id)

    async def _binding(self, key: str) -> Binding | None:
        [found] = await self._service.store.commands("the binding of a group", [("GET", key)])
        return None if found is None else Binding.decode(found)

    async def _limits(self) -> GroupLimits:
        """Returns what the run takes now. Raises TurnRefused before it serves any weights, and once it has ended."""
        service = self._service
        if not self._vocabulary:
            self._vocabulary = await runs.vocabulary(service.bus, service.run)
        live = await runs.live_version(service.bus, service.run)
        if live < 0:
            raise TurnRefused(503, "the run serves no weights yet", code="unavailable", retry_after_s=RETRY_S)
        return GroupLimits(self._config, self._vocabulary, live)

    def _decoded(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.decode(tokens)


def _no_room(reason: str) -> TurnRefused:
    return TurnRefused(429, f"there is no room for a group: {reason}", code="no_room", retry_after_s=RETRY_S)


def _in_hand(name: str) -> TurnRefused:
    return TurnRefused(409, f"group {name} is in hand already", field="id", code="in_hand", retry_after_s=RETRY_S)
