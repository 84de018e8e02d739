"""The objective once more, from its formulas: plain Python floats, one token after the other, gradients by hand.

Shares no code with the trainer but the config that it reads; there is no tensor, no packing and no autograd here.
"""

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
        return math.fsum(sums) / max(sum(sum(s.mask) for s in sequences), 1)
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


def ratios_of_level(s: Sequence, level: str) -> list[float]:
    """Proximal over rollout policy, for each token."""
    start = s.current if s.proximal is None else s.proximal
    log_ratios = [a - b for a, b in zip(start, s.rollout, strict=True)]
    if level == "sequence":
        log_ratios = [math.fsum(x for x, m in zip(log_ratios, s.mask, strict=True) if m)] * len(s.mask)
    elif level == "geometric":
        log_ratios = [mean_over_sequence(s, log_ratios)] * len(s.mask)
    return [exp(x) for x in log_ratios]


def bounded(ratio: float, config) -> float:
    if config.tis_mode == "truncate":
        return min(ratio, config.tis_clip)
    if config.tis_mode == "mask" and not config.tis_clip_low <= ratio <= config.tis_clip:
        return 0.0
    return min(max(ratio, config.tis_clip_low), config.tis_clip)


def mean_weight(sequences, config) -> float:
    """Over tokens, or on the levels of sequences over those that have trained tokens."""
    weights = []
    for s in sequences:
        kept = [bounded(r, config) for r, m in zip(ratios_of_level(s, config.tis_level), s.mask, strict=True) if m]
        weights += kept if config.tis_level == "token" else kept[:1]
    weights = [weight for weight in weights if weight > 0]
    return (math.fsum(weights) / len(weights) if weights else 1.0) or 1.0


def masked_by_second_moment(sequences, config) -> list[list[bool]]:
    """M2PO: one after the other the token with the largest square goes, until the mean of the others is small enough.

    That is done with the policy at batch start. It gives a limit, half-way between the last that went and the first that stayed, which
    holds for the policy being trained.
    """

    def squares(policies) -> list[list[float]]:  # of the tokens that leave in the advantage's direction
        return [
            [(c - r) ** 2 if m and (c - r) * s.advantage > 0 else 0.0 for c, r, m in zip(policy, s.rollout, s.mask, strict=True)]
            for s, policy in zip(sequences, policies, strict=True)
        ]

    left = sorted(x for row in squares([s.current if s.proximal is None else s.proximal for s in sequences]) for x in row if x > 0)
    last = None
    while left and math.fsum(left) / len(left) > config.m2_threshold:
        last = left.pop()
    limit = math.inf if last is None else (last + left[-1]) / 2 if left else 0.0
    return [[x > limit for x in row] for row in squares([s.current for s in sequences])]


def policy_loss(sequences, config, batch_version=None):
    """Loss, metrics, and the loss's derivative by each current log-prob (lists per sequence)."""
    low = 1 - config.eps_clip
    high = 1 + (config.eps_clip if config.eps_clip_high is None else config.eps_clip_high)
    names = ["pg_loss", "pg_clipfrac", "ppo_kl", "ois", "entropy_loss", "kl_loss", "train_rollout_logprob_abs_diff"]
    names += ["tis", "tis_clipfrac", "opsm_clipfrac", "rs_clipfrac", "rs_veto_frac"]
    tokens = {name: [] for name in names}
    scale = 1.0 / mean_weight(sequences, config) if config.tis_batch_normalize else 1.0
    too_far = masked_by_second_moment(sequences, config) if config.use_m2po else None
    unweighted_gradients, agreement = [], [0.0, 0]

    for number, s in enumerate(sequences):
        count = len(s.mask)
        start = s.current if s.proximal is None else s.proximal
        old = s.rollout if config.correction == "rollout" else start
        d = [o - c for o, c in zip(old, s.current, strict=True)]
        clip_d = [mean_over_sequence(s, d)] * count if config.advantage_estimator == "gspo" else d

        loss, by_d, by_log_prob, clipped = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
        for t in range(count):
            if too_far is not None:
                gone = too_far[number][t]
                loss[t], by_d[t] = (0.0, 0.0) if gone else (-exp(-d[t]) * s.advantage, slope(-d[t]) * s.advantage)
                clipped[t] = float(gone)
            elif config.advantage_estimator == "cispo":
                weight = min(max(exp(-d[t]), low), high)
                loss[t] = -weight * s.advantage * s.current[t]
                by_log_prob[t] = -weight * s.advantage
                clipped[t] = float(weight != exp(-d[t]))
            else:
                loss[t], by_d[t], clipped[t] = surrogate(clip_d[t], s.advantage, low, high, config.eps_clip_c)

        factor, ratios, changed = [1.0] * count, [0.0] * count, [0.0] * count
        rejected, vetoed = [0.0] * count, 0.0
        if config.correction == "decoupled":
            ratios = ratios_of_level(s, config.tis_level)
            factor = [bounded(ratio, config) for ratio in ratios]
            changed = [float(f != r) for f, r in zip(factor, ratios, strict=True)]
            factor = [f * scale for f in factor]
            if config.use_rs:
                lower = config.tis_clip_low if config.rs_lower_bound is None else config.rs_lower_bound
                upper = config.tis_clip if config.rs_upper_bound is None else config.rs_upper_bound
                rejected = [float(not lower <= r <= upper) for r in ratios_of_level(s, config.rs_level or config.tis_level)]
            if config.rs_veto_threshold is not None:
                vetoed = float(any(m and r < config.rs_veto_threshold for r, m in zip(ratios_of_level(s, "token"), s.mask, strict=True)))
            factor = [f * (1 - r) * (1 - vetoed) for f, r in zip(factor, rejected, strict=True)]
        dropped = 0.0
        if config.use_opsm:
            distance = mean_over_sequence(s, d)
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
            drawn_from = d[t] if config.correction == "none" else s.rollout[t] - s.current[t]
            ratio = exp(-drawn_from) if config.use_unbiased_kl else None
            value, by_x = kl(s.current[t] - s.reference[t], config.kl_loss_type or "k3", ratio, slope(-drawn_from))
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
        tokens["rs_clipfrac"].append(rejected)
        tokens["rs_veto_frac"].append([vetoed] * count)

    def mean(values):
        return reduce(sequences, values, config.reducer, config.loss_divisor)

    metrics = {name: mean(values) for name, values in tokens.items()}
    loss = metrics["pg_loss"] - config.entropy_coef * metrics["entropy_loss"] + config.kl_loss_coef * metrics["kl_loss"]
    metrics |= {"loss": loss, "agreement_abs_diff": agreement[0], "agreement_tokens": agreement[1]}
    if config.correction != "decoupled":
        del metrics["tis"], metrics["tis_clipfrac"]
    for name, there in (("opsm_clipfrac", config.use_opsm), ("rs_clipfrac", config.use_rs), ("rs_veto_frac", config.rs_veto_threshold)):
        if not there:
            del metrics[name]

    gradients = []
    for index, s in enumerate(sequences):  # the reducer is linear: its response to one trained token is the weight of each of them
        one_hot = [[0.0] * len(other.mask) for other in sequences]
        if 1 in s.mask:
            one_hot[index][s.mask.index(1)] = 1.0
        weight = mean(one_hot)
        gradients.append([weight * g for g in unweighted_gradients[index]])
    return loss, metrics, gradients
