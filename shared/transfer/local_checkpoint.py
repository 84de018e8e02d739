"""One whole version on this machine's disk, brought from version to version by deltas: a replica's cache, or what the trainer wrote last.

It is a Hugging Face checkpoint whose tensors are changed in place through memory maps, so a model is never in memory as a whole. While it
is changed it has a scratch name: a process that is killed there leaves nothing that could be taken for a version.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.runtime.atomic_files import scratch
from shared.runtime.errors import BadMessage
from shared.transfer import digest
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.tensor_file import HASH_THREADS, ByteArray, TensorFileBroken, TensorFiles
from shared.transfer.weight_checkpoint import (
    CHECKPOINT_FILE,
    BrokenCheckpoint,
    WeightCheckpoint,
    WeightCheckpoints,
    directory_name,
    load_checkpoint,
    version_of,
)
from shared.transfer.weight_delta import apply_delta


class LocalCheckpoint:
    """At most one version below ``directory``, which nobody else writes to.

    What an earlier process has left there counts once its bytes have been read and found right.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: WeightCheckpoint | None = None
        self._looked = False

    def held(self) -> WeightCheckpoint | None:
        """Returns the verified version that lies here, None if there is none or it is damaged. The first call may read all of it."""
        if not self._looked:
            self._looked, self._held = True, self._found()
        return self._held

    def clear(self) -> None:
        """Removes the version and everything else in the directory."""
        self._held, self._looked = None, True
        shutil.rmtree(self.directory, ignore_errors=True)

    def copy_from(self, checkpoint: WeightCheckpoint) -> None:
        """Becomes a copy of a whole checkpoint whose files have been checked."""
        self.clear()
        draft = scratch(self.directory / directory_name(checkpoint.version))
        for name in checkpoint.files:
            shutil.copyfile(checkpoint.path / name, draft / name)
        self.finish_change(draft, checkpoint)

    def begin_change(self) -> Path:
        """Withdraws the version, to be changed into another. Returns the directory whose tensors may be changed."""
        held = self.held()
        assert held is not None  # callers have looked
        draft = held.path.with_name(f".{held.path.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        held.path.rename(draft)
        self._held = None
        (draft / CHECKPOINT_FILE).unlink()
        return draft

    def finish_change(self, draft: Path, checkpoint: WeightCheckpoint) -> None:
        """Names ``draft``, which holds the tensors of ``checkpoint`` now, after its version.

        Sums of its files are not recorded, because they change with every version. It is not synced, because whoever finds it later reads
        all of it.
        """
        path = draft.with_name(directory_name(checkpoint.version))
        fields = {"version": checkpoint.version, "digest": checkpoint.digest, "tensors": checkpoint.tensors, "at": checkpoint.at}
        WeightCheckpoint(path=draft, files={}, **fields).save()
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
        self._held, self._looked = WeightCheckpoint(path=path, files={}, **fields), True

    def follow(self, source: WeightCheckpoints, version: int) -> WeightCheckpoint:
        """Returns ``version``, every byte of it verified: the source's own checkpoint if that is a whole one, else the copy here.

        Raises:
            BrokenCheckpoint: it names the checkpoint of ``source`` that is missing, torn or altered.
        """
        chain = source.chain(version)
        if len(chain) == 1:
            _verify(chain[0])
            return chain[0]
        ids, held = [part.id for part in chain], self.held()
        if held is not None and held.id in ids:
            start = ids.index(held.id)
        else:
            _verify(chain[0])
            try:
                self.copy_from(chain[0])
            except OSError as error:  # it is gone since it was verified
                raise BrokenCheckpoint(chain[0].version, chain[0].path, str(error)) from error
            start = 0
        for delta in chain[start + 1 :]:
            self._apply(delta)
        assert self._held is not None  # by copy_from or _apply
        return self._held

    def _apply(self, delta: WeightCheckpoint) -> None:
        """Applies one delta. Raises BrokenCheckpoint, and then the copy is gone."""
        delta.check_files()
        assert self._held is not None  # by copy_from, or by the delta before
        before = self._held.tensors
        draft = self.begin_change()
        try:
            _change(draft, before, delta)
        except (TensorFileBroken, BadMessage, OSError) as error:
            self.clear()
            raise BrokenCheckpoint(delta.version, delta.path, str(error)) from error
        except BrokenCheckpoint:
            self.clear()
            raise
        self.finish_change(draft, delta)

    def _found(self) -> WeightCheckpoint | None:
        if not self.directory.is_dir():
            return None
        for path in sorted(self.directory.iterdir(), reverse=True):
            if version_of(path) is None:
                shutil.rmtree(path, ignore_errors=True)  # a version that was being made
                continue
            try:
                held = load_checkpoint(path)
                if version_digest(TensorFiles(sorted(path.glob("*.safetensors"))).digests()) == held.digest:
                    return held
            except (BrokenCheckpoint, TensorFileBroken):
                continue
        return None


def _change(draft: Path, before: dict[str, TensorDigest], delta: WeightCheckpoint) -> None:
    """Turns the tensors in ``draft`` into the delta's, and checks each that changes."""

    def refused(reason: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(delta.version, delta.path, reason)

    changes = TensorFiles(delta.tensor_files())
    parts: dict[str, dict[str, ByteArray]] = {}
    for entry in changes.tensors:
        part, _, name = entry.partition("/")
        parts.setdefault(name, {})[part] = changes[entry]
    if foreign := parts.keys() - delta.tensors.keys():
        raise refused(f"a change of {min(foreign)}, which is no tensor of the version")
    for name in before.keys() | delta.tensors.keys():
        if name not in parts and before.get(name) != delta.tensors.get(name):
            raise refused(f"it has no change of {name}, which is not what it was in the version before")
    held = TensorFiles(sorted(draft.glob("*.safetensors")), writable=True)

    def change(name: str) -> None:
        expected = delta.tensors[name]
        if held.tensors.get(name) != (expected.dtype, expected.shape):
            raise refused(f"{name} is of another dtype or shape than in the version before")
        apply_delta(held[name], parts[name], ITEM_BYTES[expected.dtype])
        if digest.of_bytes(held[name]) != expected.digest:
            raise refused(f"{name} laid over its base is not what it should be (its digest differs)")

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        list(threads.map(change, parts))


def _verify(checkpoint: WeightCheckpoint) -> None:
    """Reads all of a whole checkpoint. Raises BrokenCheckpoint."""
    checkpoint.check_files()
    try:
        found = TensorFiles(checkpoint.tensor_files()).digests()
    except (TensorFileBroken, OSError) as error:
        raise BrokenCheckpoint(checkpoint.version, checkpoint.path, str(error)) from error
    if found != checkpoint.tensors:
        raise BrokenCheckpoint(checkpoint.version, checkpoint.path, f"its tensors are not those that its {CHECKPOINT_FILE} names")
