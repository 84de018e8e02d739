"""Certificates and files with credentials."""

import ssl
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from shared.accounts import certificates
from shared.accounts.certificates import LIFE, RENEW, KeyPair, stale
from shared.accounts.credentials import Deployment, make, write
from shared.accounts.permissions import ROLES, NatsSettings, RedisSettings
from shared.runtime.addresses import HttpAddress
from shared.runtime.errors import ConfigError
from tests.support.tables import table

PLACE = (HttpAddress("nats", 4222), HttpAddress("redis", 6379))
PLAIN, ENCRYPTED = Deployment("demo", *PLACE), Deployment("demo", *PLACE, tls=True)


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in sorted(directory.rglob("*")) if path.is_file()}


def passwords(directory: Path) -> dict[str, str]:
    urls = {name: text for name, text in files(directory).items() if name.endswith("_url")}
    return {name: url.split("@")[0].rsplit(":", 1)[1] for name, url in urls.items()} | {
        "health": files(directory)["redis/health"],
        "router": files(directory)["router/router_key"],
        "console": files(directory)["console/token"],
    }


def test_every_account_has_its_files_and_a_password_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, PLAIN)
    expected = {f"{role}/nats_url" for role in ROLES} | {f"{role}/redis_url" for role in ROLES if role != "environment"}
    assert set(files(tmp_path)) == expected | {
        "nats/nats.conf",
        "redis/redis.conf",
        "redis/health",
        "nats/admission",
        "redis/admission",
        "router/router_key",
        "rollout/router_key",
        "console/token",
    }
    assert len(set(passwords(tmp_path).values())) == 18
    assert all(len(password) >= 40 for password in passwords(tmp_path).values())
    found = files(tmp_path)
    assert found["buffer/nats_url"] == f"nats://buffer.demo:{passwords(tmp_path)['buffer/nats_url']}@nats:4222\n"
    assert found["buffer/redis_url"] == f"redis://buffer.demo:{passwords(tmp_path)['buffer/redis_url']}@redis:6379/0\n"
    assert found["rollout/router_key"] == found["router/router_key"]
    assert {(tmp_path / name / "router_key").stat().st_mode & 0o777 for name in ("rollout", "router")} == {0o400}
    assert all(passwords(tmp_path)[f"{role}/nats_url"] in found["nats/nats.conf"] for role in ROLES)


def test_a_second_call_changes_nothing_and_says_so(tmp_path: Path) -> None:
    first = make(tmp_path, PLAIN)
    before = files(tmp_path)
    second = make(tmp_path, PLAIN)
    assert files(tmp_path) == before
    assert "passwords: 20 made, 0 kept" in first
    assert second == ["passwords: 0 made, 20 kept", "files: all as they were", "run demo: 8 accounts, no TLS"]


def test_another_run_and_encryption_take_effect_and_passwords_stay(tmp_path: Path) -> None:
    make(tmp_path, PLAIN)
    before = passwords(tmp_path)
    settings = {"nats_settings": NatsSettings(listen="0.0.0.0:4333"), "redis_settings": RedisSettings(port=6380)}
    make(tmp_path, Deployment("other", HttpAddress("10.0.0.1", 4333), HttpAddress("::1", 6380), tls=True, **settings))
    found = files(tmp_path)
    assert passwords(tmp_path) == before
    assert found["trainer/nats_url"].startswith("tls://trainer.other:") and found["trainer/nats_url"].endswith("@10.0.0.1:4333\n")
    assert found["trainer/redis_url"].startswith("rediss://trainer.other:") and found["trainer/redis_url"].endswith("@[::1]:6380/0\n")
    assert '"user": "trainer.other"' in found["nats/nats.conf"] and "demo" not in found["nats/nats.conf"] + found["redis/redis.conf"]
    assert 'listen: "0.0.0.0:4333"' in found["nats/nats.conf"] and "tls-port 6380" in found["redis/redis.conf"]
    assert '"/credentials/key.pem"' in found["nats/nats.conf"]
    assert make(tmp_path, PLAIN)[0] == "passwords: 0 made, 20 kept"
    assert "tls" not in files(tmp_path)["nats/nats.conf"]


def test_a_lost_file_is_one_new_password(tmp_path: Path) -> None:
    make(tmp_path, PLAIN)
    before = passwords(tmp_path)
    (tmp_path / "reward" / "nats_url").unlink()
    assert "passwords: 1 made, 19 kept" in make(tmp_path, PLAIN)
    after = passwords(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"reward/nats_url"}
    assert after["reward/nats_url"] in files(tmp_path)["nats/nats.conf"]


@table("content", ["", "nats://nats:4222", "junk", "nats://[user:x@nats"])
def test_a_file_without_a_password_is_bad_input(tmp_path: Path, content: str) -> None:
    make(tmp_path, PLAIN)
    path = tmp_path / "buffer" / "nats_url"
    path.chmod(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path}.*remove the file"):
        make(tmp_path, PLAIN)


def test_modes(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    (directory / "replicas" / "spot-1").mkdir(parents=True, mode=0o755)  # as by a backup, or by a first `--join`
    make(directory, ENCRYPTED)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(directory) == 0o700
    for role in ROLES:
        assert mode(directory / role) == 0o700
        assert {mode(path) for path in (directory / role).iterdir()} == {0o400}
    for server in ("nats", "redis"):
        assert mode(directory / server) == 0o755
        assert {mode(path) for path in (directory / server).iterdir() if path.name != "admission"} == {0o444}
        assert mode(directory / server / "admission") == 0o400


def test_a_directory_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DIR"):
        make(tmp_path / "file", PLAIN)


def test_certificates_are_kept_and_every_role_trusts_them(tmp_path: Path) -> None:
    assert make(tmp_path, ENCRYPTED)[0].startswith("certificates: made (there is none yet)")
    before = files(tmp_path)
    assert len({before[f"{role}/ca.pem"] for role in ROLES}) == 1
    assert make(tmp_path, ENCRYPTED)[0] == "certificates: kept"
    assert files(tmp_path) == before
    (tmp_path / "reward" / "ca.pem").unlink()
    assert make(tmp_path, ENCRYPTED)[0].startswith("certificates: made")
    assert files(tmp_path)["nats/certificate.pem"] != before["nats/certificate.pem"]


def test_writing_tells_whether_it_changed_anything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "one"
    assert write(path, b"1", 0o400)
    assert not write(path, b"1", 0o400)
    assert write(path, b"1", 0o444)
    assert write(path, b"2", 0o400)
    assert path.read_bytes() == b"2"
    assert list(tmp_path.iterdir()) == [path]


# --- certificates: what they say, when they are made anew, and that a TLS library believes them

HOSTS = {"nats": ["nats", "localhost", "127.0.0.1"], "redis": ["redis", "10.1.2.3"]}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_server_is_named_by_its_hosts_and_signs_nobody() -> None:
    chain = certificates.make(HOSTS)
    for server, hosts in HOSTS.items():
        certificate = x509.load_pem_x509_certificate(chain.servers[server].certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name.value) for name in names] == hosts
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(chain.authority))
    assert b"PRIVATE" not in chain.authority
    assert stale(chain, HOSTS) is None


@pytest.mark.parametrize(("before_the_end", "kept"), [(RENEW + timedelta(days=1), True), (RENEW - timedelta(days=1), False)])
def test_it_is_made_anew_a_month_before_its_end(before_the_end: timedelta, kept: bool) -> None:
    assert (stale(certificates.make(HOSTS, NOW), HOSTS, NOW + LIFE - before_the_end) is None) == kept


def test_what_does_not_fit_is_made_anew() -> None:
    chain, other = certificates.make(HOSTS), certificates.make(HOSTS)
    assert "other hosts" in (stale(chain, HOSTS | {"nats": ["nats", "elsewhere"]}) or "")
    mixed = chain.servers | {"nats": KeyPair(chain.servers["nats"].certificate, other.servers["nats"].key)}
    assert "key" in (stale(replace(chain, servers=mixed), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, authority=other.authority), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, authority=b"junk"), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, servers={}), HOSTS) or "")


def test_a_strict_client_believes_it(tmp_path: Path) -> None:
    chain = certificates.make(HOSTS)
    for name, content in {"ca": chain.authority, "crt": chain.servers["nats"].certificate, "key": chain.servers["nats"].key}.items():
        (tmp_path / name).write_bytes(content)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on

    def shake(host: str) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = client.wrap_bio(to_client, to_server, server_hostname=host)
        theirs = server.wrap_bio(to_server, to_client, server_side=True)
        left = {ours, theirs}
        while left:
            for side in list(left):
                try:
                    side.do_handshake()
                    left.discard(side)
                except ssl.SSLWantReadError:
                    pass

    for host in HOSTS["nats"]:
        shake(host)
    with pytest.raises(ssl.SSLCertVerificationError, match="redis"):
        shake("redis")


def test_a_clock_that_is_a_little_behind_is_no_problem() -> None:
    certificate = x509.load_pem_x509_certificate(certificates.make(HOSTS, NOW).authority)
    assert certificate.not_valid_before_utc == NOW - certificates.SKEW
