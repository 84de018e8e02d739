"""The section of the run's config that defines the objective. Names are slime's; `docs/algorithms.md` has the formulas."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shared.config import presets
from shared.config.algorithm_rules import CONTRADICTIONS, EFFECTS
from shared.config.section import MUTABLE, Rule, Section, hook

Estimator = Literal["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence", "geometric"]
OffPolicy = Literal["decoupled", "rollout", "none"]
Reducer = Literal["rollout_mean", "token_mean", "fixed_length"]
WeightBounding = Literal["truncate", "clip", "mask"]


class AlgorithmSection(Section):
    """The objective."""

    rules: ClassVar[tuple[Rule, ...]] = (*EFFECTS, *CONTRADICTIONS)

    preset: Annotated[list[str], BeforeValidator(presets.listed)] = Field(
        default=[], description="published algorithms by name, whose fields are set unless given: docs/algorithms.md"
    )

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
    kl_loss_type: KlType | None = Field(default=None, description="KL estimator; default: k3 in the loss, k1 in the reward")
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
    tis_mode: WeightBounding = Field(
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

    opd_teachers: dict[str, str] = Field(
        default={}, description="teachers of opd_type = sglang, SGLang servers: name = http://host:port", **MUTABLE
    )
    opd_teacher_weights: dict[str, float] = Field(
        default={}, description="the teachers of a prompt that names none, with their weights; default: all alike"
    )
    opd_teacher_key: str = Field(
        default="opd_teacher", min_length=1, description="key of a prompt's metadata: its teacher, a list of them, or their weights by name"
    )
    opd_teacher_key_variable: str | None = Field(
        default=None, description="the environment variable of the rollout service that holds the teachers' API key", **MUTABLE
    )
    opd_top_k: int = Field(
        default=0,
        ge=0,
        description="entries of teachers' distributions that the policy learns for each token; the vocabulary's size: all",
    )
    opd_top_k_coef: float = Field(default=1.0, gt=0, description="weight of the KL to these in the loss")
    opd_teacher_timeout: float = Field(default=120, gt=0, description="seconds for the teachers' log-probs of one sample", **MUTABLE)
    opd_teacher_concurrency: int = Field(default=64, gt=0, description="samples in a teacher's hands, for each rollout service", **MUTABLE)

    calculate_per_token_loss: bool = Field(
        default=False, description="mean over the batch's tokens (DAPO), not over rollouts of their own means"
    )
    loss_divisor: int | None = Field(
        default=None, gt=0, description="tokens by which every rollout's sum is divided in place of its own number (Dr.GRPO)"
    )

    custom_loss_function_path: str | None = hook("that is the loss of loss_type custom_loss")
    custom_advantage_function_path: str | None = hook("that sets advantages in place of advantage_estimator's")
    custom_tis_function_path: str | None = hook("that weighs and masks the per-token loss of off_policy decoupled")
    custom_pg_loss_reducer_function_path: str | None = hook("that makes the reducer of the policy loss")
    custom_reward_post_process_path: str | None = hook("that makes of a batch's rewards what advantages are made of")
    custom_convert_samples_to_train_data_path: str | None = hook("that makes rewards and loss masks of a batch's samples")
    rollout_data_postprocess_path: str | None = hook("that changes a batch's data once its advantages are there")

    @property
    def correction(self) -> OffPolicy:
        """Returns how stale samples are corrected, from ``off_policy`` or slime's names for it; by default decoupled."""
        if self.off_policy is not None:
            return self.off_policy
        return "rollout" if self.use_rollout_logprobs else "none" if self.use_tis is False else "decoupled"

    @property
    def has_critic(self) -> bool:
        """Returns whether advantages come from a critic's values."""
        return self.advantage_estimator == "ppo"

    @property
    def compares_rewards(self) -> bool:
        """Returns whether advantages compare rewards within their group; a custom function replaces that, too."""
        custom = self.custom_reward_post_process_path or self.custom_convert_samples_to_train_data_path
        compares = self.advantage_estimator not in ("ppo", "reinforce_plus_plus")
        return compares and not (self.disable_rewards_normalization or custom)

    @property
    def needs_groups(self) -> bool:
        """Returns whether nothing is learned from a group of one: its rewards are compared, and there is nothing else to learn from."""
        replaced = self.custom_advantage_function_path or self.use_opd
        return self.loss_type == "policy_loss" and self.compares_rewards and not replaced

    @property
    def measures_kl(self) -> bool:
        """Returns whether the loss has a KL term to the reference policy, even with coefficient 0."""
        return self.use_kl_loss or self.kl_loss_coef != 0.0

    @property
    def clip_range(self) -> tuple[float, float]:
        """Returns the lower and upper bound of the clipped ratio."""
        return 1.0 - self.eps_clip, 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Returns the lower and upper bound of an importance weight under ``use_rs``."""
        lower, upper = self.rs_lower_bound, self.rs_upper_bound
        return self.tis_clip_low if lower is None else lower, self.tis_clip if upper is None else upper

    @property
    def reducer(self) -> Reducer:
        """Returns how the losses of tokens are reduced to one number (``services/trainer/objective/reduce.py``)."""
        return "token_mean" if self.calculate_per_token_loss else "rollout_mean" if self.loss_divisor is None else "fixed_length"
