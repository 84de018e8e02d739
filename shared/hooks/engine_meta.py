"""Reads what the engine says of the tokens of one answer (``meta_info``) into a hook's sample: versions, nuclei, routed experts.

Arrays come as lists, arrays, tensors, or base64 of 32-bit integers.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.schema.versions import TOKEN_VERSIONS

_NUCLEUS = ("top_p_token_ids", "top_p_kept_token_ids"), ("top_p_token_offsets", "top_p_kept_token_offsets")
"""The engine's names, newer and older, of a nucleus's ids and of their offsets."""


def listed(values: Any) -> list[Any]:
    """Returns the entries of a list, an array or a tensor of any shape; none for None."""
    if values is None:
        return []
    if hasattr(values, "tolist"):
        flat = values.reshape(-1).tolist()
        return list(flat)
    return list(values)


def versions(meta: Mapping[str, Any], count: int) -> list[int | None]:
    """Returns the version of each of ``count`` tokens, None where the engine does not name it (its version at the end says nothing)."""
    told = meta.get(TOKEN_VERSIONS) or []  # of a part of an answer, those of its new tokens
    found: list[int | None] = [*[None] * (count - len(told)), *told[:count]]
    for span in meta.get("weight_versions") or ():
        for at in range(span["start"], min(span["end"], count)):
            found[at] = int(span["version"])
    return found


def add_nucleus(sample: Any, meta: Mapping[str, Any], count: int, trainable: bool) -> None:
    """Appends the nuclei of ``count`` new tokens, empty ones where they are not trainable and nuclei are kept. Raises ValueError."""
    ids, offsets = (_integers(meta, names) for names in _NUCLEUS)
    if (ids is None) != (offsets is None):
        raise ValueError("meta_info has only one of a nucleus's token ids and offsets")
    had = sample.rollout_top_p_token_offsets is not None
    if ids is None or offsets is None:
        if trainable or not had:
            return
        ids, offsets = np.empty(0, np.int32), np.zeros(count + 1, np.int32)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError(f"a nucleus with {len(offsets)} offsets, the last {offsets[-1:]}, for {count} tokens and {len(ids)} ids")
    if had:
        old = np.asarray(listed(sample.rollout_top_p_token_offsets), np.int32)
        ids = np.concatenate([np.asarray(listed(sample.rollout_top_p_token_ids), np.int32), ids])
        offsets = np.concatenate([old, offsets[1:] + old[-1]])
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = ids, offsets


def check_nucleus(sample: Any) -> None:
    """Raises ValueError where the nuclei are not one for each response token."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None and offsets is None:
        return
    if ids is None or offsets is None:
        raise ValueError("rollout_top_p_token_ids and rollout_top_p_token_offsets go together")
    if len(offsets) != sample.response_length + 1 or int(offsets[-1]) != len(ids):
        raise ValueError(f"rollout_top_p_token_offsets: {len(offsets)} for {sample.response_length} response tokens and {len(ids)} ids")


def set_routed_experts(sample: Any, args: Any, meta: Mapping[str, Any]) -> None:
    """Takes over the experts that each token went through, int32 [T - 1, layers, experts a token]. Raises ValueError."""
    given = _integers(meta, ("routed_experts",))
    if given is None:
        return
    if args is None:
        raise ValueError("args is needed to read routed experts")
    start = int(meta.get("routed_experts_start_len") or 0)
    rows, layers, experts = max(0, len(sample.tokens) - 1 - start), args.num_layers, args.moe_router_topk
    if start < 0 or given.size != rows * layers * experts:
        raise ValueError(f"{given.size} routed experts for {rows} tokens from {start} on, {layers} layers and {experts} experts each")
    routed = given.reshape(rows, layers, experts)
    if start:
        before = sample.rollout_routed_experts
        if before is None or len(before) < start:
            raise ValueError(f"routed experts from token {start} on, without those before it")
        routed = np.concatenate([np.asarray(before, np.int32)[:start], routed])
    sample.rollout_routed_experts = routed


def _integers(meta: Mapping[str, Any], names: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Returns the integers under the first of the names that is there, flat."""
    value = next((meta[name] for name in names if name in meta), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.int32)
    return np.asarray(listed(value), np.int32).reshape(-1)
