"""Log-probs by chunks, their kernels, and optimizers with their state in host memory, on a GPU, against plain torch and the plain Adam."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [100, 4096, 151_936])
def test_kernels_equal_plain_torch(dtype, width, kept):
    """``kept``: a sampler kept every tenth token at most, and none of the first ones."""
    from services.trainer.parallel import likelihood_kernel
    from services.trainer.parallel.likelihood import NEVER

    torch.manual_seed(1)
    logits, temperature = (torch.randn(33, width + 16, device="cuda") * 4).to(getattr(torch, dtype)), 0.7
    real, tail = logits[:, :width], logits[:, width:].clone()
    if kept:
        left_out = torch.rand(real.shape, device="cuda") > 0.1
        left_out[:, : width // 2], left_out[:, -1] = True, False
        real.masked_fill_(left_out, NEVER)
    x = real.float() / temperature
    distribution = x.log_softmax(1)
    entropy = -(distribution.exp() * distribution).sum(1)
    highest, total, weighted = likelihood_kernel.row_statistics(real, temperature)
    torch.testing.assert_close(highest + total.log(), x.logsumexp(1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(total.log() - weighted / total, entropy, atol=2e-5, rtol=1e-5)
    ids = torch.randint(0, width, (33, 3), device="cuda")
    ids[1, 1] = -1
    upstream, for_entropy = torch.randn(33, 3, device="cuda"), torch.randn(33, device="cuda")
    expected = -distribution.exp() * (upstream.sum(1, keepdim=True) + for_entropy[:, None] * (distribution + entropy[:, None]))
    expected.scatter_add_(1, ids.clamp(min=0), torch.where(ids >= 0, upstream, 0.0))
    likelihood_kernel.to_gradient(real, ids, x.logsumexp(1), upstream, upstream.sum(1), (entropy, for_entropy), temperature)
    bound = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    torch.testing.assert_close(real.float(), expected / temperature, atol=bound, rtol=bound)
    assert torch.equal(logits[:, width:], tail)


def test_products_of_bfloat16_are_added_in_float32():
    from services.trainer.parallel.likelihood import _adds_wide, add_product

    left, right = (torch.randn(*size, device="cuda").bfloat16() for size in ((500, 300), (300, 64)))
    total = torch.ones(500, 64, device="cuda")
    add_product(total, left, right)
    print("adds wide:", _adds_wide())
    expected = 1 + left.double() @ right.double()
    torch.testing.assert_close(total.double(), expected, atol=1e-3 if _adds_wide() else 0.2, rtol=1e-2)


@pytest.mark.parametrize("overlap", [False, True])
def test_adam_in_host_memory_gives_the_bits_of_the_plain_one(overlap, monkeypatch):
    from services.trainer.megatron import optimizer as precision_adam
    from services.trainer.megatron.optimizer import Adam
    from shared.config.trainer_section import OptimizerState

    monkeypatch.setattr(precision_adam, "SLICE_ELEMENTS", 1 << 20)
    weights = [torch.randn(count, device="cuda").bfloat16() for count in (3_000_001, 17, 2_500_000)]
    main = [weight.float() for weight in weights]
    shards = [weight.clone() for weight in weights]
    plain = Adam([{"params": main}], lr=1e-2, weight_decay=0.1)
    keeping = OptimizerState(offload_fraction=1.0, overlap=overlap)
    away = precision_adam.PrecisionAdam([{"params": shards}], keeping=keeping, lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        for parameter, shard in zip(main, shards, strict=True):
            gradient = torch.randn_like(parameter)
            parameter.grad, shard.decoupled_grad = gradient, gradient.clone()
        plain.step()
        away.step()
    for parameter, shard in zip(main, shards, strict=True):
        assert away.state[shard]["master_param"].device.type == "cpu" and away.state[shard]["master_param"].is_pinned()
        assert torch.equal(away.state[shard]["master_param"], parameter.cpu())
        assert torch.equal(shard, parameter.bfloat16())


def test_shards_in_host_memory_train_as_those_on_the_gpu(tmp_path):
    """The torch backend's, by the weights after two steps of four micro-batches, whose gradients are added in host memory."""
    from services.trainer.parallel import runtime
    from tests.unit.trainer.megatron import rank_steps
    from tests.unit.trainer.megatron.tiny import make_checkpoint

    torch.backends.cuda.matmul.allow_tf32 = False
    make_checkpoint("qwen3_moe", tmp_path / "model")
    plain, away = (
        rank_steps.train(tmp_path / "model", {"trainer_backend": "torch", "fsdp_cpu_offload": offload}, 2) for offload in (False, True)
    )
    runtime.stop()
    for ours, theirs in zip(away["steps"], plain["steps"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5) and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for name, tensor in plain["weights"].items():
        torch.testing.assert_close(away["weights"][name], tensor, atol=1e-4, rtol=0)
