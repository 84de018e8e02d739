"""Certificates: what they say, when they are made anew, and that a TLS library believes them."""

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from shared.accounts import certificates
from shared.accounts.certificates import LIFE, RENEW, KeyPair, make, stale

HOSTS = {"nats": ["nats", "localhost", "127.0.0.1"], "redis": ["redis", "10.1.2.3"]}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_server_is_named_by_its_hosts_and_signs_nobody() -> None:
    chain = make(HOSTS)
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
    assert (stale(make(HOSTS, NOW), HOSTS, NOW + LIFE - before_the_end) is None) == kept


def test_what_does_not_fit_is_made_anew() -> None:
    chain, other = make(HOSTS), make(HOSTS)
    assert "other hosts" in (stale(chain, HOSTS | {"nats": ["nats", "elsewhere"]}) or "")
    mixed = chain.servers | {"nats": KeyPair(chain.servers["nats"].certificate, other.servers["nats"].key)}
    assert "key" in (stale(replace(chain, servers=mixed), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, authority=other.authority), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, authority=b"junk"), HOSTS) or "")
    assert "cannot be used" in (stale(replace(chain, servers={}), HOSTS) or "")


def test_a_strict_client_believes_it(tmp_path: Path) -> None:
    chain = make(HOSTS)
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
    certificate = x509.load_pem_x509_certificate(make(HOSTS, NOW).authority)
    assert certificate.not_valid_before_utc == NOW - certificates.SKEW
