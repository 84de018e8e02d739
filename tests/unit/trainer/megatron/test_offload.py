"""A model that was in host memory and came back: the same bits everywhere, and steps as if it had never gone."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.colocation import Offload
from services.trainer.parallel.trained_model import WeightReadLock
from shared.runtime.errors import DeadlineExceeded
from tests.unit.trainer.megatron import rank_steps


def state(actor: Actor) -> dict[str, Tensor]:
    """Copies of all parameters, float32 weights and moments."""
    found = {name: tensor for module in actor.model.modules for name, tensor in module.named_parameters()}
    for role, part in actor.optimizer.parts().items():
        for number, parameter in enumerate(one for group in part.optimizer.param_groups for one in group["params"]):
            found[f"{role}.{number}"] = parameter
            found |= {f"{role}.{number}.{key}": part.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def storages(actor: Actor) -> int:
    """Bytes that parameters, gradients and moments take on the device."""
    tensors = [tensor for module in actor.model.modules for tensor in module.parameters()]
    tensors += [buffer.grad_data for chunk in actor.model.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    for part in actor.optimizer.parts().values():
        tensors += [one for group in part.optimizer.param_groups for one in group["params"]]
        tensors += [value for values in part.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("qwen3_tied", {}, marks=pytest.mark.extra),
        pytest.param("qwen3", {"train_dtype": "bfloat16"}, marks=pytest.mark.extra),
        pytest.param("qwen3", {"train_dtype": "bfloat16", "use_distributed_optimizer": False}, marks=pytest.mark.extra),
        ("qwen3", {"use_distributed_optimizer": False}),
        ("qwen3_moe", {"train_dtype": "bfloat16"}),
    ],
)
def test_a_round_trip_changes_no_bit(kind: str, config: dict[str, Any], make_actor: Any) -> None:
    actor = make_actor(kind, **config)
    rank_steps.steps(actor, 2)
    offload, before, size = Offload(actor.model, actor.optimizer), state(actor), storages(actor)
    for _ in range(2):
        freed = offload.to_host("optimizer") + offload.to_host("weights")
        assert storages(actor) == 0
        assert freed >= size
        assert offload.to_host("weights") == 0, "what is away already moves twice"
        offload.to_device()
        assert not offload.away
        assert storages(actor) == size
        after = state(actor)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("backend", ["megatron", pytest.param("torch", marks=pytest.mark.extra)])
def test_steps_between_turns_are_those_of_a_run_that_never_moved(backend: str, make_actor: Any) -> None:
    still, moved = (make_actor("qwen3", train_dtype="bfloat16", trainer_backend=backend) for _ in range(2))
    offload = Offload(moved.model, moved.optimizer)
    for step in range(3):
        straight = rank_steps.steps(still, 1, step)
        offload.to_host("optimizer")
        offload.to_host("weights")
        offload.to_device()
        assert rank_steps.steps(moved, 1, step) == straight


@pytest.mark.parametrize("backend", [pytest.param("megatron", marks=pytest.mark.extra), "torch"])
def test_the_weights_can_be_read_while_the_optimizer_is_away(backend: str, make_actor: Any) -> None:
    actor = make_actor("qwen3", train_dtype="bfloat16", trainer_backend=backend)
    rank_steps.steps(actor, 1)
    wanted = {name: tensor.clone() for bucket in actor.export(1 << 20) for name, tensor in bucket if tensor is not None}
    offload = Offload(actor.model, actor.optimizer)
    offload.to_host("optimizer")
    assert offload.away == {"optimizer"}
    found = {name: tensor for bucket in actor.export(1 << 20) for name, tensor in bucket if tensor is not None}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- whoever changes parameters waits for those who read them, and knows for how long

SECONDS = 60


def test_nobody_waits_for_a_reading_that_is_over() -> None:
    readers = WeightReadLock()
    readers.wait("optimizer step")
    readers.begin("a push", SECONDS)
    readers.over()
    readers.wait("optimizer step")
    assert readers.stall == 0.0


def test_a_change_waits_for_the_end_of_a_reading() -> None:
    readers, changed = WeightReadLock(), threading.Event()
    readers.begin("a push", SECONDS)

    def change() -> None:
        readers.wait("optimizer step")
        changed.set()

    changing = threading.Thread(target=change)
    changing.start()
    while readers.waiting_since is None:
        threading.Event().wait(0.001)
    assert not changed.is_set()
    readers.over()
    changing.join(SECONDS)
    assert changed.is_set() and readers.stall > 0


def test_a_reading_without_an_end_is_an_error_that_names_it() -> None:
    readers = WeightReadLock()
    readers.begin("the push of version 7", 0.01)
    with pytest.raises(DeadlineExceeded, match="the push of version 7.*no optimizer step"):
        readers.wait("optimizer step")
