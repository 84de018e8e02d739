"""Checks of the objective: what its presets set and what was given otherwise; the key of its teachers."""

import os

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config import presets
from shared.runtime.errors import ConfigError


def check_presets(inspection: Inspection) -> Findings:
    """Yields a note for each preset."""
    config = inspection.config
    values = {field: value for section in type(config).model_fields for field, value in getattr(config, section)}
    yield from map(Note, presets.told(config.algorithm.preset, values))


def check_teachers(inspection: Inspection) -> Findings:
    """Yields a key that is not set where the services start."""
    variable = inspection.config.algorithm.opd_teacher_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("algorithm.opd_teacher_key_variable", variable, "a variable that is set where `myxo up` starts")
