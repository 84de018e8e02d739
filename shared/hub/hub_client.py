"""The hub itself, through huggingface_hub: what a repository holds, where its files lie in the cache, and why it could not be reached;
downloads, with room checked before and progress shown: a bar on a terminal, else plain lines.
"""

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from shared.data.rows import ReadProgress
from shared.hub.hub_names import HubName
from shared.model.hf_checkpoint import TEMPLATE_FOLDER
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import say
from shared.runtime.tasks import run_in_thread

REQUEST_SECONDS = 4.0  # The seconds that the hub may stay silent in one request about a repository
ANSWER_SECONDS = 6.0  # The seconds that such a request may take in all, including a slow look-up of the hub's address and a second try

RETRY_SECONDS = 1.0

_BUSY = (429, 500, 502, 503, 504)
_NO_ROOM = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT)


class HubError(MyxoError):
    """A name cannot be used; the message goes behind its field and value."""


class Unreachable(HubError):
    """The hub did not answer, or is not to be asked."""


class NoSuchRepository(HubError):
    """The hub has no repository of that name, or none that this account may see."""


@dataclass(frozen=True)
class RepositoryListing:
    """The files of a repository at a commit: file → bytes, None where the hub does not say. ``cached``: why nothing can be downloaded
    beyond what this machine holds; None where it can."""

    commit: str
    files: dict[str, int | None]
    cached: Unreachable | None = None


@dataclass(frozen=True)
class Hub:
    """One hub and the cache of this machine.

    Args:
        endpoint: the hub's URL. home, cache: where files are kept; ``home`` holds what is made of them. offline: whether the network must
            not be used. listings: the repositories seen so far, by kind, repository, and revision or commit.
    """

    endpoint: str
    home: Path
    cache: Path
    offline: bool
    listings: dict[tuple[str, str, str], RepositoryListing] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Hub":
        """Reads ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` in the same way as huggingface_hub."""
        home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"
        offline = (environment.get("HF_HUB_OFFLINE") or "").upper() in ("1", "ON", "YES", "TRUE")
        endpoint = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        return cls(endpoint, Path(home).expanduser().absolute(), Path(cache).expanduser().absolute(), offline)

    def storage(self, name: HubName) -> Path:
        """Returns the directory in which the cache keeps a repository."""
        return self.cache / f"{name.kind}s--{name.repo.replace('/', '--')}"

    def snapshot(self, name: HubName) -> Path:
        """Returns the directory of a pinned name's files, as far as they are there."""
        assert name.commit is not None
        return self.storage(name) / "snapshots" / name.commit

    def cached_commit(self, name: HubName) -> str | None:
        """Returns the commit that the revision had when this cache last got it."""
        ref = self.storage(name) / "refs" / name.revision
        return ref.read_text().strip() if ref.is_file() else None

    def remember(self, name: HubName) -> None:
        """Notes in the cache which commit a revision has, where the hub has just said so or nothing is noted: the name can then be read
        without a network. A cache that cannot be written does without."""
        assert name.commit is not None
        noted, current = self.cached_commit(name), self.listings.get((name.kind, name.repo, name.revision))
        if name.commit not in (name.revision, noted) and (noted is None or (current is not None and current.commit == name.commit)):
            ref = self.storage(name) / "refs" / name.revision
            with contextlib.suppress(OSError):
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(name.commit)

    def commit(self, name: HubName) -> str:
        """Returns the commit of the name's revision, that of the cache where the hub cannot be reached. Raises HubError."""
        try:
            return self.listing(name).commit
        except Unreachable:
            if (cached := self.cached_commit(name)) is None:
                raise
            return cached

    def listing(self, name: HubName) -> RepositoryListing:
        """Returns what the repository holds now, or at the name's commit. Raises Unreachable, HubError."""
        asked = name.commit or name.revision
        if (known := self.listings.get((name.kind, name.repo, asked))) is not None:
            return known
        if self.offline:
            raise Unreachable("HF_HUB_OFFLINE is set")
        require("huggingface_hub")
        info = self._info(name, asked)
        if not info.sha:
            raise HubError(f"{self.endpoint} names no commit of it")
        files = {file.rfilename: file.size for file in info.siblings or []}
        if unsafe := [path for path in files if path.startswith("/") or ".." in path.split("/")]:
            raise HubError(f"the repository has a file called {unsafe[0]!r}")
        found = RepositoryListing(info.sha, files)
        self.listings[name.kind, name.repo, asked] = self.listings[name.kind, name.repo, found.commit] = found
        return found

    def _info(self, name: HubName, revision: str) -> Any:
        from huggingface_hub import HfApi

        def ask() -> Any:
            api = HfApi(endpoint=self.endpoint)
            return api.repo_info(name.repo, repo_type=name.kind, revision=revision, files_metadata=True, timeout=REQUEST_SECONDS)

        end = time.monotonic() + ANSWER_SECONDS
        while True:
            left = max(end - time.monotonic(), 0.1)
            asking = run_in_thread(ask, "hub")  # the look-up of a hub's address has no deadline of its own
            try:
                return asking.result(left)
            except Exception as error:  # whatever the library and those below it raise is reported in words
                if not asking.done():
                    raise self.in_words(TimeoutError(f"no answer within {left:.0f} s"), name) from None
                if getattr(getattr(error, "response", None), "status_code", None) not in _BUSY or time.monotonic() + RETRY_SECONDS > end:
                    raise self.in_words(error, name) from error
                time.sleep(RETRY_SECONDS)

    def noted_listing(self, name: HubName) -> RepositoryListing:
        """Returns `listing`, or without a network what huggingface_hub has noted of a repository that it downloaded as a whole."""
        assert name.commit is not None
        try:
            return self.listing(name)
        except Unreachable as unreachable:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads((self.storage(name) / "trees" / f"{name.commit}.json").read_text())["files"]
                return RepositoryListing(name.commit, {path: entry["size"] for path, entry in noted.items()}, unreachable)
            raise

    def in_words(self, error: Exception, name: HubName) -> HubError:
        """Returns the error that tells a person what went wrong with a repository, and what would help."""
        import httpx
        from huggingface_hub import errors, get_token

        what, where, has_token = f"{name.kind} {name.repo}", self.endpoint, get_token() is not None
        status = getattr(getattr(error, "response", None), "status_code", None)
        match error:
            case HubError():
                return error
            case errors.GatedRepoError():
                token = "the account of HF_TOKEN has no access" if has_token else "no HF_TOKEN is set"
                page = name.repo if name.kind == "model" else f"datasets/{name.repo}"
                return HubError(f"gated, and {token}: accept its terms at {where}/{page} and set HF_TOKEN to that account's")
            case errors.RevisionNotFoundError():
                return HubError(f"the {what} has no revision {name.revision!r} on {where}")
            case errors.RepositoryNotFoundError() | errors.HFValidationError():
                private = "or the account of HF_TOKEN may not see it" if has_token else "or it is private: then set HF_TOKEN"
                return NoSuchRepository(f"there is no {what} on {where} ({private})")
            case errors.HfHubHTTPError() if status == 401:
                return HubError(f"{where} refuses the HF_TOKEN given for {what}; set a valid one, or none")
            case errors.HfHubHTTPError() if status is not None and status < 500:
                return HubError(f"{where} answers {status} for {what}: {one_line(error)}")
            case OSError() if error.errno in _NO_ROOM:
                return HubError(f"cannot be written to the cache {self.cache}: {error.strerror}; set HF_HOME to a directory with room")
            case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
                return self.in_words(error.__cause__, name)
            case errors.HfHubHTTPError() | httpx.HTTPError() | TimeoutError() | ConnectionError() | errors.LocalEntryNotFoundError():
                return Unreachable(f"{where} cannot be reached ({one_line(error)})")
            case _:
                return HubError(f"cannot be read from {where}: {one_line(error)}")


def require(module: str) -> None:
    """Raises HubError where a package that names need is not installed."""
    if importlib.util.find_spec(module) is None:
        raise HubError(f"names on the hub need {module}: pip install 'myxo[hub]', or give a path")


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns an error's text in one line of at most ``limit`` characters and a mark."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " …"


INDEX = "model.safetensors.index.json"

_NEEDED = ("config.json", "tokenizer.json")  # They come last, so that where they are, all files but the weights are

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
    beside = [*(file for file in top if file.endswith(_SUFFIXES)), *templates]
    download(hub, name, listing, sorted(beside, key=lambda file: file in _NEEDED))
    if weights:
        shards = _indexed(snapshot) or (["model.safetensors"] if "model.safetensors" in top else _weights(top))
        if absent := [file for file in shards if file not in listing.files]:
            raise HubError(f"its {INDEX} names {absent[0]}, which the repository does not hold")
        download(hub, name, listing, shards)
    return snapshot


def _complete(snapshot: Path, weights: bool) -> bool:
    """Returns whether the cache holds every file; without a network there is nothing but the cache to go by."""
    needed = (*_NEEDED, *(_indexed(snapshot) if weights else ()))
    return all((snapshot / file).is_file() for file in needed) and (not weights or any(snapshot.glob("*.safetensors")))


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
