"""Which files a checkpoint's directory holds, with the size and digest of each: told apart at a resume from what a disk has lost since.

``digests.json`` is written beside the marker, before the directory appears under its name. A checkpoint without one (of an earlier
version, or converted) counts as sound.
"""

import json
import re
import secrets
from pathlib import Path

import xxhash

from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import parse_json, read_regular

DIGESTS = "digests.json"

_MOST_BYTES = 16 * 1024**2
_CHUNK = 4 << 20
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointDamaged(MyxoError):
    """The last checkpoint that is left has files that are not as they were written."""


def write_digests(directory: Path) -> None:
    """Writes size and digest (XXH3, 128 bits) of every file of a directory into it. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != DIGESTS)
    entries = {path.name: [path.stat().st_size, file_digest(path)] for path in files}
    (directory / DIGESTS).write_text(json.dumps(entries, indent=1) + "\n")


def damage(directory: Path, rank: int = 0, world: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint's directory; None where nothing is.

    Args:
        rank, world: of the sizes all ranks look at all, of the digests each at its share: the shards that it (or, in another layout, a
            rank of the same number modulo ``world``) wrote, and rank 0 at what is no shard.
    """
    if not (directory / DIGESTS).exists():
        return None
    try:
        entries = dict(parse_json(read_regular(directory / DIGESTS, _MOST_BYTES)))
        for name, (size, _) in entries.items():
            path = directory / name
            if not path.is_file():
                return f"{name} is gone"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, {size} were written"
        for name, (_, digest) in entries.items():
            shard = _SHARD.fullmatch(name)
            if (int(shard[1]) if shard else 0) % world == rank and file_digest(directory / name) != digest:
                return f"the content of {name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"{DIGESTS} or a file that it names cannot be read ({error})"
    return None


def set_aside(directory: Path) -> None:
    """Renames a damaged checkpoint, which no longer counts then; the next checkpoint that is complete removes it."""
    try:
        directory.rename(directory.with_name(f".{directory.name}.{secrets.token_hex(2)}.damaged"))
    except FileNotFoundError:  # another rank on the same disk was faster
        return


def file_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()
