"""The tokens of a sample, with the trainer's figures of each, its turns and its forks, as the page *Samples* shows them."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import RunConfig
from shared.config.service_sections import RANK, STEP
from shared.data.rollout_files import json_value
from shared.rewards.reward_advantage import reward_advantages
from shared.schema.sample import Sample
from shared.view.group_history import GroupRecord


def safe(text: str) -> str:
    """Returns a text that can be encoded: half a surrogate pair becomes a question mark."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_text(value: Any) -> str:
    """Returns a value as text: itself, or its JSON."""
    if isinstance(value, str):
        return safe(value)
    try:
        return safe(json.dumps(value, ensure_ascii=False, default=json_value))
    except (ValueError, RecursionError, TypeError):
        return safe(str(value))


FloatArray = NDArray[np.float64]

# The fields with the trainer's own log-probs at the batch's start: the first where the loss reads them
OWN_LOG_PROBS = ("proximal_log_probs", "trainer_log_probs")


@dataclass(frozen=True)
class TrainerTokens:
    """What the trainer had for a sample's response, NaN where a token is not trained.

    log_probs: float64 [R], its own at the batch's start; advantages: [R]. absent: why either is not known.
    """

    log_probs: FloatArray | None = None
    advantages: FloatArray | None = None
    absent: str = ""


def trainer_tokens(config: RunConfig | None, step: int | None, sample: Sample) -> TrainerTokens:
    """Returns what the dumps hold of a sample that was trained in ``step``; reads files."""
    if config is None or step is None:
        return TrainerTokens(absent="known once a step has trained the sample")
    if (template := config.debug.train_dump) is None:
        return TrainerTokens(absent="not kept: --dump-details DIR (or --save-debug-train-data PATH) keeps what the trainer computed")
    if not len(sample.prompt):
        return TrainerTokens(absent="the sample's token ids are not kept: keep_rollouts_tokens keeps them")
    paths = _files(template, step)
    if not paths:
        return TrainerTokens(absent=f"no file of step {step} at {template}")
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:  # it comes with the extra `trainer`
        return TrainerTokens(absent="the package safetensors, which reads them, is not installed where the console runs")
    for path in paths:
        try:
            with safe_open(path, framework="np") as tensors:
                found = _of_sample(tensors, sample)
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            return TrainerTokens(absent=f"{path.name} cannot be read: {error}")
        if found is not None:
            return found
    return TrainerTokens(absent=f"the dump of step {step} does not hold this sample")


def _files(template: str, step: int) -> list[Path]:
    """Returns the files of all ranks of a step."""
    path = Path(template.replace(STEP, str(step)))
    if RANK not in str(path):
        return [path] if path.is_file() else []
    return sorted(path.parent.glob(escape(path.name).replace(escape(RANK), "*").replace(RANK, "*")))


def _of_sample(tensors: Any, sample: Sample) -> TrainerTokens | None:
    """Returns what a rank's file holds of a sample; None where it is another rank's. Raises ValueError, LookupError, TypeError."""
    samples: dict[str, list[str]] = json.loads(tensors.metadata()["myxo"])["samples"]
    place = next(((batch, names.index(sample.name)) for batch, names in samples.items() if sample.name in names), None)
    if place is None:
        return None
    batch, position = place
    start, end = map(int, tensors.get_slice(f"{batch}.cu_seqlens")[position : position + 2])
    if not np.array_equal(tensors.get_slice(f"{batch}.tokens")[start:end], np.concatenate([sample.prompt, sample.response])):
        return TrainerTokens(absent="the dump holds other tokens under this sample's name: it is of another run")
    begin = start + len(sample.prompt) - 1  # fields stand where the token is predicted, one before it
    names, trained = set(tensors.keys()), tensors.get_slice(f"{batch}.loss_mask")[begin : begin + len(sample.response)] > 0

    def field(name: str) -> FloatArray | None:
        if f"{batch}.{name}" not in names:
            return None
        values = np.asarray(tensors.get_slice(f"{batch}.{name}")[begin : begin + len(sample.response)], np.float64)
        return np.where(trained, values, np.nan)

    own = [values for name in OWN_LOG_PROBS if (values := field(name)) is not None]
    return TrainerTokens(own[0] if own else None, field("advantages"), "" if own else "the dump holds no log-probs of the trainer's own")


Pieces = Callable[[Sequence[int]], list[str]]  # Returns the text of each of some token ids
MOST_TOKENS = 4000  # Tokens of one answer
MOST_TURNS = 2000  # Turns of one answer

# Estimators by which all tokens of a sample have one advantage, where no KL is in the reward
_SPREAD = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")


class SampleTurn(BaseModel):
    """A stretch of the response, tokens [start, end): ``sampled`` by the model and trained here, or ``given``: what tools or users said, or
    a beginning that another sample of the rollout trains. reward: the turn's own, None where no turn of the sample was given one."""

    kind: Literal["sampled", "given"]
    start: int
    end: int
    text: str | None
    reward: float | None = None


class TokenWindow(BaseModel):
    """Tokens [first, first + len(ids)) of ``total`` of the response; every list is of the same length, None where a figure is not known.

    trained: whether the loss has the token. difference: the trainer's log-prob less the engine's.
    """

    first: int
    total: int
    ids: list[int]
    text: list[str] | None
    trained: list[bool]
    versions: list[int]
    log_probs: list[float | None]
    trainer_log_probs: list[float | None]
    difference: list[float | None]
    advantages: list[float | None]


class Fork(BaseModel):
    """Another sample of the same rollout, with which ``shared`` tokens are common from the beginning, prompts included; None: not known."""

    index: int
    shared: int | None


@dataclass(frozen=True)
class ShownSample:
    """A sample at a position of its group, and what was found of it. removed, stale: why none of its tokens is in the loss."""

    group: GroupRecord
    position: int
    sample: Sample
    stale: bool = False

    @property
    def removed(self) -> bool:
        return self.position in self.group.removed

    def trained(self) -> NDArray[np.bool_]:
        """Returns which tokens the loss has: [R]."""
        sample = self.sample
        if self.removed or self.stale:
            return np.zeros(len(sample.response), bool)
        return (sample.mask != 0) & (sample.versions() >= self.group.mask_below)


def turns(sample: Sample, decode: Callable[[Sequence[int]], str] | None) -> list[SampleTurn]:
    """Returns the turns of a response, in order. decode: None without a tokenizer; then only a response of one turn has its text."""
    edges = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.response)] if len(sample.response) else []
    found = []
    rewards = {start: reward for start, _, reward in sample.turn_rewards} if any(reward for *_, reward in sample.turn_rewards) else {}
    for start, end in pairwise(edges):
        text = decode(sample.response[start:end].tolist()) if decode else sample.text if len(edges) == 2 else None
        kind: Literal["sampled", "given"] = "sampled" if sample.mask[start] else "given"
        found.append(SampleTurn(kind=kind, start=start, end=end, text=None if text is None else safe(text), reward=rewards.get(start)))
    return found[:MOST_TURNS]


def window(
    shown: ShownSample, first: int, count: int, trainer: TrainerTokens, advantage: float | None, pieces: Pieces | None
) -> TokenWindow:
    """Returns some tokens of a response. advantage: of all of them, where the trainer's own are not known."""
    sample, total = shown.sample, len(shown.sample.response)
    part = slice(min(first, total), min(first + count, total))
    trained = shown.trained()
    advantages = trainer.advantages
    if advantages is None and advantage is not None:
        advantages = np.where(trained, advantage, np.nan)
    difference = None if trainer.log_probs is None or sample.log_probs is None else trainer.log_probs - sample.log_probs
    ids = sample.response[part].tolist()

    def numbers(values: NDArray[np.floating] | None) -> list[float | None]:
        if values is None:
            return [None] * len(ids)
        return [float(value) if np.isfinite(value) else None for value in values[part].astype(np.float64).round(6)]

    return TokenWindow(
        first=part.start,
        total=total,
        ids=ids,
        text=[safe(text) for text in pieces(ids)] if pieces else None,
        trained=trained[part].tolist(),
        versions=sample.versions()[part].tolist(),
        log_probs=numbers(sample.log_probs),
        trainer_log_probs=numbers(trainer.log_probs),
        difference=numbers(difference),
        advantages=numbers(advantages),
    )


def forks(samples: Sequence[Sample], position: int) -> list[Fork]:
    """Returns the other samples of a sample's rollout."""
    own = samples[position]
    others = [(index, other) for index, other in enumerate(samples) if index != position and other.rollout == own.rollout]
    return [Fork(index=index, shared=_shared(own, other)) for index, other in others]


def _shared(one: Sample, other: Sample) -> int | None:
    if not len(one.prompt) or not len(other.prompt):
        return None
    first, second = np.concatenate([one.prompt, one.response]), np.concatenate([other.prompt, other.response])
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def advantages_of(group: GroupRecord, samples: Sequence[Sample], config: AlgorithmSection | None) -> tuple[list[float] | None, str]:
    """Returns the advantage of each sample, or None and why it is not known without the trainer: ``shared.rewards.reward_advantage``.

    Args:
        samples: of the group, whose roles and rollouts say what is compared; without them every sample is a rollout.
    """
    if group.dataset is not None:
        return None, "held-out prompts are not trained"
    if config is None or not group.rewards:
        return None, "the group has no rewards yet"
    if (why := _by_token(config)) is not None:
        return None, f"{why}: an advantage is known only from the trainer (--dump-details keeps it)"
    whole = len(samples) == len(group.rewards)
    roles: list[Hashable] = [sample.role for sample in samples] if whole else [""] * len(group.rewards)
    rollouts = [sample.rollout for sample in samples] if whole else list(group.rollouts) or list(range(len(group.rewards)))
    return reward_advantages(config, list(group.rewards), roles, rollouts).tolist(), ""


def _by_token(config: AlgorithmSection) -> str | None:
    """Returns why the advantages of a sample's tokens are not all its reward's; None where they are."""
    custom = ("custom_advantage_function_path", "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    reasons = {
        f"advantage_estimator is {config.advantage_estimator}": config.advantage_estimator not in _SPREAD,
        "the loss has no advantages": config.loss_type != "policy_loss",
        "the KL penalty is in the reward (kl_coef)": config.kl_coef != 0.0,
        "advantages are whitened over the batch (normalize_advantages)": config.normalize_advantages,
        "a teacher's log-probs are in them (use_opd)": config.use_opd,
        "turns' rewards are in them (turn_advantage_coef)": bool(config.turn_advantage_coef),
        **{f"{name} makes them": bool(getattr(config, name)) for name in custom},
    }
    return next((why for why, holds in reasons.items() if holds), None)
