"""A split of a data set from the hub as one JSONL file, which is read like any other.

The package ``datasets`` says which files of the repository belong to a split (from the configs of its card, or the names of its files) and
reads them. It sees a directory of empty files with the repository's names, in which the split's own files then take their places: it needs
no network, and nothing but the split is downloaded.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shared.hub.hub_client import Hub, HubError, RepositoryListing, one_line, require
from shared.hub.hub_download import download
from shared.hub.hub_names import HubName
from shared.runtime.safe_files import replacement
from shared.runtime.safe_text import say

_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # The files that tell the configs and splits

_BATCH_ROWS = 1000


def rows_file(hub: Hub, name: HubName) -> Path:
    """Returns the rows of a pinned split, an object a line; the file is made once and kept in ``HF_HOME``. Columns of bytes are left out.

    Raises HubError: no such repository, config or split, files that cannot be read, no network, no room.
    """
    assert name.commit is not None
    folder = hub.home / "myxo" / "datasets" / name.repo.replace("/", "--") / name.commit / (name.config or "@default")
    path = folder / f"{name.split}.jsonl"
    if name.split is not None and path.is_file():
        return path
    listing = hub.noted_listing(name)
    for package in ("huggingface_hub", "datasets"):
        require(package)
    download(hub, name, listing, [file for file in _CARDS if file in listing.files])
    with _placeholders(hub, name, listing) as directory:
        builder = _builder(directory, name, listing)
        files = _split_files(directory, builder, name)
        download(hub, name, listing, files)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacement(path) as out:
                _write(hub.snapshot(name), directory, builder, name, files, out)
        except OSError as error:
            reason = error.strerror or str(error)
            raise HubError(f"its rows cannot be written to {folder}: {reason}; set HF_HOME to a directory with room") from error
    return path


@contextmanager
def _placeholders(hub: Hub, name: HubName, listing: RepositoryListing) -> Iterator[Path]:
    """Makes a directory with the repository's names: the cards as they are, every other file empty."""
    with tempfile.TemporaryDirectory(prefix="myxo-hub-") as made:
        directory = Path(made).resolve() / "repository"
        directory.mkdir()
        for file in listing.files:
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file in _CARDS:
                path.symlink_to(hub.snapshot(name) / file)
            else:
                path.touch()
        yield directory


def _builder(directory: Path, name: HubName, listing: RepositoryListing) -> Any:
    """Returns the reader of the data set's config. Raises HubError."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return datasets.load_dataset_builder(str(directory), name.config, cache_dir=str(directory.parent / "cache"))
    except Exception as error:  # `datasets` and those below it raise anything, over the card or the files' names
        configs: list[str] = []
        with suppress(Exception):  # the first error counts
            configs = list(datasets.get_dataset_config_names(str(directory)))
        if len(configs) > 1 and name.config not in configs:
            problem = "a config has to be named" if name.config is None else f"it has no config {name.config!r}"
            raise HubError(f"{problem}; it has {', '.join(configs)}: give {_example(name, configs[0])}") from None
        if any(file.endswith(".py") for file in listing.files):
            converted = f"hf:{name.repo}@refs/convert/parquet:{name.split or 'train'}"
            raise HubError(f"it is made by a script, which is not run; try the hub's own conversion: {converted}") from error
        raise HubError(f"it holds no files that `datasets` reads: {_reason(error, directory)}") from error


def _split_files(directory: Path, builder: Any, name: HubName) -> list[str]:
    """Returns the split's files, by their names in the repository. Raises HubError for a split that there is not."""
    splits = [str(split) for split in builder.config.data_files]
    if name.split not in splits:
        problem = "a split has to be named" if name.split is None else f"it has no split {name.split!r}"
        example = _example(name, name.config, splits[0]) if splits else "another data set"
        raise HubError(f"{problem}; it has {', '.join(splits) or 'none'}: give {example}")
    return [Path(os.path.abspath(file)).relative_to(directory).as_posix() for file in builder.config.data_files[name.split]]


def _write(snapshot: Path, directory: Path, builder: Any, name: HubName, files: list[str], out: IO[bytes]) -> None:
    say(f"myxo: writing the rows of {name}")
    if all(file.endswith(".jsonl") for file in files):  # they stay as they are: no type is read into them
        for file in files:
            with (snapshot / file).open("rb") as source:
                shutil.copyfileobj(source, out)
            out.write(b"\n")  # the last line may lack it, and empty ones do not count
        return
    for file in files:
        (directory / file).unlink()
        (directory / file).symlink_to(snapshot / file)
    try:
        for row in _rows(builder, str(name.split)):
            out.write(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n")
    except OSError:
        raise
    except Exception as error:  # reading a format raises anything
        raise HubError(f"its files cannot be read: {_reason(error, directory)}") from error


def _rows(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    from datasets.data_files import DataFilesDict

    builder.config.data_files = DataFilesDict({split: builder.config.data_files[split]})
    for table in builder.as_streaming_dataset(split).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from table.select([field.name for field in table.schema if not _holds_bytes(field.type)]).to_pylist()


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))


def _example(name: HubName, config: str | None, split: str | None = None) -> str:
    return str(HubName("dataset", name.repo, name.revision, None, config, split or name.split or "train"))


def _reason(error: Exception, directory: Path) -> str:
    text = str(error).replace(f"{directory}/", "").replace(str(directory), "the repository")
    return one_line(RuntimeError(text) if text else error, 300)
