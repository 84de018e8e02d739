"""Correction for samples that another policy made: weights, rejections and masks, never part of the gradient.

Behaviour policy: the engine's, log-probs as it gave them with the tokens. Proximal policy: the trainer's at batch
start. The decoupled objective clips around the proximal policy and weights by proximal over behaviour: Hilton et al.
2022 (arXiv:2110.00641, "Batch size-invariance for policy optimization", section 3), AReaL (arXiv:2505.24298).
All tensors are [T], finite everywhere.
"""

from services.trainer.objective.importance.importance_weights import ImportanceWeight, importance_weight, level_ratio, weight_counts
from services.trainer.objective.importance.rejection import off_policy_sequence_mask, vetoed, within
from services.trainer.objective.importance.second_moment import second_moment_limit, second_moment_mask, second_moments

__all__ = [
    "ImportanceWeight",
    "importance_weight",
    "level_ratio",
    "off_policy_sequence_mask",
    "second_moment_limit",
    "second_moment_mask",
    "second_moments",
    "vetoed",
    "weight_counts",
    "within",
]
