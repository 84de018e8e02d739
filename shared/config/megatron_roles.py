"""slime's ``--megatron-config-path``: a YAML file of what actor and critic have of their own, laid over the config's values.

``megatron`` is a list with an entry for each role: ``role``, and ``overrides`` (flag = value). The actor's stand over what is given
elsewhere; of the critic's, Myxo has those of `CRITIC`.
"""

from pathlib import Path
from typing import Any

import yaml

from shared.config.config_layers import Layers
from shared.config.run_config import field_sections
from shared.runtime.errors import ConfigError, nearest

FIELD = "trainer.megatron_config_path"

CRITIC = {"lr": "critic_lr", "load": "critic_load"}
"""The critic's own values, and the fields that hold them."""

PLACED = ("num_nodes", "num_gpus_per_node")
"""What slime leaves out of such a file: flags alone place the roles."""

EXPECTED = "megatron: a list of entries with role (actor, critic; each once at most) and overrides, a mapping of flags"


def lay_megatron_config(layers: Layers) -> None:
    """Lays the file of ``megatron_config_path``, where one is given, over the values; adds a problem for each entry that is not taken."""
    trainer = layers.values.get("trainer")
    if not isinstance(trainer, dict) or trainer.get("megatron_config_path") is None:
        return
    path = Path(str(trainer["megatron_config_path"]))
    try:
        roles = _roles(path)
    except ConfigError as error:
        layers.problems.append(error)
        return
    sections: dict[str, dict[str, Any]] = {"trainer": {"megatron_config_path": None, "megatron": {}}}
    for role, given in roles.items():
        for name, value in given.items():
            if (reason := _refused(role, name)) is not None:
                layers.problems.append(ConfigError(FIELD, f"{path}: {role}: {name}", reason))
            elif role == "critic":
                sections["trainer"][CRITIC[name]] = value
            elif (section := field_sections().get(name)) is not None:
                sections.setdefault(section, {})[name] = value
            else:
                sections["trainer"]["megatron"][name] = value
    layers.lay(sections, path)
    own = "; ".join(f"{', '.join(given)} of the {role}" for role, given in roles.items() if given)
    layers.notes.append(f"{path} stands over what is given elsewhere: {own or 'nothing'}")


def _refused(role: str, name: str) -> str | None:
    """Returns why a role's own value is not taken; None where it is."""
    if role == "actor":
        return "give it as a flag: it says where the run lies" if name in ("load", "save") else None
    if name == "save":
        return "leave it out: the critic's checkpoints lie in the run's directory, with the actor's"
    return None if name in CRITIC else f"the critic has the actor's value; of its own it may have {', '.join(CRITIC)}"


def _roles(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the own values of each role. Raises ConfigError."""
    found: dict[str, dict[str, Any]] = {}
    for entry in _entries(path):
        role, given = entry.get("role"), entry.get("overrides") or entry.get("args") or {}
        if role not in ("actor", "critic"):
            raise ConfigError(FIELD, f"{path}: role = {role!r}", nearest(str(role), ["actor", "critic"]))
        if role in found or not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise ConfigError(FIELD, f"{path}: {role}", EXPECTED)
        found[role] = {name: value for name, value in given.items() if name not in PLACED}
    return found


def _entries(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of the file's list. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"not a readable YAML file: {' '.join(str(error).split())}"
        raise ConfigError(FIELD, str(path), reason) from None
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(FIELD, str(path), EXPECTED)
    return entries
