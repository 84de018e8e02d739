"""A config whose models and data are named on the hub: its names pinned, its files on this machine.

The frozen config of a run holds pinned names, no paths: each service finds the files in its own machine's cache or downloads them, and
they are the same everywhere. A resumed run continues with the commits that it began with.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.data.data_files import DataFile
from shared.hub import hub_datasets, hub_download, hub_names
from shared.hub.hub_client import Hub, HubError, NoSuchRepository, Unreachable
from shared.hub.hub_names import HubName
from shared.runtime.errors import BadInput, ConfigError, raise_problems

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


def pinned(config: RunConfig, known: Mapping[str, str] | None = None, *, hub: Hub | None = None) -> RunConfig:
    """Returns the same config with every name pinned to a commit. Raises ConfigError by field, or Problems of several.

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

    return _changed(config, (*MODELS, FROZEN, *DATA), change)


def local(
    config: RunConfig, fields: Collection[str] = (*MODELS, FROZEN, *DATA), *, weights: bool = True, hub: Hub | None = None
) -> RunConfig:
    """Returns the same config with paths in the place of pinned names; what is not in the cache is downloaded. Raises as `pinned`.

    Args:
        fields: those whose files are needed; names in others stay. weights: whether the weights of models are needed. hub: as there.
    """
    source = hub or Hub.of()

    def change(field: str, name: HubName) -> Path:
        if name.commit is None:
            raise HubError("has no commit; the config of a run has one with each name")
        is_model = _is_model(field)
        path = hub_download.model_directory(source, name, weights=weights) if is_model else hub_datasets.rows_file(source, name)
        source.remember(name)
        return path

    return _changed(config, fields, change)


def for_service(config: RunConfig, service: str) -> RunConfig:
    """Returns `local` for the fields that a service reads. Raises ConfigError."""
    return local(config, _NEEDED.get(service, ()), weights=service not in ("buffer", "gateway"))


def found(config: RunConfig) -> list[HubName]:
    """Returns the names in a config."""
    names: list[HubName] = []

    def change(field: str, name: HubName) -> Path:
        names.append(name)
        return Path(str(name))

    _changed(config, (*MODELS, FROZEN, *DATA), change)
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
                if (engines := current.with_checkpoints(partial(_new_value, change=change))) != current:
                    sections[section] = engines
                continue
            if dotted == SETS:
                if (evaluation := current.with_files(partial(_new_file, change=change))) != current:
                    sections[section] = evaluation
                continue
            value = getattr(current, field, None)  # a config may be left without it
            new = _new_value(dotted, value, change)
        except ConfigError as error:
            problems.append(error)
            continue
        if new is not value:
            sections[section] = current.model_copy(update={field: new})
    raise_problems(problems)
    return config.model_copy(update=sections) if sections else config


def _new_file(field: str, file: DataFile, change: Change) -> DataFile:
    return replace(file, path=_new_value(field, file.path, change))


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
