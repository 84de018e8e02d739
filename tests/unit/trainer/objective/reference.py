"""The objective once more, from its formulas: plain Python floats, one token after the other, gradients by hand.

Shares no code with the trainer but the config that it reads; there is no tensor, no packing and no autograd here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMIT = 20.0


@dataclass
class Sequence:
    """One sample: lists over its R response tokens, all in float64. ``proximal`` None: a single step a batch."""

    prompt: int
    mask: list[int]
    current: list[float]
    rollout: list[float]
    proximal: list[float] | None
    reference: list[float]
    entropy: list[float]
    advantage: float
    versions: list[int]
    rollout_id: int


def exp(x: float) -> float:
    return math.exp(min(max(x, -LIMIT), LIMIT))


def slope(x: float) -> float:
    """Derivative of ``exp`` above by x."""
    return math.exp(x) if -LIMIT <= x <= LIMIT else 0.0


def mean_over_sequence(sequence: Sequence, values: list[float]) -> float:
    kept = [value for value, m in zip(values, sequence.mask, strict=True) if m]
    return math.fsum(kept) / max(len(kept), 1)


def reduce(sequences: list[Sequence], values: list[list[float]], reducer: str, fixed_length: int | None) -> float:
    """The reducers as they are defined, over the whole batch: no weights."""
    sums = [math.fsum(v for v, m in zip(vs, s.mask, strict=True) if m) for s, vs in zip(sequences, values, strict=True)]
    if reducer == "token_mean":
        return math.fsum(sums) / sum(max(sum(s.mask), 1) for s in sequences)
    rollouts = {s.rollout_id for s in sequences}
    total = 0.0
    for rollout in rollouts:
        of = [i for i, s in enumerate(sequences) if s.rollout_id == rollout]
        tokens = fixed_length if reducer == "fixed_length" else max(sum(sum(sequences[i].mask) for i in of), 1)
        total += math.fsum(sums[i] for i in of) / tokens
    return total / len(rollouts)


def surrogate(d: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float, float]:
    """PPO: loss, its derivative by d, and 1 if clipped."""
    ratio = exp(-d)
    free, bounded = -ratio * advantage, -min(max(ratio, low), high) * advantage
    loss, by_d = (free, slope(-d) * advantage) if free >= bounded else (bounded, 0.0)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, by_d = -dual * advantage, 0.0
    return loss, by_d, float(bounded > free)


def kl(x: float, kind: str, ratio: float | None, ratio_slope: float) -> tuple[float, float]:
    """The estimate and its derivative by the current log-prob."""
    if kind == "k1":
        value, by_x = x, 1.0
    elif kind == "k2":
        value, by_x = x * x / 2, x
    elif x < -LIMIT:
        value, by_x = math.exp(LIMIT) - 1 - LIMIT, 0.0
    else:
        value, by_x = math.exp(-x) - 1 + x, 1.0 - math.exp(-x)
    if ratio is not None:
        value, by_x = ratio * value, ratio_slope * value + ratio * by_x
    if kind == "low_var_kl" and not -10.0 <= value <= 10.0:
        value, by_x = math.copysign(10.0, value), 0.0
    return value, by_x


def policy_loss(sequences, config, batch_version=None):
    """Loss, metrics, and the loss's derivative by each current log-prob (lists per sequence)."""
    low = 1 - config.eps_clip
    high = 1 + (config.eps_clip if config.eps_clip_high is None else config.eps_clip_high)
    names = ["pg_loss", "pg_clipfrac", "ppo_kl", "ois", "entropy_loss", "kl_loss", "train_rollout_logprob_abs_diff"]
    names += ["tis", "tis_clipfrac", "opsm_clipfrac"]
    tokens = {name: [] for name in names}
    unweighted_gradients, agreement = [], [0.0, 0]

    for s in sequences:
        count = len(s.mask)
        start = s.current if s.proximal is None else s.proximal
        old = s.rollout if config.off_policy == "rollout" else start
        d = [o - c for o, c in zip(old, s.current, strict=True)]
        clip_d = [mean_over_sequence(s, d)] * count if config.advantage_estimator == "gspo" else d

        loss, by_d, by_log_prob, clipped = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
        for t in range(count):
            if config.advantage_estimator == "cispo":
                weight = min(max(exp(-d[t]), low), high)
                loss[t] = -weight * s.advantage * s.current[t]
                by_log_prob[t] = -weight * s.advantage
                clipped[t] = float(weight != exp(-d[t]))
            else:
                loss[t], by_d[t], clipped[t] = surrogate(clip_d[t], s.advantage, low, high, config.eps_clip_c)

        factor, ratios, changed = [1.0] * count, [0.0] * count, [0.0] * count
        if config.off_policy == "decoupled":
            log_ratios = [a - b for a, b in zip(start, s.rollout, strict=True)]
            if config.importance_level == "sequence":
                log_ratios = [math.fsum(x for x, m in zip(log_ratios, s.mask, strict=True) if m)] * count
            elif config.importance_level == "geometric":
                log_ratios = [mean_over_sequence(s, log_ratios)] * count
            ratios = [exp(x) for x in log_ratios]
            for t, ratio in enumerate(ratios):
                inside = config.tis_clip_low <= ratio <= config.tis_clip
                bounded = min(max(ratio, config.tis_clip_low), config.tis_clip) if config.importance == "tis" else 0.0
                factor[t], changed[t] = (ratio, 0.0) if inside else (bounded, 1.0)
        dropped = 0.0
        if config.use_opsm:
            distance = mean_over_sequence(s, [r - c for r, c in zip(s.rollout, s.current, strict=True)])
            dropped = float(s.advantage < 0 and distance > config.opsm_delta)
            factor = [f * (1 - dropped) for f in factor]

        gradient = [f * g for f, g in zip(factor, by_log_prob, strict=True)]
        kept = max(sum(s.mask), 1)
        for t in range(count):
            if config.advantage_estimator == "gspo":  # every token of the sequence moves its d
                total = math.fsum(f * g for f, g, m in zip(factor, by_d, s.mask, strict=True) if m)
                gradient[t] += -total / kept
            else:
                gradient[t] += -factor[t] * by_d[t]
        estimates = []
        for t in range(count):
            ratio = exp(-d[t]) if config.use_unbiased_kl else None
            value, by_x = kl(s.current[t] - s.reference[t], config.kl_loss_type, ratio, slope(-d[t]))
            estimates.append(value)
            gradient[t] += config.kl_loss_coef * by_x
        unweighted_gradients.append([g * m for g, m in zip(gradient, s.mask, strict=True)])

        differences = [abs(a - b) for a, b in zip(start, s.rollout, strict=True)]
        trained_versions = {version for version, m in zip(s.versions, s.mask, strict=True) if m}
        if trained_versions == {batch_version}:
            agreement[0] += math.fsum(x for x, m in zip(differences, s.mask, strict=True) if m)
            agreement[1] += sum(s.mask)
        tokens["pg_loss"].append([f * x for f, x in zip(factor, loss, strict=True)])
        tokens["pg_clipfrac"].append(clipped)
        tokens["ppo_kl"].append(clip_d)
        tokens["ois"].append([exp(-x) for x in clip_d])
        tokens["entropy_loss"].append(s.entropy)
        tokens["kl_loss"].append(estimates)
        tokens["train_rollout_logprob_abs_diff"].append(differences)
        tokens["tis"].append(ratios)
        tokens["tis_clipfrac"].append(changed)
        tokens["opsm_clipfrac"].append([dropped] * count)

    def mean(values):
        return reduce(sequences, values, config.reducer, config.fixed_length)

    metrics = {name: mean(values) for name, values in tokens.items()}
    loss = metrics["pg_loss"] - config.entropy_coef * metrics["entropy_loss"] + config.kl_loss_coef * metrics["kl_loss"]
    metrics |= {"loss": loss, "agreement_abs_diff": agreement[0], "agreement_tokens": agreement[1]}
    if config.off_policy != "decoupled":
        del metrics["tis"], metrics["tis_clipfrac"]
    if not config.use_opsm:
        del metrics["opsm_clipfrac"]

    gradients = []
    for index, s in enumerate(sequences):  # the reducer is linear: its response to one token is that token's weight
        one_hot = [[0.0] * len(other.mask) for other in sequences]
        row = []
        for t in range(len(s.mask)):
            one_hot[index][t] = 1.0
            row.append(mean(one_hot) * unweighted_gradients[index][t])
            one_hot[index][t] = 0.0
        gradients.append(row)
    return loss, metrics, gradients
