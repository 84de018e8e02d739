"""Downloads of a repository's files into the cache, with room checked before and progress shown: a bar on a terminal, else plain lines."""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from shared.data.read_progress import ReadProgress
from shared.hub.hub_client import Hub, HubError, RepositoryListing, Unreachable, require
from shared.hub.hub_names import HubName
from shared.model.hf_checkpoint import TEMPLATE_FOLDER
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import say
from shared.runtime.tasks import run_in_thread

INDEX = "model.safetensors.index.json"

_NEEDED = ("config.json", "tokenizer.json")

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
"""Endings of the files beside the weights: config, tokenizer, chat template, and code that an engine may be allowed to run."""


def model_directory(hub: Hub, name: HubName, *, weights: bool = True) -> Path:
    """Returns the directory of a pinned name's files on this machine; what is not in the cache is downloaded. ``weights``: whether they are
    needed, or config and tokenizer alone.

    Raises HubError: no such repository or file, no network, no room.
    """
    snapshot = hub.snapshot(name)
    if _complete(snapshot, weights):
        return snapshot
    listing = hub.listing(name)
    require("huggingface_hub")
    top = [file for file in listing.files if "/" not in file]
    _check(listing, top)
    templates = [file for file in listing.files if file.startswith(f"{TEMPLATE_FOLDER}/")]
    download(hub, name, listing, [*(file for file in top if file.endswith(_SUFFIXES)), *templates])
    if weights:
        shards = _indexed(snapshot) or (["model.safetensors"] if "model.safetensors" in top else _weights(top))
        if absent := [file for file in shards if file not in listing.files]:
            raise HubError(f"its {INDEX} names {absent[0]}, which the repository does not hold")
        download(hub, name, listing, shards)
    return snapshot


def _complete(snapshot: Path, weights: bool) -> bool:
    """Returns whether the cache holds every file; without a network there is nothing but the cache to go by."""
    if not all((snapshot / file).is_file() for file in _NEEDED):
        return False
    if not weights:
        return True
    shards = _indexed(snapshot)
    return all((snapshot / file).is_file() for file in shards) if shards else any(snapshot.glob("*.safetensors"))


def _indexed(snapshot: Path) -> list[str]:
    """Returns the files that the index names; none where there is no index."""
    path = snapshot / INDEX
    if not path.is_file():
        return []
    try:
        return sorted(set(parse_json(path.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"its {INDEX} is none ({error})") from None


def _weights(top: list[str]) -> list[str]:
    return [file for file in top if file.endswith(".safetensors")]


def _check(listing: RepositoryListing, top: list[str]) -> None:
    """Refuses a repository that holds no model that a run could start from, before anything of it is downloaded."""
    for file in _NEEDED:
        if file not in top:
            raise HubError(f"the repository holds no {file}; give a model in the format of transformers, with a fast tokenizer")
    if not _weights(top):
        others = sorted({Path(file).suffix for file in listing.files if file.endswith((".bin", ".gguf", ".pth", ".pt", ".h5"))})
        held = f" (but {', '.join(others)})" if others else ""
        raise HubError(f"the repository holds no *.safetensors{held}; give a model whose weights have that format")


STALL_SECONDS = 120.0  # The seconds that a download may go without a byte

XET_STALL_SECONDS = 20.0
"""The same for Xet, the hub's storage for large files, whose client retries for minutes: plain HTTP is then used instead."""

_POLL_INTERVAL = 0.1


def download(hub: Hub, name: HubName, listing: RepositoryListing, files: Sequence[str]) -> None:
    """Makes ``files`` lie in the name's snapshot, each of its size in ``listing``. Raises HubError."""
    snapshot = hub.snapshot(name)

    def lacks(file: str) -> bool:
        path, size = snapshot / file, listing.files.get(file)
        return not path.is_file() or size not in (None, path.stat().st_size)

    missing = [file for file in files if lacks(file)]
    if not missing:
        return
    if listing.cached is not None:
        raise listing.cached
    total = sum(listing.files.get(file) or 0 for file in missing)
    directory = next(path for path in (hub.cache, *hub.cache.parents) if path.exists())
    if total > (free := shutil.disk_usage(directory).free):
        raise HubError(f"{decimal(total)} to download, and {directory} has {decimal(free)} free; set HF_HOME to a directory with room")
    _watched(_Transfer(hub, name, missing), f"{name.repo} ({len(missing)} files)", total)
    for file in filter(lacks, missing):
        raise HubError(f"{file} has not come whole: {listing.files.get(file)} bytes were promised; try again")


def _watched(transfer: "_Transfer", what: str, total: int) -> None:
    """Runs a transfer in a thread, which a download that hangs leaves behind. Raises HubError."""
    running = run_in_thread(transfer.run, "download")
    with ReadProgress(f"downloading {what}", total, decimal) as progress:
        while not wait([running], _POLL_INTERVAL).done:
            progress.at(transfer.bytes)
            silent = time.monotonic() - transfer.last_byte_at
            if silent > XET_STALL_SECONDS:
                transfer.leave_xet()
            if silent > STALL_SECONDS:
                raise Unreachable(f"{transfer.hub.endpoint} has sent nothing of {transfer.file} for {STALL_SECONDS:.0f} s")
    if isinstance(failure := running.exception(), Exception):
        raise transfer.hub.in_words(failure, transfer.name) from failure
    if progress.shown:
        say(f"myxo: downloaded {what}: {decimal(total)}")


class _Transfer:
    """A download of several files. ``bytes``: received so far. ``last_byte_at``: monotonic seconds."""

    def __init__(self, hub: Hub, name: HubName, files: list[str]) -> None:
        self.hub, self.name, self._files = hub, name, files
        self.bytes, self.file, self.last_byte_at = 0, files[0], time.monotonic()
        self._over_xet = False

    def run(self) -> None:
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # its warnings of retries would stand between our lines
        for file in self._files:
            self.file = file
            self._over_xet, before = not constants.HF_HUB_DISABLE_XET, self.bytes
            try:
                self._fetch()
            except (EntryNotFoundError, HfHubHTTPError, httpx.HTTPError):
                raise
            except Exception as error:
                if not self._over_xet or getattr(error, "errno", None) is not None:
                    raise
                # a firewall may block Xet, and the hub itself has all files, too
                say(f"myxo: {self.file}: {type(error).__name__}; once more over plain HTTP")
                constants.HF_HUB_DISABLE_XET, self._over_xet, self.bytes = True, False, before
                self._fetch()

    def leave_xet(self) -> None:
        """Ends a download over Xet, which then begins again over plain HTTP; leaves any other download alone."""
        if self._over_xet:
            from huggingface_hub.utils import _xet

            _xet.abort_xet_session()

    def _fetch(self) -> None:
        from huggingface_hub import hf_hub_download

        self.last_byte_at = time.monotonic()
        hf_hub_download(
            self.name.repo,
            self.file,
            repo_type=self.name.kind,
            revision=self.name.commit,
            cache_dir=self.hub.cache,
            endpoint=self.hub.endpoint,
            force_download=Path(self.hub.snapshot(self.name), self.file).exists(),  # it is there, and of another size
            tqdm_class=_meter(self),
        )

    def received(self, size: float, count: bool = True) -> None:
        """Takes note of bytes that came; ``count``: whether they are new to `bytes`."""
        if size:
            self.bytes += int(size) * count
            self.last_byte_at = time.monotonic()


def _meter(transfer: _Transfer) -> type[Any]:
    """Returns the progress bar that huggingface_hub is given: it shows nothing and counts into ``transfer``."""
    from tqdm import tqdm

    class Meter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{key: value for key, value in options.items() if key != "name"} | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            transfer.received(n or 0)
            return None

        def update_transfer(self, n: float | None = 1) -> None:
            """Takes bytes over the network, which `update` counts as well."""
            transfer.received(n or 0, count=False)

    return Meter
