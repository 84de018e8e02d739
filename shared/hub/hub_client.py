"""The hub itself, through huggingface_hub: what a repository holds, where its files lie in the cache, and why it could not be reached."""

import contextlib
import errno
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.hub.hub_names import HubName
from shared.runtime.errors import MyxoError
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
