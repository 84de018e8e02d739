"""Which of a config's values are fields: slime's keys and Megatron's flags under their names; others are refused with the nearest."""

from typing import Any

from shared.config import megatron_flags, slime_flags
from shared.config.config_layers import Known
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.runtime.errors import ConfigError, nearest


def known_fields(values: dict[str, Any]) -> Known:
    """Returns the values of known fields, Megatron's flags under their names, the errors of the others, and lines for the user."""
    known, problems, notes = _own_fields(values)
    trainer = known.get("trainer", {})
    if isinstance(trainer, dict) and isinstance(trainer.get("megatron"), dict):
        try:
            known = {**known, "trainer": {**trainer, "megatron": megatron_flags.canonical(trainer["megatron"], field_sections())}}
        except ConfigError as error:
            problems.append(error)
            known = {**known, "trainer": {key: value for key, value in trainer.items() if key != "megatron"}}
    return Known(known, problems, notes)


def _translated(values: dict[str, Any]) -> Known:
    """Returns the values with slime's keys, which are no fields, as the fields that they stand for; they stand in any section."""
    owners = field_sections()
    known: dict[str, Any] = {}
    found = Known({}, [], [])
    for section, fields in values.items():
        known[section] = fields
        if not isinstance(fields, dict):
            continue
        known[section] = {**fields}
        megatron = fields.get("megatron")
        tables = [(section, known[section])]
        if section == "trainer" and isinstance(megatron, dict):
            known[section]["megatron"] = {**megatron}
            tables.append(("trainer.megatron", known[section]["megatron"]))
        for path, table in tables:
            for key in list(table):
                name = key.replace("-", "_")
                if name not in owners and (entry := slime_flags.find(name)) is not None:
                    _translate(f"{path}.{key}", name, entry, table.pop(key), found)
    for name, value in found.values.items():
        section = known.setdefault(owners[name], {})
        if isinstance(section, dict):
            section.setdefault(name, value)
    return Known(known, found.problems, found.notes)


def _translate(path: str, name: str, entry: slime_flags.Entry, value: Any, found: Known) -> None:
    """Adds to ``found`` what one of slime's keys comes to."""
    try:
        translation = slime_flags.translate(name, entry, value)
        if translation.environment:
            raise ValueError(f"a config holds no secrets; set {', '.join(translation.environment)} in the environment")
    except ValueError as error:
        found.problems.append(ConfigError(path, value, str(error)))
        return
    merged = translation.over(found.values)
    found.values.update(merged)
    found.notes.extend(note for note in translation.notes if note not in found.notes)


def _own_fields(given: dict[str, Any]) -> Known:
    """Returns the known fields, a ConfigError for each unknown section and key, and lines for the user."""
    names, owners = list(RunConfig.model_fields), field_sections()
    known: dict[str, Any] = {}
    values, problems, notes = _translated(given)
    for section, fields in values.items():
        if section not in names:
            elsewhere = f"belongs into the section [{owners[section]}]" if section in owners else None
            shown = "…" if isinstance(fields, dict) and elsewhere is None else fields
            problems.append(ConfigError(section, shown, elsewhere or f"unknown section; {nearest(section, names)}"))
        elif not isinstance(fields, dict):
            problems.append(ConfigError(section, fields, f"expected a section [{section}] with fields"))
        else:
            valid = list(section_model(section).model_fields)
            known[section] = {field: value for field, value in fields.items() if field in valid}
            for field in (field for field in fields if field not in valid):
                advice = megatron_flags.refusal(field) or f"unknown key; {nearest(field, valid)}"
                expected = f"unknown key here; it belongs into the section [{owners[field]}]" if field in owners else advice
                problems.append(ConfigError(f"{section}.{field}", fields[field], expected))
    return Known(known, problems, notes)
