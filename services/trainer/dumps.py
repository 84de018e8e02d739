"""Dumps of a step on disk: batches that can be trained again without the services of a run, and every tensor that a rank used.

The paths are templates as slime has them: ``{rollout_id}`` is the step, ``{rank}`` the rank.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from services.trainer import slime_dumps
from services.trainer.actor import StepResult
from services.trainer.batches import TrainBatch
from shared.runtime.safe_files import replace_file
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.messages import Batch
from shared.store.payload_store import BlockingStore

SCHEMA = 1


def write_batch(template: str, batch: Batch, store: BlockingStore) -> Path:
    """Writes a batch to one file: in slime's format where the path ends in ``.pt``, else its references and payloads as they are in the
    store, as MessagePack. Returns the path.

    Raises PayloadMissing, BadMessage, DeadlineExceeded, StoreRefused; OSError.
    """
    payloads = [group.payload for group in batch.groups]
    stored = list(zip(batch.groups, store.stream(payloads), strict=True))
    path = Path(filled(template, batch.step, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == slime_dumps.SUFFIX:
        slime_dumps.write(path, slime_dumps.entries(batch, {group.group: sample_codec.decode(blobs) for group, blobs in stored}))
        return path
    by_key = {key: blob for group, blobs in stored for key, blob in zip(group.payload.keys, blobs, strict=True)}
    replace_file(path, codec.pack({"schema": SCHEMA, "batch": batch.encode(), "blobs": by_key}))
    return path


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
            replayed = {} if packed.experts is None else {"experts": packed.experts}
            tensors.update({f"{name}.{field}": tensor.contiguous().cpu() for field, tensor in (plain | replayed | packed.fields).items()})
    path = Path(filled(template, batch.step, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"step": batch.step, "version": batch.version, "samples": samples, "results": [asdict(result) for result in results]}
    save_file(tensors, path, metadata={"myxo": json.dumps(described)})
    return path


def filled(template: str, step: int, rank: int) -> str:
    """Returns the path for one step and rank."""
    return template.replace("{rollout_id}", str(step)).replace("{rank}", str(rank))
