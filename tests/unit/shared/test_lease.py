"""Who is alive: leases, and nodes that ask each other."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.leader_lease import LeaseObserver, LeaseTiming
from shared.nodes.node_agent import CONNECTIONS_PER_NODE, NodeLinks
from tests.support.waiting import until

TIMING = LeaseTiming(5.0)


def test_a_holder_renews_several_times_before_it_must_stop() -> None:
    assert TIMING.acts_until(100.0) == 100.0 + TIMING.duration - TIMING.margin
    assert 2 * TIMING.renewal < TIMING.duration - TIMING.margin


def test_a_revision_must_stand_for_the_whole_duration() -> None:
    observer = LeaseObserver(6.0)
    assert not observer.see(4, 100.0)
    assert not observer.see(4, 105.9)
    assert observer.see(4, 106.0)
    assert observer.see(4, 107.0)


def test_a_renewal_starts_the_count_anew() -> None:
    observer = LeaseObserver(6.0)
    observer.see(4, 100.0)
    assert not observer.see(5, 105.0)
    assert not observer.see(5, 110.9)
    assert observer.see(5, 111.0)
    assert not observer.see(4, 112.0), "a server that has lost what it had is no reason to take over"


def test_time_in_which_the_lease_could_not_be_read_does_not_count() -> None:
    observer = LeaseObserver(6.0)
    observer.see(4, 100.0)
    observer.unreadable()
    assert not observer.see(4, 107.0)
    assert observer.see(4, 113.0)


@dataclass
class Try:
    """A message to the server and its answer: seconds before it is sent, on the way there, on the way back; whether the answer is lost."""

    pause: float
    there: float
    back: float
    lost: bool


SECONDS = st.one_of(st.floats(0, 0.5), st.floats(0, 10))
TRIES = st.lists(st.builds(Try, SECONDS, SECONDS, SECONDS, st.booleans()), max_size=40)


@given(holder=TRIES, waiter=TRIES, offset=st.floats(-1000, 1000))
def test_whatever_is_late_or_lost_nobody_takes_the_lease_from_one_who_acts(holder: list[Try], waiter: list[Try], offset: float) -> None:
    """The holder renews and the waiter looks and takes, each at its own pace and by its own clock, through one server."""
    revision = known = 1
    until = TIMING.acts_until(0.0)
    observer, wanted = LeaseObserver(TIMING.duration), None
    now = {"holder": 0.0, "waiter": 0.0}
    left = {"holder": list(holder), "waiter": list(waiter)}
    while left["holder"] and left["waiter"]:
        who = min(left, key=lambda one: now[one] + left[one][0].pause + left[one][0].there)  # whose message the server stores next
        one = left[who].pop(0)
        sent = now[who] + one.pause
        stored = sent + one.there
        now[who] = stored + one.back
        if who == "holder":
            renewed = known == revision
            revision += renewed
            if renewed and not one.lost:
                known, until = revision, max(until, TIMING.acts_until(sent))
            elif not renewed:
                known = revision  # it reads what is there: its own
        elif wanted is not None:
            if wanted == revision:
                assert stored >= until + TIMING.margin - 1e-6
                return
            wanted = None
        elif one.lost:
            observer.unreadable()
        elif observer.see(revision, now[who] + offset):
            wanted = revision


@pytest.mark.parametrize("duration", [2.0, 6.0, 60.0])
def test_every_part_of_a_timing_follows_its_duration(duration: float) -> None:
    timing = LeaseTiming(duration)
    assert timing.renewal + timing.attempt < timing.acts_until(0.0) < duration


# --- nodes ask each other for a sign of life: who does not answer is named, and answers from elsewhere change nothing

HOME = "127.0.0.1"
SILENCE_S = 1.0


@pytest.fixture
async def links() -> AsyncIterator[list[NodeLinks]]:
    """Those of two nodes; the second asks the first."""
    made = [NodeLinks(2, SILENCE_S) for _ in range(2)]
    for each in made:
        await each.listen(HOME)
    made[1].ask([made[0].point])
    yield made
    for each in made:
        await each.close()


async def test_a_node_that_stops_answering_is_silent_until_it_answers_again(links: list[NodeLinks]) -> None:
    first, second = links
    point = first.point
    assert second.silent() == []
    await answered_for(second, point, 1.5 * SILENCE_S)
    await first.close()
    await until(lambda: second.silent() == [point], "the silence", 20, 0.05)
    server = await asyncio.start_server(first._answer, HOME, int(point.rpartition(":")[2]))
    await until(lambda: second.silent() == [], "another answer", 20, 0.05)
    server.close()
    second.ask([])
    assert second.silent() == [], "nobody asks there any more"


async def test_a_node_that_takes_connections_and_says_nothing_is_silent(links: list[NodeLinks]) -> None:
    def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    server = await asyncio.start_server(say_nothing, HOME, 0)
    point = f"{HOME}:{server.sockets[0].getsockname()[1]}"
    links[1].ask([links[0].point, point])
    await until(lambda: links[1].silent() == [point], "the silence", 20, 0.05)
    server.close()


async def test_strangers_neither_crash_it_nor_take_all_of_its_connections(links: list[NodeLinks]) -> None:
    first, second = links
    port = int(first.point.rpartition(":")[2])
    crowd = [await asyncio.open_connection(HOME, port) for _ in range(3 * CONNECTIONS_PER_NODE)]
    for _, writer in crowd:
        writer.write(os.urandom(13))
    await answered_for(second, first.point, 2 * SILENCE_S)  # the connection that was there first stays
    for reader, _ in crowd:
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await reader.read(100):  # who says nothing more is let go
                    pass
    for _, writer in crowd:
        writer.close()


async def answered_for(links: NodeLinks, point: str, seconds: float) -> None:
    """Returns once a point has answered for so long, and asserts that it was never silent."""
    since = links._heard[point]

    def answered() -> bool:
        assert links.silent() == []
        return links._heard[point] > since + seconds

    await until(answered, "answers", 30, 0.05)


async def test_an_address_that_is_not_this_machines_is_no_error() -> None:
    links = NodeLinks(2, SILENCE_S)
    await links.listen("192.0.2.1")  # RFC 5737: nobody's
    assert links.point == ""
    await links.listen(HOME)
    assert links.point.startswith(f"{HOME}:")
    await links.close()
