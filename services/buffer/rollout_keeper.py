"""Keeps the responses of groups that have ended: reads their payloads before they are freed, and hands them to the disk's thread.

It works behind the run: a group waits here while its payload is in the store anyway, and a little longer (`HELD_BYTES`). What cannot be
kept (it is to be freed and too much waits, the store has lost it, the disk does not take it) is left out and counted; neither a decision
nor a batch ever waits for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from services.buffer import ended_groups
from services.buffer.ended_groups import EndedGroup
from services.buffer.prompt_supply import PromptSupply
from services.buffer.rollout_writer import QUEUE_BYTES, TOO_LARGE, RolloutWriter, WriteJob
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.runtime.errors import MyxoError, PayloadMissing
from shared.runtime.service_base import Service
from shared.runtime.telemetry import Metrics
from shared.schema.ledger import eval_group_parts, group_number

RATE_BYTES = 8 << 20
"""Payload bytes that are read each second at most: about 900,000 generated tokens, for a twentieth of a core."""

HELD_BYTES = 64 << 20
"""Payloads that nobody else needs any more and that stay in the store until they were read."""

WAITING_GROUPS = 1 << 15
"""Groups that may wait."""

LOT_BYTES, LOT_GROUPS = 4 << 20, 64
"""Payloads that are read together."""

READ_SECONDS = 10.0
"""How long the store has for a lot."""

DRAIN_POLL_SECONDS = 0.02

BEHIND, LOST, STORE = "behind", "lost", "store"
"""Why a group is not kept: too many wait, the store has lost its payload, the store does not answer or refuses."""


class RolloutKeeper:
    """See the module's docstring.

    Args:
        free: has payload keys removed from the store.
    """

    def __init__(self, service: Service, prompts: PromptSupply, free: Callable[[list[str]], None]) -> None:
        monitoring, directory = service.config.monitoring, service.config.run.root / rollout_files.DIRECTORY
        self._store, self._prompts, self._free = service.store, prompts, free
        self._share = monitoring.keep_rollouts
        self._writer = RolloutWriter(directory, monitoring.keep_rollouts_bytes, monitoring.keep_rollouts_tokens, service.log)
        self._waiting: deque[tuple[EndedGroup, bool]] = deque()
        self._came = asyncio.Event()
        self._awaited: dict[str, EndedGroup] = {}  # payload keys that are still to be read
        self._held: dict[str, int] = {}  # those of them that nobody else needs any more, with their bytes
        self._held_bytes = 0
        self._hurry = asyncio.Event()
        self._busy = False

    def take(self, groups: list[EndedGroup], *, again: bool = False) -> None:
        """Takes note of groups that have ended, before their payloads are released. ``again``: they may have been kept before."""
        for group in ended_groups.chosen(groups, self._share):
            if group.size > QUEUE_BYTES:
                self._writer.skip(TOO_LARGE, f"{group.group}: a payload of {group.size} bytes")
            elif len(self._waiting) >= WAITING_GROUPS:
                self._writer.skip(BEHIND)
            else:
                self._awaited.update(dict.fromkeys(group.keys, group))
                self._waiting.append((group, again))
                self._came.set()

    def release(self, keys: Iterable[str]) -> None:
        """Has payload keys freed: now, or once they were read. Where too much is held already, the group is given up."""
        now = []
        for key in keys:
            group = self._awaited.get(key)
            if group is None:
                now.append(key)
            elif key not in self._held:
                self._held[key] = size = group.size // len(group.keys)
                self._held_bytes += size
                if self._held_bytes > HELD_BYTES:
                    self._writer.skip(BEHIND)
                    now += self._let_go(group)
        if now:
            self._free(now)

    def _let_go(self, group: EndedGroup) -> list[str]:
        """Waits for a group's payload no longer; returns the keys that were only held for it."""
        for key in group.keys:
            self._awaited.pop(key, None)
        freed = [key for key in group.keys if key in self._held]
        self._held_bytes -= sum(self._held.pop(key) for key in freed)
        return freed

    async def run(self) -> None:
        """Reads and hands on until cancelled."""
        while True:
            self._busy = False
            self._came.clear()
            if not self._waiting:
                await self._came.wait()
            self._busy, started = True, time.monotonic()
            lot, size = [self._waiting.popleft()], 0
            while self._waiting and len(lot) < LOT_GROUPS and (size := size + lot[-1][0].size) < LOT_BYTES:
                lot.append(self._waiting.popleft())
            read = sum(await asyncio.gather(*(self._keep(group, again) for group, again in lot)))
            spent = time.monotonic() - started
            pause = read / RATE_BYTES - spent
            if pause > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause)

    async def _keep(self, group: EndedGroup, again: bool) -> int:
        """Returns the bytes that were asked for."""
        if group.keys and group.keys[0] not in self._awaited:  # given up
            return 0
        try:
            blobs = await self._store.read(group.keys, deadline=READ_SECONDS)
            prompt = self._prompt(group.group) if not group.keys else None
            self._writer.offer(WriteJob(group, blobs, prompt, again))
        except PayloadMissing as error:
            if not again and group.keys[0] in self._awaited:  # else it was freed once it was kept, or given up and is counted
                self._writer.skip(LOST, error)
        except (MyxoError, RedisError) as error:
            self._writer.skip(STORE, error)
        finally:
            if freed := self._let_go(group):
                self._free(freed)
        return group.size

    def _prompt(self, name: str) -> Prompt | None:
        """The prompt of a group that has no payload to read it from."""
        heldout, parts = self._prompts.heldout, eval_group_parts(name)
        if parts is None:
            return self._prompts.training.at(group_number(name))
        return heldout[parts[2]] if heldout is not None and parts[2] < len(heldout) else None

    async def drain(self, seconds: float) -> None:
        """Returns when all that was taken is on disk, or after ``seconds``."""
        self._hurry.set()
        end = time.monotonic() + seconds
        while (self._waiting or self._busy or not self._writer.idle) and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def gauge(self, metrics: Metrics) -> None:
        """Sets ``rollouts_kept``, ``rollouts_bytes`` and, by reason, ``rollouts_not_kept``."""
        metrics.set("rollouts_kept", self._writer.written)
        metrics.set("rollouts_bytes", self._writer.used)
        for reason, count in dict(self._writer.skipped).items():
            metrics.set("rollouts_not_kept", count, reason=reason)
