"""Loading a bucket by what the first load was seen to do: the same parameters, or no plan at all."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.loader import add_as_trained
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.process.embedded_servers import free_port
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.manifest import Bucket
from shared.transfer.weight_channel import TransferDeadline
from tests.support.tables import table
from tests.support.weights_group import flat_of, manifest_of

Load = Callable[["Model", str, Tensor], None]


class Model(nn.Module):
    """Fused, sharded, padded and converted parameters, as an engine's rank has them. ``special``: what it does with ``other``."""

    def __init__(self, special: Load = lambda model, name, tensor: None) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 8), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.embed = nn.Parameter(torch.full((9, 4), 7.0), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("bias", torch.zeros(5))
        self.other = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("sum", torch.ones(4, 4))
        self.computed = torch.zeros(4, 4)
        self.special, self.loads = special, 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, 4 * "qkv".index(name), 4).copy_(tensor)
            elif name == "down":  # the second of two ranks' share of its columns
                self.down.data.copy_(tensor.narrow(1, 3, 3))
            elif name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name == "other":
                self.special(self, name, tensor)
            elif name != "elsewhere":  # which is another rank's
                self.get_buffer(name).copy_(tensor) if name == "bias" else self.get_parameter(name).data.copy_(tensor)


def tensors(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 8), "k": (4, 8), "v": (4, 8), "down": (4, 6), "embed": (7, 4), "norm": (6,), "bias": (5,), "other": (4, 4)}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return made | {"elsewhere": torch.randn(3, generator=random)}


def bucket_of(given: dict[str, Tensor]) -> Bucket:
    (bucket,) = manifest_of(given, bucket_bytes=1 << 20).buckets
    return bucket


def loaded(given: dict[str, Tensor], special: Load) -> dict[str, Tensor]:
    """What the model holds after its own load."""
    with torch.inference_mode(False):
        model = Model(special)
        model.load_weights((name, tensor.clone()) for name, tensor in given.items())
    return {**model.state_dict(), "computed": model.computed}


def same(model: Model, wanted: dict[str, Tensor]) -> bool:
    held = {**model.state_dict(), "computed": model.computed}
    return all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


def plain(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor.t())


def by_a_pool(model: Model, name: str, tensor: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.other.data.copy_, tensor).result()


def plus_one(model: Model, name: str, tensor: Tensor) -> None:
    """A norm that keeps one more than its weight beside it, as Gemma's and Qwen3-Next's do."""
    model.other.data.copy_(tensor)
    torch.add(model.other.data, 1.0, out=model.sum)


def converted(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor.bfloat16())


def scaled(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor)
    model.other.data.mul_(2)


def made_contiguous(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor.t().contiguous())


def computed(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor)
    model.computed = model.other @ model.other


def replaced(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data = tensor.clone()


def measured(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.fill_(tensor.sum().item())


def filled_after(model: Model, name: str, tensor: Tensor) -> None:
    model.other.data.copy_(tensor)
    model.other.data[1:].fill_(3)


@table("inference", [False, True])
@table("special", [plain, by_a_pool, plus_one])
def test_copies_are_repeated(special: Load, inference: bool) -> None:
    """From any flat buffer, without the model's own load."""
    model, bucket = Model(special), bucket_of(tensors(0))
    with torch.inference_mode(inference):  # SGLang's loop runs in it
        traced, obstacle = load_plan.trace(model, bucket, flat_of(bucket, tensors(0)))
        assert traced is not None, obstacle
        assert same(model, loaded(tensors(0), special)) and model.loads == 1
        model.embed.data.fill_(5)
        for seed in (1, 2):
            traced.replay(flat_of(bucket, tensors(seed)))
            assert same(model, loaded(tensors(seed), special))
        assert model.loads == 1


@table("inference", [False, True])
@table(
    ("special", "obstacle"),
    [
        (converted, "_to_copy|aten.to"),
        (scaled, "mul_"),
        (made_contiguous, "clone|contiguous"),
        (computed, "aten.mm|aten.matmul"),
        (replaced, "clone"),
        (measured, "sum"),
        (filled_after, "fills what it has loaded"),
    ],
)
def test_what_is_more_than_copies_is_not(special: Load, obstacle: str, inference: bool) -> None:
    """The model loads such a bucket itself, every time."""
    model, bucket = Model(special), bucket_of(tensors(0))
    with torch.inference_mode(inference):
        traced, found = load_plan.trace(model, bucket, flat_of(bucket, tensors(0)))
        assert traced is None and any(one in found for one in obstacle.split("|")), found
        loader = load_plan.BucketLoader(bucket)
        for seed in (1, 2, 3):
            loader.load(model, flat_of(bucket, tensors(seed)))
            assert same(model, loaded(tensors(seed), special))


def test_a_parameter_that_is_replaced_by_one_that_nothing_is_copied_to() -> None:
    def renewed(model: Model, name: str, tensor: Tensor) -> None:
        model.other.data = torch.ones(4, 4)

    bucket = bucket_of(tensors(0))
    traced, found = load_plan.trace(Model(renewed), bucket, flat_of(bucket, tensors(0)))
    assert traced is None and found == "it replaced a parameter"


def test_plans_of_parameters_that_have_moved_are_not_used() -> None:
    model, given = Model(plain), tensors(0)
    receiver, manifest = Receiver(model, 0, "cpu"), manifest_of(given)
    for loader in receiver.layout(manifest).loaders:
        loader.load(model, flat_of(loader.bucket, given))
    assert receiver.layout(manifest).loaders[0].traced
    model.qkv.data = torch.zeros(12, 8)
    for loader in receiver.layout(manifest).loaders:
        assert not loader.traced
        loader.load(model, flat_of(loader.bucket, given))
    assert same(model, loaded(given, plain))


@pytest.mark.parametrize("special", [plain, plus_one])
def test_a_comparison_changes_nothing(special: Load) -> None:
    """It counts what differs of each tensor, in this rank's part, and of the constants beside it."""
    model, bucket = Model(special), bucket_of(tensors(0))
    model.load_weights(iter(tensors(0).items()))
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {name: int(count) for name, count in load_plan.compare(model, bucket, flat_of(bucket, tensors(0))).items()} == dict.fromkeys(
        ["q", "k", "v", "down", "embed", "norm", "bias", "other"], 0
    )
    given = tensors(0)
    given["v"][1, 2:5] += 1
    given["down"][0, 0] = 99  # the other rank's
    given["norm"][3] = -given["norm"][3]
    model.embed.data[8, 0] = 1
    held["embed"][8, 0] = 1
    found = {name: int(count) for name, count in load_plan.compare(model, bucket, flat_of(bucket, given)).items() if count}
    assert found == {"v": 3, "norm": 1, "embed": 1}
    assert same(model, {**held, "computed": model.computed})


class GemmaForCausalLM(nn.Module):
    """Loads norms as SGLang's class of that name does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(6), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            tensor += 1.0
            self.norm.data.copy_(tensor)


def test_a_model_that_adds_to_what_it_is_given_adds_to_a_copy() -> None:
    """What has come is hashed after it was loaded, and may be the trainer's own memory."""
    model, given = GemmaForCausalLM(), {"model.norm.weight": torch.arange(6.0)}
    add_as_trained(model)
    loader, flat = load_plan.BucketLoader(bucket_of(given)), flat_of(bucket_of(given), given)
    for _ in range(2):
        loader.load(model, flat)
        assert torch.equal(flat, flat_of(loader.bucket, given)) and model.norm.tolist() == [1, 2, 3, 4, 5, 6]
    assert not any(map(int, load_plan.compare(model, loader.bucket, flat).values()))


def test_nan_is_equal_to_itself() -> None:
    model, given = Model(plain), tensors(0)
    given["bias"][:] = float("nan")
    bucket = bucket_of(given)
    model.load_weights(iter(given.items()))
    assert not any(int(count) for count in load_plan.compare(model, bucket, flat_of(bucket, given)).values())


def test_a_load_that_cannot_be_compared() -> None:
    model, bucket = Model(scaled), bucket_of(tensors(0))
    with pytest.raises(NotImplementedError, match=r"mul_.* on the parameter of other cannot be compared"):
        load_plan.compare(model, bucket, flat_of(bucket, tensors(0)))


# --- an abort that comes before the order which it aborts


def test_an_order_whose_lanes_were_called_off_says_so() -> None:
    receiver = Receiver(torch.nn.Linear(1, 1), 0, "cpu")
    channel = WeightChannelAddress(
        kind="group", name="channel", address="127.0.0.1", port=free_port(), secret="00" * 32, backend="gloo", world_size=3
    )
    receiver.join([channel], 1, 30.0)
    receiver.abort()
    with pytest.raises(ReceiveError, match="was called off") as off:
        receiver.prepare(1, 1, ["channel"], TransferDeadline(30.0))
    assert not off.value.touched
    with pytest.raises(ReceiveError, match="has joined none"):
        receiver.prepare(1, 1, ["another"], TransferDeadline(30.0))
