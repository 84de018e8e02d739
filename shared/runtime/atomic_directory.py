"""Directories that appear complete or not at all, through a kill at any instant.

A directory is written under a scratch name beside its place, synced, and renamed. Where an older one stands in the place it
steps aside first; a kill between the two renames leaves it under its ``.replaced`` name, where :func:`settle` finds it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_PARTIAL = ".partial"
_REPLACED = ".replaced"


def scratch(target: Path) -> Path:
    """A new empty directory to be published as ``target``; what an earlier attempt left there is removed."""
    path = target.with_name(f".{target.name}{_PARTIAL}")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def fsync_tree(path: Path) -> None:
    """Bring every file and directory below ``path`` to the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))


def publish(finished: Path, target: Path) -> None:
    """Rename the finished (and synced) directory to ``target``, in place of an older one."""
    settle(target)
    aside = _aside(target)
    if target.exists():
        target.rename(aside)
    finished.rename(target)
    _fsync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def settle(target: Path) -> None:
    """Undo a replacement of ``target`` that was killed half-way: either bring the old one back or finish removing it."""
    aside = _aside(target)
    if not aside.exists():
        return
    if target.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(target)
        _fsync(target.parent)


def replaced_by(path: Path) -> Path | None:
    """The target beside which ``path`` was put aside, or None if ``path`` is not such a directory."""
    if path.name.startswith(".") and path.name.endswith(_REPLACED):
        return path.with_name(path.name[1 : -len(_REPLACED)])
    return None


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}{_REPLACED}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
