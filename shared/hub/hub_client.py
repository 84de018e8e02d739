"""The hub itself through huggingface_hub: what a repository holds, where its files lie in the cache, and why it could not be reached."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shared.hub.hub_names import HubName
from shared.runtime.errors import MyxoError

Result = TypeVar("Result")

REQUEST_SECONDS = 4.0
"""How long the hub may keep silent in one request about a repository."""

ANSWER_SECONDS = 6.0
"""How long such a question may take in all, a slow look-up of the hub's address and a second try among it."""

RETRY_SECONDS = 1.0

_BUSY = (429, 500, 502, 503, 504)


class HubError(MyxoError):
    """Why a name cannot be used, in words that go behind its field and value."""


class Unreachable(HubError):
    """The hub did not answer, or is not to be asked."""


class NoSuchRepository(HubError):
    """The hub has none of that name, or none for this account."""


@dataclass(frozen=True)
class RepositoryListing:
    """What a repository holds at a commit: file → bytes, None where the hub does not say. ``cached``: why nothing more of it can be had
    than what this machine holds, None where it can."""

    commit: str
    files: dict[str, int | None]
    cached: Unreachable | None = None


@dataclass(frozen=True)
class Hub:
    """One hub and the cache of this machine.

    Args:
        endpoint: the hub's URL. home, cache: where files are kept; ``home`` for what is made of them. offline: whether the network is not
            to be used. listings: what was seen of repositories so far, by kind, repository and commit. current: the commits that
            revisions had when the hub was asked for them.
    """

    endpoint: str
    home: Path
    cache: Path
    offline: bool
    listings: dict[tuple[str, str, str], RepositoryListing] = field(default_factory=dict)
    current: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Hub:
        """As ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` say; huggingface_hub reads them the same way."""
        caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(environment.get("HF_HOME") or f"{caches}/huggingface").expanduser().absolute()
        cache = environment.get("HF_HUB_CACHE")
        offline = (environment.get("HF_HUB_OFFLINE") or "").upper() in ("1", "ON", "YES", "TRUE")
        endpoint = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        return cls(endpoint, home, Path(cache).expanduser().absolute() if cache else home / "hub", offline)

    def storage(self, name: HubName) -> Path:
        """Where the cache keeps a repository."""
        return self.cache / f"{name.kind}s--{name.repo.replace('/', '--')}"

    def snapshot(self, name: HubName) -> Path:
        """Where the files of a pinned name lie, as far as they are there."""
        assert name.commit is not None
        return self.storage(name) / "snapshots" / name.commit

    def cached_commit(self, name: HubName) -> str | None:
        """The commit that the revision had when this cache last got it."""
        ref = self.storage(name) / "refs" / name.revision
        return ref.read_text().strip() if ref.is_file() else None

    def remember(self, name: HubName) -> None:
        """Notes in the cache which commit a revision has, so that the name can be read without a network: where the hub has just said so,
        or nothing is noted. A cache that cannot be written does without."""
        assert name.commit is not None
        noted, said = self.cached_commit(name), self.current.get((name.kind, name.repo, name.revision))
        if name.commit not in (name.revision, noted) and (noted is None or said == name.commit):
            ref = self.storage(name) / "refs" / name.revision
            with contextlib.suppress(OSError):
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(name.commit)

    def look(self, name: HubName) -> RepositoryListing:
        """What the repository holds now, or at the name's commit. Raises Unreachable, HubError."""
        known = self.listings.get((name.kind, name.repo, name.commit or ""))
        if known is not None:
            return known
        if self.offline:
            raise Unreachable("HF_HUB_OFFLINE is set")
        require("huggingface_hub")
        found = self._asked(name)
        self.listings[name.kind, name.repo, found.commit] = found
        if name.commit is None:
            self.current[name.kind, name.repo, name.revision] = found.commit
        return found

    def _asked(self, name: HubName) -> RepositoryListing:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        ask = api.model_info if name.kind == "model" else api.dataset_info

        def answer() -> Any:
            return ask(name.repo, revision=name.commit or name.revision, files_metadata=True, timeout=REQUEST_SECONDS)

        end = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                info = within(max(end - time.monotonic(), 0.1), answer)
                break
            except Exception as error:  # whatever the library and what it builds on raise, told in words
                if getattr(getattr(error, "response", None), "status_code", None) in _BUSY and time.monotonic() + RETRY_SECONDS < end:
                    time.sleep(RETRY_SECONDS)
                    continue
                raise self.in_words(error, name) from error
        if not info.sha:
            raise HubError(f"{self.endpoint} names no commit of it")
        files = {file.rfilename: file.size for file in info.siblings or []}
        unsafe = [path for path in files if path.startswith("/") or ".." in path.split("/")]
        if unsafe:
            raise HubError(f"the repository has a file called {unsafe[0]!r}")
        return RepositoryListing(info.sha, files)

    def cached_listing(self, name: HubName, reason: Unreachable) -> RepositoryListing | None:
        """What huggingface_hub has noted of a whole repository that it downloaded; None where it has not. ``reason``: why it is of use."""
        assert name.commit is not None
        try:
            noted = json.loads((self.storage(name) / "trees" / f"{name.commit}.json").read_text())["files"]
            return RepositoryListing(name.commit, {path: entry["size"] for path, entry in noted.items()}, reason)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def in_words(self, error: Exception, name: HubName) -> HubError:
        """What went wrong with a repository, and what would help."""
        import httpx
        from huggingface_hub import errors

        what, where = f"{name.kind} {name.repo}", self.endpoint
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        match error:
            case HubError():
                return error
            case errors.GatedRepoError():
                token = "the account of HF_TOKEN has no access" if _has_token() else "no HF_TOKEN is set"
                return HubError(f"gated, and {token}: accept its terms at {where}/{_page(name)} and set HF_TOKEN to that account's")
            case errors.RevisionNotFoundError():
                return HubError(f"the {what} has no revision {name.revision!r} on {where}")
            case errors.RepositoryNotFoundError() | errors.HFValidationError():
                private = "or the account of HF_TOKEN may not see it" if _has_token() else "or it is private: then set HF_TOKEN"
                return NoSuchRepository(f"there is no {what} on {where} ({private})")
            case errors.HfHubHTTPError() if status == 401:
                return HubError(f"{where} refuses the HF_TOKEN given for {what}; set a valid one, or none")
            case errors.HfHubHTTPError() if status is not None and status < 500:
                return HubError(f"{where} answers {status} for {what}: {_line(error)}")
            case OSError(errno=errno.ENOSPC | errno.EACCES | errno.EROFS | errno.EDQUOT):
                return HubError(f"cannot be written to the cache {self.cache}: {error.strerror}; set HF_HOME to a directory with room")
            case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
                return self.in_words(error.__cause__, name)
            case errors.HfHubHTTPError() | httpx.HTTPError() | TimeoutError() | ConnectionError() | errors.LocalEntryNotFoundError():
                return Unreachable(f"{where} cannot be reached ({_line(error)})")
            case _:
                return HubError(f"cannot be read from {where}: {_line(error)}")


def require(module: str) -> None:
    """Raises HubError where a package that names need is not installed."""
    if importlib.util.find_spec(module) is None:
        raise HubError(f"names on the hub need {module}: pip install 'myxo[hub]', or give a path")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What ``call`` returns or raises. Raises TimeoutError when it takes longer, and leaves its thread to end by itself: looking up the
    address of a hub has no deadline of its own."""
    answers: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return answers[0]


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _page(name: HubName) -> str:
    return name.repo if name.kind == "model" else f"datasets/{name.repo}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " …"
