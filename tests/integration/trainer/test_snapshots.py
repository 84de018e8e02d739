"""The trainer's side of a real store and bus: snapshots of weights, and what actor and critic leave for each other."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file

from services.trainer import actor_critic_exchange
from services.trainer.actor import Actor
from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.control_client import ControlClient
from services.trainer.parallel import runtime
from services.trainer.weights.snapshot_writer import CURRENT, SnapshotWriter
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import PayloadMissing
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive, WeightsSnapshot
from shared.store.payload_store import StoreFull
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoints
from tests.support.run_config import run_config
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import make_checkpoint

SECONDS = 60


class Bench:
    """A trainer of one rank without its loop."""

    def __init__(self, link: ControlClient, actor: Actor, nats: EmbeddedNats) -> None:
        self.link, self.actor, self._nats = link, actor, nats
        self.writer = SnapshotWriter(link.config, link, actor)
        self.snapshots = WeightCheckpoints.of_run(link.config)
        self.steps = 0

    def again(self) -> None:
        """As after a restart of the trainer's process."""
        self.writer = SnapshotWriter(self.link.config, self.link, self.actor)

    def step(self) -> None:
        rank_steps.steps(self.actor, 1, first=self.steps)
        self.steps += 1

    def kept(self, key: str, kind: type[Any]) -> Any:
        bus, bucket = self.link.service.bus, self.link.service.subjects.weights_bucket
        value = self.link.call(bus.get(bucket, key), SECONDS)
        return None if value is None else kind.decode(value)

    def card(self, version: int, **gauges: float) -> None:
        """A replica's card, as the link has read it from the registry."""
        fields = {"service": "rollout", "instance": "rollout-1", "host": "h", "pid": 1, "http": "", "state": "ready", "incarnation": "a"}
        card = ServiceStatus(**fields, version=version, gauges=gauges, at=time.time())

        async def renew() -> None:
            bus = await Bus.connect(self._nats.url, "test")
            await Registry(bus, self.link.service.run).renew(card)
            await bus.close()

        asyncio.run(renew())
        end = time.monotonic() + SECONDS
        while not any(one.version == version and one.gauges == gauges for one in self.link.replicas):
            assert time.monotonic() < end, self.link.replicas
            time.sleep(0.05)

    def exported(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in self.actor.export(10**9) for name, tensor in bucket if tensor is not None}

    def rebuilt(self, version: int, place: Path) -> dict[str, torch.Tensor]:
        path = LocalCheckpoint(place).follow(self.snapshots, version).path
        return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench(
    nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NewBench]:
    links: list[ControlClient] = []
    make_checkpoint("qwen3_tied", tmp_path / "model")

    def make(dtype: str = "float32", **weights: Any) -> Bench:
        config = run_config(tmp_path, run={"name": run_name}, weights={"update_weight_buffer_size": 20_000, **weights})

        async def create() -> None:
            bus = await Bus.connect(nats.url, "test")
            await runs.create(bus, config, valkey.url)
            await bus.close()

        asyncio.run(create())
        for name, value in {"NATS_URL": nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": run_name}.items():
            monkeypatch.setenv(name, value)
        links.append(ControlClient().__enter__())
        return Bench(links[-1], rank_steps.actor(tmp_path / "model", train_dtype=dtype), nats)

    yield make
    for link in links:
        link.__exit__()
    runtime.stop()


@pytest.mark.parametrize(("dtype", "encoding"), [pytest.param("float32", "xor", marks=pytest.mark.extra), ("bfloat16", "overwrite")])
def test_every_version_of_a_training_comes_back_to_the_bit(dtype: str, encoding: str, new_bench: NewBench, tmp_path: Path) -> None:
    bench = new_bench(
        dtype,
        update_weight_transport="disk",
        update_weight_mode="delta",
        update_weight_delta_encoding=encoding,
        update_weight_full_interval=3,
        keep_snapshots=3,
    )
    kinds = []
    for version in range(5):
        assert bench.writer.due(version)
        written = bench.writer.write(version)
        assert written is not None and not bench.writer.due(version)
        assert bench.kept("snapshot", WeightsSnapshot) == written
        kinds.append(written.form)
        rebuilt, exported = bench.rebuilt(version, tmp_path / "cache"), bench.exported()
        assert rebuilt.keys() == exported.keys()
        assert all(torch.equal(rebuilt[name], tensor) and rebuilt[name].dtype == tensor.dtype for name, tensor in exported.items())
        bench.step()
    assert kinds == ["full", "delta", "delta", "full", "delta"]
    assert bench.snapshots.versions() == [0, 1, 2, 3, 4]  # the newest three, and what version 2 is made of
    assert {"config.json"} < {path.name for path in bench.snapshots.path_of(3).iterdir()}
    bench.actor.close()


def test_a_trainer_that_comes_back(new_bench: NewBench, tmp_path: Path) -> None:
    """It continues with deltas where it left off; where what lies beside the links is not theirs, or a link is gone, with a whole one."""
    bench = new_bench(update_weight_transport="disk", update_weight_mode="delta", keep_snapshots=9)
    forms = []

    def write(version: int) -> None:
        bench.step()
        bench.again()
        written = bench.writer.write(version)
        assert written is not None
        forms.append(written.form)

    for version in (0, 1):
        write(version)
    (tmp_path / "runs" / bench.link.service.run / "weights" / ".v000002.partial").mkdir()  # killed while it wrote
    write(2)
    shutil.rmtree(bench.snapshots.directory / CURRENT)
    write(3)
    write(4)
    shutil.rmtree(bench.snapshots.path_of(3))
    write(5)
    write(6)
    write(5)  # a trainer that went back to an older checkpoint
    assert forms == ["full", "delta", "delta", "full", "delta", "full", "delta", "full"]
    assert bench.snapshots.versions() == [0, 1, 2, 4, 5]
    assert all(torch.equal(tensor, bench.exported()[name]) for name, tensor in bench.rebuilt(5, tmp_path / "cache").items())
    assert {path.name for path in bench.snapshots.directory.iterdir()} == {CURRENT, *(f"v{v:06d}" for v in (0, 1, 2, 4, 5))}


@pytest.mark.extra
def test_a_replica_that_cannot_have_a_version_gets_a_whole_one(new_bench: NewBench) -> None:
    bench = new_bench(update_weight_transport="disk", update_weight_mode="delta")
    for version in (0, 1):
        bench.step()
        bench.writer.write(version)
    assert bench.snapshots.load(1).kind == "delta" and not bench.writer.due(1)
    bench.card(0, broken_snapshot=1.0)
    assert bench.writer.due(1)
    written = bench.writer.write(1)
    assert written is not None and written.form == "full" and bench.snapshots.load(1).kind == "full"
    assert not bench.writer.due(1)  # its card will say so for a while


def test_what_is_live_without_pushes(new_bench: NewBench) -> None:
    bench = new_bench(update_weight_transport="disk")
    written = bench.writer.write(3)
    bench.writer.tell_live()
    assert written is not None and bench.kept("live", WeightsLive) is None
    bench.card(3)
    bench.writer.tell_live()
    live = bench.kept("live", WeightsLive)
    assert (live.version, live.replicas, live.digest) == (3, ["rollout-1"], written.digest)
    for version in (4, 5):
        bench.writer.write(version)
    bench.card(4)  # behind the trainer, but ahead of what was live
    bench.writer.tell_live()
    assert bench.kept("live", WeightsLive).version == 4


@pytest.mark.extra
def test_snapshots_beside_pushes_are_rare(new_bench: NewBench) -> None:
    bench = new_bench(snapshot_interval=2, update_weight_dtype="bfloat16")
    assert [bench.writer.due(version) for version in (0, 1, 2)] == [False, False, True]
    written = bench.writer.write(2)
    assert written is not None and {known.dtype for known in bench.snapshots.load(2).tensors.values()} == {"bfloat16"}
    assert '"bfloat16"' in (Path(written.path) / "config.json").read_text()
    bench.again()
    assert [bench.writer.due(version) for version in (2, 3, 4)] == [False, False, True]
    assert not new_bench(snapshot_interval=0, update_weight_dtype="bfloat16").writer.due(100)


@pytest.mark.extra
def test_a_full_disk_ends_no_training(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = new_bench(update_weight_transport="disk", update_weight_mode="delta")
    bench.writer.write(0)
    bench.step()

    def no_space(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("shared.transfer.tensor_file.write", no_space)
        assert bench.writer.write(1) is None
    assert bench.snapshots.versions() == [0] and not bench.writer.due(1)  # not at once again
    assert os.listdir(bench.snapshots.directory) == ["v000000"]
    written = bench.writer.write(1)
    assert written is not None and written.form == "full"


@pytest.fixture
def exchange(valkey: EmbeddedValkey, run_name: str) -> Iterator[ActorCriticExchange]:
    made = ActorCriticExchange(valkey.url, run_name)
    yield made
    made.close()


def test_numbers_come_back_to_the_bit(exchange: ActorCriticExchange) -> None:
    numbers = {"g1/0": torch.tensor([0.1, -2.5]), "g1/1": torch.zeros(0)}
    assert not exchange.complete("values", 4)
    exchange.write("values", 4, numbers)
    exchange.write("values", 4, {"g2/0": torch.tensor([7.0])})  # another rank's
    assert not exchange.complete("values", 4)
    exchange.finish("values", 4)
    assert exchange.complete("values", 4) and not exchange.complete("kl", 4) and not exchange.complete("values", 5)
    first, empty, other = exchange.read("values", 4, ["g1/0", "g1/1", "g2/0"])
    assert torch.equal(first, numbers["g1/0"]) and empty.numel() == 0 and other.tolist() == [7.0]
    assert exchange.read("values", 4, []) == []


def test_what_is_not_there_is_named(exchange: ActorCriticExchange) -> None:
    exchange.write("kl", 2, {"g1/0": torch.ones(1)})
    with pytest.raises(PayloadMissing, match=r"the store holds no kl of sample g1/1, step 2"):
        exchange.read("kl", 2, ["g1/0", "g1/1"])


def test_steps_behind_a_checkpoint_are_freed(exchange: ActorCriticExchange, valkey: EmbeddedValkey, run_name: str) -> None:
    for step in range(5):
        exchange.write("values", step, {"g/0": torch.ones(1)})
        exchange.finish("values", step)
    exchange.forget("values", 3)
    assert [exchange.complete("values", step) for step in range(5)] == [False, False, False, True, True]
    again = ActorCriticExchange(valkey.url, run_name)  # as after a restart
    again.forget("values", 4)
    assert [again.complete("values", step) for step in range(5)] == [False, False, False, False, True]
    again.close()


def test_what_its_reader_is_past_is_not_written_again(exchange: ActorCriticExchange) -> None:
    exchange.save("critic", 3)
    for step in (2, 3):  # an actor that resumed from an older checkpoint
        exchange.write("kl", step, {"g/0": torch.ones(1)})
        exchange.finish("kl", step)
    assert [exchange.complete("kl", step) for step in (2, 3)] == [False, True]


def test_each_role_says_how_far_it_has_saved(exchange: ActorCriticExchange) -> None:
    assert exchange.saved("critic") == 0
    exchange.save("critic", 12)
    assert (exchange.saved("critic"), exchange.saved("actor")) == (12, 0)


@pytest.mark.extra
def test_a_full_store_is_named_and_written_to_once_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedValkey(tmp_path, max_bytes=8 << 20)
    server.start()
    try:
        client: Any = redis.Redis.from_url(server.url)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(100):
                client.set(f"junk{number}", bytes(256 << 10))
        monkeypatch.setattr(actor_critic_exchange, "CALL_SECONDS", 0.5)
        exchange = ActorCriticExchange(server.url, "r")
        values = {"g0/0": torch.zeros(200_000)}
        with pytest.raises(StoreFull, match="writing the values of step 0: the store is full"):
            exchange.write("values", 0, values)
        client.flushall()
        exchange.write("values", 0, values)
        assert torch.equal(exchange.read("values", 0, ["g0/0"])[0], values["g0/0"])
        exchange.close()
    finally:
        server.stop()
