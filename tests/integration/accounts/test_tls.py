"""Encrypted connections: who trusts the authority gets in, nobody else does, and the error says what to do."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.accounts.credentials import AUTHORITY
from shared.bus.connection import Bus, BusUnreachable
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import free_port
from shared.runtime.addresses import CA_VARIABLE
from shared.runtime.errors import ConfigError, MyxoError
from shared.schema.messages import Payload
from shared.store.payload_store import BlockingStore, Store, StoreRefused, StoreUnreachable
from tests.support.guarded_servers import GuardedServers

RUN = "guarded"  # that of the shared servers, behind whose Valkey the encrypting proxy stands
ABSENT = Payload(keys=["guarded:group:x"], bytes=1)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServers]:
    """NATS with TLS; certificates for Redis, too."""
    servers = GuardedServers(tmp_path_factory.mktemp("encrypted"), RUN, tls=True)
    servers.nats.start()
    yield servers
    servers.nats.stop()


@pytest.fixture
def trusting(encrypted: GuardedServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_VARIABLE, str(encrypted.accounts / "trainer" / AUTHORITY))


async def connect(servers: GuardedServers, url: str | None = None) -> Bus:
    return await Bus.connect(url or servers.nats_url("trainer"), "test", deadline=1000, inbox=Subjects(RUN).inbox("trainer"))


@pytest.mark.usefixtures("trusting")
async def test_who_trusts_the_authority_is_connected(encrypted: GuardedServers) -> None:
    assert encrypted.nats_url("trainer").startswith("tls://")
    bus = await connect(encrypted)
    assert bus.connection.is_connected
    assert (await bus.js.account_info()).memory is not None
    await bus.close()


async def test_without_the_authority_the_connection_is_refused_with_what_to_do(encrypted: GuardedServers) -> None:
    for url in (encrypted.nats_url("trainer"), encrypted.nats_url("trainer").replace("tls://", "nats://")):
        with pytest.raises(BusUnreachable, match=f"certificate is not trusted.*name the authority's file in {CA_VARIABLE}") as caught:
            await connect(encrypted, url)
        assert not any(secret in str(caught.value) for secret in encrypted.secrets)


async def test_another_authority_is_not_trusted(encrypted: GuardedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = GuardedServers(tmp_path, RUN, tls=True)
    monkeypatch.setenv(CA_VARIABLE, str(other.accounts / "trainer" / AUTHORITY))
    with pytest.raises(BusUnreachable, match="certificate is not trusted"):
        await connect(encrypted)


@pytest.mark.usefixtures("trusting")
async def test_a_host_that_the_certificate_does_not_name_is_not_trusted(encrypted: GuardedServers) -> None:
    with pytest.raises(BusUnreachable, match="certificate is not trusted.*127.0.0.2"):
        await connect(encrypted, encrypted.nats_url("trainer").replace("127.0.0.1", "127.0.0.2"))


async def test_a_file_that_holds_no_authority_is_bad_input(
    encrypted: GuardedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    for name in ("junk.pem", "nothing.pem"):
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / name))
        with pytest.raises(ConfigError, match=CA_VARIABLE):
            await connect(encrypted)
        with pytest.raises(ConfigError, match=CA_VARIABLE):
            Store("rediss://localhost:1")


async def test_a_client_that_does_not_encrypt_gets_nowhere(encrypted: GuardedServers) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", encrypted.nats.port)
    try:
        assert b'"tls_required":true' in await reader.readline()
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        await writer.drain()
        heard = await asyncio.wait_for(reader.read(), 60)  # until the server closes
        assert b"PONG" not in heard
    finally:
        writer.close()


@pytest.fixture
async def proxy(encrypted: GuardedServers, guarded: GuardedServers) -> AsyncIterator[str]:
    """A server that speaks TLS with Redis's certificate and hands on to a Valkey. Returns the URL of the trainer's account."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    home = encrypted.accounts / "redis"
    context.load_cert_chain(home / "certificate.pem", home / "key.pem")
    talks: set[asyncio.Task[None]] = set()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        inner, outer = await asyncio.open_connection("127.0.0.1", guarded.valkey.port)
        try:
            ways = {asyncio.ensure_future(pour(reader, outer)), asyncio.ensure_future(pour(inner, writer))}
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()
            outer.close()
            talks.discard(task)

    port = free_port()
    server = await asyncio.start_server(talk, ["127.0.0.1", "127.0.0.2"], port, ssl=context)
    yield guarded.redis_url("trainer").replace("redis://", "rediss://").replace(f":{guarded.valkey.port}/", f":{port}/")
    server.close()
    for task in talks:
        task.cancel()


@pytest.mark.usefixtures("trusting")
async def test_the_stores_clients_encrypt_and_check_the_host(proxy: str) -> None:
    store = Store(proxy)
    await store.ping(deadline=1000)
    await store.close()
    blocking = BlockingStore(proxy)
    with pytest.raises(MyxoError, match="the store holds no blob guarded:group:x"):
        await asyncio.to_thread(blocking.read, ABSENT)
    blocking.close()
    elsewhere = Store(proxy.replace("127.0.0.1", "127.0.0.2"))
    with pytest.raises(StoreUnreachable, match="certificate is not trusted.*127.0.0.2"):
        await elsewhere.ping(deadline=1000)
    await elsewhere.close()


async def test_the_stores_clients_refuse_a_certificate_that_nobody_vouches_for(proxy: str) -> None:
    store = Store(proxy)
    with pytest.raises(StoreUnreachable, match=f"the store's certificate is not trusted; name the authority's file in {CA_VARIABLE}"):
        await store.ping(deadline=1000)
    await store.close()
    blocking = BlockingStore(proxy)
    with pytest.raises(StoreRefused, match="certificate is not trusted"):
        await asyncio.to_thread(blocking.read, ABSENT, 1000)
    blocking.close()


@pytest.mark.extra
@pytest.mark.usefixtures("trusting")
async def test_a_redis_server_with_the_rendered_config_encrypts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = GuardedServers(tmp_path, RUN, tls=True, certificates="redis")
    monkeypatch.setenv(CA_VARIABLE, str(servers.accounts / "trainer" / AUTHORITY))
    monkeypatch.setattr(servers.valkey, "address", str(servers.socket))  # unencrypted: it is to be seen alive
    try:
        servers.valkey.start()
    except MyxoError:
        if "Failed finding TLS support" in servers.valkey.log_path.read_text():
            pytest.skip("this valkey-server is built without TLS; its client side is tested above, the whole in compose")
        raise
    try:
        store = Store(servers.redis_url("trainer"))
        await store.ping()
        await store.close()
    finally:
        servers.valkey.stop()
