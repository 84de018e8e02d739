"""Optimizers and their learning rate, against plain ones."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.client_states import ClientRefused, ClientStates
from services.trainer.megatron import optimizer as precision_adam
from services.trainer.megatron.optimizer import Adam, PrecisionAdam
from services.trainer.parallel import runtime
from shared.config.trainer_section import LearningRateSchedule, OptimizerState
from shared.runtime.errors import ConfigError
from tests.support.tables import rare, table
from tests.unit.trainer.megatron import rank_steps

PLAIN = {"train_dtype": "bfloat16"}
OFFLOADED = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.model.modules[0].named_parameters()}


def after_steps(hf_dir, count=3, **megatron):
    model = rank_steps.actor(hf_dir, **PLAIN, megatron=megatron)
    results = rank_steps.steps(model, count)
    return model, [result.grad_norm for result in results], weights_of(model)


@pytest.mark.parametrize(
    "flags",
    [
        rare(OFFLOADED),
        {**OFFLOADED, "optimizer_offload_fraction": 0.5},
        rare({"use_precision_aware_optimizer": True}),
    ],
)
def test_float32_state_gives_the_plain_adams_bits(flags, hf, monkeypatch):
    monkeypatch.setattr(precision_adam, "SLICE_ELEMENTS", 100)
    plain, norms, weights = after_steps(hf("qwen3"))
    plain.close()
    model, found, other = after_steps(hf("qwen3"), **flags)
    inner = model.optimizer.parts()["dense"].optimizer
    model.close()
    assert isinstance(inner, PrecisionAdam)
    assert found == norms
    assert all(torch.equal(other[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    "flags",
    [
        OFFLOADED,
        *(rare(flags) for flags in (NARROW, {**NARROW, "exp_avg_dtype": "fp8", "main_params_dtype": "fp16"})),
    ],
)
def test_a_checkpoint_goes_on_as_the_run_that_never_stopped(flags, hf, tmp_path, monkeypatch):
    monkeypatch.setattr(precision_adam, "SLICE_ELEMENTS", 1000)
    model, _, _ = after_steps(hf("qwen3"), 2, **flags)
    model.save_checkpoint(tmp_path, 2)
    rank_steps.steps(model, 2, first=2)
    weights = weights_of(model)
    model.close()
    resumed = rank_steps.actor(hf("qwen3"), **PLAIN, megatron=flags)
    resumed.load_checkpoint(tmp_path)
    rank_steps.steps(resumed, 2, first=2)
    other = weights_of(resumed)
    resumed.close()
    assert all(torch.equal(other[name], weight) for name, weight in weights.items())


def test_fewer_bits_stay_close_and_save_memory():
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(5000, generator=generator)
    gradients = [torch.randn(5000, generator=generator) for _ in range(30)]

    def run(*dtypes, main_grads="fp32"):
        shard = start.clone()
        adam = PrecisionAdam([{"params": [shard]}], keeping=OptimizerState(dtypes, main_grads), lr=1e-2)
        for gradient in gradients:
            shard.decoupled_grad = gradient.bfloat16() if main_grads == "bf16" else gradient.clone()
            adam.step()
        return shard, sum(adam.state[shard][name].nbytes for name in precision_adam.STATES)

    expected, most = run("fp32", "fp32", "fp32")
    moved = (expected - start).abs().mean()
    for dtypes, tolerance in [
        (("fp32", "bf16", "bf16"), 0.02),
        (("fp32", "fp16", "fp16"), 0.002),
        (("fp16", "fp32", "fp32"), 0.02),
        (("fp32", "fp8", "fp32"), 0.1),
    ]:
        found, size = run(*dtypes)
        assert size < most
        assert (found - expected).abs().mean() < tolerance * moved, dtypes
    found, _ = run("fp32", "fp32", "fp32", main_grads="bf16")
    assert (found - expected).abs().mean() < 0.01 * moved


def test_what_is_kept_in_fewer_bits_is_read_and_set_without_a_change():
    shard = torch.randn(3000)
    adam = PrecisionAdam([{"params": [shard]}], keeping=OptimizerState(("fp16", "fp8", "bf16")), lr=1e-2)
    for _ in range(3):
        shard.decoupled_grad = torch.randn(3000)
        adam.step()
    for name in precision_adam.STATES:
        before = adam.get_unscaled_state(shard, name).clone()
        adam.set_scaled_state(shard, name, before)
        assert torch.equal(adam.get_unscaled_state(shard, name), before), name


@pytest.mark.extra
def test_a_client_that_comes_back_has_its_scales(hf, tmp_path, monkeypatch):
    model = rank_steps.actor(hf("qwen3"), **PLAIN, megatron={**NARROW, "exp_avg_dtype": "fp8"})
    states, inner = ClientStates(model), model.optimizer.parts()["dense"].optimizer

    def kept():
        return [
            inner.get_unscaled_state(shard, name).clone() for shard in inner.param_groups[0]["params"] for name in precision_adam.STATES
        ]

    states.create("a", 0, 0, [])
    rank_steps.steps(model, 2)
    before = kept()
    states.create("b", 0, 0, [])
    model.train_step(rank_steps.share(model, 5), lambda *given: (1e3 * rank_steps.weighted_loss(*given)[0], {}), need_entropy=True)
    states.enter("a")
    after = kept()
    states.write("a", tmp_path / "saved", 1)
    saved = load_file(file := tmp_path / "saved" / "rank-0.safetensors")
    save_file(dict(list(saved.items())[:-1]), file)
    with pytest.raises(ClientRefused, match="saved: lacks tensors"):
        states.read("a", tmp_path / "saved")
    save_file(saved, file)
    with monkeypatch.context() as patch, pytest.raises(ClientRefused, match="saved: lacks tensors"):
        elsewhere = iter([False, False, True])  # another rank finds the state, reads it, and lacks tensors
        patch.setattr(runtime, "anywhere", lambda own: own or next(elsewhere))
        states.read("a", tmp_path / "saved")
    model.close()
    assert all(map(torch.equal, after, before))


@pytest.mark.extra
def test_bfloat16_gradient_buffers_train(hf):
    model, norms, _ = after_steps(hf("qwen3"), 1)
    model.close()
    narrow, found, _ = after_steps(hf("qwen3"), 1, use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    dtypes = {buffer.grad_data.dtype for buffer in narrow.model.chunks[0].buffers}
    narrow.close()
    assert dtypes == {torch.bfloat16}
    assert found == pytest.approx(norms, rel=2e-2)


@table(
    ("flags", "trainer", "field"),
    [
        ({"exp_avg_dtype": "bf16"}, {}, "exp_avg_dtype"),
        ({"optimizer_offload_fraction": 0.5}, {}, "optimizer_offload_fraction"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5}, {}, "optimizer_offload_fraction"),
        ({"optimizer_cpu_offload": True}, {"use_distributed_optimizer": False}, "optimizer_cpu_offload"),
        ({"use_precision_aware_optimizer": True}, {"train_dtype": "float32"}, "use_precision_aware_optimizer"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(flags, trainer, field):
    settings = {"train_dtype": "bfloat16", "use_distributed_optimizer": True} | trainer
    found = list(OptimizerState.problems(flags, settings["train_dtype"], settings["use_distributed_optimizer"]))
    assert [error.field for error in found] == [f"trainer.megatron.{field}"]
    assert all(isinstance(error, ConfigError) for error in found)


# --- the Adam that Megatron is given, against torch's


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_equals_torch_adamw(weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((7, 5), (3,), (1, 1))]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    mine, torchs = Adam(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_the_step_stands_in_the_group_and_survives_a_state_dict():
    parameter = torch.ones(3, requires_grad=True)
    adam = Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    adam.step()
    assert adam.param_groups[0]["step"] == 1
    assert adam.state[parameter].keys() == {"exp_avg", "exp_avg_sq"}
    twin = torch.nn.Parameter(parameter.detach().clone())
    other = Adam([twin], lr=0.1)
    other.load_state_dict(copy.deepcopy(adam.state_dict()))
    for optimizer, tensor in ((adam, parameter), (other, twin)):
        tensor.grad = torch.full((3,), 2.0)
        optimizer.step()
    assert torch.equal(parameter, twin)


def test_parameters_without_gradient_or_elements_are_left_alone():
    still, empty = torch.ones(2, requires_grad=True), torch.ones(0, requires_grad=True)
    empty.grad = torch.ones(0)
    Adam([still, empty], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still, torch.ones(2))


def test_coupled_weight_decay_and_closures_are_refused():
    with pytest.raises(ValueError, match="AdamW"):
        Adam([torch.ones(1, requires_grad=True)], adam_w_mode=False)
    with pytest.raises(ValueError, match="closure"):
        Adam([torch.ones(1, requires_grad=True)]).step(lambda: 0.0)


# --- the learning-rate schedule


def rates(count, **fields):
    schedule = LearningRateSchedule(**fields)
    return [schedule.at(update) for update in range(count)]


def test_constant_after_a_warm_up_that_wastes_no_update():
    assert rates(5, lr=1.0, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates(2, lr=1.0) == [1.0, 1.0]


def test_linear_decay_ends_at_min_lr_and_stays():
    assert rates(7, lr=1.0, min_lr=0.2, warmup_steps=1, decay_steps=5, decay_style="linear") == pytest.approx(
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_decay_is_half_way_in_the_middle():
    values = rates(6, lr=1.0, min_lr=0.0, decay_steps=4, decay_style="cosine")
    assert values == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lr": 1.0, "decay_style": "linear"}, "lr_warmup_iters"),
        ({"lr": 1.0, "decay_style": "cosine", "decay_steps": 3, "warmup_steps": 3}, "lr_warmup_iters"),
        ({"lr": 1.0, "min_lr": 2.0, "decay_style": "linear", "decay_steps": 3}, "min_lr"),
    ],
)
def test_contradictions_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        LearningRateSchedule(**fields)
