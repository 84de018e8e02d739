"""The address by which other machines reach a process."""

import pytest

from shared.runtime.errors import ConfigError
from shared.runtime.own_address import own_address


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MYXO_HOST", "NATS_URL", "NATS_URL_FILE"):
        monkeypatch.delenv(variable, raising=False)


def test_loopback_where_the_bus_is_here_or_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("NATS_URL", "nats://user:p@127.0.0.1:4222,nats://10.1.2.3:4222")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("NATS_URL", "nats://no-such-host.invalid:4222")
    assert own_address() == "127.0.0.1"


def test_the_interface_that_leads_to_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 127/8 is this machine: the route to 127.0.0.9 begins at an address that the kernel chooses."""
    monkeypatch.setenv("NATS_URL", "tls://user@127.0.0.9:4222")
    assert own_address().startswith("127.")


def test_what_is_given_wins_and_has_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:4222")
    monkeypatch.setenv("MYXO_HOST", "127.0.0.7")
    assert own_address() == "127.0.0.7"
    monkeypatch.setenv("MYXO_HOST", "no-such-host.invalid")
    with pytest.raises(ConfigError, match="MYXO_HOST = 'no-such-host.invalid': does not resolve"):
        own_address()
