"""Checks that the generators of a curriculum can be made: their names, their parameters, their first level."""

from myxo.preflight.inspection import Findings, Inspection
from shared.data import reasoning_gym_source
from shared.rewards.names import REASONING_GYM, missing_package
from shared.runtime.errors import ConfigError


def check_generators(inspection: Inspection) -> Findings:
    """Yields what is wrong with ``reasoning_gym``."""
    curriculum = inspection.config.curriculum
    if not curriculum.reasoning_gym:
        return
    if (missing := missing_package(REASONING_GYM)) is not None:
        yield ConfigError(reasoning_gym_source.FIELD, ", ".join(curriculum.reasoning_gym), missing)
        return
    reasoning_gym_source.make(inspection.config)  # raises ConfigError
