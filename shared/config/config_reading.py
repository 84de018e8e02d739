"""Reading a run's config: a TOML file over its bases, flags and other files over it, presets; and all that is wrong at once.

`dump` writes the resolved config as TOML, section by section; `tomllib` and `parse` read it back to the same.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from shared.config import presets
from shared.config.config_layers import (
    Layers,
    in_file,
    known_fields,
    lay_custom_config,
    lay_eval_config,
    lay_megatron_config,
    lay_picture_backend,
    lay_prefill_servers,
    lay_sglang_config,
)
from shared.config.eval_section import NAME
from shared.config.flag_table import Off
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.config.section import HOOK, WITHOUT_RULES, ContradictoryFields, Section
from shared.config.slime_defaults import settle_functions
from shared.data.data_files import DataFile
from shared.runtime.errors import BadInput, ConfigError, problems_of, raise_problems
from shared.runtime.safe_text import is_masked, without_credentials


class ConfigReading(NamedTuple):
    """A config as it was read.

    Args:
        config: None where a value is wrong; it is there if the only errors are unknown sections, keys and flags. problems: a ConfigError
            for each error. notes: lines for the user, of keys under other names or without effect. origins: ``section.field`` → the file
            that set it, where that is another than the config's own. remaining: the config for checks; where something was refused,
            `without` those fields, and None where no config is left.
    """

    config: RunConfig | None
    problems: list[BadInput]
    notes: list[str]
    origins: dict[str, Path]
    remaining: RunConfig | None

    def with_origin(self, problem: BadInput) -> BadInput:
        """Returns the problem with the file that its field comes from, where that is another than the config's own."""
        origin = self.origins.get(".".join(problem.field.split(".")[:2])) if isinstance(problem, ConfigError) else None
        return problem if origin is None else in_file(problem, origin)


def parse(values: dict[str, Any]) -> RunConfig:
    """Builds the config from nested plain values. Raises ConfigError with field, value and what is expected, or Problems of several."""
    known, problems, _ = known_fields(values)
    problems += [
        ConfigError(f"{section}.{field}", "…", "stands for a credential that files and prints leave out; give the field's own value again")
        for section, fields in known.items()
        for field, value in fields.items()
        if is_masked({field: value})
    ]
    known, preset = _with_presets(known)
    try:
        config = with_own_gpus(_without_steps(RunConfig.model_validate(known)))
    except ValidationError as error:
        problems += _without_consequences(_config_errors(error, {**values, **known}), problems)
        problems += _misfits_of_others(known, error, values)
    raise_problems([_of_preset(problem, preset) for problem in problems])
    return config


def _without_steps(config: RunConfig) -> RunConfig:
    """Returns the config of a run without training steps as that half of a run which it needs: engines to evaluate, or a trainer for the
    warm start; both where the warm start's weights are evaluated."""
    if config.has_steps or config.debug.trains_only or config.tinker.tinker_endpoint:
        return config
    half = {"debug_rollout_only": True} if config.sft.sft_data is None else {} if config.eval.named else {"debug_train_only": True}
    evaluates = (config.eval.eval_function_path or config.rollout.rollout_function_path) if config.eval.named else None
    drawn, constant = {"rollout_function_path": None}, {"lr_decay_style": "constant"}  # over no steps nothing is drawn, or decays
    return config.with_fields(debug=half, trainer=constant, rollout=drawn, eval={"eval_function_path": evaluates})


def with_own_gpus(config: RunConfig) -> RunConfig:
    """Returns the config of one half of a run without colocation: it shares its GPUs with no one."""
    if not (config.debug.debug_rollout_only or config.debug.trains_only):
        return config
    return config.with_fields(trainer={"colocate": False, "offload_train": None, "offload_rollout": None})


def _with_presets(known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values with those of the presets that they name; and of each field that was set so the preset."""
    known = {section: {name: value for name, value in fields.items() if not isinstance(value, Off)} for section, fields in known.items()}
    try:
        named = [str(name) for name in presets.listed(known.get("algorithm", {}).get("preset", []))]
    except ValueError:  # the field's own check tells it
        named = []
    owners = field_sections()
    given = {field: value for fields in known.values() for field, value in fields.items()}
    defaults = {field: section_model(section).model_fields[field].default for field, section in owners.items()}
    found = presets.fields_of(named, given, defaults)
    for field, value in found.items():
        known = {**known, owners[field]: {**known.get(owners[field], {}), field: value}}
    return known, {f"{owners[field]}.{field}": str(presets.owner(named, field)) for field in found}


def _of_preset(problem: BadInput, preset: dict[str, str]) -> BadInput:
    """Returns the same problem with the preset that set the field."""
    if not isinstance(problem, ConfigError) or problem.field not in preset:
        return problem
    return ConfigError(problem.field, problem.value, f"{problem.expected} (set by preset {preset[problem.field]})")


def _misfits_of_others(known: dict[str, Any], refused: ValidationError, values: dict[str, Any]) -> list[BadInput]:
    """Returns the contradictions among the valid fields: pydantic checks for them only once all fields are valid."""
    if not any(error["loc"] for error in refused.errors()):
        return []  # all sections were valid, and what does not go together over them was refused
    fields = {tuple(problem.field.split(".")[:2]) for problem in _config_errors(refused, values)}
    others = {section: {name: value for name, value in given.items() if (section, name) not in fields} for section, given in known.items()}
    try:
        RunConfig.model_validate(others)
    except ValidationError as error:
        if isinstance(error.errors()[0].get("ctx", {}).get("error"), ContradictoryFields):
            found = _config_errors(error, values)
            return [problem for problem in found if not any(path[-1] in str(problem) for path in fields)]
    return []


def load(path: Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> RunConfig:
    """Returns the config of `read`. Raises ConfigError for an error in it, or Problems of several."""
    config, problems, *_ = read(path, overrides)
    raise_problems(problems)
    assert config is not None  # or there was a problem
    return config


COMMAND_LINE = Path("the command line")  # The origin of values in no file


def read(path: Path | None, overrides: dict[str, dict[str, Any]] | None = None, refused: Sequence[BadInput] = ()) -> ConfigReading:
    """Reads a TOML file over its bases, applies ``overrides`` (section → field → value), makes paths absolute from here.

    ``path``: None: the overrides are all there is. ``refused``: errors that are reported already. Raises ConfigError for a file that cannot
    be read.
    """
    layers, origin = Layers(), path or COMMAND_LINE
    if path is not None:
        layers.read(path)
    layers.lay(overrides or {}, origin)
    lay_custom_config(layers)
    lay_megatron_config(layers)  # roles have theirs over everybody's
    layers.notes += settle_functions(layers.values)
    problems = layers.problems
    try:
        lay_eval_config(layers)
        lay_prefill_servers(layers)
        lay_sglang_config(layers)
        lay_picture_backend(layers)
        config, found = parse(layers.values).absolute(Path.cwd()), list[BadInput]()
    except BadInput as error:
        config, found = None, _without_consequences(problems_of(error), [*problems, *refused])
    met = [*problems, *refused, *found]
    remaining = _remaining(layers.values, {name for problem in met for name in fields_named(problem)}) if met else config
    others = {field: file for field, file in layers.origins.items() if file != origin}
    reading = ConfigReading(config, problems, layers.notes, others, remaining)
    return reading._replace(problems=problems + [reading.with_origin(problem) for problem in found])


_STAND_INS: dict[str, dict[str, Any]] = {"run": {"name": "run"}, "model": {"hf_checkpoint": "."}, "rollout": {"rollout_batch_size": 1}}
"""Values of the fields without a default, where these are left out in the end."""


def _remaining(values: dict[str, Any], names: set[str]) -> RunConfig | None:
    known, _ = _with_presets(known_fields(values).values)
    kept = {section: {name: value for name, value in fields.items() if name not in names} for section, fields in known.items()}
    given = {section: {**_STAND_INS.get(section, {}), **kept.get(section, {})} for section in (*known, *_STAND_INS)}
    try:
        config = RunConfig.model_validate(given, context=WITHOUT_RULES)
    except ValidationError:
        return None
    return without(with_own_gpus(_without_steps(config)).absolute(Path.cwd()), names)


def without(config: RunConfig, names: Collection[str]) -> RunConfig:
    """Returns the config without some fields: reading one raises an AttributeError, as `refusals_of` takes it. Those of ``[debug]`` stay:
    by them a run is a whole one or a half, which decides what is checked."""
    sections = {section: getattr(config, section).model_copy() for section in RunConfig.model_fields if section != "debug"}
    for section in sections.values():
        for name in section.__dict__.keys() & set(names):
            del section.__dict__[name]
    return config.model_copy(update=sections)


def refusals_of(error: AttributeError | BadInput) -> list[BadInput]:
    """Returns the problems that ended a check; none where it read a field that the config is `without`. Raises any other AttributeError."""
    if isinstance(error, BadInput):
        return problems_of(error)
    if not isinstance(error.obj, Section) or error.name not in type(error.obj).model_fields:
        raise error
    return []


def fields_named(problem: BadInput) -> set[str]:
    """Returns the fields that an error is about: its own, and those that it says contradict it, or may have been meant."""
    if not isinstance(problem, ConfigError):
        return set()
    section, _, own = problem.field.partition(".")
    if section in RunConfig.model_fields and not own:
        return set(section_model(section).model_fields)
    said = problem.expected.partition("valid are ")[0].replace("-", "_")
    if (meant := re.search(r"did you mean \[(\w+)\]", said)) is not None:
        return set(section_model(meant[1]).model_fields)
    words = re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", said) + re.findall(r"did you mean _*(\w+)", said)
    return {word for word in (*words, own.partition(".")[0], section.strip("-").replace("-", "_")) if word in field_sections()}


def _without_consequences(found: Iterable[BadInput], reported: list[BadInput]) -> list[BadInput]:
    """Returns the errors that do not follow from a reported one: a misspelt field, or a section that is no table, is also missing."""
    refused = [problem for problem in reported if isinstance(problem, ConfigError)]
    fields = {problem.field for problem in refused}
    hints = {problem.expected.rpartition("did you mean ")[2].strip("-").replace("-", "_") for problem in refused}

    def follows(problem: BadInput) -> bool:
        if not isinstance(problem, ConfigError):
            return False
        section, _, name = problem.field.rpartition(".")
        lacks_section = f"[{section or name}]?" in hints and problem.expected.startswith("required: ")
        return problem.field in fields or section in fields or f"{name}?" in hints or lacks_section

    return [problem for problem in found if not follows(problem)]


def _config_errors(error: ValidationError, values: dict[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each value that pydantic refused, under its field."""
    for found in error.errors():
        reason = found.get("ctx", {}).get("error")
        if isinstance(reason, ContradictoryFields):
            for problem in reason.problems:
                field, message = problem.split(": ", 1)
                yield _config_error(found["type"], field.split("."), message, values)
        else:
            yield _config_error(found["type"], [str(part) for part in found["loc"]], found["msg"].removeprefix("Value error, "), values)


def _config_error(kind: str, location: list[str], message: str, values: dict[str, Any]) -> ConfigError:
    location, value = _found(location, values)
    if kind == "missing":
        model = section_model(location[0]) if len(location) > 1 else None
        description = model.model_fields[location[1]].description if model and location[1] in model.model_fields else "a section"
        return ConfigError(".".join(location), None, f"required: {description}")
    if value is None:
        value = _default(location)
    if kind == "string_pattern_mismatch" and HOOK in message:
        message = "expected package.module:function, a function at a module's top level, in a module as Python imports it"
    return ConfigError(".".join(location), without_credentials(value, free=True), message[0].lower() + message[1:])


def _default(location: list[str]) -> Any:
    """Returns the value that a field has where none is given; None for what has none."""
    if len(location) != 2 or location[0] not in RunConfig.model_fields:
        return None
    field = section_model(location[0]).model_fields.get(location[1])
    return None if field is None or field.is_required() else field.default


def _found(location: list[str], values: Any) -> tuple[list[str], Any]:
    """Returns a location with the names of a list's tables in the place of their numbers, and the value there; a key of a list: of all.
    What stands behind a plain value is a member of its type's union."""
    shown = []
    for part in location:
        if isinstance(values, str | int | float):
            break
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
            name = values.get("name") if isinstance(values, dict) else None
            shown.append(name if isinstance(name, str) and re.match(NAME, name) else part)
            continue
        if isinstance(values, list) and not part.isdecimal():
            values = [item.get(part) for item in values if isinstance(item, dict)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
        shown.append(part)
    return shown, values


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def dump(config: RunConfig) -> str:
    """Returns every field of every section. Fields without a value stand as comments, for TOML has no null; where they have one by default,
    as an empty text."""
    blocks = []
    for section in type(config).model_fields:
        lines, tables = [f"[{section}]"], list[str]()
        for field, value in getattr(config, section):
            if isinstance(value, list) and value and isinstance(value[0], BaseModel):  # these have the form that the field gives them
                value = getattr(config, section).model_dump(mode="json", include={field})[field]
            if isinstance(value, list) and value and isinstance(value[0], dict):
                rows = [[f"{_key(name)} = {_value(one)}" for name, one in item.items() if one is not None] for item in value]
                tables += ["\n".join([f"[[{section}.{field}]]", *row]) for row in rows]
                continue
            none = f"# {field} = none" if section_model(section).model_fields[field].default is None else f'{field} = ""'
            lines.append(none if value is None else f"{field} = {_value(value)}")
        blocks += ["\n".join(lines), *tables]
    return "\n\n".join(blocks) + "\n"


def _value(value: Any) -> str:
    match value:
        case float():
            return repr(value)
        case bool() | int() | str():
            # JSON's escapes are TOML's too, but for DEL, which JSON leaves as it is and TOML refuses
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Path() | DataFile():
            return _value(str(value))
        case list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case dict() if _holds_null(value):
            return _value(json.dumps(value))
        case dict():
            items = (f"{_key(key)} = {_value(item)}" for key, item in value.items())
            return "{ " + ", ".join(items) + " }" if value else "{}"
        case BaseModel():
            return _value(value.model_dump(mode="json", exclude_none=True))
        case _:
            raise TypeError(f"{type(value).__name__} has no form in TOML")


def _holds_null(value: Any) -> bool:
    return value is None or any(map(_holds_null, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _value(key)
