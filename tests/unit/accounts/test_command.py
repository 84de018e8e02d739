"""``myxo accounts`` as a person types it."""

import sys
from pathlib import Path

import pytest

from myxo.commands.accounts import address
from myxo.main import main
from shared.runtime.errors import ConfigError
from tests.support.tables import table


def test_it_says_what_it_did_and_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accounts", str(tmp_path), "--run", "demo"]) == 0
    out = capsys.readouterr().out
    assert "passwords: 20 made, 0 kept" in out and "run demo: 8 accounts, no TLS" in out
    for path in tmp_path.glob("*/*_url"):
        assert path.read_text().split("@")[0].rsplit(":", 1)[1] not in out
    assert main(["accounts", str(tmp_path), "--run", "demo", "--tls"]) == 0
    assert "certificates: made" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--run", "Demo"], "--run = 'Demo'"),
        (["--run", "a.b"], "--run = 'a.b'"),
        (["--run", "a", "--nats", "nats"], "--nats = 'nats': expected HOST:PORT"),
        (["--run", "a", "--redis", "redis:x"], "--redis = 'redis:x': expected HOST:PORT"),
        (["--run", "a", "--mounted", "here"], "--mounted = 'here': expected an absolute path"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path: Path, arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accounts", str(tmp_path / "new"), *arguments]) == 2
    error = capsys.readouterr().err
    assert field in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_servers_without_containers_listen_and_keep_data_where_it_is_said(tmp_path: Path) -> None:
    words = ["--tls", "--nats", "10.0.0.10:4333", "--redis", "10.0.0.10:6380", "--listen", "10.0.0.10", "--data", str(tmp_path / "data")]
    words += ["--nats-monitor", "0.0.0.0:8223"]
    assert main(["accounts", str(tmp_path / "made"), "--run", "r", "--redis-memory", "4gb", *words]) == 0
    bus, store = ((tmp_path / "made" / name).read_text() for name in ("nats/nats.conf", "redis/redis.conf"))
    assert 'listen: "10.0.0.10:4333"' in bus and 'http: "0.0.0.0:8223"' in bus and f'"store_dir": "{tmp_path}/data/nats"' in bus
    assert f'"cert_file": "{tmp_path}/made/nats/certificate.pem"' in bus and f'tls-key-file "{tmp_path}/made/redis/key.pem"' in store
    expected = ("bind 10.0.0.10", "tls-port 6380", f'dir "{tmp_path}/data/redis"', "maxmemory 4gb")
    assert all(line in store.splitlines() for line in expected)


def test_without_the_library_tls_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "shared.accounts.certificates", raising=False)
    monkeypatch.delattr("shared.accounts.certificates", raising=False)
    assert main(["accounts", str(tmp_path), "--run", "demo", "--tls"]) == 1
    assert "pip install 'myxo[accounts]'" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "host", "port"), [("nats:4222", "nats", 4222), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:2", "::1", 2)])
def test_addresses(text: str, host: str, port: int) -> None:
    assert (address("--nats", text).host, address("--nats", text).port) == (host, port)
    assert str(address("--nats", text)) == text


@table("text", ["", "a", "a:", ":1", "a:0", "a:99999", "a:b", "u@a:1", "a:1/x", "[::1:1"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="--nats"):
        address("--nats", text)
