"""Samples as the trainer's tests want them: by their tokens, with everything else filled in."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.schema.sample import Sample


def train_sample(prompt: Sequence[int], response: Sequence[int], versions: Sequence[int] | int = 0, **changes: Any) -> Sample:
    """A sample all of whose tokens are trained, where ``changes`` says nothing else. ``versions``: of each response token, or of all."""
    length = len(response)
    of_tokens = [versions] * length if isinstance(versions, int) else [int(version) for version in versions]
    fields: dict[str, Any] = {
        "group": "g",
        "index": 0,
        "prompt": np.array(prompt, np.int32),
        "response": np.array(response, np.int32),
        "log_probs": np.full(length, -1.0, np.float32),
        "mask": np.ones(length, np.uint8),
        "segments": [(at, at + 1, version) for at, version in enumerate(of_tokens)],
        "finish": "stop",
        "text": "",
    }
    return Sample(**{**fields, **changes})
