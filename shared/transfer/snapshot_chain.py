"""A run's versions on disk: what is there, what a version is made of, what may go.

The chain of a version is the newest whole checkpoint at or below it, and the deltas from there on, each lying on the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from shared.config.run_config import RunConfig
from shared.runtime.atomic_files import publish, replaced_by, scratch, settle
from shared.transfer.snapshot import BrokenLink, SnapshotLink, directory_name, version_of


class Snapshots:
    """The links below one directory. Nothing is kept in memory: another process writes there.

    Args:
        directory: need not exist yet. What else lies in it is left alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def of(cls, config: RunConfig) -> Snapshots:
        """A run's. A directory that runs may share has one by the run's name: what lies there, its trainer removes."""
        shared = config.weights.update_weight_disk_dir
        return cls(config.run.root / "weights" if shared is None else shared / config.run.name)

    def place(self, version: int) -> Path:
        return self.directory / directory_name(version)

    def versions(self) -> list[int]:
        """What there are directories of, the oldest first; whether they can be read is another matter."""
        if not self.directory.is_dir():
            return []
        found = (version_of(path) for path in self.directory.iterdir() if path.is_dir())
        return sorted(version for version in found if version is not None)

    def newest(self) -> SnapshotLink | None:
        """The newest link that can be read."""
        for version in reversed(self.versions()):
            try:
                return self.link(version)
            except BrokenLink:
                continue
        return None

    def link(self, version: int) -> SnapshotLink:
        """Raises BrokenLink."""
        return SnapshotLink.read(self.place(version))

    def chain(self, version: int) -> list[SnapshotLink]:
        """The links that make ``version``, the full one first. Only their ``link.json`` are read.

        Raises BrokenLink naming the one that is missing, torn, or not what the one above it lies on.
        """
        links = [self.link(version)]
        while (base := links[0].base) is not None:
            below = self.link(base[0])
            if below.digest != base[1]:
                reason = f"version {links[0].version} lies on another version {base[0]} (digest {base[1]}) than the one that is here"
                raise BrokenLink(below.version, below.path, reason)
            links.insert(0, below)
        return links

    def draft(self, version: int) -> Path:
        """An empty directory to be published as ``version``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return scratch(self.place(version))

    def publish(self, draft: Path, version: int) -> Path:
        """The finished (and synced) draft appears as ``version``, in place of an older one of that name."""
        publish(draft, self.place(version))
        return self.place(version)

    def forget_after(self, version: int) -> list[int]:
        """Removes versions above this one: a trainer that went back to a checkpoint makes them anew. Returns them."""
        later = [found for found in self.versions() if found > version]
        for found in reversed(later):  # no link ever lies on one that is gone
            _remove(self.place(found))
        return later

    def retain(self, keep: int) -> list[int]:
        """Removes what the newest ``keep`` readable versions are not made of. Returns what it removed, the newest first.

        A directory that cannot be read stays: whoever wrote it may want to know. So does everything while a link of a kept chain is
        missing, for nobody can tell then what that chain was made of.
        """
        readable = []
        for version in self.versions():
            try:
                readable.append(self.link(version))
            except BrokenLink:
                continue
        try:
            needed = {link.version for newest in readable[-keep:] for link in self.chain(newest.version)}
        except BrokenLink:
            return []
        removed = [link.version for link in reversed(readable) if link.version not in needed]
        for version in removed:
            _remove(self.place(version))
        return removed

    def sweep(self) -> None:
        """For the one writer, at its start: ends what an earlier one was killed in."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if (target := replaced_by(path)) is not None and version_of(target) is not None:
                settle(target)
            elif path.name.startswith(".v") and path.name.endswith((".partial", ".removed")):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Takes a link's name away at once: nobody ever sees half of one."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)
