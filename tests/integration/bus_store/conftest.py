"""Every test of bus and store runs on the embedded servers and, where a Docker engine is, on the images of the compose file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from tests.support.containers import ServerContainer, nats_container, needs_engine, redis_container

Server = EmbeddedServer | ServerContainer
BOTH = ["embedded", pytest.param("container", marks=pytest.mark.docker)]


@pytest.fixture(scope="session", params=BOTH)
def nats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(request.param, lambda: EmbeddedNats(tmp_path_factory.mktemp("nats")), nats_container)


@pytest.fixture(scope="session", params=BOTH)
def valkey(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(request.param, lambda: EmbeddedValkey(tmp_path_factory.mktemp("valkey")), redis_container)


@pytest.fixture(params=BOTH)
def mortal_nats(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    yield from _running(request.param, lambda: EmbeddedNats(tmp_path / "nats"), nats_container)


@pytest.fixture(params=BOTH)
def mortal_valkey(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    yield from _running(request.param, lambda: EmbeddedValkey(tmp_path / "valkey"), redis_container)


@pytest.fixture
def crash() -> Callable[[Server], None]:
    """kill -9 for a server, which then waits until it is gone; `start` brings it back."""

    def kill(server: Server) -> None:
        if isinstance(server, ServerContainer):
            server.kill()
            return
        assert server.process is not None
        server.process.kill()
        server.process.wait(30)

    return kill


def _running(kind: str, embedded: Callable[[], EmbeddedServer], contained: Callable[[], ServerContainer]) -> Iterator[Server]:
    if kind == "container":
        needs_engine()
    server: Server = contained() if kind == "container" else embedded()
    server.start()
    try:
        yield server
    finally:
        if isinstance(server, ServerContainer):
            server.remove()
        else:
            server.stop()
