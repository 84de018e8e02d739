"""One whole version on this machine's disk, brought from version to version by deltas: a replica's cache, or what the trainer wrote last.

It is a Hugging Face checkpoint whose tensors are changed in place through memory maps, so a model is never in memory as a whole. While it
is changed it has a scratch name: a process that is killed there leaves nothing that could be taken for a version.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.runtime.errors import BadMessage
from shared.runtime.safe_files import open_regular, scratch
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

COPY_BYTES = 16 * 1024**2
"""The bytes that are copied at a time."""


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
            with open_regular(checkpoint.path / name) as source, (draft / name).open("xb") as copy:
                shutil.copyfileobj(source, copy, COPY_BYTES)
        self.finish_change(draft, checkpoint)

    def begin_change(self) -> tuple[Path, TensorFiles]:
        """Withdraws the version, to be changed into another. Returns its directory and its tensors, whose bytes may be changed."""
        held = self.held()
        assert held is not None  # callers have looked
        draft = held.path.with_name(f".{held.path.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        held.path.rename(draft)
        self._held = None
        (draft / CHECKPOINT_FILE).unlink()
        return draft, _tensors(draft, writable=True)

    def finish_change(self, draft: Path, checkpoint: WeightCheckpoint) -> None:
        """Names ``draft``, which holds the tensors of ``checkpoint`` now, after its version.

        Sums of its files are not recorded, because they change with every version. It is not synced, because whoever finds it later reads
        all of it.
        """
        path = draft.with_name(directory_name(checkpoint.version))
        held = checkpoint.model_copy(update={"path": draft, "files": {}, "base": None})
        held.save()
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
        self._held, self._looked = held.model_copy(update={"path": path}), True

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
        if held is None or held.id not in ids:
            _verify(chain[0])
            try:
                self.copy_from(chain[0])
            except OSError as error:  # it is gone since it was verified
                raise chain[0].broken(error) from error
            held = chain[0]
        for delta in chain[ids.index(held.id) + 1 :]:
            self._apply(delta)
        assert self._held is not None  # by copy_from or _apply
        return self._held

    def _apply(self, delta: WeightCheckpoint) -> None:
        """Applies one delta. Raises BrokenCheckpoint, and then the copy is gone."""
        delta.check_files()
        assert self._held is not None  # by copy_from, or by the delta before
        before = self._held.tensors
        try:
            draft, tensors = self.begin_change()
            _change(tensors, before, delta)
        except (TensorFileBroken, BadMessage, OSError) as error:
            self.clear()
            raise delta.broken(error) from error
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
                if version_digest(_tensors(path).digests()) == held.digest:
                    return held
            except (BrokenCheckpoint, TensorFileBroken):
                continue
        return None


def _tensors(directory: Path, *, writable: bool = False) -> TensorFiles:
    return TensorFiles(sorted(directory.glob("*.safetensors")), writable=writable)


def _change(held: TensorFiles, before: dict[str, TensorDigest], delta: WeightCheckpoint) -> None:
    """Turns the held tensors into the delta's, and checks each that changes."""
    changes = TensorFiles(delta.tensor_files())
    parts: dict[str, dict[str, ByteArray]] = {}
    for entry in changes.tensors:
        part, _, name = entry.partition("/")
        parts.setdefault(name, {})[part] = changes[entry]
    if foreign := parts.keys() - delta.tensors.keys():
        raise delta.broken(f"a change of {min(foreign)}, which is no tensor of the version")
    for name in before.keys() | delta.tensors.keys():
        if name not in parts and before.get(name) != delta.tensors.get(name):
            raise delta.broken(f"it has no change of {name}, which is not what it was in the version before")

    def change(name: str) -> None:
        expected = delta.tensors[name]
        if held.tensors.get(name) != (expected.dtype, expected.shape):
            raise delta.broken(f"{name} is of another dtype or shape than in the version before")
        apply_delta(held[name], parts[name], ITEM_BYTES[expected.dtype])
        if digest.of_bytes(held[name]) != expected.digest:
            raise delta.broken(f"{name} laid over its base is not what it should be (its digest differs)")

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        list(threads.map(change, parts))


def _verify(checkpoint: WeightCheckpoint) -> None:
    """Reads all of a whole checkpoint. Raises BrokenCheckpoint."""
    checkpoint.check_files()
    try:
        found = TensorFiles(checkpoint.tensor_files()).digests()
    except (TensorFileBroken, OSError) as error:
        raise checkpoint.broken(error) from error
    if found != checkpoint.tensors:
        raise checkpoint.broken(f"its tensors are not those that its {CHECKPOINT_FILE} names")
