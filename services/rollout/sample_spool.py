"""Groups whose samples the link to the run's servers has not taken yet, on disk: they outlive a cut of the link, and this process.

A group is written before its samples are sent, and removed once its message is acknowledged. Its file is called after the delivery of the
task that it answers (group, attempt, the server's time of publication), so it is handed in against that task alone: by the replica that
made it, or by any of the same directory that the task is delivered to again. All of them send the same blobs under the same keys, and the
ledger takes one outcome of an attempt. What has become too old to be trained is dropped here, and the buffer is informed.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from shared.config.run_config import RunConfig
from shared.runtime.errors import BadMessage, ConfigError, PayloadChanged
from shared.runtime.safe_files import private_directory, read_regular, replace_file
from shared.runtime.telemetry import declare_metrics
from shared.schema import codec
from shared.schema.digests import MOST_BYTES, check_payload
from shared.schema.messages import Generated, Interrupted, Message, Task
from shared.schema.sample import Sample
from shared.schema.versions import last_live

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
