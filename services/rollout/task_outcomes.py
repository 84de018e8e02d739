"""What becomes of a task: its samples are stored, then reported by reference, with a span of the replica's work on it.

Groups whose samples the link to the run's servers has not taken yet are spooled on disk: they outlive a cut of the link, and this process.
A group is written before its samples are sent, and removed once its message is acknowledged. Its file is called after the delivery of the
task that it answers (group, attempt, the server's time of publication), so it is handed in against that task alone: by the replica that
made it, or by any of the same directory that the task is delivered to again. All of them send the same blobs under the same keys, and the
ledger takes one outcome of an attempt. What has become too old to be trained is dropped here, and the buffer is informed.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from services.rollout.teachers import Teachers
from shared.bus.bus_errors import TRANSIENT
from shared.bus.work_queue import MessageLease
from shared.config.engine_limits import longest_trained
from shared.config.run_config import RunConfig
from shared.data.media import MediaRule
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded, Fault, PayloadChanged, PayloadMissing
from shared.runtime.safe_files import private_directory, read_regular, replace_file
from shared.runtime.telemetry import declare_metrics
from shared.runtime.traces import Attributes, TraceSpan
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.digests import MOST_BYTES, check_payload, reference
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Discarded, Failed, Generated, Interrupted, Message, Outcome, Task
from shared.schema.sample import Sample, fitted
from shared.schema.versions import last_live
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service

declare_metrics("""
    spooled_groups | groups | finished, whose samples wait on disk for the link | with MYXO_SAMPLE_SPOOL
    spooled_bytes | bytes | of these | with MYXO_SAMPLE_SPOOL
    too_old_at_source_total | groups | that became too old to be trained while they waited for the link | with MYXO_SAMPLE_SPOOL
""")

# The variable that names a directory for these files; replicas of a site may share it. Without it nothing is written.
SPOOL_VARIABLE = "MYXO_SAMPLE_SPOOL"
OVERHEAD = 1 << 24  # bytes of a file besides its samples: the message, and the keys
_SUFFIX = ".spool"

StoredMessage = Generated | Interrupted


@dataclass(frozen=True)
class SpooledGroup:
    """A group's message, which refers to its ``blobs`` by key. ``last``: `last_version`."""

    message: StoredMessage
    blobs: Mapping[str, bytes]
    last: int


class SampleSpool:
    """The directory of one run. ``run``: its id."""

    def __init__(self, run: str, directory: Path) -> None:
        self._run, self._directory = run, directory / run

    @classmethod
    def of(cls, config: RunConfig) -> "SampleSpool | None":
        """Returns that of the environment's variable; None without it. Raises ConfigError where it names no directory to write to."""
        if not (given := os.environ.get(SPOOL_VARIABLE)):
            return None
        spool = cls(config.run.name, Path(given))
        try:
            if not os.path.isabs(given):
                raise OSError("it is relative")
            private_directory(spool._directory, 0o700)
            replace_file(probe := spool._directory / ".probe", b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(SPOOL_VARIABLE, given, f"an absolute path of a directory that this process may write to ({error})") from None
        return spool

    def put(self, task: Task, published: int, group: "SpooledGroup") -> None:
        """Writes a group to disk. A disk that takes nothing is logged: the group is then sent from memory alone.

        ``published``: the server's time of the task, in nanoseconds."""
        try:
            content = codec.pack([group.message.encode(), dict(group.blobs)])
            replace_file(self._directory / f"{_key(task, published)}.{group.last}{_SUFFIX}", content, mode=0o600, durable=True)
        except OSError as error:
            structlog.get_logger().error("group_not_spooled", group=task.group, error=str(error))

    def find(self, task: Task, published: int) -> "SpooledGroup | None":
        """Returns what an earlier delivery of the task came to; None where nothing whole is there."""
        for path in self._of(task, published):
            try:
                content, blobs = codec.unpack(read_regular(path, MOST_BYTES + OVERHEAD))
                message = Message.decode(content)
                if not isinstance(message, StoredMessage) or message.payload is None or list(blobs) != list(message.payload.keys):
                    raise BadMessage("it holds no group and its samples")
                check_payload(self._run, message.payload, blobs.values())
                return SpooledGroup(message, blobs, int(path.suffixes[-2][1:]))
            except FileNotFoundError:  # another replica has handed it in
                continue
            except (OSError, BadMessage, PayloadChanged, ValueError, TypeError) as error:
                structlog.get_logger().error("spooled_group_unreadable", path=str(path), error=str(error))
                path.unlink(missing_ok=True)
        return None

    def remove(self, task: Task, published: int) -> None:
        """Removes a group that was handed in, or is too old."""
        for path in self._of(task, published):
            path.unlink(missing_ok=True)

    def remove_too_old(self, live: int) -> None:
        """Removes the groups, of whichever process, that are too old under version ``live``: their tasks were given to others."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if int(path.suffixes[-2][1:]) < live:
                path.unlink(missing_ok=True)

    def held(self) -> tuple[int, int]:
        """Returns how many groups lie in the directory, and their bytes."""
        sizes = []
        for path in self._directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def _of(self, task: Task, published: int) -> list[Path]:
        return list(self._directory.glob(f"{_key(task, published)}.*{_SUFFIX}"))


def last_version(message: StoredMessage, samples: Sequence[Sample], config: RunConfig) -> int:
    """Returns the newest live version under which a batch that is still to be formed can take something of the group."""
    if isinstance(message, Generated) and (trained := [sample for sample in message.samples if sample.trained]):
        oldest, newest = min(sample.oldest for sample in trained), max(sample.newest for sample in trained)
    else:
        oldest = newest = max((version for sample in samples for _, _, version in sample.segments), default=0)
    return last_live(oldest, newest, config.rollout.max_staleness, config.rollout.staleness_policy)


def _key(task: Task, published: int) -> str:
    return f"{task.group}.{task.attempt}.{published}"


GENERATE = "generate"
LINK_SECONDS = 10.0  # for an attempt to send what lies in the spool
LINK_PAUSE = 1.0


class TaskOutcomes:
    """Makes and publishes the messages about the tasks of a replica."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        objective, temperature = service.config.algorithm, service.config.rollout.rollout_temperature
        self._spool = SampleSpool.of(service.config)
        self._published: dict[tuple[str, int], int] = {}  # the tasks in hand → when the server took each
        self._teachers = Teachers(objective, temperature) if objective.opd_teachers else None
        rule = MediaRule.of_run(service.config)
        self._longest, self._shown = longest_trained(service.config), None if rule is None else rule.shown

    async def close(self) -> None:
        """Closes the connections to teachers."""
        if self._teachers is not None:
            await self._teachers.close()

    async def spooled(self, lease: MessageLease[Task]) -> Generated | Interrupted | None:
        """Notes a task that was taken. Stores what an earlier delivery of it came to, where the link took nothing then, and returns its
        message; None where nothing of it lies in the spool."""
        task = lease.message
        self._published[task.group, task.attempt] = lease.published
        if self._spool is None or (found := await asyncio.to_thread(self._spool.find, task, lease.published)) is None:
            return None
        self._service.log.info("spooled_group_found", group=task.group, attempt=task.attempt)
        return await self._sent(task, found, check_age=True)

    def forget(self, task: Task) -> None:
        """Notes that a task is no longer in hand."""
        self._published.pop((task.group, task.attempt), None)

    async def generated(self, task: Task, samples: list[Sample], started: float, ended: float, aborted: int = 0) -> Generated | Interrupted:
        """Stores a finished group's samples, with their teachers' log-probs, and returns the reference to them; of one that became too old
        while the link was down, that it is stale. Times are seconds since the epoch. ``aborted``: surplus rollouts.

        Raises BadMessage for samples that are too large, or too long to be trained, and as `Teachers.taught` does."""
        if not is_evaluation(task.group):
            samples = fitted(samples, self._longest, self._config.rollout.overlong_samples, self._shown)
            if self._teachers is not None:
                samples = await self._teachers.taught(samples)

        make = partial(
            Generated,
            group=task.group,
            attempt=task.attempt,
            samples=[sample.meta() for sample in samples],
            rollouts=sample_codec.rollouts(samples),
            aborted=aborted,
            replica=self._service.instance,
            environment=task.environment,
            started=started,
            ended=ended,
        )
        return await self._stored(task, samples, make)

    async def interrupted(self, task: Task, samples: list[Sample], *, stale: bool) -> Generated | Interrupted:
        """Returns the message that hands a group on with what its samples have so far; without samples, with nothing."""
        self._service.log.info("group_interrupted", group=task.group, attempt=task.attempt, stale=stale, kept=bool(samples))
        make = partial(Interrupted, group=task.group, attempt=task.attempt, stale=stale, replica=self._service.instance)
        return await self._stored(task, samples, make) if samples else make()

    def failed(self, task: Task, reason: str, fault: Fault) -> Failed:
        return Failed(group=task.group, attempt=task.attempt, reason=reason, by=self._service.instance, fault=fault)

    async def earlier(self, task: Task) -> list[Sample]:
        """Returns the samples that the task continues; none where they are lost, so that the group begins anew."""
        if task.partial is None:
            return []
        try:
            return sample_codec.decode(await self._service.store.read(task.partial))
        except (PayloadMissing, BadMessage) as error:
            self._service.log.warning("partial_lost", group=task.group, attempt=task.attempt, error=str(error))
            return []

    async def publish(self, task: Task, message: Generated | Outcome, started: float) -> None:
        """Publishes a message about a task: to be scored, or to the buffer. ``started``: when work on it began, seconds since the epoch."""
        await self._service.report(message)
        if (published := self._published.pop((task.group, task.attempt), None)) is not None and self._spool is not None:
            await asyncio.to_thread(self._spool.remove, task, published)
            self._measure()
        self.trace(task, message, started)

    def trace(self, task: Task, message: Generated | Outcome | Exception, started: float) -> None:
        """Exports the span of the work on a task that ended with ``message``, or that goes back to the queue for an error; of one that has
        not ended none. ``started``: seconds since the epoch."""
        if not self._service.traces.on:
            return
        outcome, error = type(message).__name__.lower(), ""
        known: Attributes = {}
        match message:
            case Generated(samples=samples, aborted=aborted):
                versions = [version for sample in samples for version in (sample.oldest, sample.newest) if sample.trained]
                known = {"samples": len(samples), "tokens": sum(sample.tokens for sample in samples), "aborted_rollouts": aborted}
                known |= {"oldest_version": min(versions, default=None), "newest_version": max(versions, default=None)}
            case Interrupted(stale=stale):
                known = {"stale": stale}
            case Discarded(reason=reason):
                known = {"reason": reason}
            case Failed(reason=error):
                pass
            case Exception():
                outcome, error = "handed back", str(message)
            case _:
                return
        replica, continued = self._service.instance, task.partial is not None
        about: Attributes = {"group": task.group, "attempt": task.attempt, "replica": replica, "continued": continued, "outcome": outcome}
        span = TraceSpan(trace=task.group, name=GENERATE, started=started, ended=time.time(), error=error, attributes=about | known)
        self._service.traces.add(span)

    async def _stored(self, task: Task, samples: Sequence[Sample], make: Callable[..., StoredMessage]) -> StoredMessage:
        """Stores samples before their reference is published, under keys that no one else writes: a referenced payload never changes.
        Returns the message with it. Raises BadMessage for samples that are too large."""
        encoded, generation = sample_codec.encode(samples, self._config.store.blob_bytes), uuid.uuid4().hex
        names = self._service.subjects
        blobs = {names.payload_key(task.group, task.attempt, part, generation): blob for part, blob in enumerate(encoded)}
        message = make(payload=reference(self._service.run, blobs, [sample.length for sample in samples]))
        group = SpooledGroup(message, blobs, last_version(message, samples, self._config))
        published = self._published.get((task.group, task.attempt))
        if self._spool is not None and published is not None:
            await asyncio.to_thread(self._spool.put, task, published, group)
            self._measure()
        return await self._sent(task, group)

    async def _sent(self, task: Task, group: SpooledGroup, *, check_age: bool = False) -> StoredMessage:
        """Writes a group's samples into the store and returns its message. With a spool it waits for the link, and returns that the group
        is stale once it is; else it raises as `Store.write` does. ``check_age``: before the first attempt, too."""
        trains = not is_evaluation(task.group)
        try:
            while True:
                try:
                    if check_age and trains and self._spool is not None and (live := await self._live()) > group.last:
                        self._service.metrics.add("too_old_at_source")
                        self._service.log.warning(
                            "group_too_old_at_source", group=task.group, attempt=task.attempt, live=live, last=group.last
                        )
                        return Interrupted(group=task.group, attempt=task.attempt, stale=True, replica=self._service.instance)
                    await self._service.store.write(group.blobs, None if self._spool is None else LINK_SECONDS)
                    return group.message
                except (DeadlineExceeded, *TRANSIENT) as error:
                    if self._spool is None:
                        raise
                    if not check_age:
                        self._service.log.warning("link_down", group=task.group, attempt=task.attempt, error=str(error))
                    # no task is taken meanwhile
                    check_age, self._service.holding = True, f"the link to the run's store is down ({error})"
                    await asyncio.sleep(LINK_PAUSE)
        finally:
            self._service.holding = ""  # of others that wait for the link their next attempt says so again

    async def _live(self) -> int:
        value = await self._service.bus.get(self._service.subjects.weights_bucket, "live", deadline=LINK_SECONDS)
        return -1 if value is None else WeightsLive.decode(value).version

    def _measure(self) -> None:
        assert self._spool is not None
        self._spool.remove_too_old(self._service.version)
        for name, value in zip(("spooled_groups", "spooled_bytes"), self._spool.held(), strict=True):
            self._service.metrics.set(name, value)
