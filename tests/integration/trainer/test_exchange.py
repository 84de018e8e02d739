"""What actor and critic leave for each other in a real store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from services.trainer import actor_critic_exchange
from services.trainer.actor_critic_exchange import ActorCriticExchange
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.errors import PayloadMissing
from shared.store.payload_store import StoreFull


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
