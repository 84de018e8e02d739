"""Carries a hook's sample between a service and the process that runs the hook, as a map that MessagePack takes.

What a user's function sets may be of any type. Arrays and tensors travel as lists; an attribute that MessagePack does not carry, such as an
open connection, stays behind, which the log says.
"""

import sys
from typing import Any

import numpy as np

from shared.hooks import engine_meta
from shared.hooks.hook_sample import HookSample, status_of
from shared.runtime.errors import BadMessage
from shared.schema import codec

_BARE = vars(HookSample())
"""What a sample has that nobody set."""


def packed(sample: HookSample) -> dict[str, Any]:
    """Returns the sample as a map. Raises BadMessage for a field of slime's that does not travel."""
    fields: dict[str, Any] = {"status": getattr(status_of(sample.status), "value", str(sample.status))}
    for name, value in vars(sample).items():
        if name == "status" or (name in _BARE and _is_bare(value, _BARE[name])):
            continue
        plain = value.to_dict() if name in ("spec_info", "prefix_cache_info") else _plain(value)
        if _travels(plain):
            fields[name] = plain
        elif name in _BARE:
            raise BadMessage(f"{name} does not travel in a message: it is {str(value)[:80]}")
        else:
            print(f"sample.{name}, a {type(value).__name__}, stays in this process", file=sys.stderr)
    return fields


def unpacked(fields: dict[str, Any]) -> HookSample:
    """Returns the sample of `packed`. A status of no enum's stays text."""
    status = status_of(fields["status"])
    sample = HookSample.from_dict({**fields, "status": "pending"})
    sample.status = fields["status"] if status is None else status
    return sample


def _is_bare(value: Any, bare: Any) -> bool:
    return type(value) is type(bare) and bool(value == bare)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        dimensions = getattr(value, "ndim", 1)
        return value.item() if dimensions == 0 else engine_meta.listed(value) if dimensions == 1 else np.asarray(value)
    return value


def _travels(value: Any) -> bool:
    try:
        codec.unpack(codec.pack(value))
    except (TypeError, ValueError, OverflowError, BadMessage, RecursionError):
        return False
    return True
