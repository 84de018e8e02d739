"""Seconds of a push, from a model's tensors and the links that they cross.

Two things take time: bytes on the slowest link, and work for each tensor, which a model of many small experts has a lot of. Four constants:

- `PIPELINED`, `PER_COLLECTIVE`: measured by ``python -m benchmarks.weight_push`` on two H200;
- `RDMA`: of a network card's nominal rate, what a pull of GLM-5.2 reached on 32 H200 (prime-rl, pull request 3341: 44.26 of 50 GB/s);
- `PER_LOAD`: fitted to one published push, of Qwen3-235B-A22B. Our own measurement says at most 60 microseconds, of large tensors.
"""

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from shared.model.architecture_flags import described_shape
from shared.model.tensor_table import hf_tensors

ROOT = Path(__file__).resolve().parents[2]
_MEASURED = json.loads((ROOT / "benchmarks/results/weight_push.json").read_text())[0]
_TENSORS = 398
"""Of the model of Qwen3-4B's shape that weight_push sends."""

H200_NVLINK = 450.0
"""GB/s, one direction, nominal. H20 and H100 have the same, H800 200."""
PIPELINED = _MEASURED["gb_per_s"] / H200_NVLINK
"""Of a link's nominal rate, what a push in flattened buckets reached, building and loading beside it."""
PER_COLLECTIVE = (1 / _MEASURED["slime_way_gb_per_s"] - 1 / _MEASURED["raw_gb_per_s"]) * _MEASURED["bytes"] / 1e9 / _TENSORS
"""Seconds that a collective of its own costs a tensor, beside its bytes."""
RDMA = 44.26 / 50.0
PER_LOAD = 70e-6
"""Seconds that an engine takes to find a tensor's place and start its copy."""
MEASURED_PER_LOAD = _MEASURED["engine_seconds"] / _TENSORS
"""Seconds of an engine's part of a push for each of its tensors, of which it waits for some."""
REQUESTS = 0.05
"""Seconds of requests and answers around a push; measured: 5 to 50 ms."""

BLOCK = 128 * 128
"""Weights that share a float32 scale in FP8."""


@dataclass(frozen=True)
class Weights:
    """What is pushed. ``stages``: pipeline stages of the trainer in its ready config; each sends its own part."""

    tensors: int
    gigabytes: float
    stages: int = 1


def weights_of(name: str, fp8: bool = False) -> Weights:
    """Returns the tensors of a ready config, in bfloat16 or with matrices in FP8 (each with a tensor of scales).

    Args:
        name: of the file in ``configs/models``, without its ending.
    """
    trainer = tomllib.loads((ROOT / f"configs/models/{name}.toml").read_text())["trainer"]
    architecture = described_shape(trainer["megatron"])
    assert architecture is not None
    stages = trainer.get("pipeline_model_parallel_size", 1)
    shapes = hf_tensors(architecture)
    matrices = {tensor: shape for tensor, shape in shapes.items() if len(shape) == 2 and fp8 and "layers" in tensor}
    size = sum(math.prod(shape) * (1 + 4 / BLOCK if tensor in matrices else 2) for tensor, shape in shapes.items())
    return Weights(len(shapes) + len(matrices), size / 1e9, stages)


def flattened(weights: Weights, link: float, overlapped: bool) -> float:
    """Returns the seconds of a broadcast in flattened buckets. ``link``: GB/s, nominal. ``overlapped``: loading runs beside the wire."""
    wire, load = weights.gigabytes / (link * PIPELINED), weights.tensors * PER_LOAD
    return max(wire, load) if overlapped else wire + load


def gathered_by_tensor(weights: Weights, wire: float) -> float:
    """Returns the seconds of a push for which each tensor is gathered by two collectives of its own. ``wire``: GB/s that it reaches."""
    return weights.tensors * (2 * PER_COLLECTIVE + PER_LOAD) + weights.gigabytes / wire


def ours(weights: Weights, card: float = 50.0) -> dict[str, float]:
    """Returns the parts of a push of Myxo's to engines on other nodes, in seconds, and their sum as ``push``.

    A stage's sender has one network card, through which also comes what its expert-parallel ranks on other nodes hold; engines load
    one bucket while the next is on the wire.

    Args:
        card: GB/s, nominal.
    """
    wire = weights.gigabytes / weights.stages / (card * RDMA)
    load = weights.tensors * PER_LOAD
    return {"wire": wire, "load": load, "push": max(wire, load) + REQUESTS}
