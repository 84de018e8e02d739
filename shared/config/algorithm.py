"""The section of the run's config that says what is optimised. Names are slime's; `docs/algorithms.md` has the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shared.config.sections import HOOK, Section

Estimator = Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
Level = Literal["token", "sequence", "geometric"]
OffPolicy = Literal["decoupled", "rollout", "none"]


class AlgorithmSection(Section):
    """The objective."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = Field(
        default="policy_loss", description="policy gradient; maximum likelihood of the samples that pass rejection_threshold; or your own"
    )
    advantage_estimator: Estimator = Field(default="grpo", description="advantage and loss")
    disable_rewards_normalization: bool = Field(default=False, description="take rewards as they are, not compared within their group")
    disable_grpo_std_normalization: bool = Field(default=False, description="do not divide by the group's standard deviation (Dr.GRPO)")
    normalize_advantages: bool = Field(default=False, description="whiten advantages over the batch")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of a token: ppo, reinforce_plus_plus")
    lambd: float = Field(default=1.0, ge=0, le=1, description="λ of generalised advantages: ppo")
    rejection_threshold: float = Field(default=0.0, description="loss_type sft_loss trains samples with a reward above it")

    eps_clip: float = Field(default=0.2, gt=0, description="PPO clip, lower side")
    eps_clip_high: float | None = Field(default=None, gt=0, description="PPO clip, upper side; default: eps_clip")
    eps_clip_c: float | None = Field(default=None, gt=1, description="dual clip")
    value_clip: float = Field(default=0.2, ge=0, description="clip of the critic's loss around its values at batch start")
    num_critic_only_steps: int = Field(default=0, ge=0, description="first steps in which only the critic learns: ppo")
    use_m2po: bool = Field(default=False, description="M2PO: bound the second moment of the batch's log ratios in place of the clip")
    m2_threshold: float = Field(default=0.04, ge=0, description="M2PO's bound")

    use_kl_loss: bool = Field(default=False, description="measure the KL to the reference policy even with kl_loss_coef = 0")
    kl_loss_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference policy in the loss")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference policy in the reward of each token")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = Field(
        default=None, description="KL estimator; default: k3 in the loss, k1 in the reward"
    )
    use_unbiased_kl: bool = Field(default=False, description="weight the KL in the loss by the policy's ratio")
    ref_update_interval: int | None = Field(
        default=None, gt=0, description="steps after which the policy becomes the reference; default: never"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")

    off_policy: OffPolicy | None = Field(
        default=None,
        description="correction for stale samples: decoupled PPO (the default), PPO against the rollout's log-probs, or none",
    )
    use_rollout_logprobs: bool = Field(default=False, description="slime's name for off_policy = rollout")
    use_tis: bool | None = Field(default=None, description="slime's name: true is off_policy = decoupled, false is none")
    tis_mode: Literal["truncate", "clip", "mask"] = Field(
        default="clip", description="importance weight beyond its bounds: bounded from above, from both sides, or 0 (IcePop)"
    )
    tis_level: Level = Field(default="token", description="importance weight of a token, of its sequence, or the sequence's geometric mean")
    tis_clip: float = Field(default=2.0, gt=0, description="upper bound of the importance weight")
    tis_clip_low: float = Field(default=0.0, ge=0, description="lower bound of the importance weight")
    tis_batch_normalize: bool = Field(default=False, description="divide importance weights by their mean over the batch")
    use_rs: bool = Field(default=False, description="leave tokens or sequences out whose importance weight is outside its bounds")
    rs_level: Level | None = Field(default=None, description="level of that weight; default: tis_level")
    rs_lower_bound: float | None = Field(default=None, ge=0, description="default: tis_clip_low")
    rs_upper_bound: float | None = Field(default=None, gt=0, description="default: tis_clip")
    rs_veto_threshold: float | None = Field(
        default=None, gt=0, description="leave out a sequence with a token of a smaller importance weight; default: off"
    )
    use_opsm: bool = Field(default=False, description="leave out sequences of negative advantage that the policy has moved away from")
    opsm_delta: float = Field(default=1e-4, ge=0, description="how far, in nats a token")

    use_opd: bool = Field(default=False, description="on-policy distillation: learn from a teacher's log-probs of the policy's samples")
    opd_type: Literal["sglang", "megatron"] | None = Field(default=None, description="where the teacher runs; needed with use_opd")
    opd_kl_coef: float = Field(default=1.0, ge=0, description="weight of the teacher in the advantage")
    opd_teacher_load: Path | None = Field(default=None, description="HF checkpoint of a teacher that runs in the trainer")

    calculate_per_token_loss: bool = Field(
        default=False, description="mean over the batch's tokens (DAPO), not over rollouts of their own means"
    )
    loss_divisor: int | None = Field(
        default=None, gt=0, description="tokens by which every rollout's sum is divided in place of its own number (Dr.GRPO)"
    )

    custom_loss_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:function, the loss of loss_type custom_loss"
    )
    custom_advantage_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:function that sets advantages in place of advantage_estimator's"
    )
    custom_tis_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:function that weighs and masks the per-token loss of off_policy decoupled"
    )
    custom_pg_loss_reducer_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:function that makes the reducer of the policy loss"
    )
    custom_reward_post_process_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:function that makes of a batch's rewards what advantages are made of"
    )

    @property
    def correction(self) -> OffPolicy:
        """``off_policy``, as it or slime's names for it say; decoupled unless anything is said."""
        if self.off_policy is not None:
            return self.off_policy
        return "rollout" if self.use_rollout_logprobs else "none" if self.use_tis is False else "decoupled"

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic's values."""
        return self.advantage_estimator == "ppo"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field, expected in (*self._off_policy_refusals(), *self._refusals()):
            raise ValueError(f"algorithm.{field}: {expected}")
        return self

    def _off_policy_refusals(self) -> list[tuple[str, str]]:
        correction, found = self.correction, []
        if self.use_rollout_logprobs and (correction != "rollout" or self.use_tis):
            others = f"off_policy is {correction}, use_tis {self.use_tis}"
            found.append(("use_rollout_logprobs", f"clips around the rollout's log-probs; {others}"))
        if self.use_tis is not None and self.use_tis != (correction == "decoupled"):
            found.append(("use_tis", f"contradicts off_policy = {correction}"))
        weighted: dict[str, Any] = {name: getattr(self, name) for name in ("tis_batch_normalize", "use_rs", "rs_veto_threshold")}
        weighted["custom_tis_function_path"] = self.custom_tis_function_path
        for field, value in weighted.items():
            if value and correction != "decoupled":
                found.append((field, f"belongs to the importance weight of off_policy = decoupled, not to {correction}"))
        if self.custom_tis_function_path:
            of_builtin = [name for name in ("tis_batch_normalize", "use_rs", "rs_veto_threshold") if weighted[name]]
            found += [(name, "custom_tis_function_path takes its place") for name in of_builtin]
        for field in ("rs_level", "rs_lower_bound", "rs_upper_bound"):
            if getattr(self, field) is not None and not self.use_rs:
                found.append((field, "needs use_rs"))
        if self.tis_clip <= self.tis_clip_low:
            found.append(("tis_clip", f"not above tis_clip_low = {self.tis_clip_low}"))
        if self.tis_mode == "truncate" and self.tis_clip_low:
            found.append(("tis_clip_low", "tis_mode = truncate has no lower bound; use clip or mask"))
        lower = self.tis_clip_low if self.rs_lower_bound is None else self.rs_lower_bound
        upper = self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound
        if self.use_rs and upper <= lower:
            found.append(("rs_upper_bound", f"{upper} is not above the lower bound {lower}"))
        found += [
            (field, "measures the distance from the rollout: off_policy is none")
            for field in ("use_opsm", "use_m2po")
            if getattr(self, field) and correction == "none"
        ]
        return found

    def _refusals(self) -> list[tuple[str, str]]:
        estimator, found = self.advantage_estimator, []
        if self.kl_coef and estimator in ("grpo", "gspo", "cispo"):
            found.append(("kl_coef", f"{estimator} has no rewards of single tokens; use kl_loss_coef"))
        if self.kl_coef and self.kl_loss_coef:
            found.append(("kl_coef", f"the KL is in the loss already: kl_loss_coef = {self.kl_loss_coef}"))
        if self.use_unbiased_kl and not (self.use_kl_loss or self.kl_loss_coef):
            found.append(("use_unbiased_kl", "is about the KL in the loss: needs use_kl_loss or kl_loss_coef"))
        if self.ref_update_interval and not (self.use_kl_loss or self.kl_loss_coef or self.kl_coef):
            found.append(("ref_update_interval", "there is no reference policy: needs use_kl_loss, kl_loss_coef or kl_coef"))
        if self.use_m2po and estimator in ("gspo", "cispo"):
            found.append(("use_m2po", f"takes the place of the clip per token; {estimator} has another"))
        if self.use_m2po and self.eps_clip_c is not None:
            found.append(("eps_clip_c", "use_m2po takes the place of every clip"))
        if self.num_critic_only_steps and estimator != "ppo":
            found.append(("num_critic_only_steps", f"{estimator} has no critic; ppo has"))
        if self.use_opd and self.opd_type is None:
            found.append(("opd_type", "needed with use_opd: sglang or megatron"))
        if self.use_opd and (self.opd_type == "megatron") != (self.opd_teacher_load is not None):
            found.append(("opd_teacher_load", "the HF checkpoint of the teacher: needed with opd_type = megatron, and only there"))
        found += [
            (field, "needs use_opd") for field in ("opd_type", "opd_teacher_load") if getattr(self, field) is not None and not self.use_opd
        ]
        if (self.loss_type == "custom_loss") != (self.custom_loss_function_path is not None):
            found.append(("custom_loss_function_path", f"belongs to loss_type = custom_loss, which is {self.loss_type}"))
        if self.custom_advantage_function_path and self.has_critic:
            found.append(("custom_advantage_function_path", "a critic learns the returns of ppo's own; choose another estimator"))
        if self.calculate_per_token_loss and self.loss_divisor is not None:
            found.append(("loss_divisor", "calculate_per_token_loss divides by the batch's tokens"))
        return found
