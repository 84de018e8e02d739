"""Groups from outside over real servers: a gateway's door, the buffer that admits, the reward service that scores, and a trainer."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.gateway.ingest import GroupIntake, add_ingest_routes
from services.reward.reward_service import serve as serve_rewards
from shared.bus import runs
from shared.bus.registry import Registry
from shared.bus.subjects import TRAIN
from shared.config.service_sections import KEY_VARIABLE, ingest_key
from shared.data.tokenizer import Tokenizer
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.addresses import HttpAddress
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.runtime.http_endpoints import serving
from shared.schema import codec, sample
from shared.schema.ledger import GroupsScored
from shared.schema.messages import Batch
from shared.service import service_base
from shared.service.service_base import Service
from shared.store.payload_store import Store
from tests.integration.buffer.conftest import SHORT, Served, new_run, served
from tests.integration.buffer.player import Player
from tests.support.gateways import ready_gateway, started_gateway
from tests.support.waiting import until

__all__ = ["new_run", "served"]

KEY = "the producers' own key"
MOST = 1 << 20

Door = tuple[Player, httpx.AsyncClient]
NewDoor = Callable[..., Awaitable[Door]]


def group(name: str, **changes: Any) -> dict[str, Any]:
    """Two samples of five tokens, of which the third and the last are trained."""
    columns: dict[str, Any] = {
        "id": name,
        "tokens": [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]],
        "masks": [[0, 0, 1, 0, 1]] * 2,
        "log_probs": [[0.0, 0.0, -0.5, 9.0, -0.25]] * 2,
        "versions": 0,
        "scores": [1.0, {"exact": 0.0, "style": 0.5}],
    }
    return columns | changes


async def connected(player: Player, role: str, monkeypatch: pytest.MonkeyPatch, instance: str) -> Service:
    for name, value in player.environment(instance).items():
        monkeypatch.setenv(name, value)
    return await service_base.connect(role)


@pytest.fixture
async def door(served: Served, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewDoor]:
    """Opens a run's door for groups, with a buffer, a reward service and weights of version 0."""
    services: list[tuple[Service, asyncio.Task[None] | None]] = []
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        stop, doors = asyncio.Event(), list[asyncio.Task[None]]()

        async def open_door(**sections: dict[str, Any]) -> Door:
            sections.setdefault("ingest", {}).setdefault("ingest_groups", "alone")
            sections.setdefault("reward", {})["reward_key"] = "exact"
            player = await served(**sections)
            vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
            await runs.create(player.bus, player.config, await runs.store_url(player.bus, player.config.run.name), vocabulary)
            await player.live(0)
            rewards = await connected(player, "reward", monkeypatch, "reward-1")
            services.append((rewards, asyncio.create_task(serve_rewards(rewards))))
            gateway = await connected(player, "gateway", monkeypatch, "gateway-1")
            services.append((gateway, None))
            app = FastAPI()
            add_ingest_routes(app, GroupIntake(gateway, Tokenizer(tiny_model)), KEY, MOST)
            opened = asyncio.Event()

            async def life() -> None:
                async with serving(app, HttpAddress("127.0.0.1", 0)) as address:
                    client.base_url = f"http://{address}"
                    opened.set()
                    await stop.wait()

            doors.append(asyncio.create_task(life()))
            await opened.wait()
            await until(lambda: rewards.state == "ready", "the reward service")
            return player, client

        yield open_door
        stop.set()
        await asyncio.gather(*doors)
    for service, task in services:
        service.stopping.set()
        if task is not None:
            await task
        await service.store.close()
        await service.bus.close()


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/groups", json=body)


async def test_groups_from_outside_are_scored_batched_trained_and_in_the_ledger(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 1}, ingest={"ingest_wait": 2.0})
    described = (await client.get("/groups")).json()
    assert (described["version"], described["rollouts"], described["run"]) == (0, 2, player.config.run.name)

    first = await post(client, group("mine-1"))
    second = await post(client, group("mine-2", scores=None, environment="exact", label="2", texts=["2", "3"], metadata={"level": 3}))
    assert (first.status_code, second.status_code) == (200, 200), (first.text, second.text)
    assert not first.json()["repeated"]
    again = await post(client, group("mine-1"))
    assert again.json() == {"id": "mine-1", "group": first.json()["group"], "repeated": True}

    batch = await player.batch(0)
    assert isinstance(batch, Batch)
    by_id = {taken.group: taken for taken in batch.groups}
    assert set(by_id) == {first.json()["group"], second.json()["group"]}
    assert by_id[first.json()["group"]].rewards == [1.0, 0.0], "the producer's scores"
    assert by_id[second.json()["group"]].rewards == [1.0, 0.0], "the environment's"
    [one, other] = sample.decode(await player.store.read(by_id[first.json()["group"]].payload))
    assert (one.prompt.tolist(), one.response.tolist(), one.mask.tolist()) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert (one.log_probs.tolist(), one.segments, other.response.tolist()) == ([-0.5, 9.0, -0.25], [(0, 3, 0)], [6, 7, 8])
    assert one.metadata["ingested"] == "mine-1"

    await player.trained(0)
    await player.durable(1)
    scored = [taken.group for record in await player.records() if isinstance(record, GroupsScored) for taken in record.groups]
    assert sorted(scored) == sorted(by_id), "each once, although one was sent twice"
    audit = await player.audit()
    assert audit.ok, audit.violations
    late = await post(client, group("late", versions=1))
    assert (late.status_code, late.json()["error"]["code"]) == (410, "run_ended")
    assert (audit.trained, audit.in_flight) == (2, audit.admitted - audit.trained - audit.dropped.total() - audit.dead.total())


async def test_the_run_that_admits_nothing_holds_producers_back_and_takes_them_again_later(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 2, "max_staleness": 0}, ingest={"ingest_wait": 0.5})
    for name in ("a", "b"):
        assert (await post(client, group(name))).status_code == 200
    full = await post(client, group("c"))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "no_room")
    assert int(full.headers["Retry-After"]) >= 1
    await player.batch(0)
    await player.trained(0)  # version 1: the groups of the next step are admitted
    old = await post(client, group("c"))
    assert (old.status_code, old.json()["error"]["code"]) == (409, "stale_group"), "made by version 0, which is over the bound now"
    assert (await post(client, group("c", versions=1))).status_code == 200, "a refusal binds no id"
    assert (await player.audit()).ok


@pytest.mark.extra(each=True)
async def test_samples_of_roles_keep_them_to_the_batch(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 1, "n_samples_per_prompt": 2})
    four = {name: value * 2 for name, value in group("x").items() if name in ("tokens", "masks", "log_probs")}
    body = group("duel", **four, scores=[1.0, -1.0, 0.5, -0.5], rollouts=[0, 0, 1, 1], roles=["white", "black"] * 2)
    taken = await post(client, body)
    assert taken.status_code == 200, taken.text
    await post(client, group("other"))
    batch = await player.batch(0)
    assert isinstance(batch, Batch)
    [duel] = [one for one in batch.groups if one.group == taken.json()["group"]]
    stored = sample.decode(await player.store.read(duel.payload))
    assert [(one.rollout, one.role) for one in stored] == [(0, "white"), (0, "black"), (1, "white"), (1, "black")]
    assert duel.rewards == [1.0, -1.0, 0.5, -0.5]


@pytest.mark.extra(each=True)
async def test_a_producer_that_waits_is_told_when_its_gateway_stops(door: NewDoor, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    """It is sent away with a status that says to come again, and nothing of its group is left behind."""
    player, other = await door(rollout={"num_rollout": 2, "max_staleness": 0}, ingest={"ingest_wait": 600.0})
    for name in ("a", "b"):
        assert (await post(other, group(name))).status_code == 200
    environment = {**player.environment("gateway-0"), "REDIS_URL": valkey.url, KEY_VARIABLE: KEY}
    with started_gateway(0, tmp_path, environment) as process:
        url = await ready_gateway(Registry(player.bus, player.config.run.name), 0, process)
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=600) as client:
            both = [asyncio.create_task(post(client, group("c"))) for _ in range(2)]
            [refused], [waiting] = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().json()["error"]["code"] == "in_hand", "the other one waits for room"
            process.process.terminate()
            told = await waiting
        assert (told.status_code, told.json()["error"]["code"]) == (503, "gateway_stopping")
        assert int(told.headers["Retry-After"]) >= 1
        assert process.process.wait(60) == 0, process.words()
    await player.batch(0)
    await player.trained(0)
    assert (await post(other, group("c", versions=1))).status_code == 200, "nothing of it was bound"


async def test_an_id_stands_for_one_group(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 4, "max_staleness": 3})
    answers = await asyncio.gather(*(post(client, group("same")) for _ in range(4)))
    assert sorted({answer.status_code for answer in answers}) in ([200], [200, 409])
    assert len({answer.json()["group"] for answer in answers if answer.status_code == 200}) == 1
    other = await post(client, group("same", scores=[0.0, 0.0]))
    assert (other.status_code, other.json()["error"]["code"], other.json()["error"]["param"]) == (409, "id_taken", "id")
    groups = {(await post(client, group(f"g{number}"))).json()["group"] for number in range(3)}
    assert len(groups) == 3

    async def all_scored() -> bool:
        records = await player.records()
        return sum(len(record.groups) for record in records if isinstance(record, GroupsScored)) == 4

    await until(all_scored, "four groups that are scored")
    assert (await player.audit()).ok


async def test_a_group_whose_gateway_died_before_it_was_published_is_in_once_its_producer_repeats_it(door: NewDoor) -> None:
    """The binding stands, the task is leased by nobody who works on it: as kill -9 between the two leaves it."""
    player, client = await door(rollout={"num_rollout": 1})
    taken = (await post(client, group("dying"))).json()["group"]
    key = player.names.ingest_key(taken)
    await player.store.commands("forget that it was published", [("DEL", f"{key}:attempt-0:in")])
    repeated = await post(client, group("dying"))
    assert (repeated.status_code, repeated.json()) == (200, {"id": "dying", "group": taken, "repeated": True})
    await post(client, group("other"))
    batch = await player.batch(0)
    assert taken in {one.group for one in batch.groups}
    assert (await player.audit()).ok, "the second outcome of the attempt counts for nothing"


def fail_once(monkeypatch: pytest.MonkeyPatch, of: type, method: str, *, after: bool = False) -> None:
    """Has the first call raise, before or ``after`` what it does."""
    real, away = getattr(of, method), [DeadlineExceeded("an answer", "the bus", 0.0, "it is tried again")]

    async def called(*given: Any, **more: Any) -> Any:
        found = await real(*given, **more) if not away or after else None
        if away:
            raise away.pop()
        return found

    monkeypatch.setattr(of, method, called)


@pytest.mark.extra(each=True)
async def test_a_task_whose_group_was_published_late_is_given_to_no_other(door: NewDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes again once its lease has run out; a second group would count as the same attempt's and be lost."""
    fail_once(monkeypatch, GroupIntake, "_published")
    player, client = await door(rollout={"num_rollout": 1, "max_staleness": 0}, ingest={"ingest_wait": 10.0}, bus=SHORT)
    assert (await post(client, group("first"))).status_code == 503
    assert (await post(client, group("first"))).json()["repeated"]
    answers = [await post(client, group(name)) for name in ("second", "third")]
    assert [answer.status_code for answer in answers] == [200, 429], "the run admitted two groups"
    batch = await player.batch(0)
    stored = [sample.decode(await player.store.read(one.payload))[0].metadata["ingested"] for one in batch.groups]
    assert sorted(stored) == ["first", "second"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_group_whose_gateway_died_as_it_reported_it_is_in_once(door: NewDoor, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Whoever gets its task next reports it again; its producer has not come again yet."""
    fail_once(monkeypatch, Service, "report", after=after)
    player, client = await door(rollout={"num_rollout": 1, "max_staleness": 0}, ingest={"ingest_wait": 8.0}, bus=SHORT)
    assert (await post(client, group("first"))).status_code == 503
    answers = [await post(client, group(name)) for name in ("second", "third")]
    assert [answer.status_code for answer in answers] == [200, 429], "the run admitted two groups"
    batch = await player.batch(0)
    again = await post(client, group("first"))
    assert again.json()["repeated"]
    assert {one.group for one in batch.groups} == {answers[0].json()["group"], again.json()["group"]}
    generated = await player.bus.js.stream_info(player.names.generated_stream)
    assert generated.state.last_seq == 2, "the repeated report was dropped"


@pytest.mark.parametrize("said", ["", ":claim"])
async def test_a_group_whose_task_is_given_up_as_it_waits_for_room_has_another_one(
    door: NewDoor, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    fail_once(monkeypatch, GroupIntake, "_published")
    player, client = await door(rollout={"num_rollout": 1, "max_staleness": 0}, ingest={"ingest_wait": 10.0}, bus=SHORT)
    assert (await post(client, group("late"))).status_code == 503
    [bound] = await player.store.commands("its binding", [("GET", player.names.ingest_key("late"))])
    first, write = json.loads(bound)["group"], Store.write

    async def written(store: Store, blobs: dict[str, bytes]) -> None:
        await write(store, blobs)
        await store.commands("the end of a task", [("SET", f"{player.names.ingest_key(first)}:attempt-0{said}", "")])

    monkeypatch.setattr(Store, "write", written)
    answer = (await post(client, group("late"))).json()
    assert answer["group"] != first and not answer["repeated"]


@pytest.mark.extra(each=True)
async def test_a_task_whose_producer_does_not_come_again_is_given_up(door: NewDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is bound and never published; the run goes on with another in its place, and the late producer has that of a later task."""
    fail_once(monkeypatch, GroupIntake, "_published")
    monkeypatch.setattr("services.gateway.ingest.OWNED_SECONDS", 0.1)
    monkeypatch.setattr("services.gateway.ingest.CLAIM_SECONDS", 4)
    player, client = await door(
        rollout={"num_rollout": 1, "max_staleness": 0}, ingest={"ingest_wait": 30.0}, bus={**SHORT, "max_deliver": 3}
    )
    assert (await post(client, group("gone"))).status_code == 503
    answers = [await post(client, group(name)) for name in ("second", "third")]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    batch = await player.batch(0)
    assert {one.group for one in batch.groups} == {answer.json()["group"] for answer in answers}
    late = await post(client, group("gone"))
    assert late.json()["error"]["code"] == "no_room", "it is not taken for one that is in"
    audit = await player.audit()
    assert (audit.dead.total(), audit.ok) == (1, True)


async def test_the_group_of_a_task_that_the_gateway_cannot_read_is_given_up(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 1}, ingest={"ingest_wait": 30.0})
    [task] = await player.all_tasks(1)
    await task.ack()
    other = codec.pack({"schema": 1, "kind": "Task", "added": 1, **task.message.model_dump()})
    await player.bus.publish(player.names.task(TRAIN), other)
    answers = [await post(client, group(name)) for name in ("first", "second")]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]

    async def given_up() -> bool:
        return (await player.audit()).dead.total() == 1

    await until(given_up, "the end of the group that nobody could read")


async def test_a_task_whose_producer_comes_while_it_is_given_up_stays_its_own(door: NewDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the group became is the same ever after, and another task is not taken for it."""
    is_in, give_up = GroupIntake._is_in, GroupIntake._give_up
    late: list[httpx.Response] = []
    moment = False

    async def given_up(intake: GroupIntake, *given: Any) -> None:
        nonlocal moment
        moment = True
        await give_up(intake, *given)

    async def looked(*given: Any) -> bool:
        found = await is_in(*given)
        if moment and not late:
            late.append(httpx.Response(0))  # only the first look
            late.append(await post(client, group("gone")))
        return found

    fail_once(monkeypatch, GroupIntake, "_published")
    for name, instead in {"_is_in": looked, "_give_up": given_up}.items():
        monkeypatch.setattr(GroupIntake, name, instead)
    monkeypatch.setattr("services.gateway.ingest.OWNED_SECONDS", 0.1)
    monkeypatch.setattr("services.gateway.ingest.CLAIM_SECONDS", 4)
    player, client = await door(
        rollout={"num_rollout": 1, "max_staleness": 0}, ingest={"ingest_wait": 15.0}, bus={**SHORT, "max_deliver": 3}
    )
    assert (await post(client, group("gone"))).status_code == 503
    second = await post(client, group("second"))
    assert (await post(client, group("third"))).status_code == 429, "the run has no other task"
    again = await post(client, group("gone"))
    assert [answer.status_code for answer in (late[1], second, again)] == [200] * 3
    assert late[1].json()["group"] == again.json()["group"] and again.json()["repeated"]
    batch = await player.batch(0)
    assert {one.group for one in batch.groups} == {answer.json()["group"] for answer in (again, second)}
    audit = await player.audit()
    assert (audit.dead.total(), audit.ok) == (0, True)


async def test_what_does_not_fit_is_refused_by_its_field_and_takes_no_task(door: NewDoor) -> None:
    player, client = await door(rollout={"num_rollout": 4, "max_staleness": 3}, trainer={"max_tokens_per_gpu": 64})
    wrong: dict[str, dict[str, Any]] = {
        "id": group("a b"),
        "tokens[1][4]": group("x", tokens=[[1, 2, 3, 4, 5], [1, 2, 6, 7, 10**6]]),
        "tokens[0][1]": group("x", tokens=[[1, -2, 3, 4, 5], [1, 2, 6, 7, 8]]),
        "masks": group("x", masks=[[0, 0, 1, 0, 1]]),
        "masks[1]": group("x", masks=[[0, 0, 1, 0, 1], [0] * 5]),
        "masks[0][0]": group("x", masks=[[1] * 5] * 2),
        "masks[0][2]": group("x", masks=[[0, 0, 2, 0, 1]] * 2),
        "log_probs[0]": group("x", log_probs=[[-0.5] * 4, [-0.5] * 5]),
        "log_probs[1][4]": group("x", log_probs=[[-0.5] * 5, [-0.5] * 4 + [0.5]]),
        "log_probs[0][2]": group("x", log_probs=[[0, 0, None, 0, -1]] * 2),
        "versions": group("x", versions=1),
        "versions[1]": group("x", versions=[[0] * 5, [0] * 4]),
        "scores[1]": group("x", scores=[1.0, "good"]),
        "scores": group("x", scores=None),
        "environment": group("x", environment="nowhere"),
        "finish[0]": group("x", finish=["abort", "stop"]),
        "rollouts": group("x", rollouts=[0, 2]),
        "roles": group("x", roles=["white"]),
        "roles[1]": group("x", roles=["white", "b l"]),
        "advantages": group("x", advantages=[1, 2]),
    }
    for field, body in wrong.items():
        answer = await post(client, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (field, answer.text)
    lonely = await post(client, group("x", **{name: value[:1] for name, value in group("x").items() if isinstance(value, list)}))
    assert (lonely.status_code, lonely.json()["error"]["param"]) == (400, "tokens")
    assert (await client.post("/groups", content=b"{")).status_code == 400
    assert (await client.post("/groups", content=b" " * (MOST + 1))).status_code == 413
    waiting = await player.waiting()
    assert (await post(client, group("x"))).status_code == 200, "none of the refused ones has bound the id"
    assert await player.waiting() in (waiting - 1, waiting), "the buffer may have put another one in its place"


async def test_only_the_producers_key_opens_the_door(door: NewDoor) -> None:
    _, client = await door()
    for header in ("", f"Bearer {KEY}x", "Bearer", f"Basic {KEY}"):
        answer = await client.post("/groups", json=group("x"), headers={"Authorization": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.get("/groups", headers={"Authorization": header})).status_code == 401
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        ingest_key({KEY_VARIABLE: "short"})
    assert ingest_key({KEY_VARIABLE: KEY}) == KEY


async def test_the_gateways_own_process_has_the_door_and_none_without_a_key(door: NewDoor, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    player, other = await door(rollout={"num_rollout": 1})
    environment = {**player.environment("gateway-0"), "REDIS_URL": valkey.url}
    with started_gateway(0, tmp_path, environment) as process:
        assert process.process.wait(120) == 2
        assert KEY_VARIABLE in process.words()
    with started_gateway(0, tmp_path, environment | {KEY_VARIABLE: KEY}) as process:
        url = await ready_gateway(Registry(player.bus, player.config.run.name), 0, process)
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            taken = await post(client, group("mine"))
            assert taken.status_code == 200, taken.text
            assert (await client.get("/groups")).json()["version"] == 0
            answer = await client.post("/v1/chat/completions", json={"model": "x", "messages": [{"role": "user", "content": "x"}]})
            assert answer.status_code == 401, "the producers' key opens no session"
            stranger = {"Authorization": "Bearer sk-myxo-0-0"}
            assert (await client.post("/groups", json=group("other"), headers=stranger)).status_code == 401
            process.kill()  # −9: the producer that got no answer asks the next one
            with pytest.raises(httpx.HTTPError):
                await post(client, group("mine"))
    repeated = await post(other, group("mine"))
    assert repeated.json() == {"id": "mine", "group": taken.json()["group"], "repeated": True}
