"""The losses of a micro-batch: the policy's, that of supervised fine-tuning, the critic's; and the choice among them for a run.

`docs/reading.md` lists what a new one needs; `services.trainer.loss_inputs` puts distillation around the policy's.

Invariants, held by tests:

- the loss and every metric are sums with the batch's weights (``reduce.py``): added over micro-batches and
  data-parallel ranks they are the whole batch's, however it was split;
- where the mask is 0 nothing counts, whatever stands there: not a value, not a gradient, not a NaN;
- with one optimizer step a batch the proximal policy is the policy itself: ratio exactly 1, ``ppo_kl`` exactly 0.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.trainer.objective import correction, policy_gradient
from services.trainer.objective.correction import Statistics, off_policy_sequence_mask, second_moments
from services.trainer.objective.custom_objective import REDUCER, TIS, CustomFunctions, CustomLoss
from services.trainer.objective.policy_gradient import LOSS_KL, PolicyGradient, kl_estimate, ratio_of
from services.trainer.objective.reduce import MaskedTokens, Metrics, sequence_mean, sequence_sum
from services.trainer.packing import PARTIAL, PackedBatch
from shared.config.algorithm import AlgorithmSection
from shared.runtime.telemetry import declare_metrics

declare_metrics("""
    train/loss | | what is minimised
    train/pg_loss | | its policy-gradient part | with `loss_type` `policy_loss`
    train/entropy_loss | nats | mean entropy of the policy | where `entropy_coef` asks for it
    train/pg_clipfrac | share | tokens whose ratio is clipped
    train/ppo_kl | nats | mean of log π_old − log π_θ
    train/kl_loss | nats | mean KL to the reference policy, by `kl_loss_type` | where there is one
    train/ois | ratio | mean of π_θ / π_old
    train/opsm_clipfrac | share | tokens of sequences that off-policy sequence masking takes out | with `use_opsm`
    train/train_rollout_logprob_abs_diff | nats | mean of the absolute difference between the trainer's and the engine's log-probs | not of
        a batch in which samples [have none](hooks.md#generating)
    train/agreement_abs_diff | nats | sum of that difference over tokens that both computed under the same weights | in steps that begin at
        a new version
    train/agreement_tokens | tokens | the number of those tokens
    critic/value_loss | reward² | clipped squared distance of values from returns
    critic/value_clipfrac | share | values that were clipped
""")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss ``pg - entropy_coef H + kl_loss_coef KL``; an instance is a `LossFunction`.

    Reads the fields ``weights`` and ``advantages``; ``rollout_log_probs`` unless ``off_policy`` is ``none`` (there it
    is only measured, if it is there), or `PARTIAL` in its place, for whose gaps the log-probs at batch start stand in (those by which the
    tokens were sampled, where no version came between); ``proximal_log_probs``, the trainer's log-probs at batch start, wherever a batch
    makes more than one optimizer step; ``ref_log_probs`` for the reference KL; ``versions`` with ``batch_version``.

    Metrics, named as slime names them: loss, pg_loss, pg_clipfrac, ppo_kl (mean of d), ois (mean ratio); entropy_loss
    with an entropy; kl_loss with reference log-probs; tis and tis_clipfrac (the weight before its bounds, and where
    they took effect) under ``decoupled``; rs_clipfrac and rs_veto_frac (tokens rejected); opsm_clipfrac (tokens dropped)
    with OPSM; train_rollout_logprob_abs_diff (the trainer's log-probs at batch start against the engine's; not of a batch with gaps). With
    ``batch_version`` also two plain sums over the tokens of sequences that the engine made wholly under that very version:
    agreement_abs_diff and agreement_tokens. Their quotient is the difference of engine and trainer on equal weights, free of
    staleness.

    Args:
        batch_version: weight version that the trainer holds at batch start, before the step that makes the next.
        statistics: of the optimizer step, for tis_batch_normalize and use_m2po.
        custom: functions of the user's own in place of the importance weight and of the reducer.
        denominator: the divisor of the sum that a reducer of the user's own gives (``reduce.denominator``).

    T must hold whole sequences for gspo, OPSM, vetoes and the sequence levels (under context parallelism: gathered ones).
    """

    config: AlgorithmSection
    batch_version: int | None = None
    statistics: Statistics = field(default_factory=Statistics)
    custom: CustomFunctions = field(default_factory=CustomFunctions)
    denominator: float = 1.0

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """Returns loss and metrics. ``log_probs``, ``entropy``: [T], of ``batch.labels``. Raises MissingField; HookFailed."""
        config, tokens = self.config, MaskedTokens(log_probs, batch)
        current, advantages = tokens.log_probs, tokens.field("advantages")
        start = tokens.field("proximal_log_probs") if "proximal_log_probs" in batch.fields else current.detach()
        rollout, known = self._rollout(start, tokens)
        d = (tokens.field("rollout_log_probs") if config.correction == "rollout" else start) - current

        gradient, d_clipped = self._policy_gradient(d, rollout, tokens, advantages)
        pg, metrics = gradient.loss, {"pg_clipfrac": tokens.fraction(gradient.clipped)}
        metrics["ppo_kl"] = tokens.mean(d_clipped.detach())
        metrics["ois"] = tokens.mean(ratio_of(-d_clipped.detach()))
        if rollout is not None:
            pg = self._weighted(pg, start, rollout, tokens, metrics)
            metrics |= self._agreement(start, rollout, known, tokens)
        if config.use_opsm:
            stays = off_policy_sequence_mask(d, advantages, tokens.mask, batch.cu_seqlens, config.opsm_delta)
            pg = pg * stays
            metrics["opsm_clipfrac"] = tokens.fraction(~stays)
        pg_loss = tokens.mean(pg)
        if REDUCER in self.custom:
            pg_loss = self.custom.reduced(pg, tokens, config.reducer == "token_mean") / self.denominator
        loss = pg_loss + self._entropy(entropy, tokens, metrics) + self._reference_kl(d, rollout, tokens, metrics)
        metrics |= {"pg_loss": pg_loss.detach(), "loss": loss.detach()}
        return loss, metrics

    def _rollout(self, start: Tensor, tokens: MaskedTokens) -> tuple[Tensor | None, Tensor | None]:
        """Returns the log-probs with which the tokens were sampled, None where the objective needs none and the batch has none; and, where
        those of some tokens are not known and ``start`` stands in for them, which are: bool [T]."""
        if PARTIAL not in tokens.batch.fields:
            measured = self.config.correction != "none" or "rollout_log_probs" in tokens.batch.fields
            return (tokens.field("rollout_log_probs") if measured else None), None
        partial = tokens.field(PARTIAL)
        known = ~partial.isnan()
        return torch.where(known, partial, start), known

    def _policy_gradient(
        self, d: Tensor, rollout: Tensor | None, tokens: MaskedTokens, advantages: Tensor
    ) -> tuple[PolicyGradient, Tensor]:
        """Returns the per-token loss, and the d that it was clipped by.

        For gspo that is the mean of d over a sequence's trained tokens, on every token of it.

        Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), the length-normalised sequence ratio.
        """
        config = self.config
        if config.use_m2po:
            limit = self.statistics.second_moment_limit
            assert limit is not None and rollout is not None
            stays = second_moments(tokens.log_probs, rollout, advantages, tokens.mask) <= limit
            return policy_gradient.masked_surrogate(d, advantages, stays), d
        if config.advantage_estimator == "cispo":
            return policy_gradient.clipped_weight(d, tokens.log_probs, advantages, *config.clip_range), d
        if config.advantage_estimator == "gspo":
            d = sequence_mean(d, tokens.mask, tokens.batch.cu_seqlens)
        return policy_gradient.clipped_surrogate(d, advantages, *config.clip_range, config.eps_clip_c), d

    def _weighted(self, pg: Tensor, start: Tensor, rollout: Tensor, tokens: MaskedTokens, metrics: Metrics) -> Tensor:
        if self.config.correction != "decoupled":
            return pg
        if TIS in self.custom:
            pg, found = self.custom.weighted(pg, start, rollout, tokens)
        else:
            pg, found = correction.weighted(self.config, pg, start - rollout, tokens, self.statistics)
        metrics |= found
        return pg

    def _agreement(self, start: Tensor, rollout: Tensor, known: Tensor | None, tokens: MaskedTokens) -> Metrics:
        difference = (start - rollout).abs()
        metrics: Metrics = {}
        if known is None:
            metrics = {"train_rollout_logprob_abs_diff": tokens.mean(difference), **correction.counts(start, rollout, tokens)}
        if self.batch_version is not None:
            same = self._wholly_of_version(self.batch_version, tokens)
            same = (same if known is None else same & known).to(tokens.dtype)
            metrics |= {"agreement_abs_diff": (same * difference).sum(), "agreement_tokens": same.sum()}
        return metrics

    @staticmethod
    def _wholly_of_version(version: int, tokens: MaskedTokens) -> Tensor:
        """Returns a mask, bool [T], of the trained tokens of sequences that were sampled under ``version`` from first to last.

        A token of that version behind tokens of an older one may have been sampled with their keys and values still in place.
        """
        other = tokens.mask & (tokens.batch.fields["versions"] != version)
        return tokens.mask & (sequence_sum(other.to(tokens.dtype), tokens.batch.cu_seqlens) == 0)

    def _entropy(self, entropy: Tensor | None, tokens: MaskedTokens, metrics: Metrics) -> Tensor | float:
        coefficient = self.config.entropy_coef
        if entropy is None:
            assert coefficient == 0.0
            return 0.0
        mean = tokens.mean(tokens.blank(entropy))
        metrics["entropy_loss"] = mean.detach()
        return -coefficient * mean if coefficient != 0.0 else 0.0

    def _reference_kl(self, d: Tensor, rollout: Tensor | None, tokens: MaskedTokens, metrics: Metrics) -> Tensor | float:
        """Returns the reference KL, measured if there are reference log-probs, in the loss only with a coefficient (0 times inf is NaN).

        With ``use_unbiased_kl`` the ratio is to the policy that sampled the tokens: the rollout's, wherever the objective corrects for it.
        """
        config = self.config
        if "ref_log_probs" not in tokens.batch.fields and not config.measures_kl:
            return 0.0
        sampled = d if rollout is None or config.correction == "none" else rollout - tokens.log_probs
        ratio = ratio_of(-sampled) if config.use_unbiased_kl else None
        mean = tokens.mean(kl_estimate(tokens.log_probs, tokens.field("ref_log_probs"), config.kl_loss_type or LOSS_KL, ratio))
        metrics["kl_loss"] = mean.detach()
        return config.kl_loss_coef * mean if config.kl_loss_coef != 0.0 else 0.0


@dataclass(frozen=True)
class SftLoss:
    """The loss ``-sum(weights log p)``, the cross-entropy of next tokens; an instance is a `LossFunction`.

    With weights of reducer ``token_mean`` it is the batch's mean over trained tokens, with ``rollout_mean`` the mean of
    the samples' means (slime's default for SFT too). Metrics: loss, and entropy_loss with an entropy.
    """

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """Returns loss and metrics. ``log_probs``, ``entropy``: [T], of ``batch.labels``. Raises MissingField."""
        tokens = MaskedTokens(log_probs, batch)
        loss = tokens.mean(-tokens.log_probs)
        metrics = {"loss": loss.detach()}
        if entropy is not None:
            metrics["entropy_loss"] = tokens.mean(tokens.blank(entropy.detach()))
        return loss, metrics


@dataclass(frozen=True)
class ValueLoss:
    """The loss ``sum(weights max((V_clipped - R)^2, (V - R)^2))``, V clipped to ``[V_old - value_clip, V_old + value_clip]``.

    An instance is a critic's `LossFunction`. The micro-batch carries fields ``values`` (V_old), ``returns`` (R) and ``weights``. There is
    no factor 1/2. Metrics: loss, value_loss, value_clipfrac (share of tokens whose clipped term is the larger).

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; clipped as in OpenAI's implementation of it.
    """

    value_clip: float = 0.2

    def __call__(self, values: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """Returns loss and metrics. ``values``: [T], of the states in which the labels are chosen. Raises MissingField."""
        tokens = MaskedTokens(values, batch)
        old, returns, current = tokens.field("values"), tokens.field("returns"), tokens.log_probs  # the last are values here
        bounded = old + (current - old).clamp(-self.value_clip, self.value_clip)
        free_error, bounded_error = (current - returns).square(), (bounded - returns).square()
        loss = tokens.mean(torch.maximum(free_error, bounded_error))
        outside = (current - old).abs() > self.value_clip  # inside the bounds, the two errors differ by rounding alone
        clipped = tokens.fraction(outside & (bounded_error > free_error))
        return loss, {"loss": loss.detach(), "value_loss": loss.detach(), "value_clipfrac": clipped.detach()}


ActorLoss = PolicyLoss | SftLoss | CustomLoss


def loss_of(config: AlgorithmSection, custom: CustomFunctions, version: int, statistics: Statistics, denominator: float) -> ActorLoss:
    """Returns the actor's loss for one optimizer step.

    Args:
        custom: the user's own functions. version: that of the weights at batch start, if any. statistics: where `needs` requires them.
        denominator: ``reduce.denominator``, for a reducer of the user's own.
    """
    if config.loss_type == "custom_loss":
        return CustomLoss(custom)
    if config.loss_type == "sft_loss":
        return SftLoss()
    return PolicyLoss(config, version, statistics, custom, denominator)
