"""Dumps of a step on disk: batches that can be trained again without the services of a run, and every tensor that a rank used.

The paths are templates as slime has them: ``{rollout_id}`` is the step, ``{rank}`` the rank.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from services.trainer.actor import StepResult
from services.trainer.batches import TrainBatch
from shared.runtime.atomic_files import replace_file
from shared.runtime.errors import BadMessage, ConfigError, PayloadMissing
from shared.schema import codec
from shared.schema.messages import Batch, Payload
from shared.store.payload_store import BlockingStore

SCHEMA = 1


def write_batch(template: str, batch: Batch, store: BlockingStore) -> Path:
    """Writes a batch's references and payloads, as they are in the store, to one MessagePack file. Returns its path.

    Raises PayloadMissing, BadMessage, DeadlineExceeded, StoreRefused; OSError.
    """
    payloads = [group.payload for group in batch.groups]
    stored = zip(payloads, store.stream(payloads), strict=True)
    by_key = {key: blob for payload, blobs in stored for key, blob in zip(payload.keys, blobs, strict=True)}
    content = {"schema": SCHEMA, "batch": batch.encode(), "blobs": by_key}
    path = Path(filled(template, batch.step, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, codec.pack(content))
    return path


class DumpedBatches:
    """The batches in a template's files; they take the place of the buffer and of the store.

    Args:
        template: ``{rollout_id}`` where the step stands.

    Raises:
        ConfigError: no file fits the template.
    """

    def __init__(self, template: str) -> None:
        self._paths = dict(sorted(_found(template)))
        if not self._paths:
            expected = "files that save_debug_rollout_data has written, {rollout_id} for the step"
            raise ConfigError("load_debug_rollout_data", template, expected)
        self.steps = list(self._paths)  # those that there are files of, ascending
        self._blobs: dict[str, bytes] = {}

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; from now on `stream` yields its payloads. Raises BadMessage."""
        content = codec.unpack(self._paths[step].read_bytes())
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise BadMessage(f"{self._paths[step]} is no batch of schema {SCHEMA}")
        self._blobs |= content["blobs"]
        return Batch.decode(content["batch"])

    def stream(self, payloads: Sequence[Payload], deadline: float = 60.0) -> Iterator[list[bytes]]:
        """Yields the blobs of each payload in order, as `BlockingStore.stream` does. Raises PayloadMissing."""
        for payload in payloads:
            for key in payload.keys:
                if key not in self._blobs:
                    raise PayloadMissing(f"no file holds the blob {key}")
            yield [self._blobs[key] for key in payload.keys]

    def close(self) -> None:
        self._blobs.clear()


def write_tensors(template: str, batch: TrainBatch, results: Sequence[StepResult], rank: int) -> Path:
    """Writes all tensors that a rank's optimizer steps of a batch read, as safetensors: ``step.micro_batch.name``.

    Per-token fields are aligned to the labels, so that engine's and trainer's log-probs of a token have the same index. The file's metadata
    holds the samples of each micro-batch and what each optimizer step gave. Returns the path.
    """
    tensors, samples = {}, {}
    for step_index, step in enumerate(batch.steps):
        for index, micro_batch in enumerate(step):
            name, packed = f"{step_index}.{index}", micro_batch.packed
            samples[name] = [batch.partition.name(sample) for sample in micro_batch.indices]
            plain = {"tokens": packed.tokens, "labels": packed.labels, "loss_mask": packed.loss_mask, "cu_seqlens": packed.cu_seqlens}
            tensors.update({f"{name}.{field}": tensor.contiguous().cpu() for field, tensor in (plain | packed.fields).items()})
    path = Path(filled(template, batch.step, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"step": batch.step, "version": batch.version, "samples": samples, "results": [asdict(result) for result in results]}
    save_file(tensors, path, metadata={"myxo": json.dumps(described)})
    return path


def filled(template: str, step: int, rank: int) -> str:
    """Returns the path for one step and rank."""
    return template.replace("{rollout_id}", str(step)).replace("{rank}", str(rank))


def _found(template: str) -> Iterator[tuple[int, Path]]:
    path = Path(template)
    pattern = re.compile(re.escape(path.name).replace(r"\{rollout_id\}", r"(\d+)") + r"\Z")
    for candidate in path.parent.glob("*") if path.parent.is_dir() else ():
        if matched := pattern.match(candidate.name):
            yield int(matched[1]), candidate
