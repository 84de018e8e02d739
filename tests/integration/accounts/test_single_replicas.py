"""A remote replica's own accounts: given and revoked by `myxo accounts` while the servers run, beside others that notice nothing."""

import asyncio
from pathlib import Path

import nats.errors
import pytest
import redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError

from myxo.main import main
from shared.bus.connection import Bus, BusUnreachable
from shared.bus.subjects import Subjects
from shared.runtime.errors import MyxoError
from tests.support.guarded_servers import GuardedServers
from tests.support.waiting import until

RUN, INBOX = "remote", Subjects("remote").inbox("rollout")


def arguments(servers: GuardedServers) -> list[str]:
    given, data = servers.deployment, servers.accounts.parent
    assert given.nats_settings is not None
    words = ["accounts", str(servers.accounts), "--run", RUN, "--nats", str(given.nats), "--redis", str(given.redis)]
    return [*words, "--nats-monitor", given.nats_settings.monitor, "--data", str(data), "--mounted", given.mounted]


async def test_a_revoked_replica_can_do_nothing_and_others_notice_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = GuardedServers(tmp_path, RUN)
    servers.nats.start()
    servers.valkey.start()

    async def myxo(*words: str) -> int:
        return await asyncio.to_thread(main, [*arguments(servers), *words])

    def store(home: str) -> redis.Redis:
        return redis.Redis.from_url(servers.redis_url(home), socket_timeout=30)

    (tmp_path / "redis").mkdir()
    opened: list[Bus] = []
    try:
        role = await Bus.connect(servers.nats_url("rollout"), "role", inbox=INBOX)
        for name in ("spot-1", "spot-2"):
            assert await myxo("--join", name) == 0, capsys.readouterr().out
        buses = {name: await Bus.connect(servers.nats_url(f"replicas/{name}"), name, inbox=INBOX) for name in ("spot-1", "spot-2")}
        opened += [role, *buses.values()]
        stores = {name: store(f"replicas/{name}") for name in buses}
        for name, client in stores.items():
            assert client.setnx(f"{RUN}:group:{name}:0:0", b"x")
        refused = asyncio.ensure_future(buses["spot-1"].until_refused())  # which ends a service (`attended`)
        gone = {name: servers.nats_url(f"replicas/{name}") for name in buses}
        capsys.readouterr()

        assert await myxo("--leave", "spot-1") == 0, capsys.readouterr().out
        with pytest.raises((AuthenticationError, RedisConnectionError)):
            stores["spot-1"].ping()
        with pytest.raises(BusUnreachable, match="(?i)authorization"):
            await Bus.connect(gone["spot-1"], "again", inbox=INBOX)

        async def thrown_out() -> bool:
            return not buses["spot-1"].connection.is_connected

        await until(thrown_out, "the revoked connection's end", 60.0)
        with pytest.raises(BusUnreachable, match="(?i)authorization") as thrown:
            await asyncio.wait_for(refused, 30.0)
        assert thrown.value.refused
        with pytest.raises((nats.errors.Error, MyxoError)):
            await buses["spot-1"].retry(buses["spot-1"].js.account_info, "an answer", deadline=3.0)
        assert stores["spot-2"].ping() and not list((servers.accounts / "replicas").glob("spot-1"))
        for bus in (role, buses["spot-2"]):
            await bus.js.account_info()
            assert bus.restored_s == 0.0  # its connection never broke

        assert await myxo("--leave", "spot-1") == 2 and "expected a replica with accounts of its own: spot-2" in capsys.readouterr().err
        assert await myxo("--join", "../x") == 2 and "--join = '../x'" in capsys.readouterr().err
        servers.valkey.stop()
        assert await myxo("--leave", "spot-2") == 1 and "once it is restarted" in capsys.readouterr().out
        servers.valkey.start()
        with pytest.raises(AuthenticationError):
            store("rollout").execute_command("AUTH", f"rollout.{RUN}.spot-2", "x")
    finally:
        for bus in opened:
            await asyncio.wait_for(bus.close(), 10)
        servers.nats.stop()
        servers.valkey.stop()
