"""Compares what an engine's and a trainer's layers compute for the same tokens, and names the first operation that differs.

Both compute the sequence; the trainer's layers get what the engine's layers got (`services.trainer.trainer_layers`). A token's error of an
operation is the distance of the two outputs relative to the trainer's length, an operation's is its worst token's. The bound comes from
the trainer alone: it computes the same again, each operation's output changed at random by the relative size

    r = √(u² + K a²)

with u the unit roundoff of the coarser of both precisions, a that of the sums (float32, 2⁻²⁴) and K the widest product's terms. How far its
operations are then from where they were, the worst of all tokens and passes and no less than r, is one error that rounding explains.
`MARGIN` of them are the bound. No fixed tolerance is in it: width, depth within a layer, precision and the weights themselves are.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.model.architecture import operation_names
from shared.transfer.tensor_file import TensorFiles

Array = NDArray[Any]
MARGIN = 4.0
# Relative spacing of numbers by the name of their format, halved: what rounding to it changes at most
ROUNDOFFS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "fp8": 2.0**-4, "int8": 2.0**-7, "int4": 2.0**-3}


class Operation(NamedTuple):
    """``shown``: what it is. ``causes``: that its difference may have, keys of `SWITCHES`. ``tensors``: parts of their names."""

    shown: str
    causes: tuple[str, ...]
    tensors: tuple[str, ...] = ()


NORM, ROPE = ("norm epsilon", "weights", "kernel"), ("rope", "weights", "norm epsilon")
ATTENTION = ("KV precision", "window, scale or mask", "kernel", "chunked prefill", "prefix cache")
LOG_PROBS = ("weights", "logits' scale or cap", "precision", "temperature")
DETAILS = {
    "embedding": Operation("embedding", ("weights", "precision"), ("embed_tokens",)),
    "attention_norm": Operation("norm before the attention", NORM, ("input_layernorm",)),
    "q": Operation("queries (projection, norm and rope)", ROPE, ("self_attn.q",)),
    "k": Operation("keys (projection, norm and rope)", ROPE, ("self_attn.k",)),
    "v": Operation("values (projection)", ("weights", "precision"), ("self_attn.v", "self_attn.kv")),
    "attention": Operation("attention", ATTENTION, ("self_attn.sinks",)),
    "attention_output": Operation("attention's output", ("weights", "precision"), ("self_attn.o_proj",)),
    "mlp_norm": Operation("norm before the MLP", NORM, ("post_attention_layernorm", "pre_feedforward_layernorm")),
    "router_logits": Operation("router's logits", ("weights", "precision"), ("mlp.gate.", "mlp.router.")),
    "experts": Operation("choice of experts", ("routing",), ("mlp.gate.", "mlp.router.")),
    "mlp_output": Operation("MLP", ("weights", "kernel", "precision"), ("mlp.",)),
    "output": Operation("residual stream", ("precision", "kernel")),
    "final_norm": Operation("last norm", NORM, ("model.norm",)),
    "log_probs": Operation("output layer and log-softmax", LOG_PROBS, ("lm_head", "embed_tokens")),
    "recorded": Operation("sampling", ("sampling transform", "another version", "decode kernel", "KV precision", "prefix cache")),
}  # fmt: skip


def rounding(precisions: Sequence[str], width: int) -> float:
    """Returns r. ``precisions``: by the names of `ROUNDOFFS`. ``width``: terms of the widest product."""
    return math.hypot(max(ROUNDOFFS[one] for one in precisions), math.sqrt(width) * ROUNDOFFS["float32"])


def merged(directory: Path, tokens: int, *, sums: bool = False) -> dict[str, Array]:
    """Returns the whole tensors [tokens, width] of the files of a pass, one of each rank.

    Args:
        sums: whether ranks that hold different tensors of a name hold parts of a sum, as an engine's do before it is reduced.
    """
    parts: dict[str, list[Array]] = {}
    for path in sorted(directory.glob("rank-*.safetensors"), key=lambda one: int(one.stem.removeprefix("rank-"))):
        file = TensorFiles([path])
        for name, (dtype, shape) in file.tensors.items():
            parts.setdefault(name, []).append(file[name].view(np.int32 if dtype == "int32" else np.float32).reshape(shape))

    def whole(way: str, given: list[Array]) -> Array:
        if way:
            return np.concatenate(given, 1 if way == "columns" else 0)
        return np.sum(given, 0) if sums and any(not np.array_equal(one, given[0]) for one in given) else given[0]

    return {name.partition(":")[0]: whole(name.partition(":")[2], given)[:tokens] for name, given in parts.items()}


@dataclass(frozen=True)
class OperationDifference:
    """One operation's difference.

    Args:
        name: of `shared.model.architecture.operation_names`. error, bound: relative, of log-probs in nats. token: the worst one's index.
        tied: tokens that went to other experts since rounding decides between these, and that are left out.
    """

    name: str
    error: float
    bound: float
    token: int
    tied: int = 0

    @property
    def differs(self) -> bool:
        return not self.error <= self.bound

    @property
    def layer(self) -> int | None:
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None

    @property
    def operation(self) -> str:
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}: "
        return where + DETAILS[self.operation].shown


@dataclass(frozen=True)
class Captures:
    """The tensors of all passes, by name. ``rounded``: of the trainer's passes with changes at random. ``rounding``: r."""

    engine: Mapping[str, Array]
    plain: Mapping[str, Array]
    substituted: Mapping[str, Array]
    rounded: Sequence[Mapping[str, Array]]
    rounding: float

    def pair(self, name: str) -> tuple[Array, Array]:
        """Returns what engine and trainer have computed from the same input."""
        return self.engine[name], self.substituted[name]


def errors(found: Array, reference: Array, absolute: bool = False) -> Array:
    """Returns the error of each token [T]; infinite where a number is not finite."""
    distance = np.linalg.norm(found.astype(np.float64) - reference, axis=1)
    scale = 1.0 if absolute else np.maximum(np.linalg.norm(reference.astype(np.float64), axis=1), np.finfo(np.float32).tiny)
    return np.nan_to_num(np.asarray(distance / scale), nan=math.inf)


def differences(captures: Captures, layers: int) -> tuple[list[OperationDifference], list[str]]:
    """Returns the differences in the order of the computation, and the operations that could not be compared."""
    found, missing, tied = list[OperationDifference](), list[str](), np.zeros(0, bool)
    for name in operation_names(layers):
        there = [name in one for one in (captures.engine, captures.substituted)]
        if not any(there):
            continue
        if not all(there) or captures.engine[name].shape != captures.substituted[name].shape:
            missing.append(name)
            continue
        engine = captures.engine[name]
        operation = name.rpartition(".")[2]
        if operation == "attention_norm" or name == "final_norm":
            tied = np.zeros(len(engine), bool)
        if operation == "experts":
            difference, tied = _choices(captures, name)
        else:
            difference = _measured(captures, name, tied if operation in ("mlp_output", "output") else np.zeros(len(engine), bool))
        found.append(difference)
    return found, missing


def _measured(captures: Captures, name: str, left_out: Array) -> OperationDifference:
    engine, trainer = captures.pair(name)
    absolute = name == "log_probs"
    noise = max((float(np.max(errors(one[name], trainer, absolute)[~left_out], initial=0.0)) for one in captures.rounded), default=0.0)
    each = np.where(left_out, 0.0, errors(engine, trainer, absolute))
    token = int(np.argmax(each))
    return OperationDifference(name, float(each[token]), MARGIN * max(noise, captures.rounding), token, int(left_out.sum()))


def _choices(captures: Captures, name: str) -> tuple[OperationDifference, Array]:
    """Returns the share of tokens that go to other experts where rounding does not decide, and which tokens it decides for.

    It does where the change of the router's logits that rounding explains is enough for one of the differing experts to pass another one,
    or where a pass with changes at random has chosen differently, too.
    """
    engine, trainer = (np.sort(one, 1) for one in captures.pair(name))
    other = (engine != trainer).any(1)
    decided = np.zeros_like(other)
    for one in captures.rounded:
        decided |= (np.sort(one[name], 1) != trainer).any(1)
    logits = captures.substituted.get(name.replace("experts", "router_logits"))
    for token in () if logits is None else np.flatnonzero(other & ~decided):
        assert logits is not None
        left, taken = set(trainer[token]) - set(engine[token]), set(engine[token]) - set(trainer[token])
        gap = max(abs(float(logits[token][a] - logits[token][b])) for a in left for b in taken) if left and taken else math.inf
        decided[token] = gap <= 2 * MARGIN * captures.rounding * float(np.linalg.norm(logits[token]))
    wrong = other & ~decided
    return OperationDifference(name, float(wrong.mean()), 0.0, int(np.argmax(wrong)), int((other & decided).sum())), other


def origins(found: Sequence[OperationDifference]) -> list[OperationDifference]:
    """Returns in each layer the first operation that differs beyond its bound: the layers have got the same inputs.

    Queries and keys count where the attention differs as well: the order of their dimensions is each side's own.
    """
    by_name = {one.name: one for one in found}
    first: dict[int | str, OperationDifference] = {}
    for one in found:
        attention = by_name.get(one.name.rpartition(".")[0] + ".attention")
        if one.operation in ("q", "k") and attention is not None and not attention.differs:
            continue
        if one.differs:
            first.setdefault(one.name if one.layer is None else one.layer, one)
    return list(first.values())


SWITCHES = {
    "precision": "trainer.train_dtype and rollout.sglang dtype: the same on both sides; rollout.sglang quantization: none",
    "kernel": "rollout.sglang attention-backend, sampling-backend, moe-runner-backend; alignment = \"close\" for batch-invariant ones",
    "norm epsilon": "rms_norm_eps in the engine's config.json",
    "weights": "the engine's checkpoint: convert or push the version again; `myxo bisect --engine-checkpoint` compares another one",
    "rope": "rope_theta, rope_scaling (rope_parameters) in the engine's config.json; rollout.sglang json-model-override-args",
    "KV precision": "rollout.sglang kv-cache-dtype = \"auto\"",
    "chunked prefill": "rollout.sglang chunked-prefill-size = -1",
    "prefix cache": "rollout.sglang disable-radix-cache = true",
    "window, scale or mask": "sliding_window, attention scale and sinks in the engine's config.json",
    "routing": "trainer.use_rollout_routing_replay = true replays the engine's choice; norm_topk_prob, groups, scoring in config.json",
    "swapped experts": "the engine's checkpoint: convert or push the version again",
    "block scale": "the quantised checkpoint: quantise this tensor again (its *_scale_inv)",
    "another version": "push or convert the version again; `myxo samples` shows which versions sampled",
    "sampling transform": "rollout.rollout_top_p = 1, rollout_top_k = -1, no penalties; or trainer.support_replay = \"on\"",
    "decode kernel": "rollout.sglang disable-cuda-graph = true; attention-backend",
    "temperature": "rollout.rollout_temperature; SGLANG_RETURN_ORIGINAL_LOGPROB must be 0",
    "logits' scale or cap": "final_logit_softcapping, logits scaling in config.json",
}  # fmt: skip


Evidence = dict[str, str]  # what speaks for a cause, by its name


def causes(operation: str, evidence: Mapping[str, str] = MappingProxyType({})) -> list[dict[str, str]]:
    """Returns the causes that an operation's difference may have, those that something speaks for first: the ``kind``, the ``evidence``,
    empty where there is none yet, and the ``switch`` that removes it or finds out. ``operation``: a key of `DETAILS`."""
    kinds = dict.fromkeys([*evidence, *DETAILS[operation].causes])
    return [{"kind": kind, "evidence": evidence.get(kind, ""), "switch": SWITCHES[kind]} for kind in kinds]


def activation_evidence(captures: Captures, one: OperationDifference) -> Evidence:
    """Returns what the outputs themselves speak for."""
    engine, trainer = (tensor.astype(np.float64) for tensor in captures.pair(one.name))
    each = errors(engine, trainer)
    if one.operation.endswith("norm"):
        factor = (engine * trainer).sum(1) / np.maximum((trainer * trainer).sum(1), 1e-300)
        varies = float(np.ptp(factor)) > 0.01 * float(np.abs(factor - 1).max())  # with the tokens' sizes
        if varies and errors(engine, factor[:, None] * trainer).max() <= one.bound:
            return {"norm epsilon": f"each token's output is scaled as a whole, by {factor.min():.4g} to {factor.max():.4g}"}
    return _of_rope(captures, one, each) if one.operation in ("q", "k") else _of_experts(captures, one, each)


def _of_rope(captures: Captures, one: OperationDifference, each: Array) -> Evidence:
    engine, trainer = (np.linalg.norm(tensor.astype(np.float64), axis=1) for tensor in captures.pair(one.name))
    lengths, value = engine / np.maximum(trainer, 1e-300), one.name.rpartition(".")[0] + ".v"
    same_values = value in captures.engine and errors(*captures.pair(value)).max() <= one.bound
    if each[0] <= one.bound and same_values and np.abs(lengths - 1).max() <= one.bound:
        return {"rope": f"lengths and the first place agree, directions differ from place {int(np.argmax(each > one.bound))} on"}
    return {}


def _of_experts(captures: Captures, one: OperationDifference, each: Array) -> Evidence:
    engine, trainer = captures.pair(one.name)
    if one.operation == "router_logits":
        distance = np.linalg.norm(engine.T[:, None] - trainer.T[None], axis=2)
        nearest = distance.argmin(1)
        moved = np.flatnonzero(nearest != np.arange(len(nearest)))
        scale = np.linalg.norm(trainer, axis=0).mean() or 1.0
        if len(moved) and len(set(nearest.tolist())) == len(nearest) and distance.min(1).max() < 1e-3 * scale:
            return {"swapped experts": f"the engine's logits are the trainer's with experts {', '.join(map(str, moved))} swapped"}
    if one.operation == "mlp_output" and (chosen := captures.substituted.get(one.name.replace("mlp_output", "experts"))) is not None:
        beyond = each > one.bound
        experts = [int(e) for e in np.unique(chosen) if beyond[(chosen == e).any(1)].all()]
        if experts and not beyond[~np.isin(chosen, experts).any(1)].any():
            return {"weights": f"the tokens that differ are those of experts {', '.join(map(str, experts))}"}
    return {}


def weights_differ(engine: Array, trainer: Array, roundoff: float = 0.0) -> Array:
    """Returns which numbers of a tensor are not those of the other one, rounded by ``roundoff`` or, near 0, by its block's factor."""
    size = np.abs(trainer)
    return ~(np.abs(engine - trainer) <= 1.1 * roundoff * size + (1e-5 * size.max(initial=0.0) if roundoff else 0.0))


def weight_evidence(
    operation: str, engine: Mapping[str, Array], trainer: Mapping[str, Array], older: Callable[[], int | None], roundoff: float = 0.0
) -> Evidence:
    """Returns what the tensors of an operation's layer speak for.

    Args:
        engine, trainer: float32, by Hugging Face's names. older: finds the version, another one, that the engine's are of.
        roundoff: of the format that the engine's were quantised to; 0 for none.
    """
    changed, whole = _changed(engine, trainer, roundoff)
    own = [name for name in changed if any(part in name for part in DETAILS[operation].tensors)]
    shown = [f"{name}: {_weight_change(engine[name], trainer[name], changed[name], roundoff)}" for name in own]
    if whole and (version := older()) is not None:
        return {"another version": f"the engine's tensors are those of version {version}"}
    if swapped := sorted({part for name in own for part in _swapped(name, engine, trainer, roundoff)}, key=int):
        return {"swapped experts": f"experts {', '.join(swapped)} are in one another's place"}
    words = "; ".join(shown[:3])
    if any("the block of" in one for one in shown):
        return {"block scale": words}
    if whole and own:
        return {"another version": f"all matrices of the layer differ, as after other steps ({words})"}
    return {"weights": words} if own else {}


def _changed(engine: Mapping[str, Array], trainer: Mapping[str, Array], roundoff: float) -> tuple[dict[str, Array], bool]:
    """Returns where tensors differ, by the names of those that do, and whether every matrix does."""
    common = [name for name in trainer if name in engine and engine[name].shape == trainer[name].shape]
    changed = {name: where for name in common if (where := weights_differ(engine[name], trainer[name], roundoff)).any()}
    return changed, changed.keys() >= {name for name in common if trainer[name].ndim > 1} != set()


def _swapped(name: str, engine: Mapping[str, Array], trainer: Mapping[str, Array], roundoff: float) -> list[str]:
    """Returns the numbers of the expert whose tensor this is and of the one whose tensor the engine has in its place, if it has one."""
    if (found := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)) is None:
        return []
    before, number, part = found.groups()
    for other in trainer:
        if other.startswith(before) and other.endswith(part) and not weights_differ(engine[name], trainer[other], roundoff).any():
            return [number, other.removeprefix(before).partition(".")[0]]
    return []


def _weight_change(engine: Array, trainer: Array, other: Array, roundoff: float) -> str:
    """Returns in words how a tensor has changed. ``other``: where."""
    share = float(np.linalg.norm(engine - trainer) / max(float(np.linalg.norm(trainer)), 1e-30))
    if engine.ndim == 2:
        rows, columns = np.flatnonzero(other.any(1)), np.flatnonzero(other.any(0))
        box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        there = np.abs(trainer[box]) > np.abs(trainer[box]).max() / 64 * bool(roundoff)  # smaller ones are rounded by more
        ratios = engine[box][there] / trainer[box][there]
        middle = float(np.median(ratios)) if len(ratios) else 0.0
        if len(ratios) > 3 and np.abs(ratios - middle).max() <= (1e-2 + 1.1 * roundoff) * abs(middle) and share > 1e-6:
            where = f"rows {rows[0]} to {rows[-1]}, columns {columns[0]} to {columns[-1]}"
            return f"the block of {where} is the trainer's times {middle:.4g}: another scale"
    return f"{float(other.mean()):.0%} of the numbers differ, by {share:.2g} of its length"


def as_float32(data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> Array:
    """Returns a tensor of a checkpoint as numbers. ``data``: its bytes. ``dtype``: by torch's name."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype == "float8_e4m3fn":
        bits = np.arange(256)
        exponent, fraction = bits >> 3 & 15, bits & 7
        magnitude = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
        magnitude[bits & 127 == 127] = np.nan
        return np.where(bits & 128, -magnitude, magnitude).astype(np.float32)[data].reshape(shape)
    return data.view(np.dtype(dtype)).astype(np.float32).reshape(shape)


def recorded_problem(recorded: Array, trainer: Array, bound: float) -> str | None:
    """Returns in words how the log-probs that a sample was recorded with differ from the trainer's; None where rounding explains it.

    Args:
        recorded, trainer: of its response's tokens at the run's temperature, [R]. bound: in nats.
    """
    each = np.abs(recorded.astype(np.float64) - trainer)
    if not (each := each[np.isfinite(each)]).size or each.max() <= bound:
        return None
    where = f"mean {each.mean():.3g}, max {each.max():.3g} nats at token {int(np.argmax(each))} of the response"
    return f"{where}; rounding explains {bound:.2g}"
