"""Clients' commands: in each client's order whatever order they come in, the clients in turns."""

import asyncio
import queue
import random
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.command_worker import BURST, MOST_ENTRIES, ClientQueues, CommandWorker
from shared.schema.messages import Command, Verb

NAMES = [f"a-{index:016x}:train:0" for index in range(3)]


def command(client: str, number: int, verb: Verb = "forward") -> Command:
    return Command(client=client, number=number, at=0.0, verb=verb)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(0, 1000), st.integers(0, 5))
def test_every_client_in_order_once(counts: list[int], seed: int, begun: int) -> None:
    queues, rng = ClientQueues(lambda client: begun if client == NAMES[0] else 0), random.Random(seed)
    commands = [command(name, number) for name, count in zip(NAMES, counts, strict=True) for number in range(count)]
    rng.shuffle(commands)
    found = []
    for one in [*commands, *commands[:2]]:  # some come twice
        queues.add(one)
        if rng.random() < 0.5 and (taken := queues.next()) is not None:
            found.append(taken.key)
    while (taken := queues.next()) is not None:
        found.append(taken.key)
    for name, count in zip(NAMES, counts, strict=True):
        first = begun if name == NAMES[0] else 0
        assert [number for client, number in found if client == name] == list(range(first, count))


def test_no_client_waits_for_more_than_a_burst_of_another() -> None:
    queues = ClientQueues(lambda _: 0)
    for name in NAMES[:2]:
        for number in range(3 * BURST):
            queues.add(command(name, number))
    taken = [queues.next() for _ in range(4 * BURST)]
    clients = [one.client for one in taken if one is not None]
    assert clients == [NAMES[0]] * BURST + [NAMES[1]] * BURST + [NAMES[0]] * BURST + [NAMES[1]] * BURST


def test_clients_without_commands_cost_no_turn() -> None:
    queues = ClientQueues(lambda _: 0)
    for index in range(100):
        queues.add(command(f"a-{index:016x}:train:0", 0, "create_model"))
        assert queues.next() is not None and queues.next() is None
    assert not queues._turns
    queues.add(command(NAMES[0], 1))
    assert [one.key for one in iter(queues.next, None)] == [(NAMES[0], 1)]


def test_an_optimizer_step_ends_a_turn() -> None:
    queues = ClientQueues(lambda _: 0)
    for name in NAMES[:2]:
        queues.add(command(name, 0, "optim_step"))
        queues.add(command(name, 1))
    assert [one.client for _ in range(4) if (one := queues.next()) is not None] == [NAMES[0], NAMES[1], NAMES[0], NAMES[1]]


def test_a_long_log_is_read_as_far_as_there_is_room() -> None:
    count = 2 * MOST_ENTRIES + 10
    worker = object.__new__(CommandWorker)
    worker._entries, worker._caught_up, worker._queues = queue.Queue(MOST_ENTRIES), False, ClientQueues(lambda _: 0)

    class Log:
        async def follow(self) -> AsyncIterator[Command | None]:
            for number in range(count):
                yield command(NAMES[0], number)
            yield None

    def taken() -> None:
        while not worker._caught_up:
            worker._read(0.01)

    async def both() -> None:
        following = asyncio.create_task(worker._follow(Log()))  # type: ignore[arg-type]
        while not worker._entries.full():
            await asyncio.sleep(0)
        await asyncio.gather(following, asyncio.to_thread(taken))

    asyncio.run(both())
    assert [found.number for found in iter(worker._queues.next, None)] == list(range(count))
