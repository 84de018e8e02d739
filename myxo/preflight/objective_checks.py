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


TEACHES = (
    "custom_generate_function_path",
    "rollout_function_path",
    "custom_convert_samples_to_train_data_path",
    "rollout_data_postprocess_path",
)
"""Functions that may put a teacher's log-probs beside their samples."""


def check_teachers(inspection: Inspection) -> Findings:
    """Yields where nobody is a teacher, and a key that is not set where the services start."""
    config = inspection.config
    algorithm, given = (
        config.algorithm,
        [getattr(section, name, None) for section in (config.rollout, config.algorithm) for name in TEACHES],
    )
    alone = not algorithm.opd_teachers and not any(given) and config.debug.load_debug_rollout_data is None
    if algorithm.use_opd and algorithm.opd_type == "sglang" and alone:
        expected = "a teacher: opd_teachers, or a function that puts its log-probs beside the samples (custom_generate_function_path)"
        yield ConfigError("algorithm.use_opd", True, expected)
    variable = inspection.config.algorithm.opd_teacher_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("algorithm.opd_teacher_key_variable", variable, "a variable that is set where `myxo up` starts")
