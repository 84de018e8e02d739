"""Which sessions' keys and values stay at a replica, and what that saves where they do not all fit."""

from collections import OrderedDict

from services.gateway.replicas import HELD_SHARE, Resident, Residents
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionLog

CAPACITY = 1000


def asking(name: str, tokens: int, group: str = "") -> Resident:
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    session = Session(id=name, group=group or name, rollout=0, attempt=0, key_digest="0" * 64, deadline=1e10, sampling=sampling)
    return Resident.asking(SessionLog(session), tokens)


def test_a_session_is_admitted_where_its_tokens_have_room() -> None:
    residents = Residents(CAPACITY)
    large = asking("large", 5000)
    assert residents.fits(large), "alone it plays, whatever it takes"
    first = residents.admit(asking("a", 500), now=1.0)
    assert residents.fits(asking("b", 400)) and not residents.fits(asking("b", 401))
    first.tokens = 700
    residents.ended(first, now=2.0)
    assert not residents.fits(asking("b", 400)) and residents.fits(asking("a", 5000)), "who is resident has its next turn"
    assert Residents(0, dict(residents.sessions)).fits(asking("b", 5000)), "a replica that keeps nothing admits all"


def test_what_a_group_shares_counts_once() -> None:
    residents = Residents(CAPACITY)
    first = residents.admit(asking("a", 800, "group"), now=1.0)
    first.tokens = 850
    residents.ended(first, now=2.0)
    assert residents.fits(asking("b", 850, "group")) and not residents.fits(asking("b", 851, "group"))
    assert not residents.fits(asking("c", 100, "other"))
    first.tokens = 10  # of a conversation of its own
    residents.ended(first, now=3.0)
    assert residents.fits(asking("c", 100, "other")) and not residents.fits(asking("c", 101, "other")), "the others keep what they share"


def test_those_that_came_last_leave_when_sessions_outgrow_the_room() -> None:
    residents = Residents(CAPACITY)
    held = [residents.admit(asking(name, 300), now=1.0 + at) for at, name in enumerate(("first", "second", "third"))]
    for one in held[1:]:
        residents.ended(one, now=5.0)
    held[0].tokens = 700
    residents.ended(held[0], now=6.0)
    assert list(residents.sessions) == ["first"]
    held[0].tokens = 5000
    residents.ended(residents.admit(held[0], now=7.0), now=8.0)
    assert list(residents.sessions) == ["first"], "one alone stays"


def test_those_that_came_first_make_room_unless_they_have_a_turn() -> None:
    residents = Residents(CAPACITY)
    names = ["first", "second", "third"]
    for at, name in enumerate(names):
        residents.admit(asking(name, 300), now=1.0 + at)
    for name in names[1:]:
        residents.ended(residents.sessions[name], now=10.0)
    residents.admit(asking("fourth", 300), now=11.0)
    assert list(residents.sessions) == ["first", "third", "fourth"]
    assert [one.session.id for one in residents.idle()] == ["third"]
    residents.admit(asking("fifth", 900), now=12.0)
    assert list(residents.sessions) == ["first", "fourth", "fifth"], "who has a turn stays, though it is too much then"


class Cache:
    """The prefix cache of an engine: tokens by session, those that were used longest ago are dropped first."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, int] = OrderedDict()
        self.computed = 0

    def turn(self, name: str, prompt: int, completion: int) -> None:
        self.computed += prompt - min(prompt, self.held.pop(name, 0))
        self.held[name] = prompt + completion
        while sum(self.held.values()) > CAPACITY:
            self.held.popitem(last=False)


def played(sessions: int, turns: int, *, by_room: bool) -> int:
    """Returns the prompt tokens that an engine computes for sessions that take turns one after the other, of 50 tokens and more."""
    residents, cache, left = Residents(CAPACITY if by_room else 0), Cache(), {f"s{number}": turns for number in range(sessions)}
    for now in range(10_000):
        for name in [name for name, count in left.items() if count]:
            prompt = 50 + 5 * (turns - left[name])
            if residents.fits(each := asking(name, prompt)):
                resident = residents.admit(each, now=float(now))
                cache.turn(name, prompt, 5)
                resident.tokens = prompt + 5
                left[name] -= 1
                residents.ended(resident, float(now))
                if not left[name]:
                    residents.leave(resident)
    assert not any(left.values())
    return cache.computed


def test_of_twice_the_sessions_that_fit_few_prompts_are_computed_again() -> None:
    turns = 20
    fitting = int(HELD_SHARE * CAPACITY) // (50 + 5 * turns)
    by_request, by_session = (played(2 * fitting, turns, by_room=by_room) for by_room in (False, True))
    assert by_request > 10 * by_session >= 10 * 2 * fitting * 50
