"""The URL that agents are told: the gateway's address, or what the environment says of another network."""

import pytest

from services.gateway.gateway_service import gateway_url
from shared.runtime.errors import ConfigError


def test_it_is_the_address_where_nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYXO_GATEWAY_URL", raising=False)
    assert gateway_url("10.0.0.3:8000") == "http://10.0.0.3:8000"
    for given, url in (("http://gateway:8000", "http://gateway:8000"), ("https://agents.example.org/", "https://agents.example.org")):
        monkeypatch.setenv("MYXO_GATEWAY_URL", given)
        assert gateway_url("10.0.0.3:8000") == url


@pytest.mark.parametrize("given", ["gateway:8000", "ftp://gateway", "http://", "http://gateway:8000/v1", "http://gateway?x", "http://a b"])
def test_what_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MYXO_GATEWAY_URL", given)
    with pytest.raises(ConfigError, match="MYXO_GATEWAY_URL = "):
        gateway_url("10.0.0.3:8000")
