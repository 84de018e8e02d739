"""Samples that are none: every way in which one can be wrong and travel all the same, with what is said of it where it enters."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shared.schema import codec

Poison = Callable[[dict[str, Any]], object]
"""Changes a sample, as the map that travels."""


def _set(**fields: Any) -> Poison:
    return lambda sample: sample.update(fields)


def _first(field: str, value: Any) -> Poison:
    def change(sample: dict[str, Any]) -> None:
        changed = sample[field].astype(np.int64 if field in ("prompt", "response") else sample[field].dtype)
        changed[0] = value
        sample[field] = changed

    return change


def _version(version: int) -> Poison:
    return lambda sample: sample.update(segments=[[start, end, version] for start, end, _ in sample["segments"]])


def _shorter(field: str) -> Poison:
    return lambda sample: sample.update({field: sample[field][1:]})


POISON: dict[str, tuple[Poison, str]] = {
    "token outside the vocabulary": (_first("response", 200_000), r"response holds token 200000 at 0, which is not in \[0, \d+\)"),
    "token beyond 32 bits": (_first("response", 1 << 40), "response holds token 1099511627776 at 0"),
    "negative token": (_first("response", -1), "response holds token -1 at 0"),
    "negative prompt": (_first("prompt", -5), "prompt holds token -5 at 0"),
    "empty prompt": (_set(prompt=np.zeros(0, np.int32)), "prompt is empty"),
    "version of 2**40": (_version(1 << 40), "segments name version 1099511627776"),
    "version to come": (_version(5000), "segments name version 5000; .* the newest"),
    "version below 0": (_version(-1), "segments name version -1"),
    "mask of 7": (_first("mask", 7), "mask holds 7; expected 0 and 1"),
    "short mask": (_shorter("mask"), r"mask has \d+ entries for \d+ response tokens"),
    "short log-probs": (_shorter("log_probs"), r"log_probs has \d+ entries for \d+ response tokens"),
    "log-prob above 0": (_first("log_probs", 0.5), "log_probs holds 0.5 at 0, a trained token"),
    "log-prob nan": (_first("log_probs", np.nan), "log_probs holds nan at 0"),
    "log-prob inf": (_first("log_probs", np.inf), "log_probs holds inf at 0"),
    "log-prob of -3e38": (_first("log_probs", -3e38), r"log_probs holds .*e\+38 at 0"),
    "segments with a gap": (lambda sample: sample["segments"][0].__setitem__(0, 1), r"segments do not tile the \d+ response tokens"),
    "segments too long": (lambda sample: sample["segments"][-1].__setitem__(1, 99), r"segments end at 99, the response at \d+"),
    "tokens as floats": (_set(response=np.zeros(2, np.float32)), "response is not a one-dimensional array of integers"),
    "text that is none": (_set(text=5), "group and text are text"),
    "label that is none": (_set(label=["4"]), "label is text or None"),
    "unknown finish": (_set(finish="exploded"), "finish is 'exploded'"),
    "unknown field": (_set(surprise=1), "payload sample with unexpected fields"),
    "another group's": (_set(group="g99999999"), r"the payload holds sample g99999999/\d+ in the place of"),
    "index of another": (_set(index=77), r"the payload holds sample .*/77 in the place of"),
}
"""What is wrong → how a sample becomes so, and what the reason of its group's death says (a pattern)."""


def poisoned(blob: bytes, poison: Poison) -> bytes:
    """Returns a payload's blob with its last sample changed."""
    content = codec.unpack(blob)
    poison(content["samples"][-1])
    return codec.pack(content)
