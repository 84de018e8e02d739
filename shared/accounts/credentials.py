"""Makes the credential files, one directory for each container. Later calls keep them, and rewrite the servers' configs.

    DIR/nats/      nats.conf, admission (password of the account that may have the server read it again), certificate.pem, key.pem
    DIR/redis/     redis.conf, health (password of the account that may only ping), admission, certificate.pem, key.pem
    DIR/<role>/    nats_url, redis_url, ca.pem; rollout's, and that of the router, which has nothing else: router_key; console's: token
    DIR/replicas/<name>/   nats_url, redis_url, ca.pem of one replica (`admit`)

In compose each of these directories is a separate volume, which only its owner's container mounts.
"""

import contextlib
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from shared.accounts.permissions import (
    ADMISSION,
    CERTIFICATE,
    CONSOLE,
    HEALTH,
    KEY,
    REPLICAS,
    ROLES,
    ROLLOUT,
    NatsSettings,
    RedisSettings,
    Rights,
    nats_conf,
    redis_conf,
    replica_rights,
    rights,
)
from shared.runtime.addresses import HttpAddress
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_files import private_directory, replace_file

NATS, REDIS, ROUTER = "nats", "redis", "router"
NATS_URL, REDIS_URL, AUTHORITY = "nats_url", "redis_url", "ca.pem"  # names of a role's files
ROUTER_KEY = "router_key"  # name of the file with the key to the router's control plane
TOKEN = "token"  # name of the file with what opens the console
_BARE = (HEALTH, ADMISSION, ROUTER_KEY, TOKEN)  # files that hold a password alone, not a URL
_OWNED = (NATS_URL, REDIS_URL, ROUTER_KEY, TOKEN, ADMISSION)
OWNER_ONLY = 0o400  # mode of a role's files: its service runs as the user that makes the accounts (10001 in the images)

# The mode of the servers' files: NATS may run as root, Redis as 999. They are protected because no other container mounts the volume.
EVERYBODY = 0o444
PASSWORD_BYTES = 32


@dataclass(frozen=True)
class Deployment:
    """The servers and the run that accounts are made for.

    ``run``: the run's id. ``nats``, redis: the addresses at which services reach them. ``tls``: whether both are encrypted.
    ``nats_settings``, redis_settings: the servers' settings; by default those of compose. ``mounted``: the path at which a server sees its
    own directory; empty: where it is made.
    """

    run: str
    nats: HttpAddress
    redis: HttpAddress
    tls: bool = False
    nats_settings: NatsSettings = field(default_factory=NatsSettings)
    redis_settings: RedisSettings = field(default_factory=RedisSettings)
    mounted: str = "/credentials"


class AuthorityMissing(MyxoError):
    """TLS is configured, but the library that makes certificates is not installed."""


def make(directory: Path, deployment: Deployment) -> list[str]:
    """Makes missing credentials and writes the configs. Returns lines for a person that say what was done.

    Raises ConfigError for a directory that cannot be written and for a file there with unexpected content.
    """
    try:
        roles = (*rights(deployment.run), *(replica_rights(deployment.run, name) for name in admitted(directory)))
        private_directory(directory, 0o700)  # which alone keeps what servers read from others, outside of compose's volumes
        for name in (NATS, REDIS, ROUTER, *ROLES):
            (directory / name).mkdir(mode=0o755 if name in (NATS, REDIS) else 0o700, exist_ok=True)
        said = _certificates(directory, deployment, [role.home for role in roles]) if deployment.tls else []
        passwords, kept = _passwords(directory, roles)
        said.append(f"passwords: {len(passwords) - kept} made, {kept} kept")
        written = []
        for path, text in _texts(directory, deployment, roles, passwords).items():
            if write(path, text.encode(), OWNER_ONLY if path.name in _OWNED else EVERYBODY):
                written.append(str(path.relative_to(directory)))
        said.append(f"files: {', '.join(written) or 'all as they were'}")
        said.append(f"run {deployment.run}: {len(roles)} accounts, {'TLS' if deployment.tls else 'no TLS'}")
        return said
    except OSError as error:
        where = error.filename or directory
        raise ConfigError("DIR", str(directory), f"{where}: {error.strerror}; expected a directory that this user can write") from error


def admitted(directory: Path) -> list[str]:
    """Returns the names of the replicas that have accounts of their own."""
    return sorted(path.name for path in (directory / REPLICAS).glob("*") if path.is_dir())


def admit(directory: Path, name: str) -> None:
    """Prepares accounts for one replica; `make` makes them. Raises ConfigError."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", name):
        raise ConfigError("--join", name, "expected up to 63 lower-case letters, digits, '-' and '_'")
    (directory / REPLICAS / name).mkdir(mode=0o700, parents=True, exist_ok=True)


def revoke(directory: Path, name: str) -> None:
    """Removes one replica's accounts; `make` takes them out of the configs. Raises ConfigError for one that has none."""
    if name not in (names := admitted(directory)):
        raise ConfigError("--leave", name, f"expected a replica with accounts of its own: {', '.join(names) or 'there is none'}")
    shutil.rmtree(directory / REPLICAS / name)


def _passwords(directory: Path, roles: tuple[Rights, ...]) -> tuple[dict[Path, str], int]:
    """Returns every password by its file, known or newly made, and how many were known."""
    places = [directory / role.home / NATS_URL for role in roles]
    places += [directory / role.home / REDIS_URL for role in roles if role.store is not None]
    places += [directory / REDIS / HEALTH, directory / ROUTER / ROUTER_KEY, directory / CONSOLE / TOKEN]
    places += [directory / server / ADMISSION for server in (NATS, REDIS)]
    known = {path: password for path in places if (password := _password(path))}
    passwords = {path: known.get(path) or secrets.token_urlsafe(PASSWORD_BYTES) for path in places}
    return passwords, len(known)


def _texts(directory: Path, deployment: Deployment, roles: tuple[Rights, ...], passwords: dict[Path, str]) -> dict[Path, str]:
    bus_scheme, store_scheme = ("tls", "rediss") if deployment.tls else ("nats", "redis")
    texts = {directory / server / ADMISSION: passwords[directory / server / ADMISSION] for server in (NATS, REDIS)}
    bus = {ADMISSION: passwords[directory / NATS / ADMISSION]}
    store = {HEALTH: passwords[directory / REDIS / HEALTH], ADMISSION: passwords[directory / REDIS / ADMISSION]}
    for role in roles:
        home = directory / role.home
        bus[role.home] = passwords[home / NATS_URL]
        texts[home / NATS_URL] = f"{bus_scheme}://{role.user}:{bus[role.home]}@{deployment.nats}\n"
        if role.store is not None:
            store[role.home] = passwords[home / REDIS_URL]
            texts[home / REDIS_URL] = f"{store_scheme}://{role.user}:{store[role.home]}@{deployment.redis}/0\n"
    tls = {name: deployment.mounted or str((directory / name).absolute()) if deployment.tls else None for name in (NATS, REDIS)}
    texts[directory / NATS / "nats.conf"] = nats_conf(roles, bus, replace(deployment.nats_settings, tls=tls[NATS]))
    texts[directory / REDIS / "redis.conf"] = redis_conf(roles, store, replace(deployment.redis_settings, tls=tls[REDIS]))
    texts[directory / REDIS / HEALTH] = store[HEALTH]
    texts |= {directory / home / ROUTER_KEY: passwords[directory / ROUTER / ROUTER_KEY] for home in (ROUTER, ROLLOUT)}
    texts[directory / CONSOLE / TOKEN] = passwords[directory / CONSOLE / TOKEN]
    return texts


def _password(path: Path) -> str | None:
    try:
        text = path.read_text().strip()
        password = text if path.name in _BARE else urlsplit(text).password
    except FileNotFoundError:
        return None
    except ValueError:
        password = None
    if not password and path.name not in _BARE:
        raise ConfigError(str(path), "…", "expected a URL with a password; remove the file to have a new one made")
    return password or None


def _certificates(directory: Path, deployment: Deployment, homes: Sequence[str]) -> list[str]:
    try:
        from shared.accounts import certificates  # imports a library that only TLS needs
    except ModuleNotFoundError as error:
        raise AuthorityMissing(f"{error.name} is not installed: pip install 'myxo[accounts]'") from error

    at = {NATS: deployment.nats.host, REDIS: deployment.redis.host}
    hosts = {server: list(dict.fromkeys((server, host, "localhost", "127.0.0.1"))) for server, host in at.items()}
    reason: str | None = "there is none yet"
    with contextlib.suppress(FileNotFoundError):
        pairs = {s: certificates.KeyPair((directory / s / CERTIFICATE).read_bytes(), (directory / s / KEY).read_bytes()) for s in hosts}
        authorities = {(directory / role / AUTHORITY).read_bytes() for role in ROLES}
        found = certificates.Chain(min(authorities), pairs)
        differ = "roles trust different authorities" if len(authorities) > 1 else None
        reason = differ or certificates.stale(found, hosts)
        if reason is None:
            for home in homes:
                write(directory / home / AUTHORITY, found.authority, OWNER_ONLY)
            return ["certificates: kept"]
    chain = certificates.make(hosts)
    for server, pair in chain.servers.items():
        write(directory / server / KEY, pair.key, EVERYBODY)
        write(directory / server / CERTIFICATE, pair.certificate, EVERYBODY)
    for home in homes:
        write(directory / home / AUTHORITY, chain.authority, OWNER_ONLY)
    return [f"certificates: made ({reason}); restart servers and services"]


def write(path: Path, content: bytes, mode: int) -> bool:
    """Replaces a file atomically. Returns whether anything had to change."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mode & 0o777 == mode and path.read_bytes() == content:
            return False
    replace_file(path, content, mode=mode, durable=True)
    return True
