"""Models from the hub: which files of a repository a run needs, and a directory that holds them."""

from pathlib import Path

from shared.hub.hub_client import Hub, HubError, RepositoryListing, require
from shared.hub.hub_download import download
from shared.hub.hub_names import HubName
from shared.model.hf_checkpoint import TEMPLATE_FOLDER
from shared.runtime.safe_files import parse_json

INDEX = "model.safetensors.index.json"

_NEEDED = ("config.json", "tokenizer.json")

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
"""Endings of the files beside the weights: config, tokenizer, chat template, and code that an engine may be allowed to run."""


def directory(hub: Hub, name: HubName, *, weights: bool = True) -> Path:
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
    """Tells whether the cache holds every file; without a network there is nothing but the cache to go by."""
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
