"""What Redis refuses: for every account, commands that are not its own, keys of another run, and everybody without a password."""

import asyncio

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from shared.store.payload_store import BlockingStore, Store, StoreRefused, StoreUnreachable
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers

KEY, FOREIGN = "guarded:group:g1:0:0", "guarded-2:group:g1:0:0"

COMMANDS: dict[str, tuple[object, ...]] = {
    "PING": (),
    "GET": (KEY,),
    "SET": (KEY, b"x"),
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
ON_KEYS = {"GET": (), "SET": (b"x",), "UNLINK": (), "EXISTS": ()}


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
    commands = {"HSET": ("g/0", b"x"), "HMGET": ("g/0",), "HEXISTS": ("g/0",), "UNLINK": (), "SET": (b"1",)}
    with client(guarded, role) as connection:
        mine = {command for command, rest in commands.items() if may(connection, command, key, *rest)}
        foreign = {command for command, rest in commands.items() if may(connection, command, "guarded-2:exchange:values:0", *rest)}
        payload = {command for command, rest in commands.items() if may(connection, command, KEY, *rest)}
    if role in intended.EXCHANGE:
        assert mine == intended.EXCHANGE[role]
    assert foreign == set()
    assert payload - {"HMGET", "HEXISTS"} == intended.STORE[role] & {"HSET", "SET", "UNLINK"}


def test_readers_cannot_write_and_neither_can_who_frees(guarded: GuardedServers) -> None:
    with client(guarded, "rollout") as writer, client(guarded, "reward") as reader, client(guarded, "buffer") as freer:
        writer.set(KEY, b"1")
        assert reader.get(KEY) == b"1"
        assert freer.exists(KEY) == 1
        with pytest.raises(NoPermissionError):
            reader.set(KEY, b"2")
        assert freer.get(KEY) == b"1"
        with pytest.raises(NoPermissionError):
            freer.set(KEY, b"2")
        assert freer.unlink(KEY) == 1


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
    reader = Store(guarded.redis_url("reward"))
    try:
        with pytest.raises(StoreRefused, match="the store refuses write of 1 blobs.*no permissions") as caught:
            await reader.write({KEY: b"payload"}, deadline=1000)
        assert not any(secret in str(caught.value) for secret in guarded.secrets)
        with pytest.raises(StoreRefused, match=f"the store refuses read of 1 blobs .{FOREIGN}, …."):
            await reader.read([FOREIGN], deadline=1000)
    finally:
        await reader.close()
    blocking = BlockingStore(guarded.redis_url("buffer"))
    with pytest.raises(StoreRefused, match=f"the store refuses blob {FOREIGN}"):
        await asyncio.to_thread(blocking.read, [FOREIGN], 1000)
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
        await asyncio.to_thread(blocking.read, [KEY], 1000)
    blocking.close()
