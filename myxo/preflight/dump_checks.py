"""Checks of the dumps that a run trains on in the place of what it generates."""

from pathlib import Path

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.debug_section import DUMPS, STEP
from shared.runtime.errors import ConfigError


def check_dumps(inspection: Inspection) -> Findings:
    """Yields the first step without a file; notes what a run leaves out that trains nothing."""
    config = inspection.config
    template = config.debug.load_debug_rollout_data
    if config.debug.debug_rollout_only and config.sft.sft_data is not None:
        yield Note("debug.debug_rollout_only: nothing is trained: the warm start of [sft] is left out")
    if template is None:
        return
    if config.algorithm.has_critic:
        expected = "an estimator without a critic: its values are not in the dumps"
        yield ConfigError("algorithm.advantage_estimator", config.algorithm.advantage_estimator, expected)
    for step in range(config.rollout.num_rollout):
        path = Path(template.replace(STEP, str(step)))
        if not path.is_file():
            expected = f"a file of each step from 0 to {config.rollout.num_rollout - 1} (rollout.num_rollout); there is no {path}"
            yield ConfigError(DUMPS, template, expected)
            return
