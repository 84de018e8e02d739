"""Samples as the trainer's tests want them: by their tokens, with everything else filled in."""

from collections.abc import Sequence
from typing import Any

from shared.schema.sample import Sample
from tests.support.valid_messages import example


def train_sample(prompt: Sequence[int], response: Sequence[int], versions: Sequence[int] | int = 0, **changes: Any) -> Sample:
    """A sample all of whose tokens are trained, where ``changes`` says nothing else. ``versions``: of each response token, or of all."""
    length = len(response)
    of_tokens = [versions] * length if isinstance(versions, int) else [int(version) for version in versions]
    segments = [(at, at + 1, version) for at, version in enumerate(of_tokens)]
    fields = {"group": "g", "prompt": [*prompt], "response": [*response], "log_probs": -1.0, "segments": segments, "text": ""}
    return example(Sample, **{**fields, **changes})
