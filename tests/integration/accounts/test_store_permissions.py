"""What Redis refuses: for every account, commands that are not its own, keys of another run, and everybody without a password."""

import asyncio

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from shared.schema.digests import reference
from shared.store.payload_store import BlockingStore, Store, StoreRefused, StoreUnreachable
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers

KEY, FOREIGN = "guarded:group:g1:0:0", "guarded-2:group:g1:0:0"

COMMANDS: dict[str, tuple[object, ...]] = {
    "PING": (),
    "GET": (KEY,),
    "SET": (KEY, b"x"),
    "GETRANGE": (KEY, 0, 9),
    "SETNX": (KEY, b"x"),
    "SETRANGE": (KEY, 0, b"x"),
    "GETSET": (KEY, b"x"),
    "GETDEL": (KEY,),
    "MSET": (KEY, b"x"),
    "COPY": (KEY, KEY + "b"),
    "EXISTS": (KEY,),
    "UNLINK": (KEY,),
    "SCAN": (0,),
    "DEL": (KEY,),
    "MGET": (KEY,),
    "APPEND": (KEY, b"x"),
    "RENAME": (KEY, KEY + "b"),
    "DUMP": (KEY,),
    "EXPIRE": (KEY, 1),
    "TYPE": (KEY,),
    "KEYS": ("*",),
    "RANDOMKEY": (),
    "DBSIZE": (),
    "CONFIG GET": ("*",),
    "CONFIG SET": ("appendonly", "no"),
    "FLUSHALL": (),
    "FLUSHDB": (),
    "ACL LIST": (),
    "ACL SETUSER": ("stranger", "on", "nopass", "+@all", "~*"),
    "ACL WHOAMI": (),
    "DEBUG SLEEP": (0,),
    "INFO": (),
    "CLIENT LIST": (),
    "CLIENT KILL": ("TYPE", "normal"),
    "MONITOR": (),
    "SHUTDOWN": (),
    "SAVE": (),
    "REPLICAOF": ("127.0.0.1", 1),
    "EVAL": ("return 1", 0),
    "FUNCTION LIST": (),
    "SUBSCRIBE": ("news",),
    "PUBLISH": ("news", b"x"),
    "SWAPDB": (0, 1),
    "SELECT": (1,),
}
ON_KEYS = {"GET": (), "GETRANGE": (0, 9), "SET": (b"x",), "SETNX": (b"x",), "UNLINK": (), "EXISTS": ()}


def client(guarded: GuardedServers, role: str) -> redis.Redis:
    if role != "health":
        return redis.Redis.from_url(guarded.redis_url(role), socket_timeout=30)
    password = (guarded.accounts / "redis" / "health").read_text()
    return redis.Redis(unix_socket_path=str(guarded.socket), username="health", password=password, socket_timeout=30)


def may(connection: redis.Redis, command: str, *arguments: object) -> bool:
    try:
        connection.execute_command(*command.split(), *arguments)
    except NoPermissionError:
        return False
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):  # it may, but another account has left something else there
            return True
        if command.startswith("DEBUG") and "not allowed" in str(error):  # the server refuses it to everybody, before it looks who asks
            return False
        raise
    return True


@pytest.mark.parametrize("role", intended.STORE)
def test_an_account_runs_the_commands_that_are_meant_for_it_and_no_other(guarded: GuardedServers, role: str) -> None:
    with client(guarded, role) as connection:
        may_run = {command for command, arguments in COMMANDS.items() if may(connection, command, *arguments)}
    assert may_run == intended.STORE[role]


@pytest.mark.parametrize("role", intended.STORE)
def test_no_account_reaches_a_key_of_another_run(guarded: GuardedServers, role: str) -> None:
    with client(guarded, role) as connection:
        for key in (FOREIGN, "anything", "guarded", ":guarded:x"):
            assert not any(may(connection, command, key, *rest) for command, rest in ON_KEYS.items())


@pytest.mark.parametrize("role", intended.STORE)
def test_what_the_trainers_roles_tell_each_other_is_theirs(guarded: GuardedServers, role: str) -> None:
    key = "guarded:exchange:values:0"
    commands = {"HSET": ("g/0", b"x"), "HMGET": ("g/0",), "HEXISTS": ("g/0",), "UNLINK": (), "SET": (b"1",), "GET": (), "GETRANGE": (0, 9)}
    commands |= {"SETNX": (b"1",), "EXISTS": ()}
    with client(guarded, role) as connection:
        mine = {command for command, rest in commands.items() if may(connection, command, key, *rest)}
        foreign = {command for command, rest in commands.items() if may(connection, command, "guarded-2:exchange:values:0", *rest)}
        payload = {command for command, rest in commands.items() if may(connection, command, KEY, *rest)}
    assert mine == {"trainer": intended.EXCHANGE["trainer"] | {"GETRANGE"}, "operator": OPERATORS}.get(role, set())
    assert foreign == set()
    assert payload == {"trainer": {"GET", "GETRANGE", "HMGET", "HEXISTS"}}.get(role, intended.STORE[role] & {*commands})


@pytest.mark.parametrize("role", intended.STORE)
def test_sessions_are_opened_by_replicas_and_continued_by_gateways(guarded: GuardedServers, role: str) -> None:
    key = "guarded:session:s1"
    commands: dict[str, tuple[object, ...]] = {
        "RPUSH": (b"x",),
        "RPUSHX": (b"x",),
        "LRANGE": (0, -1),
        "LLEN": (),
        "EXPIRE": (60,),
        "GET": (),
    }
    commands |= {"UNLINK": (), "SETNX": (b"x",), "SET": (b"x",), "LPOP": (), "LSET": (0, b"x"), "LTRIM": (0, 0), "DEL": ()}
    with client(guarded, role) as connection:
        mine = {command for command, rest in commands.items() if may(connection, command, key, *rest)}
        foreign = {command for command, rest in commands.items() if may(connection, command, "guarded-2:session:s1", *rest)}
        payload = {command for command, rest in commands.items() if may(connection, command, KEY, *rest)}
    assert mine == intended.SESSIONS.get(role, {"GET", "UNLINK"} if role == "operator" else set())
    assert foreign == set()
    assert payload == intended.STORE[role] & {*commands}


@pytest.mark.parametrize("role", intended.STORE)
def test_what_became_of_groups_from_outside_is_the_gateways(guarded: GuardedServers, role: str) -> None:
    commands: dict[str, tuple[object, ...]] = {"GET": (), "SET": (b"x", "EX", 9), "SETNX": (b"x",), "UNLINK": (), "DEL": (), "EXPIRE": (9,)}
    with client(guarded, role) as connection:
        mine = {command for command, rest in commands.items() if may(connection, command, "guarded:ingest:g1", *rest)}
        foreign = {command for command, rest in commands.items() if may(connection, command, "guarded-2:ingest:g1", *rest)}
    assert mine == {"gateway": intended.INGESTED, "operator": {"GET", "UNLINK"}}.get(role, set())
    assert foreign == set()


OPERATORS = {"GET", "GETRANGE", "EXISTS", "UNLINK"}


def test_who_reads_cannot_write_and_neither_can_who_frees(guarded: GuardedServers) -> None:
    with client(guarded, "rollout") as writer, client(guarded, "reward") as reader, client(guarded, "buffer") as freer:
        assert writer.setnx(KEY, b"1")
        assert reader.getrange(KEY, 0, 9) == b"1"
        assert freer.exists(KEY) == 1
        with pytest.raises(NoPermissionError):
            reader.setnx(KEY, b"2")
        assert not freer.setnx(KEY, b"2")  # it adds prompts' pictures, and changes nothing
        for connection in (reader, freer):
            with pytest.raises(NoPermissionError):
                connection.set(KEY, b"2")
        assert freer.unlink(KEY) == 1


OVERWRITING: dict[str, tuple[object, ...]] = {
    "SET": (KEY, b"forged"),
    "SET ": (KEY, b"forged", "XX"),
    "GETSET": (KEY, b"forged"),
    "SETRANGE": (KEY, 0, b"forged"),
    "APPEND": (KEY, b"forged"),
    "MSET": (KEY, b"forged"),
    "SETEX": (KEY, 9, b"forged"),
    "PSETEX": (KEY, 9, b"forged"),
    "SETBIT": (KEY, 0, 1),
    "RESTORE": (KEY, 0, b"forged", "REPLACE"),
    "COPY": (KEY + "2", KEY, "REPLACE"),
    "RENAME": (KEY + "2", KEY),
    "DEL": (KEY,),
    "UNLINK": (KEY,),
    "GETDEL": (KEY,),
    "EXPIRE": (KEY, 0),
    "EVAL": ("return redis.call('set', KEYS[1], 'forged')", 1, KEY),
}
"""Every way in which somebody could put other bytes where a payload stands."""


def test_a_replica_adds_payloads_and_changes_none(guarded: GuardedServers) -> None:
    with client(guarded, "rollout") as replica, client(guarded, "buffer") as freer:
        assert replica.setnx(KEY, b"scored") and replica.setnx(KEY + "2", b"forged")
        assert not replica.setnx(KEY, b"forged")
        for command, arguments in OVERWRITING.items():
            with pytest.raises(NoPermissionError):
                replica.execute_command(command.strip(), *arguments)
        assert replica.getrange(KEY, 0, 99) == b"scored"
        freer.unlink(KEY, KEY + "2")


@pytest.mark.parametrize(
    ("role", "key"), [("rollout", "guarded:exchange:saved:actor"), ("trainer", KEY), ("buffer", "guarded:exchange:kl:0")]
)
def test_a_role_writes_under_its_own_prefix_only(guarded: GuardedServers, role: str, key: str) -> None:
    with client(guarded, role) as connection:
        for command, arguments in {"SETNX": (b"1",), "SET": (b"1",), "HSET": ("f", b"1"), "UNLINK": ()}.items():
            with pytest.raises(NoPermissionError):
                connection.execute_command(command, key, *arguments)


@pytest.mark.parametrize("login", ["", ":@", ":wrong@", "default:x@", "buffer.guarded:wrong@", "nobody:x@"])
def test_without_the_password_nothing_is_to_be_had(guarded: GuardedServers, login: str) -> None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(guarded.valkey.url.replace("//", f"//{login}"), socket_timeout=30, retry=once) as connection:
        for command in ("PING", "GET", "SCAN", "ACL LIST", "FLUSHALL"):
            with pytest.raises(AuthenticationError):
                connection.execute_command(*command.split(), *COMMANDS[command])
    with redis.Redis(unix_socket_path=str(guarded.socket), socket_timeout=30, retry=once) as connection, pytest.raises(AuthenticationError):
        connection.ping()


async def test_our_own_client_does_not_try_again_what_is_refused(guarded: GuardedServers) -> None:
    reader, foreign = Store(guarded.redis_url("reward")), reference("guarded", {FOREIGN: b"1"})
    try:
        with pytest.raises(StoreRefused, match="the store refuses write of 1 blobs.*no permissions") as caught:
            await reader.write({KEY: b"payload"}, deadline=1000)
        assert not any(secret in str(caught.value) for secret in guarded.secrets)
        with pytest.raises(StoreRefused, match=f"the store refuses read of 1 blobs .{FOREIGN}, …."):
            await reader.read(foreign, deadline=1000)
    finally:
        await reader.close()
    blocking = BlockingStore(guarded.redis_url("buffer"))
    with pytest.raises(StoreRefused, match=f"the store refuses blob {FOREIGN}"):
        await asyncio.to_thread(blocking.read, foreign, 1000)
    blocking.close()
    stranger = Store(guarded.valkey.url.replace("//", "//reward.guarded:hush@"))
    try:
        with pytest.raises(StoreUnreachable, match="the store refuses") as caught:
            await stranger.ping(deadline=1000)
        assert "hush" not in str(caught.value)
    finally:
        await stranger.close()
    blocking = BlockingStore(guarded.valkey.url)
    with pytest.raises(StoreRefused, match=f"the store refuses blob {KEY}"):
        await asyncio.to_thread(blocking.read, reference("guarded", {KEY: b"1"}), 1000)
    blocking.close()
