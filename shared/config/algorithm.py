"""The section of the run's config that defines the objective. Names are slime's; `docs/algorithms.md` has the formulas.

``EFFECTS`` names for every field that some objective ignores the objectives that read it; elsewhere a field that is not at its default is
refused with the reason. (`tests/unit/trainer/objective/test_objective_effects.py` changes each accepted field, and wants another loss.)
A user's own function gets the whole config as ``args`` and may read any field, so that fields which it takes the place of are accepted.
``kl_loss_type`` alone is accepted without a KL to estimate: scripts name it beside a coefficient of 0.
"""

import re
from math import exp
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shared.config import presets
from shared.config.environment_variables import VARIABLE
from shared.config.rollout_section import MODEL_NAME
from shared.config.section import MUTABLE, RECORDED, Rule, Section, hook, read_where
from shared.environment.environment_url import NATS, problem

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before ``exp``. Beyond e^20 = 4.9e8 the policies have nothing in common, and float32
overflows at e^88: inf times a zero advantage, or times the zero gradient of the branch that ``max`` did not take, is
NaN. The clamp also ends the gradient there, as MIS and verl do; slime's plain PPO has none."""

SMALLEST_RATIO = exp(-LOG_RATIO_LIMIT)  # The smallest importance ratio that there is, after the clamp

BY_DEVIATION = ("grpo", "gspo", "cispo")  # The estimators that divide by a group's deviation, and use no rewards of single tokens


EFFECTS: tuple[Rule, ...] = (
    *read_where(
        lambda section: section.loss_type != "sft_loss",
        "loss_type = sft_loss has no advantages, no ratio and no KL; it trains what passes rejection_threshold",
        *("advantage_estimator", "normalize_advantages", "custom_advantage_function_path", "custom_reward_post_process_path"),
        *("eps_clip", "eps_clip_high", "eps_clip_c", "use_m2po", "use_kl_loss", "kl_loss_coef", "kl_coef", "entropy_coef"),
        *("off_policy", "use_rollout_logprobs", "use_tis", "use_opsm", "use_opd", "custom_pg_loss_reducer_function_path"),
        *("disable_rewards_normalization", "disable_grpo_std_normalization", "tis_mode", "tis_level", "tis_clip", "tis_clip_low"),
        *("tis_batch_normalize", "use_rs", "rs_veto_threshold", "custom_tis_function_path"),
    ),
    *read_where(lambda a: a.loss_type == "sft_loss", "belongs to loss_type = sft_loss, which is {0.loss_type}", "rejection_threshold"),
    *read_where(
        lambda a: a.loss_type == "policy_loss",
        "reduces the policy loss; loss_type = custom_loss reduces its own by sum_of_sample_mean",
        "custom_pg_loss_reducer_function_path",
    ),
    *read_where(
        lambda a: a.advantage_estimator not in ("ppo", "reinforce_plus_plus"),
        "{0.advantage_estimator} takes rewards as they are",
        "disable_rewards_normalization",
    ),
    *read_where(
        lambda a: a.replaces_rewards or (a.compares_rewards and a.advantage_estimator in BY_DEVIATION),
        "no rewards are divided by their group's deviation: {0.advantage_estimator}, disable_rewards_normalization = "
        "{0.disable_rewards_normalization}",
        "disable_grpo_std_normalization",
    ),
    *read_where(
        lambda a: a.custom_advantage_function_path or a.advantage_estimator in ("ppo", "reinforce_plus_plus"),
        "{0.advantage_estimator} gives every token of a sample the same reward; ppo and reinforce_plus_plus discount",
        "gamma",
    ),
    *read_where(
        lambda a: a.custom_advantage_function_path or a.has_critic,
        "{0.advantage_estimator} has no generalised advantages; ppo has",
        "lambd",
    ),
    *read_where(
        lambda a: a.loss_type != "sft_loss" and a.advantage_estimator not in ("gspo", "ppo", "reinforce_plus_plus"),
        "adds to advantages that all tokens of a sample share and that are weighed token by token: grpo, cispo, rloo, "
        "reinforce_plus_plus_baseline; not {0.advantage_estimator} with loss_type = {0.loss_type}",
        "turn_advantage_coef",
    ),
    *read_where(lambda a: a.turn_advantage_coef, "needs turn_advantage_coef", "turn_gamma"),
    *read_where(lambda a: a.has_critic, "{0.advantage_estimator} has no critic; ppo has", "num_critic_only_steps", "value_clip"),
    *read_where(
        lambda a: a.advantage_estimator not in BY_DEVIATION,
        "{0.advantage_estimator} has no rewards of single tokens; use kl_loss_coef",
        "kl_coef",
    ),
    *read_where(lambda a: not a.use_m2po, "use_m2po takes the place of every clip", "eps_clip", "eps_clip_high", "eps_clip_c"),
    *read_where(
        lambda a: a.advantage_estimator != "cispo",
        "cispo clips a weight without a gradient, no loss: there is nothing for a dual clip to bound",
        "eps_clip_c",
    ),
    *read_where(lambda a: a.use_m2po, "needs use_m2po", "m2_threshold"),
    *read_where(
        lambda a: a.advantage_estimator not in ("gspo", "cispo"),
        "takes the place of the clip per token; {0.advantage_estimator} has another",
        "use_m2po",
    ),
    *read_where(lambda a: a.measures_kl, "is about the KL in the loss: needs use_kl_loss or kl_loss_coef", "use_unbiased_kl"),
    *read_where(
        lambda a: a.measures_kl or a.kl_coef,
        "there is no reference policy: needs use_kl_loss, kl_loss_coef or kl_coef",
        "ref_update_interval",
    ),
    *read_where(
        lambda a: a.correction == "decoupled",
        "belongs to the importance weight of off_policy = decoupled, not to {0.correction}",
        *("tis_mode", "tis_level", "tis_clip", "tis_clip_low", "tis_batch_normalize", "use_rs", "rs_veto_threshold"),
        "custom_tis_function_path",
    ),
    *read_where(lambda a: a.use_rs, "needs use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *read_where(lambda a: a.correction != "none", "measures the distance from the rollout: off_policy is none", "use_m2po"),
    *read_where(lambda a: a.use_opsm, "needs use_opsm", "opsm_delta"),
    *read_where(lambda a: a.use_opd, "needs use_opd", "opd_type", "opd_kl_coef", "opd_teacher_load"),
    *read_where(lambda a: a.use_opd and a.opd_type == "sglang", "needs use_opd and opd_type = sglang", "opd_teachers"),
    *read_where(
        lambda a: a.opd_teachers,
        "needs opd_teachers",
        *("opd_teacher_weights", "opd_teacher_key", "opd_teacher_timeout", "opd_teacher_concurrency", "opd_teacher_key_variable"),
        "opd_top_k",
    ),
    *read_where(lambda a: a.opd_top_k, "needs opd_top_k", "opd_top_k_coef"),
    *read_where(lambda a: a.loss_type == "policy_loss", "is part of loss_type = policy_loss", "opd_top_k"),
)

CONTRADICTIONS: tuple[Rule, ...] = (
    Rule(
        "use_rollout_logprobs",
        lambda a, given: given and (a.correction != "rollout" or a.use_tis),
        "clips around the rollout's log-probs; off_policy is {0.correction}, use_tis {0.use_tis}",
    ),
    Rule(
        "use_tis",
        lambda a, given: given is not None and not a.use_rollout_logprobs and given != (a.correction == "decoupled"),
        "contradicts off_policy = {0.correction}",
    ),
    Rule(
        "turn_advantage_coef",
        lambda a, given: given and (a.custom_advantage_function_path or a.replaces_rewards),
        "a function of your own makes rewards or advantages, and would be bypassed; it may read turn_rewards of its samples",
    ),
    Rule("tis_clip", lambda a, given: given <= a.tis_clip_low, "not above tis_clip_low = {0.tis_clip_low}"),
    Rule("tis_clip_low", lambda a, given: given and a.tis_mode == "truncate", "tis_mode = truncate has no lower bound; use clip or mask"),
    Rule(
        "rs_upper_bound",
        lambda a, _: a.use_rs and a.rejection_bounds[1] <= a.rejection_bounds[0],
        "{0.rejection_bounds[1]} is not above the lower bound {0.rejection_bounds[0]}",
    ),
    Rule(
        ("rs_veto_threshold", "tis_clip_low", "rs_lower_bound"),
        lambda _, given: given and given <= SMALLEST_RATIO,
        "no importance weight is smaller: log ratios are clamped at -20; give more than e^-20 = 2.06e-9",
    ),
    Rule("kl_coef", lambda a, given: given and a.kl_loss_coef, "the KL is in the loss already: kl_loss_coef = {0.kl_loss_coef}"),
    Rule("opd_type", lambda a, given: given is None and a.use_opd, "needed with use_opd: sglang or megatron"),
    Rule(
        "opd_teacher_load",
        lambda a, given: a.use_opd and (given is not None) != (a.opd_type == "megatron"),
        "the HF checkpoint of the teacher: needed with opd_type = megatron, and only there",
    ),
    Rule(
        "opd_teachers",
        lambda a, given: any(url.startswith(NATS) or problem(url) for url in given.values() if not re.match(MODEL_NAME, url)),
        "expected name = http://host:port of an SGLang server, or a model of [rollout.models]",
    ),
    Rule(
        "opd_teacher_key_variable",
        lambda a, given: given is not None and not VARIABLE.match(given),
        "expected the name of an environment variable, not its value",
    ),
    Rule(
        "opd_teacher_weights",
        lambda a, given: not given.keys() <= a.opd_teachers.keys() or any(weight <= 0 for weight in given.values()),
        "expected a positive number for each of the opd_teachers that it names",
    ),
    Rule(
        "custom_loss_function_path",
        lambda a, given: (given is not None) != (a.loss_type == "custom_loss"),
        "a function where loss_type = custom_loss, and only there; loss_type is {0.loss_type}",
    ),
    Rule(
        "custom_advantage_function_path",
        lambda a, given: given and a.has_critic,
        "a critic learns the returns of ppo's own; choose another estimator",
    ),
    *read_where(lambda a: not a.calculate_per_token_loss, "calculate_per_token_loss divides by the batch's tokens", "loss_divisor"),
)


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
    turn_advantage_coef: float = Field(
        default=0.0, ge=0, description="weight of turns' rewards, compared with the group's of the same turn, in their tokens' advantages"
    )
    turn_gamma: float = Field(default=1.0, ge=0, le=1, description="discount of a turn: 1 sums the rewards from a turn on, 0 takes its own")
    rejection_threshold: float = Field(default=0.0, description="loss_type sft_loss trains samples with a reward above it")

    eps_clip: float = Field(default=0.2, gt=0, description="PPO clip, lower side", **RECORDED)
    eps_clip_high: float | None = Field(default=None, gt=0, description="PPO clip, upper side; default: eps_clip", **RECORDED)
    eps_clip_c: float | None = Field(default=None, gt=1, description="dual clip", **RECORDED)
    value_clip: float = Field(default=0.2, ge=0, description="clip of the critic's loss around its values at batch start", **RECORDED)
    num_critic_only_steps: int = Field(default=0, ge=0, description="first steps in which only the critic learns: ppo")
    use_m2po: bool = Field(default=False, description="M2PO: bound the second moment of the batch's log ratios in place of the clip")
    m2_threshold: float = Field(default=0.04, ge=0, description="M2PO's bound")

    use_kl_loss: bool = Field(default=False, description="measure the KL to the reference policy even with kl_loss_coef = 0")
    kl_loss_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference policy in the loss", **RECORDED)
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference policy in each token's reward", **RECORDED)
    kl_loss_type: KlType | None = Field(default=None, description="KL estimator; default: k3 in the loss, k1 in the reward")
    use_unbiased_kl: bool = Field(default=False, description="weight the KL in the loss by the policy's ratio")
    ref_update_interval: int | None = Field(
        default=None, gt=0, description="steps after which the policy becomes the reference; default: never"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus", **RECORDED)

    off_policy: OffPolicy | None = Field(
        default=None, description="correction for stale samples: decoupled PPO (the default), PPO against the rollout's log-probs, or none"
    )
    use_rollout_logprobs: bool = Field(default=False, description="slime's name for off_policy = rollout")
    use_tis: bool | None = Field(default=None, description="slime's name: true is off_policy = decoupled, false is none")
    tis_mode: WeightBounding = Field(
        default="clip", description="importance weight beyond its bounds: bounded from above, from both sides, or 0 (IcePop)"
    )
    tis_level: Level = Field(default="token", description="importance weight of a token, of its sequence, or the sequence's geometric mean")
    tis_clip: float = Field(default=2.0, gt=0, description="upper bound of the importance weight", **RECORDED)
    tis_clip_low: float = Field(default=0.0, ge=0, description="lower bound of the importance weight", **RECORDED)
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
        default={},
        description="teachers of opd_type = sglang, SGLang servers or frozen models: name = http://host:port, or a name of "
        "[rollout.models]",
        **MUTABLE,
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
        default=0, ge=0, description="entries of teachers' distributions that the policy learns for each token; the vocabulary's size: all"
    )
    opd_top_k_coef: float = Field(default=1.0, gt=0, description="weight of the KL to these in the loss")
    opd_teacher_timeout: float = Field(default=120, gt=0, description="seconds for a sample's log-probs, from its place on", **MUTABLE)
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
        compares = self.advantage_estimator not in ("ppo", "reinforce_plus_plus")
        return compares and not (self.disable_rewards_normalization or self.replaces_rewards)

    @property
    def replaces_rewards(self) -> bool:
        """Returns whether a function of the user's makes what advantages are made of."""
        return bool(self.custom_reward_post_process_path or self.custom_convert_samples_to_train_data_path)

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
