"""The values of a run's config before they are checked: a TOML file over its bases, flags over it, and slime's YAML files that it names.

A file names those that it builds on at its top: ``base = "model.toml"``, or a list of them. Its values override those of its bases, and a
later base overrides an earlier one; tables such as ``[rollout.sglang]`` are merged key by key. A base's path is relative to the file that
names it.

slime's ``sglang_config`` is a file of models and groups of engines: it becomes ``[rollout.models]`` and ``[[rollout.engine_groups]]``.

slime's ``megatron_config_path`` is a file of what actor and critic have of their own, laid over all values: ``megatron`` is a list with an
entry for each role, ``role`` and ``overrides`` (flag = value). Its ``custom_config_path`` holds values of any field, also laid over all,
and what is no field for the user's functions. Its ``eval_config`` holds the tables of ``[[eval.sets]]``: under ``eval``, or at its top,
``defaults`` and ``datasets``, a list of mappings with a ``name`` or a mapping by name. What a data set does not give, ``defaults`` gives;
what neither gives, the flags.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator

from shared.config import flag_table
from shared.config.eval_section import EvalSet
from shared.config.flag_table import Fields, Off, laid
from shared.config.rollout_section import WorkerType
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.config.section import ConfigTable
from shared.config.sglang_flags import made_with, plain_name
from shared.config.trainer_section import MEGATRON_LAYOUT
from shared.runtime.errors import BadInput, ConfigError, near, nearest, shown

BASE = "base"


class Known(NamedTuple):
    """The known values: section → field → value, in a form that can be merged; the errors of the others; lines for the user."""

    values: dict[str, Any]
    problems: list[BadInput]
    notes: list[str]


def known_fields(values: dict[str, Any]) -> Known:
    """Returns the values of known fields, with slime's keys, in any section, as what they stand for, and Megatron's under their names."""
    owners, found, renamed = field_sections(), Known({}, [], []), Fields()
    for section, fields in values.items():
        if section not in RunConfig.model_fields:
            found.problems.extend(_unknown_section(section, fields))
        elif not isinstance(fields, dict):
            found.problems.append(ConfigError(section, fields, f"expected a section [{section}] with fields"))
        else:
            others, known = _without_slimes(section, fields, found, renamed), section_model(section).model_fields
            found.values[section] = {key: _table(value, known[key].annotation) for key, value in others.items() if key in known}
            found.problems.extend(_unknown(section, key, value) for key, value in others.items() if key not in known)
    megatron = found.values.get("trainer", {}).get("megatron")
    if isinstance(megatron, dict):  # its field's own check refuses others
        try:
            others = _without_slimes("trainer.megatron", megatron, found, renamed)
            found.values["trainer"]["megatron"] = flag_table.canonical(others, owners)
        except ConfigError as error:
            found.problems.append(error)
            del found.values["trainer"]["megatron"]
    found.notes.extend(flag_table.lay_renamed(found.values, owners, renamed))
    return found


def _table(value: Any, annotation: Any) -> Any:
    """Returns the table of a field that is JSON text, as TOML has no null, true or false of a switch; else the value, for its own check."""
    if annotation in (bool, bool | None):
        return flag_table.truth(value)
    if isinstance(value, str) and get_origin(annotation) is dict:
        with suppress(ValueError):
            return json.loads(value)
    return value


def _unknown_section(section: str, fields: Any) -> list[BadInput]:
    """Returns the error for a section that there is not, and for what its keys would be refused for in the one that is meant."""
    if (owner := field_sections().get(section)) is not None:
        return [ConfigError(section, fields, f"belongs into the section [{owner}]")]
    if not isinstance(fields, dict):
        return [ConfigError(section, fields, f"unknown key; {_meant(section, '', [BASE, *RunConfig.model_fields])}")]
    meant = flag_table.of_others("sections").get(section) or near(section, RunConfig.model_fields)
    expected = f"did you mean [{meant}]?" if meant else f"valid are {', '.join(RunConfig.model_fields)}"
    inner = known_fields({meant: fields}).problems if meant else []
    return [ConfigError(section, "…", f"unknown section; {expected}"), *inner]


def _meant(key: str, section: str, valid: list[str]) -> str:
    """Returns which of the ``valid`` keys of a section, or which field of another, an unknown key stands for."""
    name = key.replace("-", "_")
    field = flag_table.of_others("fields").get(name) or (None if near(name, valid) else near(name, field_sections()))
    if field is None:
        return nearest(key, valid)
    owner = field_sections()[field]
    return f"did you mean {field}?" if owner == section else f"in [{owner}], did you mean {field}?"


def _unknown(section: str, key: str, value: Any) -> ConfigError:
    """Returns the error for a key that is no field of its section."""
    if (owner := field_sections().get(key)) is not None:
        expected = f"unknown key here; it belongs into the section [{owner}]"
    else:
        expected = flag_table.refusal(key) or f"unknown key; {_meant(key, section, list(section_model(section).model_fields))}"
    return ConfigError(f"{section}.{key}", value, expected)


def _without_slimes(table: str, given: dict[str, Any], found: Known, renamed: Fields) -> dict[str, Any]:
    """Returns the keys of a table that are not slime's; of those adds fields to ``renamed``, problems and notes to ``found``."""
    others = {}
    for key, value in given.items():
        name, path = key.replace("-", "_"), f"{table}.{key}"
        if name in field_sections() or (flag := flag_table.of_slime(name)) is None:
            others[key] = value
            continue
        try:
            fields, note, environment = flag_table.translate(path, flag, value, renamed)
            if environment:
                raise ConfigError(path, value, f"a config holds no secrets; set {', '.join(environment)} in the environment")
        except ConfigError as error:
            found.problems.append(error)
            continue
        renamed.update(fields)
        found.notes.extend([note] if note not in found.notes else [])
    return others


@dataclass
class Layers:
    """The merged values of a file and its bases.

    Args:
        values: section → field → value. origins: ``section.field`` → the file that set it last. problems: the entries that were refused;
            one in a base names its file. notes: lines for the user.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Path] = field(default_factory=dict)
    problems: list[BadInput] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, path: Path, key: str = "CONFIG", given: str = "", above: tuple[Path, ...] = ()) -> None:
        """Reads a file and, under it, its bases. ``key``, ``given``: where it is named, and how. ``above``: the files that it is a base of.

        Raises ConfigError: a file is no readable TOML, or a base is missing or leads back to its own file; the error names the file.
        """
        where = f" (in {above[-1]})" if above else ""
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(key, given or str(path), f"no such file; give a TOML run config{where}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(key, given or str(path), f"not a readable TOML file: {error}{_toml_line(error, path)}{where}") from None
        chain = (*above, path)
        bases = named if isinstance(named := values.pop(BASE, []), list) else [named]
        if not all(isinstance(base, str) and base for base in bases):
            raise ConfigError(BASE, named, f"the path of a TOML file, relative to {path.parent}, or a list of such paths")
        for base in bases:
            target = path.parent / base
            if target.resolve() in [file.resolve() for file in chain]:
                circle = " → ".join(str(file) for file in (*chain, target))
                raise ConfigError(BASE, base, f"a file that does not lead back to itself: {circle}")
            self.read(target, BASE, base, chain)
        self.take(values, path, named=bool(above))

    def take(self, values: dict[str, Any], path: Path, *, named: bool = True) -> None:
        """Merges what is known of a file's values over the present ones. ``named``: whether errors of the others name the file."""
        taken, problems, notes = known_fields(values)
        self.lay(taken, path)
        self.problems += [in_file(problem, path) for problem in problems] if named else problems
        self.notes += notes

    def lay(self, values: dict[str, Any], path: Path) -> None:
        """Merges a file's own values over the present ones."""
        for section, fields in values.items():
            if not isinstance(fields, dict) or not isinstance(self.values.get(section, {}), dict):
                self.values[section] = fields  # `shared.config.config_reading.parse` refuses it
                self.origins[section] = path
                continue
            known = self.values.setdefault(section, {})
            for name, value in fields.items():
                known[name] = value if _is_file(section, name, value) else _merged(name, known.get(name, Off()), value)
                self.origins[f"{section}.{name}"] = path

    def file(self, section: str, field: str) -> Path | None:
        """Returns the path of a file that a field names; None where it names none."""
        fields = self.values.get(section)
        given = fields.get(field) if isinstance(fields, dict) else None
        return None if given is None else Path(str(given))


def _toml_line(error: Exception, path: Path) -> str:
    """Returns what stands in the line of a file that an error names, and what to do about it."""
    place = re.search(r"\(at line (\d+)", str(error))
    line = "" if place is None else path.read_text().split("\n")[int(place[1]) - 1].strip()
    remedy = "it is there twice, leave one out" if re.search("overwrite|twice", str(error)) else "put text in quotes, or write true, false"
    return f": {shown(line)}; {remedy}" if line else ""


def in_file(problem: BadInput, path: Path) -> BadInput:
    """Returns the same problem with the file that it comes from."""
    return ConfigError(problem.field, problem.value, f"{problem.expected} (in {path})") if isinstance(problem, ConfigError) else problem


def over(below: dict[str, dict[str, Any]], above: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns sections with the fields of others over theirs."""
    layers = Layers({section: dict(fields) for section, fields in below.items()})
    layers.lay(above, Path())
    return layers.values


def _is_file(section: str, name: str, value: Any) -> bool:
    """Returns whether a field's value is one file of prompts: a table with a path, where the field is no table of any keys."""
    known = section_model(section).model_fields.get(name) if section in RunConfig.model_fields else None
    return isinstance(value, dict) and "path" in value and (known is None or get_origin(known.annotation) is not dict)


def _merged(name: str, below: Any, above: Any) -> Any:
    """Merges tables key by key, also one of JSON, those called ``sglang`` by any spelling; takes back what a switch sets that is off."""
    if isinstance(above, Off):
        return laid(below, above)
    below = _table(below, dict[str, Any] if isinstance(above, dict) else str)
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if name == "sglang":
        spelled = {plain_name(str(key)): key for key in above}
        below = {spelled.get(plain_name(str(key)), key): value for key, value in below.items()}
    return {**below, **{key: _merged(key, below.get(key), value) for key, value in above.items()}}


# --- slime's files

MEGATRON_CONFIG, EVAL_CONFIG = "trainer.megatron_config_path", "eval.eval_config"

CRITIC = {"lr": "critic_lr", "load": "critic_load"}  # The critic's own values in ``megatron_config_path``, and the fields that hold them

PLACED = ("num_nodes", "num_gpus_per_node")  # What slime leaves out of such a file: flags alone place the roles

EXPECTED = "megatron: a list of entries with role (actor, critic; each once at most) and overrides, a mapping of flags"


def _yaml(field: str, path: Path) -> Any:
    """Returns the content of a file that ``field`` names. Raises ConfigError."""
    try:
        return yaml.load(path.read_text(), _UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(field, str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(field, str(path), f"not a readable YAML file: {' '.join(str(error).split())}") from None


def lay_megatron_config(layers: Layers) -> None:
    """Lays the file of ``megatron_config_path``, where one is given, over the values; adds a problem for each entry that is not taken."""
    if (path := layers.file("trainer", "megatron_config_path")) is None:
        return
    try:
        roles = _roles(path)
    except ConfigError as error:
        layers.problems.append(error)
        return
    sections: dict[str, dict[str, Any]] = {"trainer": {"megatron_config_path": None, "megatron": {}}}
    for role, given in roles.items():
        for name, value in given.items():
            if (reason := _refused(role, name)) is not None:
                layers.problems.append(ConfigError(MEGATRON_CONFIG, f"{path}: {role}: {name}", reason))
            elif role == "critic":
                sections["trainer"][CRITIC[name]] = value
            elif (section := field_sections().get(name)) is not None:
                sections.setdefault(section, {})[name] = value
            else:
                sections["trainer"]["megatron"][name] = value
    trainer, algorithm = layers.values["trainer"], layers.values.get("algorithm", {})
    critic = "'ppo'" in repr([algorithm.get("advantage_estimator", algorithm.get("preset"))])  # one preset, or a list of them
    if critic and "lr" in roles.get("actor", {}) and trainer.get("critic_lr") is None:  # the critic's is that of the flags
        sections["trainer"].setdefault("critic_lr", trainer.get("lr", section_model("trainer").model_fields["lr"].default))
    layers.take(sections, path)
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
    content = _yaml(MEGATRON_CONFIG, path)
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(MEGATRON_CONFIG, str(path), EXPECTED)
    for entry in entries:
        role, given = entry.get("role"), entry.get("overrides") or entry.get("args") or {}
        if role not in ("actor", "critic"):
            raise ConfigError(MEGATRON_CONFIG, f"{path}: role = {role!r}", nearest(str(role), ["actor", "critic"]))
        if role in found or not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise ConfigError(MEGATRON_CONFIG, f"{path}: {role}", EXPECTED)
        found[role] = {name: value for name, value in given.items() if name not in PLACED}
    return found


def lay_custom_config(layers: Layers) -> None:
    """Lays the file of ``custom_config_path`` over the values: fields into their sections, slime's and Megatron's flags as what they stand
    for, the rest into ``custom_args``."""
    if (path := layers.file("run", "custom_config_path")) is None:
        return
    try:
        values = _yaml("run.custom_config_path", path) or {}
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ConfigError("run.custom_config_path", str(path), "a mapping: field = value")
    except ConfigError as error:
        layers.problems.append(error)
        return
    layers.take(_by_section(values, path), path)
    layers.values["run"]["custom_config_path"] = None  # whoever reads the config again has its values, and may set others
    layers.notes.append(f"{path} stands over what is given elsewhere: {', '.join(values) or 'nothing'}")


def _by_section(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the keys of a file without sections in theirs; slime's in any, and what is neither field nor flag in ``custom_args``."""
    owners, found = field_sections(), Layers()
    for key, value in values.items():
        if (name := key.replace("-", "_")) in owners and name != "custom_config_path":
            found.lay({owners[name]: {name: value}}, path)
        elif flag_table.of_slime(name):
            found.lay({"run": {key: value}}, path)
        elif name.startswith("sglang_") and (flag := name.removeprefix("sglang_")).replace("_", "-") in made_with():
            found.lay({"rollout": {"sglang": {flag: value}}}, path)
        else:
            section, table = ("trainer", "megatron") if name in flag_table.spellings() else ("run", "custom_args")
            found.lay({section: {table: {key: value}}}, path)
    return found.values


def lay_eval_config(layers: Layers) -> None:
    """Puts the sets of slime's ``eval_config``, where one is given, in the place of those that ``[eval]`` names. Raises ConfigError."""
    if (path := layers.file("eval", "eval_config")) is None:
        return
    values, sets = layers.values["eval"], read_sets(path)
    if values.get("sets"):
        raise ConfigError("eval.sets", f"{len(values['sets'])} sets", f"given besides eval_config = {path}; leave one of them out")
    if values.get("eval_prompt_data") is not None:
        layers.notes.append(f"eval.eval_prompt_data: eval_config = {path} takes its place, as with slime")
    values.update(sets=sets, eval_config=None, eval_prompt_data=None)
    layers.origins["eval.sets"] = path


SGLANG_CONFIG = "rollout.sglang_config"


class _SlimeGroup(ConfigTable):
    worker_type: WorkerType = "regular"
    num_gpus: int = Field(gt=0)
    num_gpus_per_engine: int | None = Field(default=None, gt=0)
    overrides: dict[str, Any] = {}


class _SlimeModel(ConfigTable):
    name: str
    model_path: str | None = None
    update_weights: bool | None = None
    num_gpus_per_engine: int | None = Field(default=None, gt=0)
    server_groups: list[_SlimeGroup] = []
    engine_groups: list[_SlimeGroup] = []  # slime's older name

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if bool(self.server_groups) == bool(self.engine_groups):
            raise ValueError("expected server_groups, a list of mappings with num_gpus")
        return self

    def table(self, size: int) -> dict[str, Any]:
        """Returns the model in the form of ``[rollout.models]``. ``size``: GPUs of an engine, where neither model nor group says."""
        groups, paths = [], {path for path in [self.model_path] if path}
        for group in self.server_groups or self.engine_groups:
            shape = {"num_gpus": group.num_gpus, "num_gpus_per_engine": group.num_gpus_per_engine or self.num_gpus_per_engine or size}
            paths |= {str(value) for key, value in group.overrides.items() if plain_name(key) == "model-path"}
            flags = {key: value for key, value in group.overrides.items() if plain_name(key) != "model-path"}
            groups.append({"worker_type": group.worker_type, **shape, "sglang": flags})
        if len(paths) > 1:
            raise ValueError(f"{self.name}: expected one model_path for all groups; there are {', '.join(sorted(paths))}")
        return {"groups": groups, **dict.fromkeys(["hf_checkpoint"] * len(paths), *paths)}


class _SlimeFile(ConfigTable):
    sglang: list[_SlimeModel] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        names = [model.name for model in self.sglang]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have one name: {', '.join(names)}")
        return self


def lay_sglang_config(layers: Layers) -> None:
    """Puts the models and groups of slime's ``sglang_config``, where one is given, into ``[rollout]``. Raises ConfigError."""
    if (path := layers.file("rollout", "sglang_config")) is None:
        return
    rollout, own = layers.values["rollout"], str(layers.values.get("model", {}).get("hf_checkpoint", ""))
    if besides := [name for name in ("models", "engine_groups", "external_engines") if rollout.get(name)]:
        raise ConfigError(f"rollout.{besides[0]}", "…", f"given besides sglang_config = {path}; leave one of them out")
    size = str(rollout.get("rollout_num_gpus_per_engine", 1))  # text, where it comes from a command line
    if not size.isdecimal() or not int(size):
        raise ConfigError("rollout.rollout_num_gpus_per_engine", size, "a whole number, 1 or more")
    models, wishes = _sglang_models(path, int(size))
    trained = [name for name, wish in wishes.items() if (models[name].get("hf_checkpoint", own) == own if wish is None else wish)]
    if len(trained) != 1:
        expected = "update_weights for one model, which is trained; " + (f"{' and '.join(trained)} have it" if trained else "none has it")
        raise ConfigError(SGLANG_CONFIG, str(path), f"expected {expected} (a model without it has it where its path is the run's)")
    policy = models.pop(trained[0])
    if (other := policy.get("hf_checkpoint", own)) != own:
        wanted = f"{own or 'hf_checkpoint'}, or nothing: the engines of the model that is trained begin with the run's hf_checkpoint"
        raise ConfigError(SGLANG_CONFIG, f"{path}: {trained[0]}.model_path = {other}", f"expected {wanted}")
    rollout.update(models=models, policy_name=trained[0], sglang_config=None, **_policy_engines(policy["groups"]))
    layers.origins |= dict.fromkeys(("rollout.models", "rollout.engine_groups"), path)


def lay_prefill_servers(layers: Layers) -> None:
    """Divides the policy's engines into those that prefill, slime's ``prefill_num_servers``, and those that decode. Raises ConfigError."""
    rollout = layers.values.get("rollout", {})
    sizes = ("prefill_num_servers", "rollout_num_gpus_per_engine", "rollout_num_gpus", "rollout_replicas")
    if (count := rollout.get(sizes[0])) is None or not all(str(rollout.get(name) or 1).isdecimal() for name in sizes):
        return
    if not (int(count) and int(rollout.get(sizes[1], 1))):  # each field is checked by itself
        return
    field = "rollout.prefill_num_servers"
    if besides := [name for name in ("sglang_config", "engine_groups", "external_engines") if rollout.get(name)]:
        raise ConfigError(field, count, f"given besides {besides[0]}, which says what each engine does; leave one of them out")
    size, gpus = int(rollout.get("rollout_num_gpus_per_engine", 1)), rollout.get("rollout_num_gpus")
    engines = int(rollout.get("rollout_replicas") or int(gpus or 0) // size)
    if int(count) >= engines:
        raise ConfigError(field, count, f"fewer than the run's engines, of which there are {engines} (rollout_replicas, rollout_num_gpus)")
    parts = {"prefill": int(count), "decode": engines - int(count)}
    groups = [{"worker_type": kind, "replicas": number, "num_gpus_per_engine": size} for kind, number in parts.items()]
    rollout.update(prefill_num_servers=None, engine_groups=groups)


def lay_picture_backend(layers: Layers) -> None:
    """Chooses the torch backend for prompts that show something, unless a backend is given, as Megatron trains text alone.

    What is given of Megatron's layout is left out then, and drafts, which a run without them has no need of: slime's scripts give them.
    """
    data, trainer, rollout = (layers.values.get(section, {}) for section in ("data", "trainer", "rollout"))
    if not all(isinstance(one, dict) for one in (data, trainer, rollout)):
        return  # `parse` refuses it
    if data.get("multimodal_keys") is None or "trainer_backend" in trainer:
        return
    sglang = given if isinstance(given := rollout.get("sglang"), dict) else {}
    sizes = [name for name in MEGATRON_LAYOUT if trainer.pop(name, None) not in (None, False, 1, {}, [])]
    drafts = [name for name in sglang if plain_name(name).startswith("speculative-")]
    for name in drafts:
        del sglang[name]
    left = ", ".join([*(f"trainer.{name}" for name in sizes), *(f"rollout.sglang.{name}" for name in drafts)])
    layers.values["trainer"] = trainer | {"trainer_backend": "torch"}
    layers.notes.append(
        "trainer.trainer_backend = torch, as data.multimodal_keys is set and Megatron trains text alone"
        + (f"; it has no use for {left}: left out" if left else "")
    )


def _sglang_models(path: Path, size: int) -> tuple[dict[str, dict[str, Any]], dict[str, bool | None]]:
    """Returns the models of a file, in the form of ``[rollout.models]``, and what each says of ``update_weights``. Raises ConfigError."""
    try:
        given = _SlimeFile.model_validate(_yaml(SGLANG_CONFIG, path)).sglang
        return {model.name: model.table(size) for model in given}, {model.name: model.update_weights for model in given}
    except ValidationError as error:
        found = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
        no_mapping = not place and found["type"] != "value_error"
        expected = "expected a mapping with the key sglang, a list of models" if no_mapping else found["msg"].removeprefix("Value error, ")
        raise ConfigError(SGLANG_CONFIG, f"{path}: {place.removeprefix('.') or 'its top'}", expected) from None
    except ValueError as error:
        raise ConfigError(SGLANG_CONFIG, str(path), str(error)) from None


def _policy_engines(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of ``[rollout]`` for the policy's groups: the ordinary ones where engines are alike and have the run's flags."""
    size, count = groups[0]["num_gpus_per_engine"], groups[0]["num_gpus"]
    if len(groups) > 1 or groups[0]["worker_type"] != "regular" or groups[0]["sglang"] or count % size:
        return {"engine_groups": groups}
    return {"rollout_replicas": count // size, "rollout_num_gpus_per_engine": size}


_NOTHING_READS = "nothing in slime reads it; leave it out (eval_timeout ends an evaluation that is late)"
_NOT_IN_SETS = {
    "multimodal_keys": "sets show pictures as the run's prompts do, by data.multimodal_keys; leave it out",
    **dict.fromkeys(("eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout", "min_eval_samples"), _NOTHING_READS),
    "app_service": "nothing in slime reads it; give custom_generate_function_path a function that asks that service",
    "message_processor": "nothing in slime reads it; give custom_generate_function_path a function that does it",
    "reward_model": "nothing in slime reads it; give rm_type, or custom_rm_path",
    "remote_environment": "nothing in slime reads it; give rm_type an environment of [reward]",
}
"""Fields of slime's data sets that are not taken, and what to do instead."""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is there twice: the first value would be lost in silence."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if not key.tag.endswith(":merge")]  # whose keys the mapping's own override
        for tag, key in keys:
            if keys.count((tag, key)) > 1:
                raise yaml.composer.ComposerError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return node


def read_sets(path: Path) -> list[dict[str, Any]]:
    """Returns the sets of a file, as tables. Raises ConfigError that names the entry."""
    content = _yaml(EVAL_CONFIG, path)
    content = content.get("eval", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ConfigError(EVAL_CONFIG, str(path), "expected a mapping with datasets, and defaults if you like, or one under eval")
    _check_fields("", content, path, ("defaults", "datasets"))
    defaults = content.get("defaults") or {}
    _check_fields("defaults", defaults, path)
    datasets = content.get("datasets")
    if isinstance(datasets, dict):
        entries = [(f"datasets.{name}", {"name": str(name)}, fields) for name, fields in datasets.items()]
    elif isinstance(datasets, list) and datasets:
        entries = [(f"datasets[{index}]", {}, fields) for index, fields in enumerate(datasets)]
    else:
        raise ConfigError(EVAL_CONFIG, f"{path}: datasets", f"expected a list of data sets, or a mapping by name; found {datasets!r}")
    found = []
    for where, name, fields in entries:
        _check_fields(where, fields or {}, path)
        found.append({**name, **(fields or {})})
        for key, expected in (("path", "needs a path, of JSONL or Parquet"), ("name", "needs a name")):
            if key not in found[-1]:
                raise ConfigError(EVAL_CONFIG, f"{path}: {where}", expected)
    return [{**defaults, **fields} for fields in found]


def _check_fields(where: str, fields: Any, path: Path, valid: Sequence[str] = tuple(EvalSet.model_fields)) -> None:
    if not isinstance(fields, dict):
        raise ConfigError(EVAL_CONFIG, f"{path}: {where}", f"expected a mapping, found {fields!r}")
    for name, value in fields.items():
        if name not in valid:
            reason = _NOT_IN_SETS.get(str(name)) or f"unknown key; {nearest(str(name), list(valid))}"
            raise ConfigError(EVAL_CONFIG, f"{path}: {where}{'.' if where else ''}{name}", reason)
        if isinstance(value, str) and "${" in value:
            raise ConfigError(EVAL_CONFIG, f"{path}: {where}.{name} = {value!r}", "interpolations are not read; write the value")
