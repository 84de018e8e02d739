"""Weights from receiver to receiver: the tensors that were pushed, by their own digest, or an error that says what came between."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.rollout.engine.receiver import command_session, load_plan
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer import digest
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.group_channel import GroupSender
from shared.transfer.weight_channel import TransferDeadline
from tests.support.tables import table
from tests.support.waiting import until

SECONDS = 60.0

Load = Callable[["Model", Tensor], None]


def plain(model: "Model", tensor: Tensor) -> None:
    model.other.data.copy_(tensor.t())


class Model(nn.Module):
    """One rank's share of fused, sharded, padded, replicated and tied parameters. ``special``: what it does with ``other``."""

    def __init__(self, rank: int = 0, ranks: int = 1, special: Load = plain) -> None:
        super().__init__()
        self.rank, self.ranks, self.special = rank, ranks, special

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.qkv, self.down = empty(12 // ranks, 8), empty(4, 6 // ranks)
        self.embed = empty(9, 4)
        self.head = self.embed
        self.norm, self.other = empty(6, dtype=torch.bfloat16), empty(3, 4)
        self.register_buffer("cache", torch.full((2,), float(rank)))
        self.computed = torch.zeros(4, 6 // ranks)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        share = 4 // self.ranks
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, share * "qkv".index(name), share).copy_(tensor.narrow(0, share * self.rank, share))
            elif name == "down":
                width = 6 // self.ranks
                self.down.data.copy_(tensor.narrow(1, width * self.rank, width))
                self.computed.copy_(self.down * 2)
            elif name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name == "other":
                self.special(self, tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)


def tensors(seed: int) -> dict[str, Tensor]:
    """A version, as it is pushed."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 8), "k": (4, 8), "v": (4, 8), "down": (4, 6), "embed": (7, 4), "other": (4, 3)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | {
        "norm": torch.randn(6, generator=random).bfloat16()
    }


def digests(given: dict[str, Tensor]) -> dict[str, TensorDigest]:
    """What the trainer knows of a version."""
    return {
        name: TensorDigest(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest.of_bytes(tensor.contiguous().view(torch.uint8).numpy())
        )
        for name, tensor in given.items()
    }


TRUE = version_digest(digests(tensors(1)))
"""The digest that the trainer has told of the version that all sources here have."""


def receiver(seed: int, version: int = -1, rank: int = 0, ranks: int = 1, special: Load = plain) -> Receiver:
    """One that holds a version, or whose weights are unknown."""
    made = Receiver(Model(rank, ranks, special), rank, "cpu")
    made.model.load_weights(tensors(seed).items())
    made.adopt(version, digests(tensors(seed)) if version >= 0 else {})
    return made


def offered(source: Receiver, version: int = 3, seconds: float = SECONDS, ranks: int = 1, name: str = "") -> dict[str, Any]:
    name = name or f"transfer-{id(source)}-{source.rank}"
    order = {"version": version, "name": name, "address": "127.0.0.1", "ranks": ranks, "seconds": seconds}
    return command_session.send_to_peer(source, order, TransferDeadline(SECONDS))


def receive(destination: Receiver, *channels: dict[str, Any], version: int = 3, seconds: float = SECONDS) -> dict[str, Any]:
    destination.join([WeightChannelAddress.model_validate(channel) for channel in channels], 1, seconds)
    names = [channel["name"] for channel in channels]
    return destination.finish(destination.prepare(version, version, names, TransferDeadline(seconds)))


def holds(destination: Receiver, seed: int) -> bool:
    wanted = Model(destination.rank, destination.model.ranks)
    wanted.load_weights(tensors(seed).items())
    held, own = destination.model.state_dict(), destination.model
    return all(torch.equal(held[name], tensor) for name, tensor in wanted.state_dict().items()) and torch.equal(
        own.computed, wanted.computed
    )


@pytest.fixture
def source() -> Iterator[Receiver]:
    made = receiver(1, version=3)
    yield made
    made.disturb("the test is over")


def test_the_destination_holds_what_was_pushed_to_the_source(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_session, "BUCKET_BYTES", 300)  # several buckets, more than there are buffers
    destination = receiver(2)
    offer = offered(source)
    answer = receive(destination, offer["channel"])
    assert answer["digest"] == offer["digest"] == source.digest == destination.digest == TRUE
    assert (destination.version, destination.known) == (3, digests(tensors(1)))
    assert holds(destination, 1) and holds(source, 1)
    assert destination.model.head is destination.model.embed and destination.model.embed[7:].eq(0).all()


def test_ranks_give_their_parts_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_session, "BUCKET_BYTES", 600)
    sources = [receiver(1, version=3, rank=rank, ranks=2) for rank in range(2)]
    destinations = [receiver(2, rank=rank, ranks=2) for rank in range(2)]
    channels = [offered(source, ranks=2)["channel"] for source in sources]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda destination: receive(destination, *channels), destinations))
    assert [answer["digest"] for answer in answers] == [TRUE, TRUE]
    assert all(holds(destination, 1) for destination in destinations)


def altered_element(model: Model) -> None:
    model.qkv.data[0, 0] += 1e-3


def altered_replica(model: Model) -> None:
    model.norm.data[5] *= 3


def another_version(model: Model) -> None:
    model.load_weights(tensors(4).items())


def zeros(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


@table("ranks", [1, 2])
@table("lie", [altered_element, altered_replica, another_version, zeros])
def test_weights_that_are_not_the_trainers_are_known_by_their_digest(lie: Callable[[Model], None], ranks: int) -> None:
    """Whatever the source says: its own digest, and those of its tensors, are those of the trainer's version."""
    sources = [receiver(1, version=3, rank=rank, ranks=ranks) for rank in range(ranks)]
    destinations = [receiver(2, rank=rank, ranks=ranks) for rank in range(ranks)]
    lie(sources[-1].model)
    assert {source.digest for source in sources} == {TRUE}
    channels = [offered(source, ranks=ranks)["channel"] for source in sources]
    with ThreadPoolExecutor(ranks) as pool:
        answers = list(pool.map(lambda destination: receive(destination, *channels), destinations))
    (found,) = {answer["digest"] for answer in answers}
    assert found != TRUE and not all(holds(destination, 1) for destination in destinations)


def test_what_a_source_says_of_its_weights_is_not_believed(source: Receiver) -> None:
    source.known.update(digests(tensors(4)))
    destination = receiver(2)
    assert receive(destination, offered(source)["channel"])["digest"] == TRUE and holds(destination, 1)


def test_tensors_that_are_missing_or_have_other_shapes(source: Receiver) -> None:
    del source.known["norm"]
    answer = receive(receiver(2), offered(source)["channel"])
    assert answer["digest"] != TRUE
    source.known["norm"] = TensorDigest("bfloat16", (3,), 0)
    with pytest.raises((BadMessage, RuntimeError)):
        offered(source)


def cast(model: Model, tensor: Tensor) -> None:
    model.other.data.copy_(tensor.t().bfloat16())


def scaled(model: Model, tensor: Tensor) -> None:
    model.other.data.copy_(tensor.t())
    model.other.data.mul_(2)


def kept_aside(model: Model, tensor: Tensor) -> None:
    model.computed.copy_(tensor[:1].sum())


def elsewhere(model: Model, tensor: Tensor) -> None:
    """Another rank's."""


@table("special", [cast, scaled, kept_aside, elsewhere])
def test_what_cannot_be_told_from_the_parameters_is_not_sent_and_nothing_is_changed_by_the_attempt(special: Load) -> None:
    source = receiver(1, version=3, special=special)
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()} | {"computed": source.model.computed.clone()}
    with pytest.raises(BadMessage, match="cannot be told from its parameters|it can send none"):
        offered(source)
    after = source.model.state_dict() | {"computed": source.model.computed}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not source.before_change


def test_a_tensor_that_is_held_in_less_than_it_was_pushed_in_is_not_sent() -> None:
    source = receiver(1, version=3)
    source.known["norm"] = TensorDigest("float32", (6,), 0)
    with pytest.raises(BadMessage, match=r"torch.float32 is held as torch.bfloat16"):
        offered(source)


def test_two_destinations_at_once(source: Receiver) -> None:
    destinations = [receiver(2), receiver(4)]
    offers = [offered(source, name=f"l{number}") for number in range(2)]
    with pytest.raises(BadMessage, match="sends to 2 others already"):
        offered(source)
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(lambda pair: receive(pair[0], pair[1]["channel"]), zip(destinations, offers, strict=True)):
            assert answer["digest"] == TRUE


def test_what_is_not_held_is_not_sent(source: Receiver) -> None:
    with pytest.raises(BadMessage, match="version 4 is not to be had here: this engine holds version 3"):
        offered(source, version=4)
    with pytest.raises(BadMessage, match="version 3"):
        offered(receiver(2))


async def test_a_push_breaks_a_transfer_off(source: Receiver) -> None:
    """Before the destination has come: nothing of it is touched. And nothing is ever taken for version 3 that is not."""
    offer, destination = offered(source), receiver(2, version=1)
    source.disturb("a push of version 4 begins")
    with pytest.raises(ReceiveError, match="a push of version 4 begins") as raised:
        receive(destination, offer["channel"])
    assert not raised.value.touched and destination.version == 1
    await until(lambda: not source.before_change, "the transfer's end at its source")


def test_a_push_that_begins_while_the_source_looks_at_its_parameters(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    look = load_plan.held_copies

    def disturbed(*given: Any) -> Any:
        source.disturb("a push of version 4 begins")
        return look(*given)

    monkeypatch.setattr(load_plan, "held_copies", disturbed)
    with pytest.raises(ReceiveError, match="a push of version 4 begins"):
        receive(receiver(2), offered(source)["channel"])


def test_a_push_in_the_middle_of_a_transfer(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_session, "BUCKET_BYTES", 300)
    give, given = GroupSender.send, threading.Event()

    def disturbed(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        if given.is_set():
            source.disturb("a push of version 4 begins")
        given.set()
        give(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", disturbed)
    destination = receiver(2, version=1)
    with pytest.raises(ReceiveError, match=r"a push of version 4 begins") as raised:
        receive(destination, offered(source)["channel"])
    assert destination.version == (-1 if raised.value.touched else 1)
    assert bool(destination.digest) != raised.value.touched  # of neither version


def test_a_source_that_never_was() -> None:
    channel = {"kind": "group", "name": "x", "address": "127.0.0.1", "port": 9, "secret": "00" * 32, "backend": "gloo", "world_size": 2}
    with pytest.raises(ReceiveError, match="channel x"):
        receive(receiver(2), channel, seconds=1.0)


def test_bytes_that_changed_on_their_way(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    give = GroupSender.send

    def altered(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        flat[3] ^= 1
        give(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", altered)
    assert receive(receiver(2), offered(source)["channel"])["digest"] not in ("", TRUE)


DYING = """
import json, os, signal, sys, time
from services.rollout.engine.receiver import command_session, load_plan
from shared.transfer.group_channel import GroupSender
from tests.unit.rollout import test_peer as t
command_session.BUCKET_BYTES, give, given = 300, GroupSender.send, []
def last_words(channel, index, flat):
    if given:
        os.kill(os.getpid(), signal.SIGKILL)
    given.append(flat)
    give(channel, index, flat)
GroupSender.send = last_words
print(json.dumps(t.offered(t.receiver(1, version=3))["channel"]), flush=True)
time.sleep(t.SECONDS)
"""


def test_a_source_that_dies_in_the_middle() -> None:
    """kill -9: the destination says whom it waited for, long before the deadline, and holds nothing that it would take for a version."""
    root = Path(__file__).parents[3]
    destination = receiver(2, version=1)
    with subprocess.Popen([sys.executable, "-c", DYING], cwd=root, stdout=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            channel = json.loads(source.stdout.readline())
            with pytest.raises(ReceiveError, match=channel["name"]) as raised:
                receive(destination, channel, seconds=600)
        finally:
            source.kill()
    assert destination.version == (-1 if raised.value.touched else 1)
    assert bool(destination.digest) != raised.value.touched
