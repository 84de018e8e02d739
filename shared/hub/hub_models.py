"""Models from the hub: which files of a repository a run needs, and a directory that holds them."""

from __future__ import annotations

import json
from pathlib import Path

from shared.hub.hub_client import Hub, HubError, RepositoryListing, require
from shared.hub.hub_download import download
from shared.hub.hub_names import HubName

INDEX = "model.safetensors.index.json"

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
"""Of the files beside the weights: config, tokenizer, chat template, and code that an engine may be allowed to run."""


def directory(hub: Hub, name: HubName, *, weights: bool = True) -> Path:
    """The files of a pinned name on this machine, downloaded where they are not in the cache.

    Args:
        weights: whether the weights are needed, or config and tokenizer alone.

    Raises HubError: no such repository or file, no network, no room.
    """
    snapshot = hub.snapshot(name)
    if not _missing(snapshot, weights):
        return snapshot
    listing = hub.look(name)
    require("huggingface_hub")
    _check(listing)
    beside = [file for file in listing.files if "/" not in file and file.endswith(_SUFFIXES)]
    download(hub, name, listing, beside)
    if weights:
        shards = _indexed(snapshot) or _without_index(listing)
        absent = [file for file in shards if file not in listing.files]
        if absent:
            raise HubError(f"its {INDEX} names {absent[0]}, which the repository does not hold")
        download(hub, name, listing, shards)
    return snapshot


def _missing(snapshot: Path, weights: bool) -> bool:
    """Whether the cache lacks a file; without a network there is nothing but this to go by."""
    if not all((snapshot / file).is_file() for file in ("config.json", "tokenizer.json")):
        return True
    if not weights:
        return False
    shards = _indexed(snapshot)
    return not (all((snapshot / file).is_file() for file in shards) if shards else any(snapshot.glob("*.safetensors")))


def _indexed(snapshot: Path) -> list[str]:
    """The files that the index names; none where there is no index."""
    path = snapshot / INDEX
    if not path.is_file():
        return []
    try:
        return sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"its {INDEX} is none ({error})") from None


def _without_index(listing: RepositoryListing) -> list[str]:
    found = [file for file in listing.files if "/" not in file and file.endswith(".safetensors")]
    return ["model.safetensors"] if "model.safetensors" in found else found


def _check(listing: RepositoryListing) -> None:
    """Refuses a repository that holds no model that a run could start from, before anything of it is downloaded."""
    top = [file for file in listing.files if "/" not in file]
    for file in ("config.json", "tokenizer.json"):
        if file not in top:
            raise HubError(f"the repository holds no {file}; give a model in the format of transformers, with a fast tokenizer")
    if not any(file.endswith(".safetensors") for file in top):
        others = sorted({Path(file).suffix for file in listing.files if file.endswith((".bin", ".gguf", ".pth", ".pt", ".h5"))})
        held = f" (but {', '.join(others)})" if others else ""
        raise HubError(f"the repository holds no *.safetensors{held}; give a model whose weights have that format")
