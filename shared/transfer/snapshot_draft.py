"""A link in the making: tensors come in bucket by bucket and go to disk at once, whole or as what changed since the version before."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shared.runtime.atomic_files import fsync_tree
from shared.transfer import digest, tensor_file
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.snapshot import BrokenLink, FileSum, SnapshotKind, SnapshotLink, sum_of
from shared.transfer.snapshot_chain import Snapshots
from shared.transfer.snapshot_copy import THREADS, LocalCopy, OpenTensors
from shared.transfer.snapshot_delta import Bytes, Encoding, encode

Tensors = Mapping[str, tuple[str, tuple[int, ...], Bytes]]
"""Name → dtype by torch's name, shape, bytes: uint8 [nbytes]."""


class SnapshotDraft:
    """The link of ``version``: a full one, or with a ``base`` a delta on the version that lies there.

    Args:
        base: becomes a copy of the new version, tensor by tensor; None for a full link. encoding: of a delta.
    """

    def __init__(self, snapshots: Snapshots, version: int, base: LocalCopy | None = None, encoding: Encoding = "xor") -> None:
        self._snapshots, self._version, self._base, self._encoding = snapshots, version, base, encoding
        self._known: dict[str, TensorDigest] = {}
        self._files: list[list[str]] = []
        self._threads = ThreadPoolExecutor(THREADS)
        self._below: SnapshotLink | None = None
        self._held: OpenTensors | None = None
        if base is not None:
            self._below = base.held()
            assert self._below is not None  # callers have looked
            self._base_draft = base.begin()
            self._held = OpenTensors(sorted(self._base_draft.glob("*.safetensors")), writable=True)
        self._draft = snapshots.draft(version)

    @property
    def kind(self) -> SnapshotKind:
        return "full" if self._base is None else "delta"

    def add(self, tensors: Tensors) -> None:
        """One bucket. Its bytes are read before this returns. Raises OSError; BrokenLink: a tensor that the base does not have."""
        entries: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}
        for name, (known, made) in zip(tensors, self._threads.map(self._entries, tensors, tensors.values()), strict=True):
            self._known[name] = known
            entries.update(made)
        if entries:
            tensor_file.write(self._numbered(len(self._files)), entries)
            self._files.append(list(entries))

    def publish(self, beside: Callable[[Path], None] = lambda _: None) -> SnapshotLink:
        """The link appears, complete.

        Args:
            beside: writes what a full link holds besides weights (config, tokenizer) into its directory.

        Raises BrokenLink: a tensor of the base has not come. OSError.
        """
        stem = "model" if self._base is None else "delta"
        total, weight_map = len(self._files), {}
        for number, names in enumerate(self._files):
            file = f"{stem}.safetensors" if total == 1 else f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"
            self._numbered(number).rename(self._draft / file)
            weight_map.update(dict.fromkeys(names, file))
        base = None
        if self._below is not None:
            if missing := self._below.tensors.keys() - self._known.keys():
                raise BrokenLink(self._version, self._draft, f"{sorted(missing)[0]} has not come")
            base = self._below.version, self._below.digest
        else:
            size = sum(int(np.prod(known.shape)) * ITEM_BYTES[known.dtype] for known in self._known.values())
            if total > 1:
                index = {"metadata": {"total_size": size}, "weight_map": weight_map}
                (self._draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            beside(self._draft)
        link = self._link(self._draft, base)
        link.write()
        fsync_tree(self._draft)
        path = self._snapshots.publish(self._draft, self._version)
        self._let_go()
        published = SnapshotLink.read(path)
        if self._base is not None:
            self._base.finish(self._base_draft, published)
        return published

    def discard(self) -> None:
        """Leaves nothing of it; the base is gone, too."""
        self._let_go()
        shutil.rmtree(self._draft, ignore_errors=True)
        if self._base is not None:
            self._base.clear()

    def _let_go(self) -> None:
        self._threads.shutdown()
        if self._held is not None:
            self._held.__exit__()

    def _entries(self, name: str, tensor: tuple[str, tuple[int, ...], Bytes]) -> tuple[TensorDigest, Tensors]:
        """A tensor's digest, and what of it goes into a file."""
        dtype, shape, data = tensor
        known = TensorDigest(dtype, shape, digest.of_bytes(data))
        if self._held is None or self._below is None:
            return known, {name: tensor}
        before = self._below.tensors.get(name)
        if before is None or (before.dtype, before.shape) != (dtype, shape):
            raise BrokenLink(self._version, self._draft, f"{name} is not in version {self._below.version}, or of another dtype or shape")
        if before == known:
            return known, {}
        old = self._held[name]
        parts = encode(old, data, ITEM_BYTES[dtype], self._encoding)
        old[:] = data
        return known, {f"{part}/{name}": ("uint8", packed.shape, packed) for part, packed in parts.items()}

    def _link(self, path: Path, base: tuple[int, str] | None) -> SnapshotLink:
        files: dict[str, FileSum] = {file.name: sum_of(file) for file in sorted(path.iterdir()) if file.is_file()}
        encoding = None if base is None else self._encoding
        return SnapshotLink(path, self._version, self.kind, version_digest(self._known), self._known, files, base, encoding, time.time())

    def _numbered(self, number: int) -> Path:
        return self._draft / f".shard-{number}"
