"""A version of one's own on this machine's disk, brought from version to version by deltas: a replica's cache, or the writer's last one.

It is a Hugging Face checkpoint directory like a full link, whose tensors are changed in place through memory maps: a model is never in
memory as a whole. While it is being changed it has a scratch name; a process killed there leaves nothing that could be taken for a
version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from shared.runtime.atomic_files import scratch
from shared.runtime.errors import BadMessage
from shared.transfer import digest
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.snapshot import LINK_FILE, BrokenLink, SnapshotLink, directory_name, version_of
from shared.transfer.snapshot_chain import Snapshots
from shared.transfer.snapshot_delta import Bytes, apply
from shared.transfer.tensor_file import TensorFile, TensorFileBroken

THREADS = min(8, os.cpu_count() or 1)
"""Hashing, packing and unpacking let go of the interpreter."""


class OpenTensors:
    """The tensors of several files as one mapping of names. A context manager.

    Raises TensorFileBroken: a file cannot be read, or a tensor is in two of them.
    """

    def __init__(self, files: Iterable[Path], *, writable: bool = False) -> None:
        self._files: dict[str, TensorFile] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in files:
            file = TensorFile(path, writable=writable)
            if both := self._files.keys() & file.tensors.keys():
                raise TensorFileBroken(f"{path} holds {sorted(both)[0]}, and so does {self._files[min(both)].path}")
            self._files.update(dict.fromkeys(file.tensors, file))
            self.tensors.update(file.tensors)

    def __getitem__(self, name: str) -> Bytes:
        return self._files[name][name]

    def known(self) -> dict[str, TensorDigest]:
        """Every tensor's digest. Reads all of them."""
        with ThreadPoolExecutor(THREADS) as threads:
            digests = threads.map(lambda name: digest.of_bytes(self[name]), self.tensors)
            return {name: TensorDigest(*self.tensors[name], found) for name, found in zip(self.tensors, digests, strict=True)}

    def __enter__(self) -> OpenTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()


class LocalCopy:
    """At most one version below ``directory``, which nobody else writes to.

    What an earlier process has left there counts once its bytes have been read and found right.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: SnapshotLink | None = None
        self._looked = False

    def held(self) -> SnapshotLink | None:
        """The version that lies here, verified; None where there is none, or it is damaged. The first call may read all of it."""
        if not self._looked:
            self._looked = True
            self._held = self._found()
        return self._held

    def clear(self) -> None:
        """Removes whatever lies here."""
        self._held, self._looked = None, True
        shutil.rmtree(self.directory, ignore_errors=True)

    def take(self, link: SnapshotLink) -> None:
        """Becomes a copy of a full link whose files have been checked."""
        self.clear()
        place = self.directory / directory_name(link.version)
        draft = scratch(place)
        for name in link.files:
            shutil.copyfile(link.path / name, draft / name)
        self._settle(draft, link)

    def begin(self) -> Path:
        """Gives up being a version in order to become another: returns the directory whose tensors may be changed."""
        held = self.held()
        assert held is not None  # callers have looked
        draft = held.path.with_name(f".{held.path.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        held.path.rename(draft)
        self._held = None
        (draft / LINK_FILE).unlink()
        return draft

    def finish(self, draft: Path, link: SnapshotLink) -> None:
        """The draft of `begin` holds ``link``'s version now."""
        self._settle(draft, link)

    def follow(self, source: Snapshots, version: int) -> SnapshotLink:
        """Has ``version`` ready to be loaded, every byte of it verified: the source's own directory where that is whole, else a copy here.

        Raises BrokenLink naming the link of ``source`` that is missing, torn or altered.
        """
        chain = source.chain(version)
        if len(chain) == 1:
            _verify(chain[0])
            return chain[0]
        made = [(link.version, link.digest) for link in chain]
        held = self.held()
        at = (held.version, held.digest) if held is not None else None
        if at in made:
            start = made.index(at)
        else:
            _verify(chain[0])
            try:
                self.take(chain[0])
            except OSError as error:  # gone since it was looked at
                raise BrokenLink(chain[0].version, chain[0].path, str(error)) from error
            start = 0
        for link in chain[start + 1 :]:
            self._lay_over(link)
        assert self._held is not None  # by _lay_over
        return self._held

    def _lay_over(self, link: SnapshotLink) -> None:
        """One delta. Raises BrokenLink; the copy is gone then."""
        link.check_files()
        assert self._held is not None  # by take, or by the delta before
        before = self._held.tensors
        draft = self.begin()
        try:
            with OpenTensors(link.weights()) as changes:
                self._change(draft, before, link, changes)
        except (TensorFileBroken, BadMessage, OSError) as error:
            self.clear()
            raise BrokenLink(link.version, link.path, str(error)) from error
        except BrokenLink:
            self.clear()
            raise
        self._settle(draft, link)

    def _change(self, draft: Path, before: dict[str, TensorDigest], link: SnapshotLink, changes: OpenTensors) -> None:
        """Has the tensors of ``draft`` be the link's, each checked where it changes."""
        parts: dict[str, dict[str, Bytes]] = {}
        for entry in changes.tensors:
            part, _, name = entry.partition("/")
            parts.setdefault(name, {})[part] = changes[entry]
        if foreign := parts.keys() - link.tensors.keys():
            raise BrokenLink(link.version, link.path, f"a change of {sorted(foreign)[0]}, which is no tensor of the version")
        for name in before.keys() | link.tensors.keys():
            if name not in parts and before.get(name) != link.tensors.get(name):
                raise BrokenLink(link.version, link.path, f"it has no change of {name}, which is not what it was in the version before")
        with ExitStack() as stack:
            held = stack.enter_context(OpenTensors(sorted(draft.glob("*.safetensors")), writable=True))

            def change(name: str) -> None:
                expected = link.tensors[name]
                if held.tensors.get(name) != (expected.dtype, expected.shape):
                    raise BrokenLink(link.version, link.path, f"{name} is of another dtype or shape than in the version before")
                apply(held[name], parts[name], ITEM_BYTES[expected.dtype])
                if digest.of_bytes(held[name]) != expected.digest:
                    raise BrokenLink(link.version, link.path, f"{name} laid over its base is not what it should be (its digest differs)")

            for _ in stack.enter_context(ThreadPoolExecutor(THREADS)).map(change, parts):
                pass

    def _settle(self, draft: Path, link: SnapshotLink) -> None:
        """The draft appears as a version. Its files have no sums: in a copy they change with every version, the tensors' digests do."""
        place = draft.with_name(directory_name(link.version))
        held = SnapshotLink(draft, link.version, "full", link.digest, link.tensors, {}, at=link.at)
        held.write()  # not synced: whoever finds it later reads all of it
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        self._held, self._looked = SnapshotLink(place, link.version, "full", link.digest, link.tensors, {}, at=link.at), True

    def _found(self) -> SnapshotLink | None:
        if not self.directory.is_dir():
            return None
        for path in sorted(self.directory.iterdir(), reverse=True):
            if version_of(path) is None:
                shutil.rmtree(path, ignore_errors=True)  # a version that was being made
                continue
            try:
                link = SnapshotLink.read(path)
                with OpenTensors(sorted(path.glob("*.safetensors"))) as held:
                    if version_digest(held.known()) == link.digest:
                        return link
            except (BrokenLink, TensorFileBroken):
                continue
        return None


def _verify(link: SnapshotLink) -> None:
    """Reads the whole of a full link. Raises BrokenLink."""
    link.check_files()
    try:
        with OpenTensors(link.weights()) as held:
            known = held.known()
    except (TensorFileBroken, OSError) as error:
        raise BrokenLink(link.version, link.path, str(error)) from error
    if known != link.tensors:
        raise BrokenLink(link.version, link.path, "its tensors are not those that its link.json names")
