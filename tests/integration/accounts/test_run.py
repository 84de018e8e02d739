"""A whole run with every role on its own account: all that the code does is allowed, and nothing else was tried."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError
from rich.console import Console

from myxo.commands.audit import audit
from myxo.commands.status import status, summary
from myxo.launch.launcher import erase_from_bus, erase_from_store
from services.trainer.control_client import ControlClient
from shared.bus import runs, streams
from shared.bus.connection import Bus, NotPermitted
from shared.bus.registry import Registry
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN, Subjects
from shared.bus.work_queue import WorkQueue
from shared.schema import sample
from shared.schema.ledger import GroupsScored
from shared.schema.messages import Accepted, Batch, Generated, Scored, ScoredGroup, Task, Trained
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.schema.weight_messages import WeightChannelAddress, WeightsLive, WeightsPrepare
from shared.schema.weight_messages import WeightsReady as Ready
from shared.store.payload_store import BlockingStore, Store
from tests.integration.buffer.player import Player
from tests.support.attesting import attested
from tests.support.guarded_servers import GuardedServers
from tests.support.run_config import run_config, write_jsonl
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

RUN = "worked"
NAMES = Subjects(RUN)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[GuardedServers]:
    """Servers of this test alone: their log must hold no refusal at its end."""
    servers = GuardedServers(tmp_path / "servers", RUN)
    servers.nats.start()
    servers.valkey.start()
    yield servers
    servers.valkey.stop()
    servers.nats.stop()


class Roles:
    """A connection to bus and store for every role that the test plays."""

    def __init__(self, servers: GuardedServers) -> None:
        self._servers = servers
        self.buses: dict[str, Bus] = {}
        self.stores: dict[str, Store] = {}

    async def open(self) -> None:
        for role in ("operator", "rollout", "trainer"):
            self.buses[role] = await Bus.connect(self._servers.nats_url(role), f"played {role}", inbox=NAMES.inbox(role))
            self.stores[role] = Store(self._servers.redis_url(role))

    async def close(self) -> None:
        for bus in self.buses.values():
            await bus.close()
        for store in self.stores.values():
            await store.close()


@pytest.fixture
async def roles(servers: GuardedServers) -> AsyncIterator[Roles]:
    roles = Roles(servers)
    await roles.open()
    yield roles
    await roles.close()


def start(servers: GuardedServers, service: str, logs: Path) -> ServiceProcess:
    return ServiceProcess(service, logs / f"{service}.log", servers.environment(service) | {"MYXO_INSTANCE": f"{service}-0"})


async def ready(registry: Registry, process: ServiceProcess) -> None:
    async def is_ready() -> bool:
        assert process.process.poll() is None, process.words()
        return any((found.pid, found.state) == (process.process.pid, "ready") for found in await registry.alive(process.name))

    await until(is_ready, process.name)


async def test_every_role_can_do_its_work_and_the_servers_refuse_nothing(
    servers: GuardedServers, roles: Roles, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, rollout, trainer = (roles.buses[role] for role in ("operator", "rollout", "trainer"))
    write_jsonl(tmp_path / "prompts.jsonl")
    config = run_config(
        tmp_path,
        run={"name": RUN},
        model={"hf_checkpoint": str(tiny_model)},
        reward={"rm_type": "exact"},
        rollout={"num_rollout": 2, "max_staleness": 0},
    )
    await runs.create(operator, config, servers.redis_url("operator"), vocabulary=100)
    assert await runs.store_url(operator, RUN) is None  # the operator's password is nobody else's business
    registry = Registry(operator, RUN)

    with start(servers, "buffer", tmp_path) as buffer, start(servers, "reward", tmp_path) as reward:
        await ready(registry, buffer)
        await ready(registry, reward)

        # a replica: its status, weights, tasks, payloads
        async def prepare(offer: WeightsPrepare) -> Ready:
            return Ready(replica="rollout-0", version=offer.version - 1)

        await rollout.serve(NAMES.replica_weights("rollout-0", "prepare"), WeightsPrepare, prepare)
        registered = ServiceStatus(service="rollout", instance="rollout-0", host="h", pid=1, http="", state="ready", at=time.time())
        await Registry(rollout, RUN).renew(registered)
        assert [seen.instance for seen in await Registry(trainer, RUN).alive("rollout")] == ["rollout-0"]
        assert [seen.instance for seen in await Registry(rollout, RUN).alive("rollout")] == ["rollout-0"]
        joined = ServiceEvent(service="rollout", instance="rollout-0", what="joined", detail="", at=time.time())
        await rollout.publish(NAMES.event("service", "joined"), joined)
        channel = WeightChannelAddress(kind="group", name="channel-1", address="a", port=1, secret="00" * 32, backend="gloo", world_size=2)
        offer = WeightsPrepare(version=0, channels=[channel], rank=1, deadline=5)
        answer = await trainer.request(NAMES.replica_weights("rollout-0", "prepare"), offer, Ready, deadline=60, awaited_from="rollout-0")
        assert answer.replica == "rollout-0"

        player = Player(trainer, roles.stores["rollout"], config, "", tmp_path)
        queue = WorkQueue(rollout, task_consumer(RUN, config.bus, TRAIN), Task)
        reader = BlockingStore(servers.redis_url("trainer"), RUN)
        handed_back = False

        async def generate() -> int:
            """Groups generated now. The first is handed back once, to come again."""
            nonlocal handed_back
            leases = await queue.fetch(4)
            for lease in leases:
                if not handed_back:
                    handed_back = True
                    await lease.hand_back()
                    continue
                await lease.extend()
                await rollout.publish(NAMES.generated(lease.message.environment), announced(await player.generate(lease.message)))
                await lease.ack()
            return len(leases)

        for step in range(2):
            await player.live(step)

            async def batch(step: int = step) -> Batch | None:
                await generate()
                found = await player.ask(step)
                return found if isinstance(found, Batch) else None

            formed = await until(batch, f"the batch of step {step}")
            keys = [key for group in formed.groups for key in group.payload.keys]
            read = {group.group: sample.decode(await asyncio.to_thread(reader.read, group.payload)) for group in formed.groups}
            now = time.time()
            report = Trained(step=step, version=step + 1, started=now, ended=now, metrics={}, attestation=attested(formed, read))
            await trainer.request(NAMES.trained, report, Accepted, deadline=60, awaited_from="the buffer")
            await trainer.publish(NAMES.event("trainer", "step"), Trained(step=step, version=step, started=now, ended=now, metrics={}))
            if step == 0:  # a killed buffer reads its ledger again
                buffer.kill()
                buffer.__init__("buffer", tmp_path / "buffer.log", servers.environment("buffer") | {"MYXO_INSTANCE": "buffer-0"})  # type: ignore[misc]
                await ready(registry, buffer)
        await player.durable(2)
        await until(lambda: roles.stores["operator"].missing(keys), "the end of the payloads")

        async def finished() -> bool:
            return await runs.phase(trainer, RUN) == runs.FINISHED

        await until(finished, "the end of the run")
        await Registry(rollout, RUN).leave(registered)
        assert reward.stop() == 0
        assert buffer.stop() == 0
        assert await registry.alive() == []
        words = buffer.words() + reward.words()

    # people
    for name, value in servers.environment("operator").items():
        monkeypatch.setenv(name, value)
    out = Console(file=io.StringIO(), width=200)
    assert await audit(RUN, tmp_path / "runs", out, True) == 0
    assert json.loads(out.file.getvalue())["trained"] == 4  # type: ignore[attr-defined]
    assert await status(RUN, tmp_path / "runs", out, False) == 0
    assert await summary(RUN, tmp_path / "runs", out) == 0
    await erase_from_bus(operator, RUN)
    await erase_from_store(servers.redis_url("operator"), RUN)
    assert not await streams.exists(operator, RUN)

    log = servers.nats.log_path.read_text()
    assert "Violation" not in log and "authentication error" not in log, log
    assert not any(secret in text for secret in servers.secrets for text in (words, log, out.file.getvalue()))  # type: ignore[attr-defined]


def announced(done: Scored) -> Generated:
    """What a replica says of a group that it has generated."""
    fields = {name: getattr(done, name) for name in ("group", "attempt", "payload", "replica", "environment", "started", "ended")}
    return Generated(**fields, samples=[replace(meta, digest=0) for meta in done.samples])


async def test_what_a_replica_can_do_with_its_account_forges_nothing(
    servers: GuardedServers, roles: Roles, tiny_model: Path, tmp_path: Path
) -> None:
    """It can neither reward a group, its own or another's, nor change one that was announced, nor speak for the trainer."""
    operator, rollout = roles.buses["operator"], roles.buses["rollout"]
    write_jsonl(tmp_path / "prompts.jsonl")
    config = run_config(tmp_path, run={"name": RUN}, model={"hf_checkpoint": str(tiny_model)}, reward={"rm_type": "exact"})
    await runs.create(operator, config, None, vocabulary=100)
    player = Player(rollout, roles.stores["rollout"], config, "", tmp_path)
    scores = Player(operator, roles.stores["rollout"], config, "", tmp_path)
    trainer = Player(roles.buses["trainer"], roles.stores["rollout"], config, "", tmp_path)
    with start(servers, "buffer", tmp_path) as buffer, start(servers, "reward", tmp_path) as reward:
        await ready(Registry(operator, RUN), buffer)
        await ready(Registry(operator, RUN), reward)
        await trainer.live(0)
        queue = WorkQueue(rollout, task_consumer(RUN, config.bus, TRAIN), Task)
        first, second = await until(lambda: queue.fetch(2), "two tasks")
        honest = await player.generate(first.message)
        forged = honest.model_copy(update={"rewards": [1e6] * len(honest.rewards)})
        with pytest.raises(NotPermitted, match=r'publish to ".*\.scored\.reward"'):
            await rollout.publish(NAMES.scored("reward"), forged)
        await rollout.publish(NAMES.scored("rollout"), forged)
        await until(lambda: "outcome_refused" in buffer.words(), "the refusal of a reward from a replica")
        await rollout.publish(NAMES.generated("exact"), announced(honest))
        other = announced(await player.generate(second.message))
        await rollout.publish(NAMES.generated("exact"), other)

        async def scored() -> list[ScoredGroup] | None:
            found = [group for record in await scores.records() if isinstance(record, GroupsScored) for group in record.groups]
            return found if len(found) == 2 else None

        assert {reward for group in await until(scored, "two scored groups") for reward in group.rewards} <= {0.0, 1.0}
        [key] = other.payload.keys
        with redis.Redis.from_url(servers.redis_url("rollout")) as replica:
            for command in (("SET", key, b"x"), ("SETNX", f"{RUN}:exchange:saved:critic", b"9"), ("UNLINK", key)):
                with pytest.raises(NoPermissionError):
                    replica.execute_command(*command)
            assert not replica.setnx(key, b"forged")
        batch = await trainer.batch(0)
        with contextlib.closing(BlockingStore(servers.redis_url("trainer"), RUN)) as reader:
            assert len(list(reader.stream([group.payload for group in batch.groups]))) == 2
        assert (await scores.audit()).ok
        assert reward.stop() == 0
        assert buffer.stop() == 0


async def test_the_trainers_own_link_works_with_its_account(
    servers: GuardedServers, roles: Roles, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, run={"name": RUN}, model={"hf_checkpoint": str(tiny_model)})
    await runs.create(roles.buses["operator"], config, None)
    for name, value in servers.environment("trainer").items():
        monkeypatch.setenv(name, value)

    def live() -> list[str]:
        with ControlClient() as link:
            link.weights_live(WeightsLive(version=3, replicas=["r"], seconds=0.1, bytes=1, at=time.time()))
            link.report("step", Trained(step=0, version=0, started=1.0, ended=2.0, metrics={}))
            return [link.config.run.name, link.service.redis_url]

    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    assert await asyncio.to_thread(live) == [RUN, servers.redis_url("trainer")]
    known = await roles.buses["operator"].get(NAMES.weights_bucket, "live")
    assert known is not None and WeightsLive.decode(known).version == 3
    assert "Violation" not in servers.nats.log_path.read_text()


async def test_a_service_on_the_wrong_account_or_without_one_says_so_and_ends(
    servers: GuardedServers, roles: Roles, tiny_model: Path, tmp_path: Path
) -> None:
    config = run_config(tmp_path, run={"name": RUN}, model={"hf_checkpoint": str(tiny_model)})
    await runs.create(roles.buses["operator"], config, None)
    service = "reward"
    own = servers.environment(service)
    missing = tmp_path / "nothing"
    (tmp_path / "empty").write_text("\n")
    wrong = tmp_path / "wrong"
    wrong.write_text(f"nats://{service}.{RUN}:hush@127.0.0.1:{servers.nats.port}\n")
    wrong_store = tmp_path / "wrong_store"
    wrong_store.write_text(f"redis://{service}.{RUN}:hush@127.0.0.1:{servers.valkey.port}/0\n")
    cases = {
        "another": ({**own, "NATS_URL_FILE": servers.environment("trainer")["NATS_URL_FILE"]}, f'subscription to "_inbox.{RUN}.{service}'),
        "wrong": ({**own, "NATS_URL_FILE": str(wrong)}, "authorization violation"),
        "missing": ({**own, "NATS_URL_FILE": str(missing)}, f"NATS_URL_FILE = '{missing}': No such file"),
        "empty": ({**own, "REDIS_URL_FILE": str(tmp_path / "empty")}, "REDIS_URL_FILE"),
        "store": ({**own, "REDIS_URL_FILE": str(wrong_store)}, "the store refuses"),
        "no store": ({**own, "REDIS_URL_FILE": ""}, "REDIS_URL = None: required"),
    }
    processes = {name: ServiceProcess(service, tmp_path / f"{name}.log", environment) for name, (environment, _) in cases.items()}
    try:
        for name, (_, expected) in cases.items():
            assert processes[name].process.wait(90) == 2, processes[name].words()
            assert expected in processes[name].words()
            assert "hush" not in processes[name].words()
    finally:
        for process in processes.values():
            process.__exit__()
