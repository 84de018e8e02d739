"""Tells what the presets of the objective set, and what was given otherwise."""

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config import presets


def check_presets(inspection: Inspection) -> Findings:
    """Yields a note for each preset."""
    config = inspection.config
    values = {field: value for section in type(config).model_fields for field, value in getattr(config, section)}
    yield from map(Note, presets.told(config.algorithm.preset, values))
