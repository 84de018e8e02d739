"""Pushes that others have measured, and what the model says of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.scale.push_model import H200_NVLINK, PIPELINED, RDMA, Weights, flattened, gathered_by_tensor, weights_of

H800_NVLINK = 200.0
TWO_NODES = 400.0
"""GB/s into a node of eight network cards of 400 Gbit/s: less than NVLink inside it."""
_KIMI = "MoonshotAI, checkpoint-engine, README"


@dataclass(frozen=True)
class PublishedPush:
    """A row. ``seconds``: as published. ``predicted``: the model's. ``fitted``: whether a constant was fitted to it."""

    model: str
    setup: str
    source: str
    seconds: float
    predicted: float
    fitted: bool = False

    @property
    def difference(self) -> float:
        """Returns how far the prediction is off, as a share of what was published."""
        return self.predicted / self.seconds - 1


def published_pushes() -> Iterator[PublishedPush]:
    """Yields all rows, small models first."""
    small = weights_of("qwen3-30b-a3b")
    nvlink = H200_NVLINK * PIPELINED
    yield PublishedPush(
        "Qwen3-30B-A3B, BF16", "8 H100, colocated", "hebiao064, Optimizing Weight Sync in slime", 7.0, gathered_by_tensor(small, nvlink)
    )
    over_cards = gathered_by_tensor(small, 50 * RDMA)
    yield PublishedPush("Qwen3-30B-A3B, BF16", "32 H100, NCCL over 400 Gbit/s", "verl, checkpoint_engine/README", 7.0, over_cards)
    yield _broadcast("GLM-4.5-Air, BF16", "8 H800", 3.47, weights_of("glm-4.5-air"), H800_NVLINK)
    yield _broadcast("Qwen3-235B-A22B, BF16", "8 H800", 6.22, weights_of("qwen3-235b-a22b"), H800_NVLINK, fitted=True)
    deepseek, kimi = weights_of("deepseek-v3", fp8=True), weights_of("kimi-k2", fp8=True)
    yield _broadcast("DeepSeek-V3.1, FP8", "16 H20", 10.19, deepseek, TWO_NODES)
    yield _broadcast("DeepSeek-V3.1, FP8", "256 H20", 11.33, deepseek, TWO_NODES)
    yield _broadcast("Kimi-K2, 1T, FP8", "16 H20", 14.36, kimi, TWO_NODES)
    yield _broadcast("Kimi-K2, 1T, FP8", "256 H20", 16.04, kimi, TWO_NODES)


def _broadcast(model: str, setup: str, seconds: float, weights: Weights, link: float, fitted: bool = False) -> PublishedPush:
    """A row of checkpoint-engine, which broadcasts flattened buckets and loads each behind its broadcast."""
    return PublishedPush(model, setup, _KIMI, seconds, flattened(weights, link, overlapped=False), fitted)
