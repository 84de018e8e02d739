"""Sessions in a real store: whoever appends to one sees what others did, and a key opens its own alone."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from myxo.launch.launcher import erase_from_store
from services.gateway.replicas import ASKED_AT_ONCE, IDLE_SECONDS, GenerationTarget, Replicas, Resident
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.messages import Sampling
from shared.sessions.session import (
    PendingTurn,
    Session,
    SessionEnded,
    SessionLog,
    SessionOver,
    SessionUnknown,
    Turn,
    TurnBegun,
    TurnEnded,
    TurnExtended,
    TurnHeld,
    new_key,
)
from shared.sessions.session_store import KEPT_SECONDS, OPENED_SECONDS, SessionStore
from shared.store.payload_store import Store


def session(name: str = "s1", **more: object) -> tuple[Session, str]:
    key, digest = new_key(name)
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    fields = {"group": "g1", "rollout": 0, "attempt": 0, "deadline": time.time() + 60, "sampling": sampling} | more
    return Session(id=name, key_digest=digest, **fields), key


def begun(request: str, holder: str = "a", seconds: float = 60.0, **more: object) -> TurnBegun:
    now = time.time()
    return TurnBegun(request=request, holder=holder, at=now, until=now + seconds, rest=np.array([1, 2]), **more)


def tokens(*ids: int) -> dict[str, object]:
    spans = ((0, len(ids), 3),)
    return {"completion": np.array(ids), "log_probs": np.full(len(ids), -1, np.float32), "spans": spans}


def ended(request: str, *ids: int, holder: str = "a") -> TurnEnded:
    return TurnEnded(request=request, holder=holder, finish="stop", **tokens(*ids))


def drawn(request: str, start: int, *ids: int, holder: str = "a", seconds: float = 60.0) -> TurnExtended:
    return TurnExtended(request=request, holder=holder, start=start, until=time.time() + seconds, **tokens(*ids))


@pytest.fixture
def sessions(store: Store, run_name: str) -> SessionStore:
    return SessionStore(store, run_name)


async def test_a_session_is_what_was_appended_to_it(sessions: SessionStore, store: Store, run_name: str) -> None:
    opened, key = session()
    await sessions.open(opened)
    log = await sessions.find(key)
    assert isinstance(await sessions.begin(log, begun("r1")), PendingTurn)
    assert (await sessions.append(log, ended("r1", 5, 6))).tokens.tolist() == [1, 2, 5, 6]
    again = await sessions.find(key)
    assert again.session == opened
    assert [turn.tokens.tolist() for turn in again.turns.values()] == [[1, 2, 5, 6]]
    assert (await sessions.end(opened.id, SessionEnded(at=1.0, reward=0.5))).ended == SessionEnded(at=1.0, reward=0.5)
    await store.commands("its end", [("UNLINK", f"{run_name}:session:{opened.id}")])
    with pytest.raises(SessionUnknown, match="opens no session"):
        await sessions.find(key)


async def test_a_run_that_begins_anew_has_no_sessions_and_no_groups_of_producers(
    sessions: SessionStore, store: Store, valkey: EmbeddedValkey, run_name: str
) -> None:
    await sessions.open(session()[0])
    key = Subjects(run_name).ingest_key("a")
    await store.commands("a producer's id", [("SET", key, b"g1"), ("SET", f"{run_name}:notes", b"a user's")])
    await erase_from_store(valkey.url, run_name)
    assert await sessions.opened(int(time.time() // OPENED_SECONDS), 0, 5.0) == []
    assert await store.missing([key, Subjects(run_name).session_key("s1"), f"{run_name}:notes"]) == [
        key,
        Subjects(run_name).session_key("s1"),
    ]
    await store.commands("the end", [("UNLINK", f"{run_name}:notes")])


async def test_a_key_opens_its_own_session_alone(sessions: SessionStore) -> None:
    (one, key), (other, other_key) = session("s1"), session("s2")
    await sessions.open(one)
    await sessions.open(other)
    await sessions.make_gateway_key()
    secret, others_secret = key.rpartition("-")[2], other_key.rpartition("-")[2]
    assert (await sessions.find(key)).session.id == "s1"
    for wrong in (
        f"sk-myxo-s1-{others_secret}",
        f"sk-myxo-s3-{secret}",
        "sk-myxo-s1-",
        f"sk-myxo-s1-{secret}x",
        f"sk-myxo-s1-{secret[:-1]}",
        f"sk-myxo-.gateway-key-{secret}",
        f"sk-myxo-s*-{secret}",
        f"sk-myxo-s1\n-{secret}",
        f"sk-myxo-../s1-{secret}",
    ):
        with pytest.raises(SessionUnknown):
            await sessions.find(wrong)


async def test_two_gateways_end_one_turn_once(sessions: SessionStore) -> None:
    opened, key = session()
    await sessions.open(opened)
    one, other = await sessions.find(key), await sessions.find(key)
    await sessions.begin(one, begun("r1", "a"))
    with pytest.raises(TurnHeld) as held:
        await sessions.begin(other, begun("r1", "b"))
    assert held.value.until > time.time()
    await sessions.append(one, ended("r1", 7))
    repeated = await sessions.begin(other, begun("r1", "b"))
    assert isinstance(repeated, Turn) and repeated.completion.tolist() == [7], "the retry is answered with what was drawn"
    assert (await sessions.append(one, ended("r1", 8))).completion.tolist() == [7]


async def test_a_turn_whose_gateway_died_goes_on_from_its_tokens(sessions: SessionStore) -> None:
    opened, key = session()
    await sessions.open(opened)
    dead, next_one = await sessions.find(key), await sessions.find(key)
    await sessions.begin(dead, begun("r1", "a", seconds=0.0))
    await sessions.extend(dead, drawn("r1", 0, 5, 6, seconds=0.0))
    taken = await sessions.begin(next_one, begun("r1", "b"))
    assert isinstance(taken, PendingTurn) and taken.completion.tolist() == [5, 6] and taken.spans == ((0, 2, 3),)
    with pytest.raises(TurnHeld):  # it was not dead after all
        await sessions.extend(dead, drawn("r1", 2, 7))
    with pytest.raises(TurnHeld):
        await sessions.append(dead, ended("r1", 5, 6, 7))
    assert (await sessions.append(next_one, ended("r1", 5, 6, 8, holder="b"))).completion.tolist() == [5, 6, 8]


async def test_an_ended_session_takes_no_turn(sessions: SessionStore) -> None:
    opened, key = session()
    await sessions.open(opened)
    log = await sessions.find(key)
    await sessions.begin(log, begun("r1"))
    await sessions.append(log, ended("r1", 5))
    await sessions.begin(log, begun("r2"))
    await asyncio.gather(*(sessions.end(opened.id, SessionEnded(at=1.0, reward=float(n), reason="done")) for n in range(3)))
    for refused in (sessions.append(log, ended("r2", 6)), sessions.begin(log, begun("r3")), sessions.extend(log, drawn("r2", 0, 1))):
        with pytest.raises(SessionOver, match="s1 has ended: done"):
            await refused
    assert isinstance(await sessions.begin(log, begun("r1")), Turn), "what it had drawn is answered still"
    final = await sessions.read(opened.id)
    assert list(final.turns) == ["r1"] and final.ended == log.ended


async def test_a_session_that_is_gone_takes_no_turn(sessions: SessionStore, store: Store, run_name: str) -> None:
    opened, key = session()
    await sessions.open(opened)
    log = await sessions.find(key)
    [left] = await store.commands("its time", [("TTL", f"{run_name}:session:s1")])
    assert KEPT_SECONDS < left <= KEPT_SECONDS + 61
    await store.commands("its end", [("UNLINK", f"{run_name}:session:{opened.id}")])
    for gone in (sessions.begin(log, begun("r1")), sessions.refresh(log), sessions.end(opened.id, SessionEnded(at=1.0))):
        with pytest.raises(SessionUnknown):
            await gone
    assert await store.commands("nothing was made", [("EXISTS", f"{run_name}:session:s1")]) == [0]


async def test_turns_survive_the_stores_death(tmp_path: Path, crash: Callable[[EmbeddedValkey], None], run_name: str) -> None:
    """With ``everysec`` a busy disk has the server answer seconds before it writes: what is killed then has lost what it answered."""
    mortal_valkey = EmbeddedValkey(tmp_path / "valkey", appendfsync="always")
    mortal_valkey.start()
    store = Store(mortal_valkey.url, run_name)
    sessions = SessionStore(store, run_name)
    try:
        opened, key = session()
        await sessions.open(opened)
        log = await sessions.find(key)
        await sessions.begin(log, begun("r1"))
        crash(mortal_valkey)
        appended = asyncio.create_task(sessions.append(log, ended("r1", 5)))
        await asyncio.to_thread(mortal_valkey.start)
        assert (await appended).completion.tolist() == [5]
        assert list((await sessions.find(key)).turns) == ["r1"]
    finally:
        await store.close()
        mortal_valkey.stop()


async def test_sessions_that_have_ended_make_room_at_every_replica_while_turns_wait(sessions: SessionStore) -> None:
    """However many others are idle at the replicas before it."""
    replicas = Replicas(None, sessions, 8)  # type: ignore[arg-type]
    replicas.known = [GenerationTarget(name, name, 1, 512, 100, kept=1 << 20) for name in ("first", "second")]
    replicas._share_residents(1)
    ended = set[str]()
    for name, residents in replicas._residents.items():
        for number in range(ASKED_AT_ONCE + 1):
            opened, _ = session(f"{name}.{number}")
            await sessions.open(opened)
            residents.ended(residents.admit(Resident.asking(SessionLog(opened), 10), now=1.0), now=2.0)
        ended.add(opened.id)
        await sessions.end(opened.id, SessionEnded(at=1.0))
    before = {name for residents in replicas._residents.values() for name in residents.sessions}
    await replicas._make_room(3.0)
    assert replicas.residents == len(before), "nobody waits"
    replicas.waiting = 1
    for _ in range(3):
        await replicas._make_room(3.0)
    assert {name for residents in replicas._residents.values() for name in residents.sessions} == before - ended
    await replicas._make_room(3.0 + IDLE_SECONDS)
    assert not replicas.residents
