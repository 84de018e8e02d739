"""The port inventory: nothing of a run listens but what docs/ports.md says, at the addresses that it says."""

import asyncio
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import free_port
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import PeerTransferOffer, PeerTransferRequest, WeightChannelAddress
from tests.e2e.launched import ROOT, LaunchedRun
from tests.support.listening_sockets import ListeningSocket, listening_inodes, listening_sockets

RUN_SECONDS = 900
LOOK_S = 0.1
FULL_LOOK_S = 1.0
"""How often whose the sockets are is asked although there is none that was not there before: a process may inherit one."""
LENDS_SECONDS = 60.0
"""How long the lender waits for the borrower."""

FLAGS = [
    *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    *("--gateway-replicas", "1", "--gateway-host", "127.0.0.2"),
    *("--console", "--console-port", "0"),
    *("--update-weights-interval", "20"),  # a replica refuses to lend weights that are being changed
]
ADDRESSES = {"loopback": "127.0.0.1", "private": "127.0.0.2"}
"""The private address is this machine's, too, but another one than that of everything else."""


class Row(NamedTuple):
    """A row of the page. ``process``: whole words of a command line. ``most``: sockets of one process at a time."""

    process: str
    addresses: set[str]
    most: float

    def names(self, command: str) -> bool:
        return re.search(rf"(?:^|[\s/]){re.escape(self.process)}(?:[\s_]|$)", command) is not None


def page_rows() -> list[Row]:
    page = (ROOT / "docs" / "ports.md").read_text()
    table = page.split("<!-- ports:")[1].split("<!-- /ports -->")[0]
    rows = []
    for line in table.splitlines():
        if line.startswith("| `"):
            processes, addresses, sockets, *_ = [cell.strip() for cell in line.strip("|").split("|")]
            most = float("inf") if sockets == "many" else int(sockets)
            where = {ADDRESSES[name] for name in re.findall(r"\w+", addresses)}
            rows += [Row(process, where, most) for process in re.findall(r"`(.+?)`", processes)]
    return rows


def excess(sockets: set[ListeningSocket], rows: list[Row]) -> list[str]:
    """What listens, at one time, and is not on the page."""
    crowds, found = Counter(one.pid for one in sockets), []
    for one in sockets:
        row = next((row for row in rows if row.names(one.command)), None)
        if row is None or one.address not in row.addresses or crowds[one.pid] > row.most:
            found.append(f"{one.address}:{one.port} of {one.command[-200:]!r}; on the page: {row}")
    return found


class Inventory:
    """All that listened below a process, looked at again and again, and what of it is not on the page."""

    def __init__(self, pid: int) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.excess: list[str] = []
        self._pid, self._rows = pid, page_rows()
        self._known, self._full_look_at = frozenset[str](), 0.0

    def look(self) -> None:
        there, now = listening_inodes(), time.monotonic()
        if there <= self._known and now < self._full_look_at:
            return
        self._known, self._full_look_at = there, now + FULL_LOOK_S
        sockets = listening_sockets(self._pid)
        self.seen |= {(row.process, one.address) for one in sockets for row in self._rows if row.names(one.command)}
        self.excess += excess(sockets, self._rows)

    def until_seen(self, process: str, address: str) -> None:
        end = time.monotonic() + LENDS_SECONDS
        while (process, address) not in self.seen:
            assert time.monotonic() < end, f"{process} did not listen at {address} within {LENDS_SECONDS:g} s; seen: {self.seen}"
            time.sleep(LOOK_S)


@contextlib.contextmanager
def inventory(pid: int) -> Iterator[Inventory]:
    """Looks on while the body runs."""
    taken, ended = Inventory(pid), threading.Event()

    def keep_looking() -> None:
        while not ended.wait(LOOK_S):
            taken.look()

    looking = threading.Thread(target=keep_looking, daemon=True)
    looking.start()
    try:
        yield taken
    finally:
        ended.set()
        looking.join()


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_run_listens_where_the_page_says_and_nowhere_else(
    small_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainer ranks, an engine with a door for a router, a push, and a replica that lends its weights to one that never comes."""
    monkeypatch.setenv("MYXO_HOST", ADDRESSES["private"])
    monkeypatch.setenv("MYXO_ROUTER_URL", f"http://127.0.0.1:{free_port()}")  # nobody is there; the doors are open
    monkeypatch.setenv("MYXO_ROUTER_KEY", "a key that nobody asks for")
    for name in ("MYXO_HTTP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    config, root = small_run("ports", steps=500, staleness=1), tmp_path / "runs" / "ports"
    with LaunchedRun(config, root, "ports", FLAGS) as run, inventory(run.process.pid) as taken:
        cards = run.until("a replica that was pushed to", lambda cards: bool(served(cards)), RUN_SECONDS)
        channel = asyncio.run(lent_by(served(cards)[0], run))
        assert channel.address == ADDRESSES["private"]
        taken.until_seen("sglang::scheduler", channel.address)
    assert not taken.excess, "\n".join(sorted(set(taken.excess)))
    unseen = {(row.process, address) for row in page_rows() for address in row.addresses} - taken.seen
    assert not unseen, f"on the page, and nothing of it listened in a whole run: {unseen}"


def served(cards: list[ServiceStatus]) -> list[ServiceStatus]:
    return [card for card in cards if card.service == "rollout" and card.version >= 0]


async def lent_by(replica: ServiceStatus, run: LaunchedRun) -> WeightChannelAddress:
    """Asks a replica for the weights that it serves, as another one does; again while it refuses, because a push is changing them."""
    servers, end = run.directory.servers(), time.monotonic() + RUN_SECONDS
    assert servers is not None
    bus = await Bus.connect(servers.nats_url, "test")
    subject = Subjects(run.run).replica_weights(replica.instance, "transfer")
    try:
        while True:
            serving = {card.instance: card.version for card in await Registry(bus, run.run).alive("rollout")}
            version = serving.get(replica.instance, replica.version)
            request = PeerTransferRequest(destination="nobody", version=version, ranks=1, deadline=LENDS_SECONDS)
            try:
                offer = await bus.request(subject, request, PeerTransferOffer, deadline=30, awaited_from=replica.instance, patient=False)
                return offer.channels[0]
            except MyxoError as error:
                assert time.monotonic() < end, f"{replica.instance} lent no weights: {error}\n{run.said()}"
                await asyncio.sleep(LOOK_S)
    finally:
        await bus.close()


def test_what_is_not_on_the_page_is_found() -> None:
    rows = page_rows()
    assert len(rows) >= 10
    good = {
        ListeningSocket(1, "/bin/nats-server -c nats.conf", "127.0.0.1", 1),
        ListeningSocket(2, "python -m services.buffer", "127.0.0.1", 2),
    }
    assert not excess(good, rows)
    for bad in (
        ListeningSocket(1, "/bin/nats-server -c nats.conf", "127.0.0.1", 9),  # a second one
        ListeningSocket(3, "/bin/valkey-server valkey.conf", "127.0.0.1", 9),
        ListeningSocket(4, "python -m services.reward", "0.0.0.0", 9),
        ListeningSocket(5, "python -u -m services.trainer.rank actor", "::", 9),
        ListeningSocket(6, "python -m services.reward.worker", "127.0.0.1", 9),
        ListeningSocket(7, "python -m http.server", "127.0.0.1", 9),
        ListeningSocket(8, "python /myxo/services/rollout/engine/gpu_launcher.py --port 9", "127.0.0.1", 9),
    ):
        assert excess(good | {bad}, rows), bad
