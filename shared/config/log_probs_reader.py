"""Decides whether a run's samples need the log-probs with which the rollout drew their tokens. Pure.

A generate function may not keep them. Where samples are trained by the very weights that drew them, and nothing is made of what engine and
trainer differ by, the trainer's own log-probs at batch start are the rollout's: they stand in. With `off_policy` = none nothing asks for
them.
"""

from collections.abc import Iterator

from shared.config.algorithm import AlgorithmSection
from shared.config.rollout_section import RolloutSection

FIELD = "rollout.missing_log_probs"

_READ_BY = ("custom_tis_function_path", "use_m2po", "use_rs", "rs_veto_threshold", "tis_batch_normalize")
"""Fields of the objective that are about the distance between rollout and trainer alone."""


def log_probs_reader(algorithm: AlgorithmSection, rollout: RolloutSection) -> str | None:
    """Returns which setting needs the rollout's log-probs, as a sentence; None where samples may lack them."""
    if rollout.missing_log_probs == "refuse":
        return f"{FIELD} = refuse"
    return next((f"{setting} reads them" for setting in _readers(algorithm, rollout)), None)


def misfit(algorithm: AlgorithmSection, rollout: RolloutSection) -> str | None:
    """Returns what contradicts `missing_log_probs` = recompute, as ``section.field: what is wrong``."""
    if rollout.missing_log_probs != "recompute" or (reader := log_probs_reader(algorithm, rollout)) is None:
        return None
    instead = "the trainer's own stand in for them with max_staleness = 0 or off_policy = none, and no use_tis"
    return f"{FIELD}: recompute, but {reader}; {instead}"


def _readers(algorithm: AlgorithmSection, rollout: RolloutSection) -> Iterator[str]:
    if algorithm.loss_type != "policy_loss":
        return
    yield from (f"algorithm.{field} = {value}" for field in _READ_BY if (value := getattr(algorithm, field)))
    if algorithm.use_rollout_logprobs:
        yield "algorithm.use_rollout_logprobs = true"
    if algorithm.use_tis:
        yield "algorithm.use_tis = true"
    if algorithm.off_policy in ("decoupled", "rollout"):
        yield f"algorithm.off_policy = {algorithm.off_policy}"
    if algorithm.correction == "decoupled" and rollout.max_staleness:
        yield f"algorithm.off_policy = decoupled (the default) with rollout.max_staleness = {rollout.max_staleness}"
