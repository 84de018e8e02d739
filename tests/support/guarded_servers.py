"""Real servers with the configs and accounts that `myxo accounts` makes: what a deployment runs, on free ports of this machine."""

import tempfile
from pathlib import Path

from shared.accounts.credentials import NATS_URL, REDIS_URL, Deployment, make
from shared.accounts.permissions import NatsSettings, RedisSettings
from shared.process.embedded_servers import EmbeddedServer, free_port, nats_binary, valkey_binary
from shared.runtime.addresses import HttpAddress


class GuardedNats(EmbeddedServer):
    """nats-server with a rendered nats.conf."""

    name = "nats-server"
    answer = b"INFO"

    def __init__(self, directory: Path, config: Path, port: int) -> None:
        super().__init__(directory)
        self._config, self.port = config, port
        self.address, self.url = ("127.0.0.1", port), f"nats://127.0.0.1:{port}"

    def _command(self) -> list[str]:
        return [str(nats_binary()), "-c", str(self._config)]


class GuardedValkey(EmbeddedServer):
    """valkey-server with a rendered redis.conf."""

    name = "valkey-server"
    question, answer = b"PING\r\n", b"-NOAUTH"

    def __init__(self, directory: Path, config: Path, port: int) -> None:
        super().__init__(directory)
        self._config, self.port = config, port
        self.address, self.url = ("127.0.0.1", port), f"redis://127.0.0.1:{port}"

    def _command(self) -> list[str]:
        return [str(valkey_binary()), str(self._config)]


class GuardedServers:
    """Both servers of one run, and its credentials.

    Args:
        directory: for everything. tls: encrypt. certificates: whose directory both servers read theirs from. host: where they are reached.
    """

    def __init__(self, directory: Path, run: str, tls: bool = False, certificates: str = "nats", host: str = "127.0.0.1") -> None:
        self.run, self.accounts, self.tls = run, directory / "accounts", tls
        # a unix socket's path may have 107 bytes
        self.socket = Path(tempfile.mkdtemp(prefix="myxo-")) / "redis.sock"
        (directory / "nats").mkdir(parents=True)
        (directory / "valkey").mkdir()
        nats_port, redis_port = free_port(), free_port()
        self.deployment = Deployment(
            run,
            HttpAddress(host, nats_port),
            HttpAddress(host, redis_port),
            tls=tls,
            nats_settings=NatsSettings(f"0.0.0.0:{nats_port}", f"127.0.0.1:{free_port()}", str(directory / "nats")),
            redis_settings=RedisSettings(host, redis_port, str(self.socket), str(directory / "valkey")),
            mounted=str(self.accounts / certificates),
        )
        self.said = make(self.accounts, self.deployment)
        self.nats = GuardedNats(directory / "nats", self.accounts / "nats" / "nats.conf", nats_port)
        self.valkey = GuardedValkey(directory / "valkey", self.accounts / "redis" / "redis.conf", redis_port)
        self.valkey.address = (host, redis_port)

    def nats_url(self, role: str) -> str:
        return (self.accounts / role / NATS_URL).read_text().strip()

    def redis_url(self, role: str) -> str:
        return (self.accounts / role / REDIS_URL).read_text().strip()

    def environment(self, role: str) -> dict[str, str]:
        """What a container of the role is told."""
        home = self.accounts / role
        return {
            "MYXO_RUN": self.run,
            "NATS_URL_FILE": str(home / NATS_URL),
            "REDIS_URL_FILE": str(home / REDIS_URL),
            "MYXO_CA_FILE": str(home / "ca.pem"),
        }

    @property
    def secrets(self) -> list[str]:
        """Every password that was made, to look for where none may be."""
        urls = [path.read_text() for name in (NATS_URL, REDIS_URL) for path in self.accounts.glob(f"*/{name}")]
        return [url.split("@")[0].rsplit(":", 1)[1] for url in urls] + [(self.accounts / "redis" / "health").read_text()]
