"""A directory that all ranks write together, in the background if wanted, and that appears when all of them have written their parts.

A thread of each rank writes its part without a collective, so that training may continue meanwhile. The threads report to one another
through the store by which the ranks have met: any disk will do. Where ranks see different directories, each directory has a leader. Rank
0 leads all: the others' directories appear first and its own last, which is the moment from which the whole counts. Only then is anything
older removed, so that a death at any instant leaves the older one everywhere, or the newer one.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from services.trainer.parallel.runtime import deadline, gather_json, together
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.tasks import log_error


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

    def as_json(self) -> list[dict[str, Any]]:
        """Returns each directory's ranks and their machine, for a checkpoint's marker."""
        return [{"host": self.hosts[ranks[0]], "ranks": ranks} for ranks in self.directories]


def alone() -> Places:
    """Returns the place of a world of one."""
    return Places((0,), (socket.gethostname(),))


def find_places(root: Path) -> Places:
    """Finds out which ranks see the same directory ``root``, which is made if need be. A collective of all ranks. Raises OSError.

    Every rank makes a file there and looks for the others': host names and mount points do not decide it.
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


@dataclass(frozen=True)
class HeldPart:
    """A part of a checkpoint that a rank holds.

    Args:
        nbytes: its size. main: whether it is one of those parts that together make up the whole without overlap. Others repeat, cut in
            another way perhaps, what another rank holds: a tied embedding is on the first and on the last pipeline stage.
    """

    nbytes: int
    main: bool = True


@dataclass
class Elected:
    """The parts, by name, that a rank writes: ``main`` ones, and ``copies`` that its directory would otherwise lack."""

    main: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)


def elect(held: Sequence[Mapping[str, HeldPart]], directories: Sequence[Sequence[int]]) -> list[Elected]:
    """Returns what each rank writes. All ranks find the same.

    Args:
        held: by rank, the parts that it holds by their names; a part of one name is the same on all ranks.
        directories: the ranks that see each directory; the first one's are those that share rank 0's.
    """
    elected = [Elected() for _ in held]
    for number, ranks in enumerate(directories):
        mains, copies = dict[str, list[int]](), dict[str, list[int]]()
        for rank in ranks:
            for name, part in held[rank].items():
                (mains if part.main else copies).setdefault(name, []).append(rank)
        size = {name: held[holders[0]][name].nbytes for name, holders in (mains | copies).items()}
        load = dict.fromkeys(ranks, 0)
        for name in sorted(mains, key=lambda name: (len(mains[name]) > 1, -size[name], name)):  # what only one can write, first
            load[writer := _least_loaded(mains[name], load)] += size[name]
            elected[writer].main.add(name)
        for name in sorted(copies.keys() - mains.keys()) if number else ():
            load[writer := _least_loaded(copies[name], load)] += size[name]
            elected[writer].copies.add(name)
    return elected


def _least_loaded(ranks: Sequence[int], load: Mapping[int, int]) -> int:
    return min(ranks, key=lambda rank: (load[rank], rank))


_FULL_BYTES = 16 << 20  # A disk with less room than this, once a write has failed, counts as full
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 60.0


class SaveFailed(MyxoError):
    """A checkpoint or an export could not be written; the ones before it stand."""


class WrittenTogether(Protocol):
    """The parts of what is written. Each method is called on a thread of its own rank, and none is a collective.

    Attributes:
        target: what appears. partial: the directory that is written meanwhile.
    """

    target: Path
    partial: Path

    def write(self) -> Any:
        """Writes this rank's part. Returns JSON data about it."""

    def beside(self, everyone: list[Any]) -> list[bytes]:
        """Returns, on rank 0, for each directory what its leader needs to complete it, given what `write` returned on each rank."""

    def publish(self, content: bytes) -> None:
        """Completes this leader's directory and makes it appear. ``content``: its share of what `beside` returned."""

    def tidy(self) -> None:
        """Removes what the new directory replaces. It is called on leaders once all directories have appeared."""


class _Abandoned(Exception):
    """Another rank has failed, and says so itself."""


class JointWrite:
    """Something on its way to the disk. All ranks construct it together.

    Args:
        what: names it in errors. parts: this rank's. places: the ranks' directories. next_action: what happens if it fails, for errors.
        timeout_seconds: how long ranks wait for one another's parts.
    """

    def __init__(self, what: str, parts: WrittenTogether, places: Places, next_action: str, timeout_seconds: float) -> None:
        self.target = parts.target
        self._what, self._parts, self._places, self._next, self._timeout = what, parts, places, next_action, timeout_seconds
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        with deadline(f"the beginning of {what}"):
            attempt = gather_json(secrets.token_hex(8))[0]
        self._store = PrefixStore(f"myxo_write_{attempt}", _get_default_store())
        self._error: Exception | None = None
        self._failed_in = "written"
        self._appeared = False
        # no daemon: a process that ends without an error ends after its checkpoint is complete
        self._thread = threading.Thread(target=self._work, name=f"write {self.target.name}")
        self._thread.start()

    def finish(self) -> Path:
        """Waits until it has appeared, and returns where. This is a collective of all ranks.

        Raises:
            SaveFailed: it could not be written, on whichever rank; the text names rank and cause.
            DeadlineExceeded, PeerLost: a rank was too slow, or went away.
        """
        writing = f"writing {self._what}"
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise DeadlineExceeded(writing, "the disk", self._timeout, self._next)
        with deadline(writing):
            everyone = gather_json([self._cause(), self._failed_in])
        failed = [f"rank {rank}: {cause}" for rank, (cause, _) in enumerate(everyone) if cause]
        if failed:
            verb = next(verb for cause, verb in everyone if cause)
            raise SaveFailed(f"{self._what} could not be {verb}; {'; '.join(failed)}; {self._next}") from self._error
        return self.target

    def _cause(self) -> str | None:
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def _work(self) -> None:
        result: Any = None
        with self._noted():
            result = self._parts.write()
        with self._noted():
            self._tell(f"written_{self._rank}", {"error": self._cause(), "result": result})
        if self._rank == self._places.leaders[self._rank]:
            with self._noted():
                self._lead() if self._rank == 0 else self._follow()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Keeps an error of the body: this rank reports it in `finish`, which may be many steps away."""
        try:
            yield
        except _Abandoned:
            pass
        except Exception as error:
            if self._error is None:
                self._error = _attributed(error, self._parts.partial)
                log_error("save_failed", self._what, self._error)

    def _lead(self) -> None:
        outcome, others = "failed", [ranks[0] for ranks in self._places.directories[1:]]
        try:
            everyone = self._reported("written", range(self._world), "the parts")
            contents = self._parts.beside(everyone)
            for leader, content in zip(others, contents[1:], strict=True):
                self._store.set(f"beside_{leader}", content)  # type: ignore[arg-type]  # it takes bytes; its stub says text
            self._failed_in = "published"
            self._reported("published", others, "the directories")
            self._parts.publish(contents[0])
            outcome = "complete"
            if others:
                self._store.set("outcome", outcome)
            self._parts.tidy()
        finally:
            if outcome == "failed":
                if others:
                    self._store.set("outcome", outcome)
                self._discard()

    def _follow(self) -> None:
        outcome, own = "failed", f"beside_{self._rank}"
        try:
            self._wait(lambda: self._store.check([own]) or self._store.check(["outcome"]), "the index", "rank 0")
            if self._store.check([own]):
                with self._noted():
                    self._failed_in = "published"
                    self._parts.publish(self._store.get(own))
                    self._appeared = True
                self._store.delete_key(own)
                self._tell(f"published_{self._rank}", {"error": self._cause(), "result": None})
                self._wait(lambda: self._store.check(["outcome"]), "the outcome", "rank 0")
            outcome = self._store.get("outcome").decode()
            if outcome == "complete":
                self._parts.tidy()
        finally:
            if outcome == "failed":
                self._discard()

    def _discard(self) -> None:
        """Removes what was written: on a disk that is full, others need the room."""
        shutil.rmtree(self._parts.partial, ignore_errors=True)
        if self._appeared:
            shutil.rmtree(self.target, ignore_errors=True)

    def _tell(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _reported(self, event: str, ranks: range | list[int], what: str) -> list[Any]:
        """Returns what these ranks have reported of an event. Raises _Abandoned where one of them failed, after all have reported."""
        keys = {rank: f"{event}_{rank}" for rank in ranks}
        waiting = dict(keys)

        def arrived() -> bool:
            for rank, key in list(waiting.items()):
                if not self._store.check([key]):
                    return False
                del waiting[rank]
            return True

        self._wait(arrived, f"{what} of {self._what}", lambda: f"ranks {sorted(waiting)}")
        reported = [json.loads(self._store.get(key)) for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        if any(each["error"] for each in reported):
            raise _Abandoned
        return [each["result"] for each in reported]

    def _wait(self, there: Callable[[], bool], what: str, awaited_from: str | Callable[[], str]) -> None:
        ends, leaving = time.monotonic() + self._timeout, False
        while not there():
            if not leaving and not threading.main_thread().is_alive():  # this process ends: the other ranks end too, or are dead
                leaving, ends = True, min(ends, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > ends:
                named = awaited_from if isinstance(awaited_from, str) else awaited_from()
                raise DeadlineExceeded(what, named, self._timeout, self._next)
            time.sleep(_POLL_SECONDS)


def _attributed(error: Exception, directory: Path) -> Exception:
    """Returns the error of writing into a directory, or where its disk is full an OSError that says so: torch names a wrong position."""
    full = not isinstance(error, OSError) and directory.is_dir() and shutil.disk_usage(directory).free < _FULL_BYTES
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({error})", str(directory)) if full else error
