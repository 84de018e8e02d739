"""What is optimised: one frozen dataclass, checked when it is made. Names and defaults are slime's, save where noted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from shared.runtime.errors import ConfigError

AdvantageEstimator = Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
LossType = Literal["policy_loss", "sft_loss", "custom_loss"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
OffPolicy = Literal["decoupled", "rollout", "none"]
Bounding = Literal["truncate", "clip", "mask"]
Level = Literal["token", "sequence", "geometric"]
Teacher = Literal["sglang", "megatron"]
Reducer = Literal["rollout_mean", "token_mean", "fixed_length"]

GROUP_RELATIVE = ("grpo", "gspo", "cispo")
"""Estimators that compare the samples of a group, and know no rewards of single tokens."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective of a run.

    Args:
        loss_type: ``policy_loss``; ``sft_loss``: maximum likelihood of the samples that pass (``losses.passing``); ``custom_loss``.
        advantage_estimator: ``grpo``, ``reinforce_plus_plus``, its ``_baseline`` and ``ppo`` clip per token, ``gspo`` per sequence,
            ``cispo`` clips the weight and keeps every gradient; how rewards become advantages goes with it (``advantage.py``).
        normalize_rewards: False takes rewards as they are. normalize_std: False only subtracts the mean (Dr.GRPO).
        normalize_advantages: whiten over the trained tokens of the batch.
        gamma, lambd: discount of a token, and of an error of the critic (``returns.py``).
        kl_coef: weight of the reference KL in the reward: ppo, reinforce_plus_plus and its baseline.
        use_opd, opd_kl_coef: on-policy distillation: the teacher's disagreement is taken off the advantages. opd_type: ``sglang``: its
            log-probs come with the samples; ``megatron``: the trainer computes them.
        eps_clip, eps_clip_high: the ratio is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``; None: the same both ways.
        eps_clip_c: dual clip, > 1; None: off. value_clip: of the critic's loss.
        use_m2po, m2_threshold: in place of the clip, mask tokens until the second moment of the log ratio is at most this.
        use_kl_loss, kl_loss_coef: measure the reference KL; add it to the loss. A coefficient other than 0 measures it too.
        kl_loss_type: which estimate (``kl.py``); None: k3 in the loss, k1 in the reward. use_unbiased_kl: that of the loss.
        entropy_coef: weight of the entropy that is subtracted from the loss.
        off_policy: ``decoupled``: clip around the trainer's own log-probs at batch start, and weight by how they differ from the
            rollout's (ours, the default); ``rollout``: clip around the rollout's (slime's ``--use-rollout-logprobs``); ``none``: clip
            around the trainer's, weight nothing.
        tis_mode, tis_level, tis_clip, tis_clip_low, tis_batch_normalize: the weight of ``decoupled`` (``importance/``).
        use_rs, rs_level, rs_lower_bound, rs_upper_bound, rs_veto_threshold: what is rejected for that weight; a level or bound that is None
            is the weight's, a veto that is None is off.
        use_opsm, opsm_delta: drop sequences of negative advantage that the policy has left by more than delta nats a token.
        reducer: how per-token losses become one number (``reduce.py``). fixed_length: tokens by which ``fixed_length`` divides every
            rollout.
        rejection_threshold: ``sft_loss`` trains samples with a reward above it.

    Raises:
        ConfigError: a value outside its range, or one that contradicts another, with the field's name and what would be right.
    """

    loss_type: LossType = "policy_loss"
    advantage_estimator: AdvantageEstimator = "grpo"
    normalize_rewards: bool = True
    normalize_std: bool = True
    normalize_advantages: bool = False
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    use_opd: bool = False
    opd_type: Teacher | None = None
    opd_kl_coef: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    value_clip: float = 0.2
    use_m2po: bool = False
    m2_threshold: float = 0.04
    use_kl_loss: bool = False
    kl_loss_type: KlType | None = None
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    off_policy: OffPolicy = "decoupled"
    tis_mode: Bounding = "clip"
    tis_level: Level = "token"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_batch_normalize: bool = False
    use_rs: bool = False
    rs_level: Level | None = None
    rs_lower_bound: float | None = None
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = None
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    reducer: Reducer = "rollout_mean"
    fixed_length: int | None = None
    rejection_threshold: float = 0.0

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices and not (field in _OPTIONAL and getattr(self, field) is None):
                raise _refusal(self, field, f"expected one of {', '.join(choices)}")
        for field, lowest, highest in _RANGES:
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and lowest <= value <= highest):
                bounds = f">= {lowest:g}" if math.isinf(highest) else f"from {lowest:g} to {highest:g}"
                raise _refusal(self, field, f"expected a finite number {bounds}" if math.isfinite(lowest) else "expected a finite number")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise _refusal(self, "eps_clip_c", "expected a number > 1, or none")
        if (self.reducer == "fixed_length") != (self.fixed_length is not None and self.fixed_length > 0):
            raise _refusal(self, "fixed_length", "expected > 0 with reducer fixed_length, none without")
        self._off_policy_fits()
        self._terms_fit()

    def _off_policy_fits(self) -> None:
        if self.tis_clip <= self.tis_clip_low:
            raise _refusal(self, "tis_clip", f"expected > tis_clip_low = {self.tis_clip_low}")
        if self.tis_mode == "truncate" and self.tis_clip_low:
            raise _refusal(self, "tis_clip_low", "tis_mode = truncate has no lower bound; use clip or mask")
        lower, upper = self.rejection_bounds
        if self.use_rs and upper <= lower:
            raise _refusal(self, "rs_upper_bound", f"expected > rs_lower_bound = {lower}")
        weighted = {"tis_batch_normalize": self.tis_batch_normalize, "use_rs": self.use_rs, "rs_veto_threshold": self.rs_veto_threshold}
        for field, value in weighted.items():
            if value and self.off_policy != "decoupled":
                raise _refusal(self, field, f"belongs to the weight of off_policy = decoupled, here it is {self.off_policy}")
        for field in ("use_opsm", "use_m2po"):
            if getattr(self, field) and self.off_policy == "none":
                raise _refusal(self, field, "measures the distance from the rollout: off_policy is none")
        if self.use_m2po and self.advantage_estimator in ("gspo", "cispo"):
            raise _refusal(self, "use_m2po", f"takes the place of the clip per token; {self.advantage_estimator} has another")
        if self.use_m2po and self.eps_clip_c is not None:
            raise _refusal(self, "eps_clip_c", "use_m2po takes the place of every clip")

    def _terms_fit(self) -> None:
        if self.kl_coef and self.advantage_estimator in GROUP_RELATIVE:
            raise _refusal(self, "kl_coef", f"{self.advantage_estimator} has no rewards of single tokens; use kl_loss_coef")
        if self.kl_coef and self.kl_loss_coef:
            raise _refusal(self, "kl_coef", f"the KL is in the loss already: kl_loss_coef = {self.kl_loss_coef}")
        if self.use_unbiased_kl and not self.measures_kl:
            raise _refusal(self, "use_unbiased_kl", "is about the KL in the loss: needs use_kl_loss or kl_loss_coef")

    @property
    def clip_low(self) -> float:
        """Lower bound of the clipped ratio."""
        return 1.0 - self.eps_clip

    @property
    def clip_high(self) -> float:
        """Upper bound of the clipped ratio."""
        return 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Between which a weight must lie under ``use_rs``."""
        lower, upper = self.rs_lower_bound, self.rs_upper_bound
        return self.tis_clip_low if lower is None else lower, self.tis_clip if upper is None else upper

    @property
    def measures_kl(self) -> bool:
        """Whether the loss has a reference KL, be it with coefficient 0."""
        return self.use_kl_loss or self.kl_loss_coef != 0.0

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic's values."""
        return self.advantage_estimator == "ppo"


def _refusal(config: ObjectiveConfig, field: str, expected: str) -> ConfigError:
    return ConfigError(f"objective.{field}", getattr(config, field), expected)


_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": get_args(LossType),
    "advantage_estimator": get_args(AdvantageEstimator),
    "kl_loss_type": get_args(KlType),
    "off_policy": get_args(OffPolicy),
    "tis_mode": get_args(Bounding),
    "tis_level": get_args(Level),
    "rs_level": get_args(Level),
    "opd_type": get_args(Teacher),
    "reducer": get_args(Reducer),
}
_OPTIONAL = ("kl_loss_type", "rs_level", "opd_type")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("gamma", 0, 1), ("lambd", 0, 1), ("kl_coef", 0, math.inf), ("opd_kl_coef", 0, math.inf),
    ("eps_clip", 0, math.inf), ("eps_clip_high", 0, math.inf), ("eps_clip_c", 0, math.inf), ("value_clip", 0, math.inf),
    ("m2_threshold", 0, math.inf), ("kl_loss_coef", 0, math.inf), ("entropy_coef", -math.inf, math.inf),
    ("tis_clip", 0, math.inf), ("tis_clip_low", 0, math.inf), ("rs_lower_bound", 0, math.inf), ("rs_upper_bound", 0, math.inf),
    ("rs_veto_threshold", 0, math.inf), ("opsm_delta", 0, math.inf), ("rejection_threshold", -math.inf, math.inf),
)  # fmt: skip
