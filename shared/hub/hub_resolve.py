"""A config whose models and data are named on the hub: its names pinned, its files on this machine.

The frozen config of a run holds pinned names, no paths: each service finds the files in its own machine's cache or downloads them, and
they are the same everywhere. A resumed run continues with the commits that it began with.
"""

import base64
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.hub import hub_client, hub_names
from shared.hub.hub_client import Hub, HubError, NoSuchRepository, RepositoryListing, Unreachable, download, one_line, require
from shared.hub.hub_names import HubName
from shared.model.engine_checkpoint import with_engine_checkpoint
from shared.runtime.errors import BadInput, ConfigError, raise_problems
from shared.runtime.safe_files import replacement
from shared.runtime.safe_text import say

if TYPE_CHECKING:
    from shared.data.tokenizer import Tokenizer

_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # The files that tell the configs and splits

_BATCH_ROWS = 1000


def rows_file(hub: Hub, name: HubName) -> Path:
    """Returns the rows of a pinned split, an object a line; the file is made once and kept in ``HF_HOME``. Of columns of bytes pictures
    are kept, in base64; the rest is left out.

    The package ``datasets`` says which files of the repository belong to a split, and reads them. It sees a directory of empty files with
    the repository's names, in which the split's own files then take their places: it needs no network, and nothing else is downloaded.

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
            out.write(json.dumps(row, ensure_ascii=False, default=_text).encode("utf-8", "surrogatepass") + b"\n")
    except OSError:
        raise
    except Exception as error:  # reading a format raises anything
        raise HubError(f"its files cannot be read: {_reason(error, directory)}") from error


def _rows(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    from datasets.data_files import DataFilesDict

    builder.config.data_files = DataFilesDict({split: builder.config.data_files[split]})
    rows = builder.as_streaming_dataset(split)
    pictures = {name for name, feature in (rows.features or {}).items() if "Image(" in repr(feature) or "Audio(" in repr(feature)}
    for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from table.select([one.name for one in table.schema if one.name in pictures or not _holds_bytes(one.type)]).to_pylist()


def _text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


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


MODELS = ("model.hf_checkpoint", "trainer.critic_load")

FROZEN = "rollout.models"  # Stands for the checkpoints of all frozen models

SETS = "eval.sets"  # Stands for all files of evaluation sets, whichever field names them


DATA = ("data.prompt_data", SETS, "sft.sft_data")

_NEEDED = {
    "buffer": ("model.hf_checkpoint", "data.prompt_data", SETS),
    "rollout": ("model.hf_checkpoint",),
    "gateway": ("model.hf_checkpoint", FROZEN),
    "trainer": ("model.hf_checkpoint", "trainer.critic_load", "sft.sft_data"),
    "critic": ("model.hf_checkpoint", "trainer.critic_load"),
}
"""The fields whose files each service reads; buffer and gateway read no weights."""

Change = Callable[[str, HubName], Path]


_NAMED = (*MODELS, FROZEN, *DATA)


def pinned(
    config: RunConfig, known: Mapping[str, str] | None = None, fields: Collection[str] = _NAMED, *, hub: Hub | None = None
) -> RunConfig:
    """Returns the same config with the names in ``fields`` pinned to a commit. Raises ConfigError by field, or Problems of several.

    Args:
        known: what names of this run were pinned to before, as `pins` returns it. hub: by default, as the environment says; one object
            for several calls asks the hub once.
    """
    source = hub or Hub.of()

    def change(field: str, name: HubName) -> Path:
        if name.commit is None:
            earlier = (known or {}).get(str(name))
            name = _read(field, earlier) if earlier is not None else name.pinned(source.commit(name))
        return Path(str(name))

    return _changed(config, fields, change)


def local(config: RunConfig, fields: Collection[str] = _NAMED, *, weights: bool = True, hub: Hub | None = None) -> RunConfig:
    """Returns the same config with paths in the place of pinned names; what is not in the cache is downloaded. Raises as `pinned`.

    Args:
        fields: those whose files are needed; names in others stay. weights: whether the weights of models are needed. hub: as there.
    """
    source = hub or Hub.of()

    def change(field: str, name: HubName) -> Path:
        if name.commit is None:
            raise HubError("has no commit; the config of a run has one with each name")
        path = hub_client.model_directory(source, name, weights=weights) if _is_model(field) else rows_file(source, name)
        source.remember(name)
        return path

    return _changed(config, fields, change)


def for_service(config: RunConfig, service: str) -> RunConfig:
    """Returns `local` for the fields that a service reads; for rollout, with its engines' own checkpoint. Raises ConfigError."""
    here = local(config, _NEEDED.get(service, ()), weights=service not in ("buffer", "gateway"))
    return with_engine_checkpoint(here) if service == "rollout" else here


def found(config: RunConfig) -> list[HubName]:
    """Returns the names in a config."""
    names: list[HubName] = []

    def change(field: str, name: HubName) -> Path:
        names.append(name)
        return Path(str(name))

    _changed(config, _NAMED, change)
    return names


def pins(config: RunConfig | None) -> dict[str, str]:
    """Returns each name of a pinned config as it was asked for → the name with its commit."""
    return {str(name.unpinned): str(name) for name in found(config) if name.commit is not None} if config is not None else {}


def pins_in(directory: Path) -> dict[str, str] | None:
    """Returns the pins that a run's directory keeps; None where it keeps no config."""
    config = runs.frozen(directory)
    return None if config is None else pins(config)


def _changed(config: RunConfig, fields: Collection[str], change: Change) -> RunConfig:
    """Returns the config with ``change`` called for each name in ``fields``; the config itself where there is none."""
    sections: dict[str, Any] = {}
    problems: list[BadInput] = []
    for dotted in fields:
        section, _, field = dotted.partition(".")
        current = sections.get(section, getattr(config, section))
        try:
            if dotted == FROZEN:
                new = current.with_checkpoints(partial(_new_value, change=change))
            elif dotted == SETS:
                new = current.with_files(lambda name, file: replace(file, path=_new_value(name, file.path, change)))
            else:
                value = getattr(current, field, None)  # a config may be left without it
                path = _new_value(dotted, value, change)
                new = current if path is value else current.model_copy(update={field: path})
        except ConfigError as error:
            problems.append(error)
            continue
        if new != current:
            sections[section] = new
    raise_problems(problems)
    return config.model_copy(update=sections) if sections else config


def _new_value(field: str, value: Any, change: Change) -> Any:
    if isinstance(value, list) and any(hub_names.is_name(file.path) for file in value):
        return [replace(file, path=_new_value(field, file.path, change)) for file in value]
    return _new_path(field, value, change) if isinstance(value, Path) and hub_names.is_name(value) else value


def _new_path(field: str, path: Path, change: Change) -> Path:
    name = _read(field, str(path))
    is_model = _is_model(field)
    nor = f"; nor is there a directory {name.repo} here" if is_model and not Path(name.repo).exists() else ""
    try:
        return change(field, name)
    except Unreachable as error:
        instead = f"give a {'directory' if is_model else 'file'}, or run `myxo up CONFIG --dry-run` where there is a network"
        reason = f"{error}, and the cache {Hub.of().home} lacks it{nor}; {instead} and bring its HF_HOME"
        raise ConfigError(field, str(path), reason) from error
    except NoSuchRepository as error:
        raise ConfigError(field, str(path), f"{error}{nor}") from error
    except HubError as error:
        raise ConfigError(field, str(path), str(error)) from error


def _is_model(field: str) -> bool:
    return field in MODELS or field.startswith(f"{FROZEN}.")


def _read(field: str, text: str) -> HubName:
    try:
        return hub_names.model(text) if _is_model(field) else hub_names.dataset(text)
    except ValueError as error:
        raise ConfigError(field, text, str(error)) from None


def local_tokenizer(config: RunConfig) -> "Tokenizer | None":
    """Returns the run's tokenizer, for displays, which can do without; nothing is downloaded.

    None where this machine has not got its files, or lacks the packages of the extra `buffer`.
    """
    try:
        path = local(config, ("model.hf_checkpoint",), weights=False, hub=replace(Hub.of(), offline=True)).model.hf_checkpoint
        return _tokenizer(str(path))
    except BadInput:
        return None


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> "Tokenizer | None":
    if importlib.util.find_spec("tokenizers") is None or importlib.util.find_spec("jinja2") is None:
        return None
    from shared.data.tokenizer import Tokenizer

    return Tokenizer(model)
