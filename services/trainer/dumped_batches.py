"""The batches in a run's dumps, Myxo's or slime's; they take the place of the buffer and of the store."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.trainer import slime_dumps
from services.trainer.dumped_groups import batch_of, groups_of_blobs, subsampled
from services.trainer.dumps import SCHEMA, filled
from shared.config.debug_section import DUMPS, STEP
from shared.config.run_config import RunConfig
from shared.runtime.errors import BadMessage, ConfigError, PayloadMissing
from shared.schema import codec
from shared.schema.messages import Batch, Payload

KEPT = 3
"""Batches that stay in memory: the one that is trained, the next one, which is read ahead, and one more."""

_TORCH = b"PK\x03\x04", b"\x80"
"""How files that torch has written begin: as an archive, or as a pickle in its old format, which is refused with a reason."""


class DumpedBatches:
    """The batches in the files of ``load_debug_rollout_data``; every rank reads them itself.

    A path without ``{rollout_id}`` is one file that every step trains.
    """

    def __init__(self, config: RunConfig) -> None:
        debug = config.debug
        template = debug.load_debug_rollout_data or ""  # a run without steps has no batches
        self._config, self._template, self._share = config, template, debug.load_debug_rollout_data_subsample
        self._read: OrderedDict[int, tuple[Batch, dict[str, bytes]]] = OrderedDict()
        self._lock = threading.Lock()  # shards are read ahead in a thread

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step. Raises ConfigError for a file that is missing, or is none that can be trained."""
        return self._step(step)[0]

    def stream(self, payloads: Sequence[Payload], deadline: float = 60.0) -> Iterator[list[bytes]]:
        """Yields the blobs of each payload in order, as `BlockingStore.stream` does. Raises PayloadMissing."""
        for payload in payloads:
            yield self.read(payload)

    def read(self, payload: Payload, deadline: float = 60.0) -> list[bytes]:
        """Returns the blobs of a payload, as `BlockingStore.read` does. Raises PayloadMissing."""
        step = int(payload.keys[0].partition(":")[0])
        _, blobs = self._step(step)
        if missing := [key for key in payload.keys if key not in blobs]:
            raise PayloadMissing(f"the file of step {step} does not hold the blob {missing[0]}")
        return [blobs[key] for key in payload.keys]

    def close(self) -> None:
        with self._lock:
            self._read.clear()

    def _step(self, step: int) -> tuple[Batch, dict[str, bytes]]:
        with self._lock:
            if step not in self._read:
                path = Path(filled(self._template, step, 0))
                try:
                    batch, blobs = self._loaded(path, step)
                except (BadMessage, LookupError, TypeError) as error:
                    raise ConfigError(DUMPS, str(path), f"a batch that can be trained; {error}") from None
                except OSError as error:
                    raise ConfigError(DUMPS, str(path), f"a file that can be read; {error.strerror or error}") from None
                self._read[step] = _named_after(step, batch), {f"{step}:{key}": blob for key, blob in blobs.items()}
                while len(self._read) > KEPT:
                    self._read.popitem(last=False)
            return self._read[step]

    def _loaded(self, path: Path, step: int) -> tuple[Batch, dict[str, bytes]]:
        with path.open("rb") as file:
            of_torch = file.read(4).startswith(_TORCH)
        if of_torch:
            content = slime_dumps.read(path)
            version = content.get("version", step // self._config.weights.update_weights_interval)
            groups = slime_dumps.groups_of(content, path, step, self._reading(version, "version" in content))
            return batch_of(step, version, self._part(groups), content.get("mask_below", 0))
        content = codec.unpack(path.read_bytes())
        if not (isinstance(content, dict) and codec.is_schema(content.get("schema"), SCHEMA)):
            raise BadMessage(f"it is no batch of schema {SCHEMA}")
        batch, blobs = Batch.decode(content["batch"]), content["blobs"]
        if self._share is None:
            return batch, blobs
        return batch_of(step, batch.version, self._part(list(groups_of_blobs(batch, blobs))), batch.mask_below)

    def _part(self, groups: list[slime_dumps.DumpedGroup]) -> list[slime_dumps.DumpedGroup]:
        return groups if self._share is None else subsampled(groups, self._share)

    def _reading(self, version: int, own: bool) -> slime_dumps.Reading:
        config = self._config
        return slime_dumps.Reading(
            version=version,
            group_size=config.rollout.n_samples_per_prompt,
            reward_key=config.reward.reward_key,
            log_probs_reader=config.log_probs_reader,
            own=own,
        )


def _named_after(step: int, batch: Batch) -> Batch:
    """Returns the batch as that of ``step``, with keys that say so: every file that is read has its own."""
    groups = []
    for group in batch.groups:
        keys = [f"{step}:{key}" for key in group.payload.keys]
        groups.append(group.model_copy(update={"payload": group.payload.model_copy(update={"keys": keys})}))
    return batch.model_copy(update={"step": step, "groups": groups})


def dumped_steps(template: str) -> list[int]:
    """Returns the steps that there are files of, ascending. Raises ConfigError where there are none, or the path names no step."""
    path = Path(template)
    if STEP not in path.name:
        raise ConfigError(DUMPS, template, f"{STEP} in the file's name, for the step")
    pattern = re.compile(re.escape(path.name).replace(re.escape(STEP), r"(\d+)") + r"\Z")
    found = [matched for entry in (path.parent.glob("*") if path.parent.is_dir() else ()) if (matched := pattern.match(entry.name))]
    if not found:
        raise ConfigError(DUMPS, template, f"files that save_debug_rollout_data has written, {STEP} for the step")
    return sorted(int(matched[1]) for matched in found)
