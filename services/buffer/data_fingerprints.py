"""What the run's prompt files were when it began: a later life that finds others would give groups other prompts than the ledger says."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data.data_files import paths
from shared.runtime.errors import ConfigError

BLOCK_BYTES = 1 << 16

MOST_BLOCKS = 1024
"""The most blocks of a file that are read: 64 MiB. A longer file is sampled, at equal distances, its first and last block among them."""


class DataFingerprint(BaseModel):
    """What a file was. size: bytes. modified_ns: time of its last change. digest: XXH3 of its blocks that were read, in hexadecimal."""

    model_config = ConfigDict(frozen=True)

    size: int
    modified_ns: int
    digest: str

    @property
    def sampled(self) -> bool:
        """Returns whether some of the file's bytes were not read."""
        return self.size > MOST_BLOCKS * BLOCK_BYTES


ACCEPT = "go on with the prompts that are there now: --accept-changed-data"

Fingerprints = dict[str, DataFingerprint]
"""Of files, by path."""

_FINGERPRINTS = TypeAdapter(Fingerprints)


def encode(fingerprints: Fingerprints) -> bytes:
    """Returns them as JSON."""
    return _FINGERPRINTS.dump_json(fingerprints)


def decode(data: bytes | None) -> Fingerprints:
    """Reads what `encode` has written; empty where there is nothing, or what is there is none."""
    try:
        return _FINGERPRINTS.validate_json(data or b"{}")
    except ValidationError:
        return {}


def named_files(config: RunConfig) -> dict[Path, str]:
    """Returns the run's files of prompts, with the field that names each."""
    training = {path: "data.prompt_data" for path in paths(config.data.prompt_data)}
    return {path: view.field for view in eval_views(config) for path in paths(view.files)} | training


def fingerprints(config: RunConfig) -> Fingerprints:
    """Returns what the run's files are now. Raises ConfigError for one that cannot be read."""
    found = {}
    for path, field in named_files(config).items():
        try:
            found[str(path)] = fingerprint(path)
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
    return found


def fingerprint(path: Path) -> DataFingerprint:
    """Returns what a file is now. Raises OSError."""
    stat, digest = path.stat(), xxhash.xxh3_128()
    with path.open("rb") as file:
        for offset in _offsets(stat.st_size):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
    return DataFingerprint(size=stat.st_size, modified_ns=stat.st_mtime_ns, digest=digest.hexdigest())


def _offsets(size: int) -> Iterator[int]:
    blocks = -(-size // BLOCK_BYTES)
    read = min(blocks, MOST_BLOCKS)
    yield from (number * (blocks - 1) // max(1, read - 1) * BLOCK_BYTES for number in range(read))


def changed(known: Fingerprints, found: Fingerprints, fields: Mapping[Path, str]) -> list[ConfigError]:
    """Returns a refusal for each file that is another than it was. A new time alone is no change: files are copied."""
    return [
        ConfigError(fields[Path(path)], path, f"{difference} since the run began; put it back, or {ACCEPT}")
        for path, now in found.items()
        if path in known and (difference := _difference(known[path], now))
    ]


def touched(known: Fingerprints, found: Fingerprints) -> list[str]:
    """Returns the files too long to be read whole that were written since, though no difference was seen."""
    return [path for path, now in found.items() if path in known and now.sampled and known[path].modified_ns != now.modified_ns]


def _difference(then: DataFingerprint, now: DataFingerprint) -> str:
    if then.size != now.size:
        return f"has changed from {then.size:,} to {now.size:,} bytes"
    return "" if then.digest == now.digest else "has changed, though not in length,"
