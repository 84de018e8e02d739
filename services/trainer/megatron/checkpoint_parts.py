"""The parts of a checkpoint, as `JointWrite` has them written: each rank's shards, and in each directory the index and the marker."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from services.trainer.megatron.checkpoint_digests import write_digests
from services.trainer.megatron.checkpoint_pickles import METADATA
from services.trainer.megatron.staged_shards import StagedShards
from shared.runtime.safe_files import fsync_tree

MARKER = "checkpoint.json"


class CheckpointParts:
    """One checkpoint on one rank.

    Args:
        target: what it will be called. partial: the directory that is written. shards: staged.
        marker: its content, without the directories. publish: makes ``partial`` appear as ``target``. tidy: removes older checkpoints.
    """

    def __init__(
        self,
        target: Path,
        partial: Path,
        shards: StagedShards,
        marker: dict[str, Any],
        publish: Callable[[], None],
        tidy: Callable[[], None],
    ) -> None:
        self.target, self.partial = target, partial
        self._shards, self._marker, self._publish, self.tidy = shards, marker, publish, tidy

    def write(self) -> list[list[Any]]:
        return self._shards.write()

    def beside(self, everyone: list[list[list[Any]]]) -> list[bytes]:
        directories = self._shards.places.as_json()
        common = {path.name: path.read_bytes() for path in self.partial.iterdir() if path.is_file() and path.suffix != ".distcp"}
        contents = []
        for number in range(len(directories)):
            marker = {**self._marker, "directories": directories, "here": number}
            files = {**common, METADATA: self._shards.index(everyone, number), MARKER: (json.dumps(marker, indent=2) + "\n").encode()}
            contents.append(msgpack.packb(files))
        return contents

    def publish(self, content: bytes) -> None:
        for name, data in msgpack.unpackb(content).items():
            (self.partial / name).write_bytes(data)
        write_digests(self.partial)
        fsync_tree(self.partial)
        self._publish()
