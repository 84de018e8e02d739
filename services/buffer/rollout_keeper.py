"""Keeps the responses of groups that have ended: reads their payloads before they are freed, and has them written to disk.

It works behind the run: a group waits here while its payload is in the store anyway, and a little longer (`HELD_BYTES`), also while the
store is away. What cannot be kept (it is to be freed and too much waits, the store has lost it, the disk does not take it) is left out,
counted by reason and logged. No decision and no batch waits for this; the run's end does, for `END_SECONDS` at most.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from redis.exceptions import RedisError

from services.buffer import ended_groups
from services.buffer.ended_groups import EndedGroup
from services.buffer.prompt_supply import PromptSupply
from services.buffer.rollout_writer import TOO_LARGE, RolloutNotKept, RolloutWriter
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.runtime.errors import DeadlineExceeded, MyxoError, PayloadMissing
from shared.runtime.tasks import run_in_thread
from shared.runtime.telemetry import Metrics, MetricSpec, declare_metrics
from shared.service.service_base import Service

declare_metrics(
    MetricSpec("rollouts_kept", "groups", "whose responses were written to the run's directory since the service started"),
    MetricSpec("rollouts_bytes", "bytes", "that the kept responses take on disk"),
    MetricSpec("rollouts_not_kept", "groups", "that were not written, by why", when="where there are such", labels=("reason",)),
)

RATE_BYTES = 8 << 20
"""Payload bytes that are read each second at most: about 900,000 generated tokens, for a twentieth of a core."""

HELD_BYTES = 64 << 20
"""Payloads that nobody else needs any more and that stay in the store until they were read."""

GROUP_BYTES = 32 << 20
"""The largest payload of a group that is kept."""

WAITING_GROUPS = 1 << 15
"""Groups that may wait."""

BATCH_BYTES, BATCH_GROUPS = 4 << 20, 64
"""Payloads that are read and written together."""

READ_SECONDS = 10.0
"""The deadline for reading them from the store, after which it is said that this waits for the store; then they are asked for again."""

END_SECONDS = 60.0
"""The time that the run's end waits for what is still to be kept, since all else was done."""

LOG_SECONDS = 30.0
"""The least time between two log lines about what is not kept."""

BEHIND, LOST, STORE = "behind", "lost", "store"
"""The reasons for not keeping a group: too many wait, the store has lost its payload, the store refuses."""

_Payload = tuple[EndedGroup, Sequence[bytes], Prompt | None]


class RolloutKeeper:
    """Keeps the responses of the groups that it is given.

    Args:
        free: has payload keys removed from the store. done: awaited when all is kept that the run's end has waited for.
    """

    def __init__(
        self, service: Service, prompts: PromptSupply, free: Callable[[list[str]], None], done: Callable[[], Awaitable[None]]
    ) -> None:
        monitoring, self._directory = service.config.monitoring, service.config.run.root / rollout_files.DIRECTORY
        self._store, self._prompts, self._free, self._log = service.store, prompts, free, service.log
        self._done = done
        self._share = monitoring.keep_rollouts
        self._writer = RolloutWriter(self._directory, monitoring.keep_rollouts_bytes, monitoring.keep_rollouts_tokens)
        self._waiting: asyncio.Queue[EndedGroup] = asyncio.Queue(WAITING_GROUPS)
        self._hurry = asyncio.Event()
        self._awaited: dict[str, EndedGroup] = {}  # payload keys that are still to be read
        self._held: dict[str, int] = {}  # those of them that nobody else needs any more, with their bytes
        self._held_bytes = 0
        self._logged = self._away_logged = float("-inf")
        self._open = 0  # groups that were taken, and are neither kept nor skipped
        self._end_asked: float | None = None
        self.skipped: Counter[str] = Counter()
        """Groups that are not kept, by reason."""

    def take(self, groups: list[EndedGroup]) -> None:
        """Queues groups that have ended, before their payloads are released."""
        for group in ended_groups.chosen(groups, self._share):
            if group.size > GROUP_BYTES and not group.rewards:
                group = replace(group, payload=None)
            if group.size > GROUP_BYTES:
                self._skip(TOO_LARGE, f"{group.record.group}: a payload of {group.size} bytes")
            elif self._waiting.full():
                self._skip(BEHIND)
            else:
                self._awaited.update(dict.fromkeys(group.keys, group))
                self._waiting.put_nowait(group)
                self._open += 1

    def release(self, keys: Iterable[str]) -> None:
        """Has payload keys freed, now or once they were read. Where too much is held already, the group is given up."""
        now = []
        for key in keys:
            group = self._awaited.get(key)
            if group is None:
                now.append(key)
            elif key not in self._held:
                self._held[key] = size = group.size // len(group.keys)
                self._held_bytes += size
                if self._held_bytes > HELD_BYTES:
                    if not group.again:  # else another buffer may have kept it
                        self._skip(BEHIND)
                    now += self._let_go(group)
        if now:
            self._free(now)

    def _let_go(self, group: EndedGroup) -> list[str]:
        """Gives up reading a group's payload; returns the keys that were only held for it."""
        for key in group.keys:
            self._awaited.pop(key, None)
        freed = [key for key in group.keys if key in self._held]
        self._held_bytes -= sum(self._held.pop(key) for key in freed)
        return freed

    async def run(self) -> None:
        """Reads and writes until cancelled. It writes on a daemon thread: a disk that hangs cannot keep the process from ending."""
        while True:
            batch, size = [await self._waiting.get()], 0
            started = time.monotonic()
            while not self._waiting.empty() and len(batch) < BATCH_GROUPS and (size := size + batch[-1].size) < BATCH_BYTES:
                batch.append(self._waiting.get_nowait())
            payloads = [payload for payload in await asyncio.gather(*map(self._read, batch)) if payload is not None]
            for error in await asyncio.wrap_future(run_in_thread(partial(self._write, payloads), "rollout-writer")):
                self._skip(error.reason, error)
            for _ in batch:
                self._waiting.task_done()
            self._open -= len(batch)
            if not self._open and self._end_asked is not None:
                await self._done()
            pause = sum(group.size for group, *_ in payloads) / RATE_BYTES - (time.monotonic() - started)
            if pause > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause)

    async def _read(self, group: EndedGroup) -> _Payload | None:
        """Returns a group with its payload and lets go of that; where that cannot be had, the group alone or, if it has rewards, None."""
        bare = None if group.rewards else (group, (), self._prompt(group))  # it is kept in any case
        try:
            while group.payload is not None and group.keys[0] in self._awaited:  # else it was given up
                try:
                    return group, await self._store.read(group.payload, deadline=READ_SECONDS), bare and bare[2]
                except DeadlineExceeded as error:  # what the store holds is there when it is back
                    self._say_away(error)
        except PayloadMissing as error:
            # else it was freed once it was kept, or given up and is counted
            if bare is None and not group.again and group.keys[0] in self._awaited:
                self._skip(LOST, error)
        except (MyxoError, RedisError) as error:
            self._skip(STORE, error)
        finally:
            if freed := self._let_go(group):
                self._free(freed)
        return bare

    def _prompt(self, group: EndedGroup) -> Prompt | None:
        """Returns a group's prompt; None where it cannot be read, which may be why the group was given up."""
        with contextlib.suppress(MyxoError):
            return self._prompts.of_group(group.record.group)
        return None

    def _say_away(self, error: DeadlineExceeded) -> None:
        """Says now and then that the store is away."""
        now = time.monotonic()
        if now - self._away_logged >= LOG_SECONDS:
            self._away_logged = now
            self._log.warning("rollouts_wait_for_store", waiting=self._open, error=str(error), next_action="asking for them again")

    def _write(self, payloads: list[_Payload]) -> list[RolloutNotKept]:
        """Writes groups; returns why some of them are not kept."""
        refused = []
        for payload in payloads:
            try:
                self._writer.write(*payload)
            except RolloutNotKept as error:
                refused.append(error)
        return refused

    def _skip(self, reason: str, error: object = "") -> None:
        """Counts a group that is not kept, and says so now and then."""
        self.skipped[reason] += 1
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            skipped = dict(self.skipped)
            self._log.warning("rollouts_not_kept", reason=reason, error=str(error), skipped=skipped, directory=str(self._directory))

    @property
    def delays_end(self) -> bool:
        """Returns whether a run of which all else is done is to wait until groups are kept. It hurries from the first time on."""
        if not self._open:
            return False
        if self._end_asked is None:
            self._end_asked = time.monotonic()
            self._hurry.set()
        return not self.is_late

    @property
    def is_late(self) -> bool:
        """Returns whether the run's end has waited long enough."""
        return self._end_asked is not None and time.monotonic() - self._end_asked >= END_SECONDS

    async def drain(self, seconds: float) -> None:
        """Returns when all that was taken is on disk, or after ``seconds``."""
        self._hurry.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._waiting.join(), seconds)

    def gauge(self, metrics: Metrics) -> None:
        """Sets ``rollouts_kept``, ``rollouts_bytes`` and, by reason, ``rollouts_not_kept``."""
        metrics.set("rollouts_kept", self._writer.written)
        metrics.set("rollouts_bytes", self._writer.used)
        for reason, count in self.skipped.items():
            metrics.set("rollouts_not_kept", count, reason=reason)
