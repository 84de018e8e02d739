"""Files of a repository into the cache, with room checked before and progress shown: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shared.hub.hub_client import Hub, HubError, RepositoryListing, Unreachable
from shared.hub.hub_names import HubName

STALL_SECONDS = 120.0
"""How long a download may go without a byte."""

XET_STALL_SECONDS = 20.0
"""The same for Xet, the hub's storage for large files, whose client tries for minutes: then it is given up for plain HTTP."""

LINE_SECONDS = 10.0
"""How often a line tells how far a download has got."""

PATIENCE_SECONDS = 1.0
"""What has come sooner is not told."""

_LOOK_SECONDS = 0.1


def download(hub: Hub, name: HubName, listing: RepositoryListing, files: Sequence[str]) -> None:
    """Makes ``files`` lie in the name's snapshot, each of its size in ``listing``. Raises HubError."""
    snapshot = hub.snapshot(name)
    wanted = {file: listing.files.get(file) for file in files}
    missing = [file for file, size in wanted.items() if not _whole(snapshot / file, size)]
    if not missing:
        return
    if listing.cached is not None:
        raise listing.cached
    total = sum(wanted[file] or 0 for file in missing)
    _check_room(hub, total)
    transfer = _Transfer(hub, name, missing)
    thread = threading.Thread(target=transfer.run, daemon=True)  # one that hangs must not keep the process
    shown = _Shown(f"{name.repo} ({len(missing)} files)", total)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if thread.is_alive():
                shown.show(transfer.bytes)
            silent = time.monotonic() - transfer.moved
            if silent > XET_STALL_SECONDS:
                transfer.leave_xet()
            if silent > STALL_SECONDS:
                raise Unreachable(f"{hub.endpoint} has sent nothing of {transfer.file} for {STALL_SECONDS:.0f} s")
    finally:
        shown.close(transfer.failure is None and not thread.is_alive())
    if transfer.failure is not None:
        raise hub.in_words(transfer.failure, name) from transfer.failure
    for file in missing:
        if not _whole(snapshot / file, wanted[file]):
            raise HubError(f"{file} has not come whole: {wanted[file]} bytes were promised; try again")


def _whole(path: Any, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _check_room(hub: Hub, total: int) -> None:
    place = hub.cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if total > free:
        raise HubError(f"{_size(total)} to download, and {place} has {_size(free)} free; set HF_HOME to a directory with room")


class _Transfer:
    """The download in its thread. ``bytes``: so far. ``moved``: when the last of them came. ``failure``: what ended it."""

    def __init__(self, hub: Hub, name: HubName, files: list[str]) -> None:
        self._hub, self._name, self._files = hub, name, files
        self.bytes, self.file, self.moved = 0, files[0], time.monotonic()
        self.failure: Exception | None = None
        self._over_xet = False

    def run(self) -> None:
        try:
            from huggingface_hub.utils import logging

            logging.set_verbosity_error()  # its warnings of retries would stand between our lines
            for file in self._files:
                self.file, self.moved = file, time.monotonic()
                self._fetch(file)
        except Exception as error:  # the thread that waits for this one tells it
            self.failure = error

    def _fetch(self, file: str) -> None:
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        self._over_xet, before = not constants.HF_HUB_DISABLE_XET, self.bytes
        try:
            self._get(file)
        except (EntryNotFoundError, HfHubHTTPError, httpx.HTTPError):
            raise
        except Exception as error:
            if not self._over_xet or getattr(error, "errno", None) is not None:
                raise
            # a firewall may keep Xet away, and the hub itself has all files, too
            print(f"myxo: {file}: {type(error).__name__}; once more over plain HTTP", file=sys.stderr, flush=True)
            constants.HF_HUB_DISABLE_XET, self._over_xet = True, False
            self.bytes, self.moved = before, time.monotonic()
            self._get(file)

    def leave_xet(self) -> None:
        """Ends a download over Xet, which begins again over plain HTTP; of any other nothing."""
        if self._over_xet:
            from huggingface_hub.utils import _xet

            _xet.abort_xet_session()

    def _get(self, file: str) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self._name.repo,
            file,
            repo_type=self._name.kind,
            revision=self._name.commit,
            cache_dir=self._hub.cache,
            endpoint=self._hub.endpoint,
            force_download=(self._hub.snapshot(self._name) / file).exists(),  # there, and of another size
            tqdm_class=_meter(self),
        )

    def count(self, size: float) -> None:
        if size:
            self.bytes += int(size)
            self.moved = time.monotonic()


def _meter(transfer: _Transfer) -> type[Any]:
    """The progress bar that huggingface_hub is given: it shows nothing and counts into ``transfer``."""
    from tqdm import tqdm

    class Meter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{key: value for key, value in options.items() if key != "name"} | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            transfer.count(n or 0)
            return None

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes over the network, of what `update` counts as well."""
            if n:
                transfer.moved = time.monotonic()

    return Meter


class _Shown:
    """A bar or lines on standard error, for what takes long enough."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._bar: Progress | None = None
        self._next = time.monotonic() + PATIENCE_SECONDS
        self._begun = False

    def show(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            self._begun = True
            if sys.stderr.isatty():
                self._bar = self._started()
            else:
                self._tell(f"downloading {self._what}: {_size(done)} of {_size(self._total)}")

    def _started(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(f"downloading {self._what}", total=self._total or None)
        bar.start()
        return bar

    def close(self, done: bool) -> None:
        if self._bar is not None:
            self._bar.stop()
        if done and self._begun:
            self._tell(f"downloaded {self._what}: {_size(self._total)}")

    def _tell(self, line: str) -> None:
        print(f"myxo: {line}", file=sys.stderr, flush=True)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
