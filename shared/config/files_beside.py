"""The files that a config names and that stand over its values: slime's ``custom_config_path`` and ``eval_config``."""

from pathlib import Path
from typing import Any

import yaml

from shared.config.config_layers import Layers
from shared.config.eval_config_file import read_sets
from shared.config.run_config import field_sections
from shared.runtime.errors import ConfigError


def lay_custom_config(layers: Layers) -> None:
    """Lays the YAML file of ``custom_config_path`` over the values: fields into their sections, the rest into ``custom_args``."""
    run = layers.values.get("run")
    if not isinstance(run, dict) or run.get("custom_config_path") is None:
        return
    path = Path(str(run["custom_config_path"]))
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"not a readable YAML file: {' '.join(str(error).split())}"
        layers.problems.append(ConfigError("run.custom_config_path", str(path), reason))
        return
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        layers.problems.append(ConfigError("run.custom_config_path", str(path), "a mapping: field = value"))
        return
    owners, own, sections = field_sections(), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in values.items():
        if name in owners and name != "custom_config_path":
            sections.setdefault(owners[name], {})[name] = value
        else:
            own[name] = value
    layers.lay({**sections, "run": {**sections.get("run", {}), "custom_args": own}}, path)
    if sections:
        shown = ", ".join(name for fields in sections.values() for name in fields)
        layers.notes.append(f"{path} stands over what is given elsewhere: {shown}")


def lay_eval_config(layers: Layers) -> None:
    """Puts the sets of slime's ``eval_config``, where one is given, in the place of those that ``[eval]`` names. Raises ConfigError."""
    values = layers.values.get("eval")
    if not isinstance(values, dict) or (given := values.get("eval_config")) is None:
        return
    sets = read_sets(Path(str(given)))
    if values.get("sets"):
        raise ConfigError("eval.sets", f"{len(values['sets'])} sets", f"given besides eval_config = {given}; leave one of them out")
    if values.get("eval_prompt_data") is not None:
        layers.notes.append(f"eval.eval_prompt_data: eval_config = {given} takes its place, as with slime")
    values.update(sets=sets, eval_config=None, eval_prompt_data=None)
    layers.origins["eval.sets"] = Path(str(given))
