"""Which ranks see the same checkpoint directory: all of them on a shared file system, those of one node on its own disk."""

import secrets
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.trainer.megatron.runtime import deadline, gather_json, together


@dataclass(frozen=True)
class Places:
    """The directories that the ranks write to.

    Args:
        leaders: by rank, the lowest rank that sees the same directory. hosts: by rank, the name of its machine.
    """

    leaders: tuple[int, ...]
    hosts: tuple[str, ...]

    @cached_property
    def directories(self) -> list[list[int]]:
        """Returns the ranks of each directory, that of rank 0 first."""
        return [[rank for rank, leader in enumerate(self.leaders) if leader == each] for each in sorted(set(self.leaders))]

    @property
    def shared(self) -> bool:
        """Returns whether all ranks see one directory."""
        return len(self.directories) == 1

    def directory_of(self, rank: int) -> int:
        """Returns the index of a rank's directory."""
        return sorted(set(self.leaders)).index(self.leaders[rank])

    def as_json(self) -> list[dict[str, Any]]:
        """Returns each directory's ranks and their machine, for a checkpoint's marker."""
        return [{"host": self.hosts[ranks[0]], "ranks": ranks} for ranks in self.directories]


def alone() -> Places:
    """Returns the place of a world of one."""
    return Places((0,), (socket.gethostname(),))


def find_places(root: Path) -> Places:
    """Finds out which ranks see the same directory ``root``, which is made if need be. A collective of all ranks. Raises OSError.

    Every rank makes a file there and looks for the others': host names and mount points would not tell.
    """
    if dist.get_world_size() == 1:
        root.mkdir(parents=True, exist_ok=True)
        return alone()
    what = f"the look at {root}"
    with deadline(what):
        attempt = gather_json(secrets.token_hex(8))[0]
    own = _mark(root, attempt, dist.get_rank())
    try:
        with together(what):
            root.mkdir(parents=True, exist_ok=True)
            own.touch()
        leader = next(rank for rank in range(dist.get_world_size()) if _mark(root, attempt, rank).exists())
        with deadline(what):  # also: no rank removes its file before all have looked
            found = gather_json([leader, socket.gethostname()])
    finally:
        own.unlink(missing_ok=True)
    return Places(tuple(leader for leader, _ in found), tuple(host for _, host in found))


def _mark(root: Path, attempt: str, rank: int) -> Path:
    return root / f".seen_{attempt}_{rank}"
