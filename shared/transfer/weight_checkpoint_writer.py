"""Writes one version to disk: tensors come in bucket by bucket, and go to files at once, whole or as changes since the version before."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from shared.model.hf_checkpoint import INDEX
from shared.runtime.safe_files import fsync_tree, publish, scratch
from shared.transfer import digest, tensor_file
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.local_checkpoint import LocalCheckpoint
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.tensor_file import HASH_THREADS, TensorBytes
from shared.transfer.weight_checkpoint import BrokenCheckpoint, FileSum, WeightCheckpoint, WeightCheckpoints
from shared.transfer.weight_delta import DeltaEncoding, encode_delta


class WeightCheckpointWriter:
    """Writes ``version``: a whole checkpoint, or with a ``base`` a delta on the version that lies there.

    Args:
        base: it becomes a copy of the new version, tensor by tensor; None for a whole checkpoint.
    """

    def __init__(
        self, checkpoints: WeightCheckpoints, version: int, base: LocalCheckpoint | None = None, encoding: DeltaEncoding = "xor"
    ) -> None:
        self._path, self._version, self._base, self._encoding = checkpoints.path_of(version), version, base, encoding
        self._tensors: dict[str, TensorDigest] = {}
        self._files: list[list[str]] = []  # the names in each file
        self._threads = ThreadPoolExecutor(HASH_THREADS)
        self._before: WeightCheckpoint | None = None
        if base is not None:
            self._before = base.held()
            assert self._before is not None  # callers have looked
            self._base_draft, self._held = base.begin_change()
        self._draft = scratch(self._path)

    def add(self, tensors: Mapping[str, TensorBytes]) -> Self:
        """Writes one bucket, whose bytes are read before this returns. Returns the writer.

        Raises:
            OSError: the disk refused. BrokenCheckpoint: the base does not have one of the tensors.
        """
        entries: dict[str, TensorBytes] = {}
        for name, (known, made) in zip(tensors, self._threads.map(self._entries, tensors, tensors.values()), strict=True):
            self._tensors[name] = known
            entries.update(made)
        if entries:
            tensor_file.write(self._shard(len(self._files)), entries)
            self._files.append(list(entries))
        return self

    def publish(self, write_beside: Callable[[Path], None] = lambda _: None) -> WeightCheckpoint:
        """Makes the checkpoint appear, complete.

        Args:
            write_beside: writes what a whole checkpoint holds besides weights (config, tokenizer) into its directory.

        Raises:
            OSError: the disk refused. BrokenCheckpoint: a tensor of the base has not been added.
        """
        if self._before is None:
            write_beside(self._draft)
        elif missing := self._before.tensors.keys() - self._tensors.keys():
            raise BrokenCheckpoint(self._version, self._draft, f"{min(missing)} has not come")
        self._name_files("model" if self._before is None else "delta")
        described = WeightCheckpoint(
            path=self._draft,
            version=self._version,
            digest=version_digest(self._tensors),
            tensors=self._tensors,
            files={file.name: FileSum.read(file) for file in sorted(self._draft.iterdir()) if file.is_file()},
            base=None if self._before is None else self._before.id,
            at=time.time(),
        )
        described.save()
        fsync_tree(self._draft)
        publish(self._draft, self._path)
        self._threads.shutdown()
        if self._base is not None:
            self._base.finish_change(self._base_draft, described)
        return described.model_copy(update={"path": self._path})

    def discard(self) -> None:
        """Removes the unfinished checkpoint and, with it, the base."""
        self._threads.shutdown()
        shutil.rmtree(self._draft, ignore_errors=True)
        if self._base is not None:
            self._base.clear()

    def _entries(self, name: str, tensor: TensorBytes) -> tuple[TensorDigest, dict[str, TensorBytes]]:
        """Returns a tensor's digest, and what of it goes into a file."""
        dtype, shape, data = tensor
        known = TensorDigest(dtype, shape, digest.of_bytes(data))
        if self._before is None:
            return known, {name: tensor}
        before = self._before.tensors.get(name)
        if before is None or (before.dtype, before.shape) != (dtype, shape):
            reason = f"{name} is not in version {self._before.version}, or of another dtype or shape"
            raise BrokenCheckpoint(self._version, self._draft, reason)
        if before == known:
            return known, {}
        old = self._held[name]
        parts = encode_delta(old, data, ITEM_BYTES[dtype], self._encoding)
        old[:] = data
        return known, {f"{part}/{name}": ("uint8", packed.shape, packed) for part, packed in parts.items()}

    def _name_files(self, stem: str) -> None:
        """Names the files as Hugging Face does, now that their count is known."""
        count, weight_map = len(self._files), dict[str, str]()
        for index, names in enumerate(self._files):
            file = f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
            self._shard(index).rename(self._draft / file)
            weight_map.update(dict.fromkeys(names, file))
        if stem == "model" and count > 1:
            size = sum(math.prod(known.shape) * ITEM_BYTES[known.dtype] for known in self._tensors.values())
            content = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self._draft / INDEX).write_text(json.dumps(content, indent=2) + "\n")

    def _shard(self, index: int) -> Path:
        return self._draft / f".shard-{index}"
