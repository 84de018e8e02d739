"""Makes a certificate authority and the servers' certificates, for connections within one deployment.

The authority's private key is never written: when one certificate has to be renewed, a new authority signs them all. Clients read the
authority's certificate when they start.
"""

import inspect
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=365)
RENEW = timedelta(days=30)  # certificate is renewed when less than this remains of its validity
SKEW = timedelta(minutes=5)  # client's clock may be behind by this much
_USAGES = tuple(inspect.signature(x509.KeyUsage).parameters)


@dataclass(frozen=True)
class KeyPair:
    """A server's certificate and private key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class Chain:
    """The authority's certificate, PEM, and the key pairs that it has signed, by server."""

    authority: bytes
    servers: dict[str, KeyPair]


def make(hosts: Mapping[str, Sequence[str]], now: datetime | None = None) -> Chain:
    """Returns a new authority and one certificate for each server.

    ``hosts``: server → the names and IP addresses at which clients reach it.
    """
    start = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Myxo")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority = (
        _builder(name, name, key.public_key(), start)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    servers = {}
    for server, names in hosts.items():
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server)]), name, own.public_key(), start)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in names]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(key, hashes.SHA256())
        )
        private = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        servers[server] = KeyPair(certificate.public_bytes(serialization.Encoding.PEM), private)
    return Chain(authority.public_bytes(serialization.Encoding.PEM), servers)


def stale(chain: Chain, hosts: Mapping[str, Sequence[str]], now: datetime | None = None) -> str | None:
    """Returns why a chain has to be renewed; None if it stays valid for ``hosts`` for longer than `RENEW`."""
    limit = (now or datetime.now(UTC)) + RENEW
    try:
        authority = x509.load_pem_x509_certificate(chain.authority)
        if authority.not_valid_after_utc < limit:
            return "the authority's certificate ends soon"
        for server, names in hosts.items():
            pair = chain.servers[server]
            certificate = x509.load_pem_x509_certificate(pair.certificate)
            if certificate.not_valid_after_utc < limit:
                return f"{server}'s certificate ends soon"
            certificate.verify_directly_issued_by(authority)
            if serialization.load_pem_private_key(pair.key, None).public_key() != certificate.public_key():
                return f"{server}'s key is not that of its certificate"
            given = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            if not set(map(_general_name, names)) <= set(given):
                return f"{server}'s certificate is for other hosts"
    except (ValueError, TypeError, KeyError, InvalidSignature, x509.ExtensionNotFound) as error:
        return f"a certificate cannot be used ({type(error).__name__})"
    return None


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, start: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start - SKEW).not_valid_after(start + LIFE)


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in _USAGES})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
