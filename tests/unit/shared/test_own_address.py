"""The address by which other machines reach a process."""

import pytest

from shared.runtime.addresses import address_towards, listening_interfaces, own_address
from shared.runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MYXO_HOST", "NATS_URL", "NATS_URL_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
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
    for everywhere in ("0.0.0.0", "0"):
        monkeypatch.setenv("MYXO_HOST", everywhere)
        with pytest.raises(ConfigError, match=f"MYXO_HOST = '{everywhere}': means all addresses"):
            own_address()


def test_ranks_listen_on_loopback_and_nccl_where_other_machines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("MYXO_HOST", "127.0.0.7")
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_the_way_to_a_host_begins_at_an_address_of_this_machine() -> None:
    assert address_towards("127.0.0.9").startswith("127.")
    assert address_towards("no-such-host.invalid") == "127.0.0.1"
