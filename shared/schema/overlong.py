"""Decides what becomes of a sample that is longer than a micro-batch, which the trainer never splits: `rollout.overlong_samples`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from shared.runtime.errors import BadMessage
from shared.schema.sample import Sample

OverlongPolicy = Literal["truncate", "mask", "drop", "alone"]

NO_LIMIT = 1 << 31
"""The most tokens of a sample where the policy is ``alone``: a longer sample than a micro-batch holds is one by itself."""


def too_long(tokens: int, longest: int) -> str:
    """Returns what is wrong with a sample of so many tokens, as the end of a sentence about it."""
    return (
        f"has {tokens} tokens, a micro-batch holds at most {longest}: raise max_tokens_per_gpu or context_parallel_size, "
        "or lower rollout_max_response_len"
    )


def fitted(samples: Sequence[Sample], longest: int, policy: OverlongPolicy) -> list[Sample]:
    """Returns a group's samples with none over ``longest`` tokens: of a longer one the beginning of its response, trained or masked.

    ``text`` stays whole, for the reward is that of all that was made. Raises BadMessage, naming the sample, where the policy is to drop the
    group, where a prompt leaves no room for a response, and where nothing of the group would be trained.
    """
    if all(sample.length <= longest for sample in samples):
        return list(samples)
    found = [sample if sample.length <= longest else _cut(sample, longest, policy) for sample in samples]
    if not any(sample.mask.any() for sample in found):
        raise BadMessage(f"no sample of group {samples[0].group} that could be trained fits: {_described(samples, longest)}")
    return found


def _cut(sample: Sample, longest: int, policy: OverlongPolicy) -> Sample:
    room = longest - len(sample.prompt)
    if policy == "drop" or room < 1:
        raise BadMessage(_described([sample], longest))
    return replace(
        sample,
        response=sample.response[:room],
        log_probs=None if sample.log_probs is None else sample.log_probs[:room],
        mask=sample.mask[:room] if policy == "truncate" else np.zeros(room, np.uint8),
        segments=[(start, min(end, room), version) for start, end, version in sample.segments if start < room],
        finish="length",
    )


def _described(samples: Sequence[Sample], longest: int) -> str:
    sample = max(samples, key=lambda sample: sample.length)
    return f"sample {sample.name} {too_long(sample.length, longest)}"
