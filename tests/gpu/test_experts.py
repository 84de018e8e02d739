"""Experts, latent attention and context parallelism in bfloat16 on GPUs, against float32.

By hand: ``PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -c /dev/null --noconftest tests/gpu/test_experts.py``.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, EXPERTS, PER_TOKEN = 256, 128, 16, 4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    from services.trainer.parallel import runtime

    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    runtime.stop()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Tokens, their experts (none goes to the last two), matrices at one distance from each other, and an upstream gradient."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    tokens = torch.randn(1000, HIDDEN, device="cuda", generator=generator).to(dtype)
    chosen = torch.rand(1000, EXPERTS - 2, device="cuda", generator=generator).argsort(1)[:, :PER_TOKEN]
    routing = torch.zeros(1000, EXPERTS, dtype=torch.bool, device="cuda").scatter_(1, chosen, True)
    memory = torch.randn(EXPERTS, WIDTH * HIDDEN, device="cuda", generator=generator).to(dtype) / HIDDEN**0.5
    matrices = [torch.nn.Parameter(row.view(WIDTH, HIDDEN)) for row in memory]
    upstream = torch.randn(1000 * PER_TOKEN, WIDTH, device="cuda", generator=generator).to(dtype)
    return tokens, routing, matrices, upstream


def test_grouped_products_equal_float32_and_wait_for_nothing() -> None:
    from services.trainer.megatron.moe import TokenPermutation, grouped_product, stacked

    tokens, routing, matrices, upstream = drawn(torch.bfloat16)
    assert stacked(matrices) is not None
    tokens.requires_grad_()
    for attempt in range(2):  # the first loads kernels, which may wait
        tokens.grad = None
        for matrix in matrices:
            matrix.grad = None
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            order = TokenPermutation.of(routing, PER_TOKEN)
            ends = routing.sum(0).cumsum(0).int()
            wide = grouped_product(order.ordered(tokens), ends, matrices)
            back = order.restored(wide)
            wide.backward(upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    exact = [matrix.detach().float().requires_grad_() for matrix in matrices]
    whole = tokens.detach().float().requires_grad_()
    sizes = routing.sum(0).tolist()
    rows = [whole[routing[:, expert]] @ exact[expert].T for expert in range(EXPERTS)]
    expected = torch.cat(rows)
    expected.backward(upstream.float())
    assert sizes[-2:] == [0, 0]
    assert relative(wide.detach(), expected.detach()) < 1e-2
    assert tokens.grad is not None and whole.grad is not None and relative(tokens.grad, whole.grad) < 1e-2
    for matrix, ours in zip(matrices, exact, strict=True):
        assert matrix.grad is not None and ours.grad is not None
        if ours.grad.any():
            assert relative(matrix.grad, ours.grad) < 1e-2
        else:
            assert not matrix.grad.any(), "an expert without tokens has a gradient"
    sums = torch.zeros(1000, WIDTH, device="cuda").index_add_(0, order.tokens, wide.detach().float())
    assert relative(back.detach(), sums) < 1e-2


def figures(checkpoint: Path, dtype: str, layout: dict[str, Any], routings: list[Any] | None = None) -> dict[str, Any]:
    """Log-probs, the experts that they went through, and the gradient norm of a step."""
    from tests.unit.trainer.megatron import rank_steps
    from tests.unit.trainer.megatron.tiny import pack, sequences

    torch.backends.cuda.matmul.allow_tf32 = False
    model = rank_steps.actor(checkpoint, train_dtype=dtype, **layout)
    batches = [pack(sequences(5, seed=seed, longest=300)) for seed in range(4)]
    if routings is not None:
        batches = [replace(batch, routing=routing) for batch, routing in zip(batches, routings, strict=True)]
    found, recorded = model.log_probs_and_routing(batches)
    step = model.train_step(batches, rank_steps.weighted_loss, need_entropy=True)
    trained = torch.cat([batch.loss_mask for batch in batches]) > 0
    return {"log_probs": torch.cat(found).cpu()[trained], "routing": recorded, "grad_norm": step.grad_norm}


def waits(checkpoint: Path, layout: dict[str, Any]) -> float:
    """How often the host waits for the GPU in a layer of experts, forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    from tests.unit.trainer.megatron import rank_steps

    model = rank_steps.actor(checkpoint, train_dtype="bfloat16", **layout)
    layer = model.model.modules[0].decoder.layers[0].mlp
    layer.router.router_replay = layer.router.tokens = None
    generator = torch.Generator(device="cuda").manual_seed(3)
    hidden = torch.randn(512, 1, 32, device="cuda", dtype=torch.bfloat16, generator=generator)

    def run(times: int) -> None:
        for _ in range(times):
            given = hidden.clone().requires_grad_()
            layer(given)[0].backward(hidden)

    run(2)  # the first loads kernels, which may wait
    torch.cuda.synchronize()
    if not layout.get("expert_model_parallel_size"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = []
    for times in (1, 5):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            run(times)
        names = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
        counts.append(sum(event.count for event in profiled.key_averages() if event.key in names))
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen3_moe", {}), ("qwen3_moe", {"lora_rank": 8}), ("gpt_oss", {})], ids=["experts", "adapters", "biases"]
)
def test_a_layer_of_experts_waits_for_nothing(kind: str, layout: dict[str, Any], tmp_path: Path) -> None:
    from tests.unit.trainer.megatron.tiny import make_checkpoint

    make_checkpoint(kind, tmp_path)
    assert waits(tmp_path, layout) == 0


def test_with_expert_parallelism_it_waits_once_for_the_sizes(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from tests.unit.trainer.megatron.tiny import make_checkpoint
    from tests.unit.trainer.megatron.world import World

    make_checkpoint("qwen3_moe", tmp_path)
    two = World(2, "spawn")
    try:
        assert two.run(waits, tmp_path, {"expert_model_parallel_size": 2}) == [1.0, 1.0]
    finally:
        two.stop()


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_and_latent_attention_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """The same experts on both sides: a choice that flips by rounding would hide all else."""
    from services.trainer.parallel import runtime
    from tests.unit.trainer.megatron.tiny import make_checkpoint

    make_checkpoint(kind, tmp_path)
    expected = figures(tmp_path, "float32", {})
    runtime.stop()
    found = figures(tmp_path, "bfloat16", {}, expected["routing"])
    difference = (found["log_probs"] - expected["log_probs"]).abs()
    print(f"{kind}: log-prob difference mean {difference.mean():.2e}, largest {difference.max():.2e}; "
          f"gradient norm {found['grad_norm']:.6f} against {expected['grad_norm']:.6f}")  # fmt: skip
    assert difference.mean() < 3e-2
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-2)


def test_two_gpus_share_sequences_in_bfloat16(tmp_path: Path) -> None:
    """CP2 in bfloat16 is as far from float32 as one GPU in bfloat16 is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from tests.unit.trainer.megatron.tiny import make_checkpoint
    from tests.unit.trainer.megatron.world import World

    make_checkpoint("qwen3", tmp_path)
    one, two = World(1, "spawn"), World(2, "spawn")
    try:
        (exact,) = one.run(figures, tmp_path, "float32", {})
        (rounded,) = one.run(figures, tmp_path, "bfloat16", {})
        shared, _ = two.run(figures, tmp_path, "bfloat16", {"context_parallel_size": 2})
    finally:
        one.stop()
        two.stop()
    alone, together = ((report["log_probs"] - exact["log_probs"]).abs() for report in (rounded, shared))
    print(f"one GPU: mean {alone.mean():.2e}, largest {alone.max():.2e}; CP2: mean {together.mean():.2e}, largest {together.max():.2e}")
    assert together.mean() < 1.5 * alone.mean() + 1e-4
    assert shared["grad_norm"] == pytest.approx(exact["grad_norm"], rel=3e-2)
