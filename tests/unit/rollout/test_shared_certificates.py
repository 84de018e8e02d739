"""The clients of one process read the machine's certificates once."""

import importlib
import ssl
from typing import Any

import certifi
import pytest
from anthropic import AsyncAnthropic
from httpx import AsyncClient
from openai import AsyncOpenAI

from services.rollout.function_worker import share_certificates


def context(client: Any) -> Any:
    return client._transport._pool._ssl_context


def test_clients_of_both_houses_share_them_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("httpx", "httpx2"):
        transports = importlib.import_module(f"{library}._transports.default")
        monkeypatch.setattr(transports, "create_ssl_context", transports.create_ssl_context)  # as it was, afterwards
    share_certificates()
    anthropics = [AsyncAnthropic(base_url="http://x", api_key="k")._client for _ in range(2)]
    assert context(anthropics[0]) is context(anthropics[1])
    shared = context(AsyncOpenAI(base_url="http://x/v1", api_key="k")._client)
    assert shared.verify_mode == ssl.CERT_REQUIRED and shared.check_hostname and shared.get_ca_certs()
    assert context(AsyncClient()) is shared
    unchecked = context(AsyncClient(verify=False))
    assert unchecked.verify_mode == ssl.CERT_NONE and shared.verify_mode == ssl.CERT_REQUIRED
    own = ssl.create_default_context()
    assert context(AsyncClient(verify=own)) is own
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    assert context(AsyncClient()) is not shared, "the variable is heard when it changes"
