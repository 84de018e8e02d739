"""Batches drawn at random, as the reference's sequences and as the trainer's packed micro-batch."""

from collections.abc import Iterable

import numpy as np
import torch
from hypothesis import strategies as st

from services.trainer.objective.advantage import needs
from services.trainer.objective.correction import batch_statistics
from services.trainer.objective.loss import PolicyLoss
from services.trainer.objective.reduce import rollout_parts, sample_weights
from services.trainer.packing import PARTIAL, UNKNOWN, PackedBatch, pack
from services.trainer.packing import spread as layout
from shared.config.algorithm import AlgorithmSection
from shared.schema.sample import Sample
from tests.support.train_samples import train_sample

from .reference import Sequence


def draw_sequences(seed: int, count: int, scale: float, proximal: bool, zero_advantages: bool = False) -> list[Sequence]:
    """``count`` samples of 0 to 6 response tokens, some all masked, some fanned out of one rollout.

    Numbers come from a generator and not from hypothesis, which would seek the kinks of the clip, where a derivative has
    two right values. They are exact in float32. scale: nats between the policies.
    """
    generator = np.random.default_rng(seed)

    def floats(size: int, spread: float) -> np.ndarray:
        return generator.normal(0.0, spread, size).astype(np.float32).astype(np.float64)

    sequences = []
    for _ in range(count):
        length = int(generator.integers(0, 7))
        mask = generator.integers(0, 2, length) if generator.random() < 0.7 else np.full(length, generator.integers(0, 2))
        versions = np.sort(generator.integers(3, 6, length))
        if generator.random() < 0.6:
            versions[:] = generator.integers(3, 6)
        base = -np.abs(floats(length, 2.0))

        def near(base: np.ndarray = base, length: int = length) -> list[float]:
            return (base + floats(length, scale)).astype(np.float32).astype(np.float64).tolist()

        sequences.append(
            Sequence(
                prompt=int(generator.integers(1, 4)),
                mask=mask.tolist(),
                current=near(),
                rollout=near(),
                proximal=near() if proximal else None,
                reference=near(),
                entropy=np.abs(floats(length, 1.0)).tolist(),
                advantage=0.0 if zero_advantages else float(floats(1, 1.5)[0]),
                versions=versions.tolist(),
                rollout_id=int(generator.integers(0, count)),
            )
        )
    return sequences


SCALES = st.sampled_from([0.0, 0.01, 0.3, 2.0, 40.0])
"""0: all policies are one. 0.3: around the clip. 40: log ratios beyond what is exponentiated."""


@st.composite
def sequence_batches(draw: st.DrawFn) -> list[Sequence]:
    return draw_sequences(
        seed=draw(st.integers(0, 2**32 - 1)),
        count=draw(st.integers(1, 6)),
        scale=draw(SCALES),
        proximal=draw(st.booleans()),
        zero_advantages=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def configs(draw: st.DrawFn) -> AlgorithmSection:
    off_policy = draw(st.sampled_from(["decoupled", "rollout", "none"]))
    decoupled = off_policy == "decoupled"
    estimator = draw(st.sampled_from(["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo", "rloo"]))
    use_rs = decoupled and draw(st.booleans())
    use_m2po = off_policy != "none" and estimator not in ("gspo", "cispo") and draw(st.integers(0, 2)) == 0
    mode = draw(st.sampled_from(["truncate", "clip", "mask"])) if decoupled else "clip"
    use_opsm = draw(st.booleans())
    kl_loss_coef = draw(st.sampled_from([0.0, 0.1]))
    reducer = draw(st.sampled_from(["rollout_mean", "token_mean", "fixed_length"]))
    return AlgorithmSection(
        advantage_estimator=estimator,
        eps_clip=0.2 if use_m2po else draw(st.sampled_from([0.2, 0.05, 1.0])),
        eps_clip_high=None if use_m2po else draw(st.sampled_from([None, 0.28, 5.0])),
        eps_clip_c=None if use_m2po or estimator == "cispo" else draw(st.sampled_from([None, 1.5, 3.0])),
        kl_loss_type=draw(st.sampled_from(["k1", "k2", "k3", "low_var_kl"])),
        kl_loss_coef=kl_loss_coef,
        use_unbiased_kl=kl_loss_coef > 0 and draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.01])),
        off_policy=off_policy,
        tis_mode=mode,
        tis_level=draw(st.sampled_from(["token", "sequence", "geometric"])) if decoupled else "token",
        tis_clip=draw(st.sampled_from([2.0, 1.1])) if decoupled else 2.0,
        tis_clip_low=draw(st.sampled_from([0.0, 0.8])) if decoupled and mode != "truncate" else 0.0,
        tis_batch_normalize=decoupled and draw(st.booleans()),
        use_rs=use_rs,
        rs_level=draw(st.sampled_from([None, "token", "sequence", "geometric"])) if use_rs else None,
        rs_lower_bound=draw(st.sampled_from([None, 0.5])) if use_rs else None,
        rs_upper_bound=draw(st.sampled_from([None, 1.5])) if use_rs else None,
        rs_veto_threshold=draw(st.sampled_from([None, 0.3])) if decoupled else None,
        use_m2po=use_m2po,
        m2_threshold=draw(st.sampled_from([0.04, 1e-3])) if use_m2po else 0.04,
        use_opsm=use_opsm,
        opsm_delta=draw(st.sampled_from([1e-4, 0.2])) if use_opsm else 1e-4,
        calculate_per_token_loss=reducer == "token_mean",
        loss_divisor=16 if reducer == "fixed_length" else None,
    )


def train_samples(sequences: list[Sequence]) -> list[Sample]:
    return [
        train_sample(
            range(1, s.prompt + 1),
            range(50, 50 + len(s.mask)),
            s.versions,
            mask=np.array(s.mask, dtype=np.uint8),
            log_probs=np.array(s.rollout, dtype=np.float32),
            index=index,
            rollout=s.rollout_id,
        )
        for index, s in enumerate(sequences)
    ]


def weights_of(sequences: list[Sequence], config: AlgorithmSection) -> np.ndarray:
    tokens, rollouts = [sum(s.mask) for s in sequences], [s.rollout_id for s in sequences]
    return sample_weights(tokens, rollout_parts(tokens, rollouts), config.reducer, config.loss_divisor)


def spread(sequences: list[Sequence], values: list[list[float]], blank: float = 0.0) -> torch.Tensor:
    """Per-response-token values in their places in a packed batch: float64 [T], ``blank`` everywhere else."""
    rows = [[blank] * (s.prompt - 1) + list(row) + [blank] for s, row in zip(sequences, values, strict=True)]
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def packed(sequences: list[Sequence], weights: np.ndarray, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """The micro-batch that ``pack`` makes, with the trainer's own log-probs, in ``dtype``."""
    batch = plainly_packed(sequences, weights)
    exact = spread(sequences, [[float(w) * m for m in s.mask] for s, w in zip(sequences, weights, strict=True)])
    torch.testing.assert_close(batch.fields["weights"].double(), exact, rtol=1e-7, atol=0)
    fields = {"weights": exact, "ref_log_probs": spread(sequences, [s.reference for s in sequences])}
    if sequences[0].proximal is not None:
        fields["proximal_log_probs"] = spread(sequences, [s.proximal for s in sequences])
    batch = batch.with_fields(**fields)
    floats = {name: field.to(dtype) for name, field in batch.fields.items() if field.is_floating_point()}
    return batch.with_fields(**floats)


def with_gaps(batch: PackedBatch, sequences: list[Sequence], unknown: Iterable[int]) -> PackedBatch:
    """The same micro-batch as `assemble` makes it where nobody has kept the rollout's log-probs of some samples."""
    gaps = spread(sequences, [[UNKNOWN if index in set(unknown) and m else 0.0 for m in s.mask] for index, s in enumerate(sequences)])
    given = batch.with_fields(rollout_log_probs=batch.fields["rollout_log_probs"] + gaps)
    return given.with_renamed("rollout_log_probs", PARTIAL)


def plainly_packed(sequences: list[Sequence], weights: Iterable[float]) -> PackedBatch:
    """The micro-batch that ``pack`` makes, with the advantages."""
    samples = train_samples(sequences)
    advantages = [torch.full((len(s.mask),), s.advantage, dtype=torch.float64) for s in sequences]
    packed = pack(samples, [float(weight) for weight in weights])
    return packed.with_fields(advantages=layout(samples, advantages, "advantages"))


def policy_loss(sequences: list[Sequence], config: AlgorithmSection, batch: PackedBatch, version: int | None = None) -> PolicyLoss:
    """The loss, with the statistics of the batch where it needs them; without proximal log-probs those of the policy itself."""
    if not needs(config).statistics:
        return PolicyLoss(config, version)
    if "proximal_log_probs" not in batch.fields:
        batch = batch.with_fields(proximal_log_probs=currents(sequences).detach())
    return PolicyLoss(config, version, batch_statistics(config, [batch]))


def currents(sequences: list[Sequence], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The policy's log-probs [T], a leaf."""
    return spread(sequences, [s.current for s in sequences]).to(dtype).requires_grad_()


def entropies(sequences: list[Sequence], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return spread(sequences, [s.entropy for s in sequences]).to(dtype)
