"""Checks of the objective: what its presets set and what was given otherwise; its corrections; the key of its teachers."""

import os

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config import environment_variables, presets
from shared.runtime.errors import ConfigError


def check_presets(inspection: Inspection) -> Findings:
    """Yields a note for each preset."""
    config = inspection.config
    values = {field: value for section in type(config).model_fields for field, value in getattr(config, section)}
    yield from map(Note, presets.told(config.algorithm.preset, values))


def check_support(inspection: Inspection) -> Findings:
    """Yields a note where samples come from another distribution than the one that is trained."""
    if found := inspection.config.support_mismatch:
        yield Note(
            f"{', '.join(found)}: this run trains another distribution than it samples: log-probs and ratios are those of softmax(logits / "
            "rollout_temperature) over the whole vocabulary, and train/support_mismatch is 1 in each step's metrics"
        )


def check_corrections(inspection: Inspection) -> Findings:
    """Yields a note for a correction without effect."""
    algorithm, steps = inspection.config.algorithm, inspection.config.trainer.num_steps_per_rollout
    if inspection.config.has_steps and algorithm.use_opsm and algorithm.correction != "rollout" and steps == 1:
        unmoved = "with one optimizer step a rollout the policy has not moved away from the old one, as with slime"
        yield Note(f"--use-opsm changes nothing: {unmoved}; --use-rollout-logprobs measures from the rollout's")


def check_variables(inspection: Inspection) -> Findings:
    """Yields a note for each environment variable of slime's that changes nothing here."""
    yield from map(Note, environment_variables.unread({**os.environ, **inspection.config.trainer.train_env_vars}))


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
    temperature = config.rollout.rollout_temperature
    if algorithm.opd_teachers and temperature != 1.0:
        yield Note(
            f"opd_teachers are asked for log-probs at rollout_temperature = {temperature:g}, at which the policy's are taken; SGLang gives "
            "those of given tokens at 1, whatever it is asked, and the two differ; opd_type = megatron takes both at rollout_temperature"
        )
    variable = inspection.config.algorithm.opd_teacher_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("algorithm.opd_teacher_key_variable", variable, "a variable that is set where `myxo up` starts")
