"""Replicas as the gateway sees them, and whose keys and values stay there."""

import asyncio
import socket
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from services.gateway.replicas import (
    BACKED_OFF,
    FEWEST,
    HELD_SHARE,
    GenerationClient,
    GenerationLimit,
    GenerationTarget,
    Replicas,
    Resident,
    Residents,
    choose,
    targets,
)
from services.gateway.tinker.tinker_service import Sampler
from services.gateway.turns import LiveTurn, Turns, UnrecordedSessions
from shared.config.service_sections import GatewaySection
from shared.formats.request import ChatTurn, TokenTurn, TurnRefused
from shared.schema.messages import Sampling
from shared.schema.service_messages import ServiceStatus
from shared.service.engine_load_balancer import EngineSpread
from shared.sessions.session import CONTEXT_GAUGE, EVAL_GAUGE, VOCABULARY_GAUGE, Session, SessionLog, TurnGeneration
from tests.support.http_server import http_server
from tests.support.run_config import run_config
from tests.support.wire_server import PLAIN


def target(number: int, version: int = 3) -> GenerationTarget:
    return GenerationTarget(f"rollout-{number}", f"http://{number}", version, 512, 100)


def status(number: int, **changes: object) -> ServiceStatus:
    fields = {"service": "rollout", "instance": f"rollout-{number}", "host": "h", "pid": 1, "http": "", "state": "ready", "at": 0.0}
    gauges = {CONTEXT_GAUGE: 512.0, VOCABULARY_GAUGE: 100.0}
    return ServiceStatus(**{**fields, "engine": f"http://{number}", "version": 3, "gauges": gauges, **changes})


def test_evaluations_have_replicas_of_their_own_where_the_run_says_so() -> None:
    statuses = [status(0), status(1, gauges={**status(1).gauges, EVAL_GAUGE: 1.0})]
    for apart, expected in ((True, (["rollout-1"], ["rollout-0"])), (False, (["rollout-0", "rollout-1"],) * 2)):
        replicas = Replicas(None, None, 8, apart)  # type: ignore[arg-type]
        replicas.known = targets(statuses)
        assert tuple([one.instance for one in replicas.fleet(evaluation)] for evaluation in (True, False)) == expected


def test_a_version_that_only_the_other_fleet_serves_is_behind() -> None:
    replicas = Replicas(None, None, 8, apart=True)  # type: ignore[arg-type]
    replicas.known = targets([status(0), status(1, version=9, gauges={**status(1).gauges, EVAL_GAUGE: 1.0})])
    replicas.check_version(9, replicas.fleet(evaluation=True))
    with pytest.raises(TurnRefused, match="serve version 3, older than the 9") as refused:
        replicas.check_version(9, replicas.fleet(evaluation=False))
    assert refused.value.status == 409


async def test_what_a_sequence_may_be_outlasts_the_replicas_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is made while a trainer has the GPUs is refused for no length: its turn waits for a replica."""
    monkeypatch.setattr("services.gateway.replicas.REFRESH_SECONDS", 0.0)
    statuses = [status(0), status(1, gauges={CONTEXT_GAUGE: 256.0, VOCABULARY_GAUGE: 90.0})]
    registry = Mock(alive=AsyncMock(side_effect=[statuses[:1], statuses, [status(0, engine="")], asyncio.CancelledError]))
    replicas = Replicas(registry, Mock(ended=AsyncMock(return_value=set())), 8)
    with pytest.raises(asyncio.CancelledError):
        await replicas.keep()
    assert (replicas.known, replicas.context, replicas.vocabulary) == ([], 256, 90)


async def test_a_turn_whose_fleet_is_gone_is_refused_by_its_deadline_with_the_fleets_name() -> None:
    replicas = Replicas(None, None, 8, apart=True)  # type: ignore[arg-type]
    replicas.known = targets([status(0)])
    with pytest.raises(TurnRefused, match="no replica is there for evaluations .rollout.eval_replicas."):
        await replicas._change(0.0, 0, evaluation=True)


async def test_a_turn_that_waits_for_a_first_replica_is_told_that_its_gateway_stops() -> None:
    replicas = Replicas(None, None, 8)  # type: ignore[arg-type]
    turns = Turns(Mock(), replicas, Mock(), Mock(), "m", "gateway-1", GatewaySection(), Mock(), Mock())
    turn: Any = TokenTurn(request_id="r1", model=None, prompt=np.ones(3, np.int32))
    log = SessionLog(asking("s", 3).session)
    asked = [*turns.results(log, turn), asyncio.create_task(turns.count(log, turn))]
    await asyncio.sleep(0)
    turns.watch.stop()
    for one in asked:
        with pytest.raises(TurnRefused, match="this gateway stops; another continues"):
            await one


async def test_a_turn_that_is_penalised_is_one_request_s_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine counts what that request has generated: what follows an aborted one's tokens would not be penalised for them."""
    monkeypatch.setattr("services.gateway.turns.PAUSE_SECONDS", 0.0)
    replicas, seen = Replicas(None, None, 8), Mock(of=AsyncMock(return_value={}), store=AsyncMock())  # type: ignore[arg-type]
    replicas.note([target(0)])
    for penalty, expected, requests in ((1.0, [5, 6, 7], [[1, 1], [1, 1, 5, 6]]), (1.05, [7], [[1, 1], [1, 1]])):
        pieces = [generated([5, 6], "abort"), generated([7], "stop")]
        client, sessions = Mock(generate=AsyncMock(side_effect=pieces)), UnrecordedSessions(None, "run")  # type: ignore[arg-type]
        chat = MagicMock(stop_ids=[], text=lambda ids: "x" * len(ids))
        turns = Turns(sessions, replicas, client, chat, "m", "gateway-1", GatewaySection(), Mock(on=False), seen)
        sampling = Sampling(temperature=1.0, max_new_tokens=9, repetition_penalty=penalty)
        log = SessionLog(asking("s", 3).session.model_copy(update={"sampling": sampling, "evaluation": True}))
        await turns.results(log, TokenTurn(request_id="r1", model=None, prompt=np.ones(2, np.int32)), [LiveTurn()])[0]
        assert log.turns["r1"].completion.tolist() == expected
        assert [one.args[1].input_ids.tolist() for one in client.generate.call_args_list] == requests


async def test_the_answers_to_one_request_have_one_prompt_whose_pictures_are_stored_once() -> None:
    replicas, sessions = Replicas(None, None, 8), UnrecordedSessions(None, "run")  # type: ignore[arg-type]
    replicas.note([target(0)])
    seen = Mock(of=AsyncMock(return_value={}), store=AsyncMock(), expanded=lambda tokens, messages, asked: tokens)
    client = Mock(generate=AsyncMock(side_effect=[generated([5 + number], "stop") for number in range(3)]))
    chat = MagicMock(stop_ids=[], text=lambda ids: "x" * len(ids), text_bytes=lambda messages, tools: 9, tokenizer=Mock(longest_token=9))
    chat.varied.return_value.render.return_value, chat.varied.return_value.grammar.return_value = np.ones(2, np.int32), ""
    turns = Turns(sessions, replicas, client, chat, "m", "gateway-1", GatewaySection(), Mock(on=False), seen)
    turns._answers = Mock(chat=Mock(return_value=PLAIN))
    log = SessionLog(asking("s", 3).session.model_copy(update={"sampling": Sampling(temperature=1.0, max_new_tokens=9)}))
    asked = ChatTurn(request_id="r", model=None, messages=[{"role": "user", "content": "?"}], choices=3)
    await asyncio.gather(*turns.results(log, asked))
    assert sorted(log.turns) == ["r", "rn1", "rn2"] and {tuple(one.prompt.tolist()) for one in log.turns.values()} == {(1, 1)}
    assert sorted(one.completion.tolist() for one in log.turns.values()) == [[5], [6], [7]]
    assert (chat.varied.return_value.render.call_count, seen.store.await_count) == (1, 1)
    chat.text_bytes = lambda messages, tools: 512 * 9  # a token is 9 bytes at most
    with pytest.raises(TurnRefused, match="prompt is too long: 512 tokens > 511 maximum"):
        await turns.results(log, replace(asked, request_id="long"))[0]
    assert seen.store.await_count == 1, "nothing of what is refused is stored"


async def test_the_time_for_which_replicas_sleep_takes_nothing_from_the_wait_for_room() -> None:
    replicas = Replicas(None, None, 8)  # type: ignore[arg-type]
    replicas.known = [replace(target(0), kept=100)]
    replicas._share_residents(1)
    [residents] = replicas._residents.values()
    residents.admit(asking("first", 80), now=0.0)

    async def placed() -> None:
        async with replicas.place(SessionLog(asking("second", 80).session), 80, 0, 0.4):
            pass

    replicas.asleep = True
    waiting = asyncio.create_task(placed())
    assert not (await asyncio.wait([waiting], timeout=1.0))[0]
    replicas.asleep = False
    async with asyncio.timeout(60):
        await waiting


async def test_a_machine_that_is_gone_breaks_the_connections_to_it() -> None:
    """It ends none itself, as the end of a process does: its turns would wait for all of their time."""
    client = GenerationClient(Mock())
    async with (
        http_server(lambda _asked, _number: web.Response(body=bytes(8 << 20))) as server,
        client._http.post(server.url, json={}) as answer,
    ):
        assert answer.connection is not None and answer.connection.transport is not None
        used = answer.connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert (
            0
            < used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            < 1e-3 * used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        )
    await client.close()


def generated(tokens: list[int], finish: Any) -> TurnGeneration:
    arrays = {"completion": np.array(tokens, np.int32), "log_probs": np.zeros(len(tokens), np.float32)}
    return TurnGeneration(**arrays, spans=((0, len(tokens), 3),), finish=finish)


ALL = [target(number) for number in range(4)]
SESSIONS = [f"session-{number}" for number in range(200)]


def test_a_session_stays_where_it_is_when_another_replica_leaves() -> None:
    before = {session: choose(session, ALL, 0, {}, ()) for session in SESSIONS}
    after = {session: choose(session, ALL[:3], 0, {}, ()) for session in SESSIONS}
    assert {one.instance for one in before.values() if one} == {one.instance for one in ALL}, "each replica has some"
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert moved == [session for session in SESSIONS if before[session] == ALL[3]]


def test_a_replica_without_room_or_behind_draws_nothing() -> None:
    for session in SESSIONS[:20]:
        first = choose(session, ALL, 0, {}, ())
        assert first is not None
        other = choose(session, ALL, 0, {first.instance: False}, ())
        assert other is not None and other != first
        assert choose(session, ALL, 4, {}, ()) is None
        assert choose(session, [*ALL, target(9, version=4)], 4, {}, ()) == target(9, version=4)
        assert choose(session, [], 0, {}, ()) is None


def test_one_that_failed_comes_last() -> None:
    first = choose("s", ALL, 0, {}, ())
    assert first is not None
    assert choose("s", ALL, 0, {}, {first.instance}) != first
    assert choose("s", [first], 0, {}, {first.instance}) == first


async def test_the_only_replica_is_asked_once_in_a_while_when_its_engine_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that wait for it take no place at it in its pauses, which grow; an answer ends them."""
    now, moments = 0.0, set[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replicas = Replicas(None, None, 8)  # type: ignore[arg-type]
    replicas.known = [target(0)]
    turns = [Resident.asking(SessionLog(asking(f"session-{number}", 8).session), 8) for number in range(4)]
    while now < 10.0:
        for turn in turns:
            if found := replicas._choice(turn, 0, now):
                moments.add(now)
                replicas.failed.avoid(found.instance)
        now += 0.05
    assert len(moments) == 8 and target(0).instance in replicas.failed
    replicas.failed.answered(target(0).instance)
    assert all(replicas._choice(turn, 0, now) for turn in turns)


async def test_an_address_of_several_engines_asks_one_that_has_failed_last(tmp_path: Path) -> None:
    """It has the fewest requests in hand, since it refuses each at once."""
    async with http_server(lambda _asked, _number: web.Response(status=502)) as dead, http_server(lambda _asked, _number: {}) as there:
        service: Any = SimpleNamespace(config=run_config(tmp_path), instance="rollout-9")
        spread = EngineSpread(service, None)
        spread._others = [status(number, engine=server.url) for number, server in enumerate((dead, there))]
        await spread.open()
        try:
            async with aiohttp.ClientSession(spread.url) as session:
                for _ in range(8):
                    async with session.post("/generate", json={}) as answer:
                        assert answer.status == 200
        finally:
            await spread.close()
        assert (len(dead.asked), len(there.asked)) == (1, 8)
    spread._others = [status(number, version=version, engine=f"http://{number}") for number, version in ((1, 1), (2, 2))]
    spread.least = 2  # of an evaluation that begins, before the registry is read again
    assert {spread._choice(set()) for _ in range(4)} == {"http://2"}


def test_a_replica_without_verified_weights_or_a_door_is_none() -> None:
    known = [status(0), status(1, version=-1), status(2, engine=""), status(3, gauges={}), status(4, service="buffer")]
    assert [one.instance for one in targets(known)] == ["rollout-0"]


def test_draws_are_fewer_while_memory_lacks_and_come_back() -> None:
    limit = GenerationLimit(64)
    limit.running = 64
    assert not limit.has_room
    for _ in range(5):  # of one shortage
        limit.ended(1, now=10.0)
    assert limit.limit == 64 * BACKED_OFF
    for second in range(100):
        limit.ended(1, now=20.0 + second)
    assert limit.limit == FEWEST
    limit.running = FEWEST
    for _ in range(10_000):
        limit.ended(0, now=200.0)
        limit.running = int(limit.limit)
    assert limit.limit == 64
    idle = GenerationLimit(64)
    idle.ended(1, now=1.0)
    for _ in range(100):
        idle.ended(0, now=2.0)
    assert idle.limit == 64 * BACKED_OFF, "what is not used says nothing about what would fit"
    few = GenerationLimit(1)
    few.ended(1, now=1.0)
    assert few.limit == 1, "what lacks memory gets no more than the config allows"


# --- which sessions' keys and values stay at a replica, and what that saves where they do not all fit

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


async def test_a_client_s_sample_is_given_up_where_no_replica_is_there_long_before_its_own_deadline(tmp_path: Path) -> None:
    service = SimpleNamespace(config=run_config(tmp_path, rollout={"generate_timeout": 0.1}))
    sampler = Sampler(service, Mock(), Mock(), Mock(known=[]), Mock())  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        await sampler._generated(Mock(seconds=5.0))
    assert time.monotonic() - begun < 4
