"""Stores the responses of groups that have ended: reads their payloads before they are freed, and has them written to disk.

A group's responses are taken when its end is known: at `BatchTrained`, while the store still has the payload, which is freed after a
checkpoint, and at the records that drop a group, give it up, or score a held-out prompt, which free it at once. What was generated and
could not be scored is stored without rewards.

It works behind the run: a group waits here while its payload is in the store anyway, and a little longer (`HELD_BYTES`), also while the
store is away. What cannot be stored (it is to be freed and too much waits, the store has lost it, the disk does not take it) is left out,
counted by reason and logged. No decision and no batch waits for this; the run's end does, for `END_SECONDS` at most.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import xxhash
from redis.exceptions import RedisError

from services.buffer.prompt_supply import PromptSupply
from services.buffer.state import BatchRecord, BufferState, GroupState
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.data.rollout_files import DEAD, DROPPED, EVALUATED, FAILED, TRAINED, RolloutRecord
from shared.rewards.reference import Reference
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError, PayloadMissing
from shared.runtime.tasks import run_in_thread
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema import sample
from shared.schema.ledger import BatchTrained, EvalScored, GroupDead, GroupsDropped, LedgerRecord
from shared.schema.messages import Payload
from shared.service.service_base import Service


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group that has ended: its record without prompt and samples, and the ledger's data of its samples.

    payload: None where no samples are to be kept. rewards, parts: of each sample; no rewards of a group that was given up. removed,
    stale: positions of samples that left the loss. again: whether another buffer may have kept it.
    """

    record: RolloutRecord
    payload: Payload | None = None
    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    removed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()
    again: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return () if self.payload is None else tuple(self.payload.keys)

    @property
    def size(self) -> int:
        """Returns the bytes of its payload."""
        return 0 if self.payload is None else self.payload.bytes


def ended_groups(state: BufferState, record: LedgerRecord) -> list[EndedGroup]:
    """Returns the groups that a record ends. ``state``: before the record is applied, which removes them."""
    match record:
        case BatchTrained(step=step, at=at):
            return _trained(state.batches[step], at)
        case GroupsDropped(groups=names, reason=reason, at=at):
            return [_ended(state.groups[name], status=DROPPED, at=at, reason=reason) for name in names]
        case GroupDead(group=name, reason=reason, payload=payload, at=at):
            attempt = state.groups[name].attempt
            return [EndedGroup(RolloutRecord.model_construct(group=name, attempt=attempt, status=DEAD, at=at, reason=reason), payload)]
        case EvalScored():
            return [_evaluated(record)]
        case _:
            return []


def trained_not_durable(state: BufferState, now: float) -> list[EndedGroup]:
    """Returns the groups of trained steps whose payload the store still has: a killed buffer may not have kept them yet."""
    batches = (batch for step, batch in state.batches.items() if step < state.trained_steps)
    return [group for batch in batches for group in _trained(batch, now, again=True)]


def perhaps_not_kept(state: BufferState, recent: Iterable[Iterable[EndedGroup]], now: float) -> list[EndedGroup]:
    """Returns what a buffer that takes over is to keep, unless its predecessor did: `trained_not_durable`, and ``recent`` ends."""
    groups = [*(group for groups in recent for group in groups), *trained_not_durable(state, now)]
    return list({(group.record.group, group.record.attempt): replace(group, again=True) for group in groups}.values())


def chosen_groups(groups: Iterable[EndedGroup], share: float) -> list[EndedGroup]:
    """Returns the groups to keep: all held-out prompts, and a ``share`` (0 to 1) of the others, the same ones in every process.

    A share of 0 keeps nothing at all.
    """
    if share <= 0:
        return []
    bound = share * 2**64  # hashes spread ids evenly below 2**64
    return [
        group
        for group in groups
        if share >= 1 or group.record.dataset is not None or xxhash.xxh3_64_intdigest(group.record.group.encode()) < bound
    ]


def _trained(batch: BatchRecord, at: float, *, again: bool = False) -> list[EndedGroup]:
    facts = {"status": TRAINED, "at": at, "step": batch.step, "version": batch.version, "mask_below": batch.mask_below}
    return [_ended(group, again=again, **facts) for group in batch.groups]


def _ended(group: GroupState, *, again: bool = False, **facts: Any) -> EndedGroup:
    record = RolloutRecord.model_construct(group=group.id, attempt=group.attempt, **facts)
    result = group.scored
    if result is None:  # dropped before it came back
        return EndedGroup(record)
    stale = result.stale(record.mask_below)
    return EndedGroup(record, result.payload, tuple(result.rewards), result.parts, result.removed, stale, again)


def _evaluated(scored: EvalScored) -> EndedGroup:
    payload = scored.payload
    facts: dict[str, Any] = {"dataset": scored.dataset, "version": scored.version, "reason": scored.reason, "at": scored.at}
    status = EVALUATED if scored.rewards and payload is not None else FAILED
    record = RolloutRecord.model_construct(group=scored.group, attempt=0, status=status, **facts)
    if payload is None:
        return EndedGroup(record)
    return EndedGroup(record, payload, tuple(scored.rewards), scored.parts)


FILE_BYTES = 64 << 20  # The approximate size of a file; files are removed whole, so a small bound has smaller ones
FILES = 8  # Files at least that the bound is divided into
RETRY_SECONDS = 10.0  # The pause in writing after the disk has refused a write

# The reasons for not keeping a group: the disk refuses it, it exceeds the bound, its payload holds no samples
DISK, TOO_LARGE, UNREADABLE = "disk", "too large", "unreadable"


class RolloutNotKept(Exception):
    """The responses of a group are not kept, for ``reason``; the text says more."""

    def __init__(self, reason: str, error: object = "") -> None:
        super().__init__(str(error))
        self.reason = reason


class RolloutWriter:
    """Writes groups; used by one thread at a time.

    Args:
        directory: ``rollouts/`` of the run. bound: bytes of it. tokens: whether token ids and log-probs are kept, too.

    ``written``: groups; ``used``: bytes of the directory.
    """

    def __init__(self, directory: Path, bound: int, tokens: bool) -> None:
        self._directory, self._bound, self._tokens = directory, bound, tokens
        self._file: IO[bytes] | None = None
        self._sizes: dict[Path, int] = {}  # of the files, oldest first; the last is the one that is written
        self._known: set[tuple[str, int]] | None = None
        self._refused_at = float("-inf")
        self.written = self.used = 0

    def write(self, group: EndedGroup, blobs: Sequence[bytes], prompt: Prompt | None = None) -> None:
        """Writes a group with its payload or, where it has none, its prompt. Raises RolloutNotKept, whatever is wrong."""
        if time.monotonic() < self._refused_at + RETRY_SECONDS:
            raise RolloutNotKept(DISK)
        try:
            if not (group.again and self._is_written(group)):
                self._append(group, rollout_record(group, blobs, prompt, self._tokens).line())
        except OSError as error:
            self._refused_at = time.monotonic()
            raise RolloutNotKept(DISK, error) from error
        except RolloutNotKept:
            raise
        except Exception as error:  # a bad payload loses this group's responses and nothing else
            raise RolloutNotKept(UNREADABLE, f"{group.record.group}: {type(error).__name__}: {error}") from error

    def _is_written(self, group: EndedGroup) -> bool:
        if self._known is None:
            self._known = {(head.group, head.attempt) for head in rollout_files.heads(self._directory)}
        return (group.record.group, group.record.attempt) in self._known

    def _append(self, group: EndedGroup, line: bytes) -> None:
        if len(line) > self._bound:
            raise RolloutNotKept(TOO_LARGE, f"{group.record.group}: {len(line)} bytes")
        file, path = self._file_for(len(line))
        self._make_room(len(line))
        try:
            wrote = file.write(line)
            if wrote != len(line):
                raise OSError(f"{path}: {wrote} of {len(line)} bytes written")
        except OSError:
            self._abandon(file, path)
            raise
        self._sizes[path] += len(line)
        self.used = sum(self._sizes.values())
        self.written += 1

    def _file_for(self, size: int) -> tuple[IO[bytes], Path]:
        """Returns the file that a line of ``size`` bytes goes to; files of an earlier process are never written to."""
        if self._file is not None:
            path = next(reversed(self._sizes))
            if self._sizes[path] + size <= min(FILE_BYTES, self._bound // FILES):
                return self._file, path
            self._file.close()
            self._file = None
        self._directory.mkdir(parents=True, exist_ok=True)
        there = rollout_files.files(self._directory)
        path = rollout_files.path_of(self._directory, int(there[-1].stem) + 1 if there else 0)
        self._file = path.open("xb", buffering=0)
        self._sizes = {other: other.stat().st_size for other in there} | {path: 0}
        return self._file, path

    def _make_room(self, size: int) -> None:
        for path in list(self._sizes)[:-1]:
            if sum(self._sizes.values()) + size <= self._bound:
                return
            path.unlink(missing_ok=True)
            del self._sizes[path]

    def _abandon(self, file: IO[bytes], path: Path) -> None:
        """Takes back what was written of a line, as far as the disk lets us; the next one goes to a new file."""
        self._file = None
        with file:
            file.truncate(self._sizes[path])
        if not self._sizes[path]:
            path.unlink()


def rollout_record(group: EndedGroup, blobs: Sequence[bytes], prompt: Prompt | None, tokens: bool) -> RolloutRecord:
    """Returns a group's whole record. Raises BadMessage for a payload of no samples, ValueError where they are not the ledger's."""
    try:
        samples = sample.decode(blobs)
    except BadMessage:  # perhaps it was given up for that
        if group.rewards:
            raise
        samples = []
    if group.rewards and len(samples) != len(group.rewards):
        raise ValueError(f"{len(samples)} samples in the store, {len(group.rewards)} rewards in the ledger")
    asked = dict[str, Any]()
    if samples:
        asked = {"prompt": samples[0].prompt_text, "label": samples[0].reference.value, "metadata": samples[0].metadata}
    elif prompt is not None:
        asked = {"prompt": prompt.content, "label": Reference(prompt.label, prompt.label_json).value, "metadata": prompt.metadata}
    written = [
        rollout_files.sample_of(
            item,
            samples[0],
            group.rewards[position] if group.rewards else None,
            group.parts[position] if group.parts else {},
            removed=position in group.removed,
            stale=position in group.stale,
            tokens=tokens,
        )
        for position, item in enumerate(samples)
    ]
    return group.record.model_copy(update={**asked, "samples": written})


declare_metrics("""
    rollouts_kept | groups | whose responses were written to the run's directory since the service started
    rollouts_bytes | bytes | that the kept responses take on disk
    rollouts_not_kept{reason} | groups | that were not written, by why | where there are such
""")

RATE_BYTES = 8 << 20  # Payload bytes that are read each second at most: about 900,000 generated tokens, for a twentieth of a core
HELD_BYTES = 64 << 20  # Payloads that are needed nowhere else any more and that stay in the store until they were read
GROUP_BYTES = 32 << 20  # The largest payload of a group that is kept
WAITING_GROUPS = 1 << 15  # Groups that may wait
BATCH_BYTES, BATCH_GROUPS = 4 << 20, 64  # Payloads that are read and written together

# The deadline for reading them from the store, after which it is said that this waits for the store; then they are asked for again
READ_SECONDS = 10.0
END_SECONDS = 60.0  # The time that the run's end waits for what is still to be kept, since all else was done
LOG_SECONDS = 30.0  # The least time between two log lines about what is not kept

# The reasons for not keeping a group: too many wait, the store has lost its payload, the store refuses
BEHIND, LOST, STORE = "behind", "lost", "store"
_Payload = tuple[EndedGroup, Sequence[bytes]]


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
        self._held: dict[str, int] = {}  # those of them that are needed nowhere else any more, with their bytes
        self._held_bytes = 0
        self._logged = self._away_logged = float("-inf")
        self._open = 0  # groups that were taken, and are neither kept nor skipped
        self._end_asked: float | None = None
        self.skipped: Counter[str] = Counter()  # Groups that are not kept, by reason

    def take(self, groups: list[EndedGroup]) -> None:
        """Queues groups that have ended, before their payloads are released."""
        for group in chosen_groups(groups, self._share):
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
            pause = sum(group.size for group, _ in payloads) / RATE_BYTES - (time.monotonic() - started)
            if pause > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause)

    async def _read(self, group: EndedGroup) -> _Payload | None:
        """Returns a group with its payload and lets go of that; where that cannot be had, the group alone or, if it has rewards, None."""
        bare = None if group.rewards else (group, ())  # it is kept in any case
        try:
            while group.payload is not None and group.keys[0] in self._awaited:  # else it was given up
                try:
                    return group, await self._store.read(group.payload, deadline=READ_SECONDS)
                except DeadlineExceeded as error:  # what the store holds is there when it is back
                    if time.monotonic() - self._away_logged >= LOG_SECONDS:
                        self._away_logged = time.monotonic()
                        self._log.warning("rollouts_wait_for_store", waiting=self._open, error=str(error), next_action="asking again")
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

    def _write(self, payloads: list[_Payload]) -> list[RolloutNotKept]:
        refused = []
        for group, blobs in payloads:
            prompt = None
            with contextlib.suppress(MyxoError):  # which may be why the group was given up
                # not before: a prompt may take long, which the buffer's other work does not wait for
                prompt = None if group.rewards else self._prompts.of_group(group.record.group)
            try:
                self._writer.write(group, blobs, prompt)
            except RolloutNotKept as error:
                refused.append(error)
        return refused

    def _skip(self, reason: str, error: object = "") -> None:
        """Counts a group that is not stored, and logs it now and then."""
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
