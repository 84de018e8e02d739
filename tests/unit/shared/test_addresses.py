"""Where the environment says that the servers are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.runtime import addresses
from shared.runtime.errors import ConfigError

READ: dict[str, Callable[[], str | None]] = {"NATS_URL": addresses.nats_url, "REDIS_URL": addresses.redis_url}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*READ, *(f"{name}_FILE" for name in READ), addresses.CA_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", READ)
def test_the_variable_goes_before_the_file(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, path = READ[variable], tmp_path / "url"
    assert read() is None
    path.write_text("nats://of-the-file:1\n")
    monkeypatch.setenv(f"{variable}_FILE", str(path))
    assert read() == "nats://of-the-file:1"
    monkeypatch.setenv(variable, "nats://of-the-variable:1")
    assert read() == "nats://of-the-variable:1"
    monkeypatch.setenv(variable, "")
    assert read() == "nats://of-the-file:1"


@pytest.mark.parametrize("variable", READ)
@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_url_is_bad_input(variable: str, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(f"{variable}_FILE", str(path))
    with pytest.raises(ConfigError, match=f"{variable}_FILE = '{path}'"):
        READ[variable]()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:1/0", False),
        ("unix:///a/b.sock", False),
        ("redis://user:x@host", True),
        ("redis://:x@host", True),
        ("rediss://user@host", True),
        ("redis://host/0?password=x", True),
        ("redis://host/0?protocol=3", False),
    ],
)
def test_whether_a_url_has_credentials(url: str, expected: bool) -> None:
    assert addresses.has_credentials(url) is expected
