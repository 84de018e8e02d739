"""The division of a machine's GPUs between trainer and engines. Pure.

Bytes of training with Adam in bfloat16: two for a weight, four for its gradient in float32, twelve for the float32 copy and the two
moments, which the data-parallel ranks share (`use_distributed_optimizer`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.model.architecture import Architecture

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12

TRAINING_SHARE, SERVING_SHARE = 0.7, 0.6
"""Shares of a GPU's memory that the state may take in training, and the weights in serving; activations and the KV cache have the rest."""

MOST_PER_MACHINE = 8


@dataclass(frozen=True)
class GpuLayout:
    """``train_gpus`` ranks of the trainer, ``tensor`` of which share each matrix; ``engines``, each on ``engine_gpus``."""

    train_gpus: int
    tensor: int
    engines: int
    engine_gpus: int
    colocate: bool = False


def proposed(architecture: Architecture, parameters: int, gpus: int, gpu_bytes: float) -> GpuLayout | None:
    """Returns the first layout that fits: the trainer on half of the GPUs, or on more of them, or colocated with the engines on all.

    None: nothing fits.
    """
    gpus = min(gpus, MOST_PER_MACHINE)
    serving = next((size for size in _tensors(architecture, gpus) if parameters * WEIGHT / size <= SERVING_SHARE * gpu_bytes), None)
    if serving is None:
        return None
    for train in range(gpus // 2, gpus - serving + 1):
        if train and (tensor := _fitting(architecture, parameters, train, gpu_bytes)) is not None:
            return GpuLayout(train, tensor, (gpus - train) // serving, serving)
    if (tensor := _fitting(architecture, parameters, gpus, gpu_bytes)) is not None:
        return GpuLayout(gpus, tensor, gpus // serving, serving, colocate=True)
    return None


def _fitting(architecture: Architecture, parameters: int, train: int, gpu_bytes: float) -> int | None:
    """Returns the least tensor-parallel size with which a rank's state fits."""
    for tensor in _tensors(architecture, train):
        state = parameters / tensor * (WEIGHT + GRADIENT) + parameters / train * OPTIMIZER
        if train % tensor == 0 and state <= TRAINING_SHARE * gpu_bytes:
            return tensor
    return None


def _tensors(architecture: Architecture, most: int) -> Iterator[int]:
    """Yields the sizes that divide the model's heads."""
    yield from (size for size in (1, 2, 4, 8) if size <= most and architecture.num_key_value_heads % size == 0)
