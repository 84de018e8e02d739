"""What is optimised: one frozen dataclass, checked when it is made. Names and defaults are slime's, save where
noted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from shared.errors import ConfigError

AdvantageEstimator = Literal["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
OffPolicy = Literal["decoupled", "rollout", "none"]
Importance = Literal["tis", "icepop"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
Reducer = Literal["rollout_mean", "token_mean", "fixed_length"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective of a run.

    Args:
        advantage_estimator: ``grpo`` and ``reinforce_plus_plus_baseline`` clip per token, ``gspo`` per sequence,
            ``cispo`` clips the weight and keeps every gradient; the reward's normalisation goes with it
            (``advantage.py``).
        normalize_rewards: False takes rewards as they are. normalize_std: False only subtracts the mean (Dr.GRPO).
        normalize_advantages: whiten over the trained tokens of the batch.
        eps_clip, eps_clip_high: the ratio is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``; None: the same both
            ways.
        eps_clip_c: dual clip, > 1; None: off.
        kl_loss_type, kl_loss_coef, use_unbiased_kl: the reference KL that is added to the loss (``kl.py``).
        entropy_coef: weight of the entropy that is subtracted from the loss.
        off_policy: ``decoupled``: clip around the trainer's own log-probs at batch start, and weight by how they differ
            from the rollout's (ours, the default); ``rollout``: clip around the rollout's (slime's
            ``--use-rollout-logprobs``); ``none``: clip around the trainer's, weight nothing.
        importance, importance_level, tis_clip, tis_clip_low: the weight of ``decoupled`` (``importance.py``).
        use_opsm, opsm_delta: drop sequences of negative advantage that the policy has left by more than delta nats a
            token.
        reducer: how per-token losses become one number (``reduce.py``). fixed_length: tokens by which ``fixed_length``
            divides every rollout.

    Raises:
        ConfigError: a value outside its range, with the field's name and what would be right.
    """

    advantage_estimator: AdvantageEstimator = "grpo"
    normalize_rewards: bool = True
    normalize_std: bool = True
    normalize_advantages: bool = False
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    kl_loss_type: KlType = "k3"
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    off_policy: OffPolicy = "decoupled"
    importance: Importance = "tis"
    importance_level: ImportanceLevel = "token"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    reducer: Reducer = "rollout_mean"
    fixed_length: int | None = None

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ConfigError(f"objective.{field}", getattr(self, field), f"expected one of {', '.join(choices)}")
        for field in _FINITE:
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"objective.{field}", value, "expected a finite number")
        for field in ("eps_clip", "eps_clip_high", "kl_loss_coef", "tis_clip_low", "opsm_delta"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ConfigError(f"objective.{field}", value, "expected a number >= 0")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ConfigError("objective.eps_clip_c", self.eps_clip_c, "expected a number > 1, or none")
        if self.tis_clip <= self.tis_clip_low:
            raise ConfigError("objective.tis_clip", self.tis_clip, f"expected > tis_clip_low = {self.tis_clip_low}")
        if self.use_opsm and self.off_policy == "none":
            raise ConfigError("objective.use_opsm", True, "measures the distance from the rollout: off_policy is none")
        if (self.reducer == "fixed_length") != (self.fixed_length is not None and self.fixed_length > 0):
            raise ConfigError("objective.fixed_length", self.fixed_length, "expected > 0 with reducer fixed_length, none without")

    @property
    def clip_low(self) -> float:
        """Lower bound of the clipped ratio."""
        return 1.0 - self.eps_clip

    @property
    def clip_high(self) -> float:
        """Upper bound of the clipped ratio."""
        return 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)


_CHOICES: dict[str, tuple[str, ...]] = {
    "advantage_estimator": get_args(AdvantageEstimator),
    "kl_loss_type": get_args(KlType),
    "off_policy": get_args(OffPolicy),
    "importance": get_args(Importance),
    "importance_level": get_args(ImportanceLevel),
    "reducer": get_args(Reducer),
}
_FINITE = (
    "eps_clip", "eps_clip_high", "eps_clip_c", "kl_loss_coef", "entropy_coef", "tis_clip", "tis_clip_low", "opsm_delta",
)  # fmt: skip
