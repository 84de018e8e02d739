"""Which fields of the objective have an effect where, and what contradicts what.

``EFFECTS`` names for every field that some objective ignores the objectives that read it; elsewhere a field that is not at its default is
refused with the reason. (`tests/unit/trainer/objective/test_objective_effects.py` changes each accepted field, and wants another loss.)
A user's own function gets the whole config as ``args`` and may read any field, so that fields which it takes the place of are accepted.
``kl_loss_type`` alone is accepted without a KL to estimate: scripts name it beside a coefficient of 0.
"""

from collections.abc import Callable
from math import exp
from typing import Any

from shared.config.environment_variables import VARIABLE
from shared.config.section import Rule
from shared.environment import environment_url

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before ``exp``. Beyond e^20 = 4.9e8 the policies have nothing in common, and float32
overflows at e^88: inf times a zero advantage, or times the zero gradient of the branch that ``max`` did not take, is
NaN. The clamp also ends the gradient there, as MIS and verl do; slime's plain PPO has none."""

SMALLEST_RATIO = exp(-LOG_RATIO_LIMIT)
"""The smallest importance ratio that there is, after the clamp."""

BY_DEVIATION = ("grpo", "gspo", "cispo")
"""The estimators that divide by a group's deviation, and use no rewards of single tokens."""


def _where(there: Callable[[Any], Any], expected: str, *fields: str) -> tuple[Rule, ...]:
    """Returns the rules that refuse fields which are not at their defaults where nothing reads them.

    Args:
        there: of the section: whether they are read. expected: why they are not, formatted with the section.
    """

    def unread(name: str) -> Rule:
        return Rule(name, lambda section, given: given != type(section).model_fields[name].default and not there(section), expected)

    return tuple(unread(name) for name in fields)


def _address_problem(url: str) -> bool:
    try:
        return not environment_url.parse(url).url
    except ValueError:
        return True


def _policy_loss(section: Any) -> bool:
    """Returns whether the loss is a policy gradient's, or one's own, which may read every field."""
    return section.loss_type != "sft_loss"


EFFECTS: tuple[Rule, ...] = (
    *_where(
        _policy_loss,
        "loss_type = sft_loss has no advantages, no ratio and no KL; it trains what passes rejection_threshold",
        *("advantage_estimator", "normalize_advantages", "custom_advantage_function_path", "custom_reward_post_process_path"),
        *("eps_clip", "eps_clip_high", "eps_clip_c", "use_m2po", "use_kl_loss", "kl_loss_coef", "kl_coef", "entropy_coef"),
        *("off_policy", "use_rollout_logprobs", "use_tis", "use_opsm", "use_opd", "custom_pg_loss_reducer_function_path"),
        *("disable_rewards_normalization", "disable_grpo_std_normalization", "tis_mode", "tis_level", "tis_clip", "tis_clip_low"),
        *("tis_batch_normalize", "use_rs", "rs_veto_threshold", "custom_tis_function_path"),
    ),
    *_where(lambda a: a.loss_type == "sft_loss", "belongs to loss_type = sft_loss, which is {0.loss_type}", "rejection_threshold"),
    *_where(
        lambda a: a.loss_type == "policy_loss",
        "reduces the policy loss; loss_type = custom_loss reduces its own by sum_of_sample_mean",
        "custom_pg_loss_reducer_function_path",
    ),
    *_where(
        lambda a: a.advantage_estimator not in ("ppo", "reinforce_plus_plus"),
        "{0.advantage_estimator} takes rewards as they are",
        "disable_rewards_normalization",
    ),
    *_where(
        lambda a: a.compares_rewards and a.advantage_estimator in BY_DEVIATION,
        "no rewards are divided by their group's deviation: {0.advantage_estimator}, disable_rewards_normalization = "
        "{0.disable_rewards_normalization}",
        "disable_grpo_std_normalization",
    ),
    *_where(
        lambda a: a.custom_advantage_function_path or a.advantage_estimator in ("ppo", "reinforce_plus_plus"),
        "{0.advantage_estimator} gives every token of a sample the same reward; ppo and reinforce_plus_plus discount",
        "gamma",
    ),
    *_where(
        lambda a: a.custom_advantage_function_path or a.has_critic,
        "{0.advantage_estimator} has no generalised advantages; ppo has",
        "lambd",
    ),
    *_where(lambda a: a.has_critic, "{0.advantage_estimator} has no critic; ppo has", "num_critic_only_steps", "value_clip"),
    *_where(
        lambda a: a.advantage_estimator not in BY_DEVIATION,
        "{0.advantage_estimator} has no rewards of single tokens; use kl_loss_coef",
        "kl_coef",
    ),
    *_where(lambda a: not a.use_m2po, "use_m2po takes the place of every clip", "eps_clip", "eps_clip_high", "eps_clip_c"),
    *_where(
        lambda a: a.advantage_estimator != "cispo",
        "cispo clips a weight without a gradient, no loss: there is nothing for a dual clip to bound",
        "eps_clip_c",
    ),
    *_where(lambda a: a.use_m2po, "needs use_m2po", "m2_threshold"),
    *_where(
        lambda a: a.advantage_estimator not in ("gspo", "cispo"),
        "takes the place of the clip per token; {0.advantage_estimator} has another",
        "use_m2po",
    ),
    *_where(lambda a: a.measures_kl, "is about the KL in the loss: needs use_kl_loss or kl_loss_coef", "use_unbiased_kl"),
    *_where(
        lambda a: a.measures_kl or a.kl_coef,
        "there is no reference policy: needs use_kl_loss, kl_loss_coef or kl_coef",
        "ref_update_interval",
    ),
    *_where(
        lambda a: a.correction == "decoupled",
        "belongs to the importance weight of off_policy = decoupled, not to {0.correction}",
        *("tis_mode", "tis_level", "tis_clip", "tis_clip_low", "tis_batch_normalize", "use_rs", "rs_veto_threshold"),
        "custom_tis_function_path",
    ),
    *_where(lambda a: a.use_rs, "needs use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *_where(lambda a: a.correction != "none", "measures the distance from the rollout: off_policy is none", "use_m2po"),
    *_where(lambda a: a.use_opsm, "needs use_opsm", "opsm_delta"),
    *_where(lambda a: a.use_opd, "needs use_opd", "opd_type", "opd_kl_coef", "opd_teacher_load"),
    *_where(lambda a: a.use_opd and a.opd_type == "sglang", "needs use_opd and opd_type = sglang", "opd_teachers"),
    *_where(
        lambda a: a.opd_teachers,
        "needs opd_teachers",
        *(
            "opd_teacher_weights",
            "opd_teacher_key",
            "opd_teacher_timeout",
            "opd_teacher_concurrency",
            "opd_teacher_key_variable",
            "opd_top_k",
        ),
    ),
    *_where(lambda a: a.opd_top_k, "needs opd_top_k", "opd_top_k_coef"),
    *_where(lambda a: a.loss_type == "policy_loss", "is part of loss_type = policy_loss", "opd_top_k"),
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
        lambda a, given: any(_address_problem(url) for url in given.values()),
        "expected name = http://host:port of an SGLang server",
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
    Rule(
        "loss_divisor",
        lambda a, given: given is not None and a.calculate_per_token_loss,
        "calculate_per_token_loss divides by the batch's tokens",
    ),
)
