"""Checks of the shape that architecture flags describe, where the checkpoint cannot say: the layout is wrong for it all the same."""

from myxo.preflight.inspection import Findings, Inspection
from shared.model.described_shape import contradictions, described_shape
from shared.model.parallel_layout import ParallelLayout, division_problems


def check_described_shape(inspection: Inspection) -> Findings:
    """Yields flags that contradict one another, and what the layout does not divide of the shape that they describe.

    With a checkpoint at hand, the flags are compared with it instead (`model_checks.check_megatron_flags`).
    """
    if inspection.architecture is not None:
        return
    trainer = inspection.config.trainer
    yield from contradictions(trainer.megatron)
    if (shape := described_shape(trainer.megatron)) is not None:
        yield from division_problems(shape, ParallelLayout.of(trainer), trainer.megatron)
