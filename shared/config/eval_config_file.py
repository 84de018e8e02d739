"""slime's ``--eval-config``: a YAML or JSON file of evaluation sets, read into the tables of ``[[eval.sets]]``.

``eval`` (or the file itself) holds ``defaults`` and ``datasets``: a list of mappings with a ``name``, or a mapping by name. What a data set
does not give, ``defaults`` gives; what neither gives, the flags.
"""

from pathlib import Path
from typing import Any

import yaml

from shared.config.eval_section import EvalSet
from shared.runtime.errors import ConfigError, nearest

FIELD = "eval.eval_config"

_NOTHING_READS = "nothing in slime reads it; leave it out (eval_timeout ends an evaluation that is late)"
_REFUSED = {
    "multimodal_keys": "prompts with pictures are not supported; leave it out",
    **dict.fromkeys(("eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout", "min_eval_samples"), _NOTHING_READS),
    "app_service": "nothing in slime reads it; give custom_generate_function_path a function that asks that service",
    "message_processor": "nothing in slime reads it; give custom_generate_function_path a function that does it",
    "reward_model": "nothing in slime reads it; give rm_type, or custom_rm_path",
    "remote_environment": "nothing in slime reads it; give rm_type an environment of [reward]",
}
"""Fields of slime's data sets that are not taken, and what to do instead."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: the first value would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_sets(path: Path) -> list[dict[str, Any]]:
    """Returns the sets of a file, as tables. Raises ConfigError that names the entry."""
    try:
        content = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, str(path), f"not a readable file: {error}; give YAML or JSON with defaults and datasets") from None
    except yaml.YAMLError as error:
        raise ConfigError(FIELD, str(path), f"not YAML: {' '.join(str(error).split())}") from None
    content = content.get("eval", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ConfigError(FIELD, str(path), "expected a mapping with datasets, and defaults if you like, or one under eval")
    _check_keys("", content, ("defaults", "datasets"), path)
    defaults = content.get("defaults") or {}
    _check_fields("defaults", defaults, path)
    return [{**defaults, **fields} for fields in _datasets(content.get("datasets"), path)]


def _datasets(datasets: Any, path: Path) -> list[dict[str, Any]]:
    """Returns the data sets, each with its name."""
    if isinstance(datasets, dict):
        entries = [(str(name), fields) for name, fields in datasets.items()]
        _check_all([(f"datasets.{name}", fields) for name, fields in entries], path)
        return [{"name": name, **(fields or {})} for name, fields in entries]
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError(FIELD, f"{path}: datasets", f"expected a list of data sets, or a mapping by name; found {datasets!r}")
    _check_all([(f"datasets[{index}]", fields) for index, fields in enumerate(datasets)], path)
    for index, fields in enumerate(datasets):
        if "name" not in (fields or {}):
            raise ConfigError(FIELD, f"{path}: datasets[{index}]", "needs a name")
    return datasets


def _check_all(entries: list[tuple[str, Any]], path: Path) -> None:
    for where, fields in entries:
        _check_fields(where, fields or {}, path)
        if "path" not in (fields or {}):
            raise ConfigError(FIELD, f"{path}: {where}", "needs a path, of JSONL or Parquet")


def _check_fields(where: str, fields: Any, path: Path) -> None:
    if not isinstance(fields, dict):
        raise ConfigError(FIELD, f"{path}: {where}", f"expected a mapping, found {fields!r}")
    _check_keys(where, fields, tuple(EvalSet.model_fields), path)
    for name, value in fields.items():
        if isinstance(value, str) and "${" in value:
            raise ConfigError(FIELD, f"{path}: {where}.{name} = {value!r}", "interpolations are not read; write the value")


def _check_keys(where: str, fields: dict[Any, Any], valid: tuple[str, ...], path: Path) -> None:
    for name in fields:
        if name not in valid:
            reason = _REFUSED.get(str(name)) or f"unknown key; {nearest(str(name), list(valid))}"
            raise ConfigError(FIELD, f"{path}: {where}{'.' if where else ''}{name}", reason)
