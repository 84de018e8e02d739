"""The Adam that Megatron is given, against torch's."""

import copy

import pytest
import torch

from services.trainer.megatron.optimizer import Adam


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
