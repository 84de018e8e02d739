"""A request that is sent again gets the outcome of the first, and is handled once."""

import asyncio

import pytest

from services.rollout.weight_receiver import answered_once
from shared.runtime.errors import MyxoError
from shared.schema.messages import Accepted, Message
from shared.schema.weight_messages import WeightsReceive


def receive(push: int) -> WeightsReceive:
    return WeightsReceive(version=1, push=push, channels=["c"], deadline=60)


class Handler:
    """Counts the requests that it is given; push 9 is one that fails."""

    def __init__(self) -> None:
        self.taken, self.going_on = list[int](), asyncio.Event()

    async def handle(self, request: WeightsReceive) -> Message:
        self.taken.append(request.push)
        await self.going_on.wait()
        if request.push == 9:
            raise MyxoError("the channel broke")
        return Accepted()


async def test_a_repeated_request_is_handled_once_while_it_runs_and_after() -> None:
    handler = Handler()
    once = answered_once(handler.handle)
    first, again = asyncio.ensure_future(once(receive(2))), asyncio.ensure_future(once(receive(2)))
    await asyncio.sleep(0)
    again.cancel()  # its connection broke: the handling continues
    await asyncio.sleep(0)
    handler.going_on.set()
    assert await first is await once(receive(2))
    assert handler.taken == [2]
    await once(receive(4))
    assert handler.taken == [2, 4]


async def test_a_failure_is_repeated_too() -> None:
    handler = Handler()
    handler.going_on.set()
    once = answered_once(handler.handle)
    for _ in range(2):
        with pytest.raises(MyxoError, match="the channel broke"):
            await once(receive(9))
    assert handler.taken == [9]
