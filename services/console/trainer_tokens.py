"""What the trainer computed for each token of a sample, from the tensors that a run dumps (`debug.save_debug_train_data`).

The format is ``services.trainer.dumps``'s: one safetensors file a step and rank, ``step.micro_batch.field``, fields aligned to the labels.
"""

import json
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.config.debug_section import RANK, STEP
from shared.config.run_config import RunConfig
from shared.schema.sample import Sample

FloatArray = NDArray[np.float64]

OWN_LOG_PROBS = ("proximal_log_probs", "trainer_log_probs")
"""The fields with the trainer's own log-probs at the batch's start: the first where the loss reads them."""


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
