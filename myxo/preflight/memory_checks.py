"""Checks that trainer and engines fit the GPUs of this machine, by the plan that `myxo plan` shows.

The plan is within 5 % of what was measured, so a config is refused only where it needs 10 % more than there is; nearer than 10 % to the
limit, on either side, it is told.
"""

from myxo.plan.plan_tables import problem
from myxo.plan.remedies import remedies
from myxo.plan.run_plan import NEAR, MemoryNeed, RunPlan
from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config import devices
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.runtime.errors import ConfigError

MOST_NAMED = 3


def check_gpu_memory(inspection: Inspection) -> Findings:
    """Yields a kind of process whose GPU is surely too small for it; notes one that comes near it."""
    config, architecture = inspection.config, inspection.architecture
    used = {"actor": config.trainer.train_device, "critic": config.trainer.train_device, "engine": config.rollout.rollout_device}
    on_gpus = {role for role, device in used.items() if devices.resolve(device) == "cuda"}
    if architecture is None or not on_gpus or not _divides(inspection):
        return
    if (gpu_bytes := devices.gpu_bytes()) is None:
        return
    plan = RunPlan(config, architecture, gpu_bytes, inspection.critic)
    for need in plan.needs:
        if need.role not in on_gpus or need.total <= (1 - NEAR) * need.available:
            continue
        if need.total > (1 + NEAR) * need.available and not config.debug.ignore_memory_plan:
            section, _, name = need.field.partition(".")
            expected = f"{problem(need)}{_advice(plan, need)}; `myxo plan` shows all of it, and --ignore-memory-plan starts anyway"
            yield ConfigError(need.field, getattr(getattr(config, section), name), expected)
        elif need.fits:
            yield Note(f"memory: {need.of} is near its limit: {need.total / 1e9:.1f} GB of {need.available / 1e9:.1f} by `myxo plan`")
        else:
            yield Note(f"memory: {problem(need)}; it may fail for lack of memory{_advice(plan, need)}")


def _advice(plan: RunPlan, need: MemoryNeed) -> str:
    enough = [remedy for remedy in remedies(plan, need) if remedy.fits][:MOST_NAMED]
    return f"; with one of these it fits: {', '.join(remedy.flags for remedy in enough)}" if enough else ""


def _divides(inspection: Inspection) -> bool:
    """Returns whether the layout divides ranks and model; another check tells where it does not."""
    trainer, layout = inspection.config.trainer, ParallelLayout.of(inspection.config.trainer)
    roles = ("actor", "critic") if inspection.config.algorithm.has_critic else ("actor",)
    problems = [problem for role in roles for problem in layout.world_problems(trainer.ranks(role))]
    models = [model for model in (inspection.architecture, inspection.critic) if model is not None]
    return not problems and not any(list(division_problems(model, layout, trainer.megatron)) for model in models)
