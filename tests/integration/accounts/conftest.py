"""One pair of guarded servers for the tests that only try what is refused, another for those that run a whole run."""

from collections.abc import Iterator

import pytest

from tests.support.guarded_servers import GuardedServers


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServers]:
    """Servers without a run on them."""
    servers = GuardedServers(tmp_path_factory.mktemp("guarded"), "guarded")
    servers.nats.start()
    servers.valkey.start()
    yield servers
    servers.valkey.stop()
    servers.nats.stop()
