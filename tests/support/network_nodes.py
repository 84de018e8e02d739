"""Nodes of a cluster as network namespaces, each with one cable to a switch, as this machine has, whose servers they reach.

The switch is a bridge in a namespace of its own: what passes through a bridge beside Docker's is dropped by Docker's firewall rules.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats

ROOT = Path(__file__).resolve().parents[2]


def ip(*words: str) -> None:
    """Runs the system's ``ip``; skips the test where the system permits no network namespaces."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        assert "Operation not permitted" in done.stderr, f"ip {' '.join(words)}: {done.stderr.strip()}"
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


class NodeNetwork:
    """Nodes 0, 1, …; this machine at address `head`. Use `node_network`."""

    def __init__(self, nodes: int) -> None:
        mark = secrets.token_hex(3)
        self.switch, self._cable = f"myxo-{mark}-switch", f"mx{mark}"
        self._net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.head = f"{self._net}.254"
        self.names = [f"myxo-{mark}-{node}" for node in range(nodes)]
        self.addresses = [f"{self._net}.{node + 1}" for node in range(nodes)]

    def make(self) -> None:
        ip("netns", "add", self.switch)
        self._in_switch("link", "add", "bridge", "type", "bridge")
        self._in_switch("link", "set", "bridge", "up")
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "head", "netns", self.switch)
        self._in_switch("link", "set", "head", "master", "bridge", "up")
        ip("address", "add", f"{self.head}/24", "dev", self._cable)
        ip("link", "set", self._cable, "up")
        for node, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            self._name_addresses(name)
            self._in_switch("link", "add", f"node-{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._in_switch("link", "set", f"node-{node}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def _in_switch(self, *words: str) -> None:
        ip("-n", self.switch, *words)

    def _name_addresses(self, namespace: str) -> None:
        """Lets nodes look up addresses without a name server, which they do not reach (``/etc/netns``, ip-netns(8))."""
        place = Path("/etc/netns") / namespace
        place.mkdir(parents=True)
        hosts = "".join(f"{self._net}.{last} host-{last}\n" for last in range(1, 255))
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (place / "nsswitch.conf").write_text("hosts: files\n")

    def remove(self) -> None:
        for name in self.names:
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self, node: int) -> None:
        """Takes a node's link down."""
        ip("-n", self.names[node], "link", "set", "eth0", "down")

    def mend(self, node: int) -> None:
        ip("-n", self.names[node], "link", "set", "eth0", "up")

    def part(self) -> None:
        """Cuts all links between nodes; this machine, and so the servers, they still reach."""
        self._isolate("on")

    def join(self) -> None:
        self._isolate("off")

    def _isolate(self, whether: str) -> None:
        for node in range(len(self.names)):
            self._in_switch("link", "set", f"node-{node}", "type", "bridge_slave", "isolated", whether)

    def readdress(self, node: int) -> None:
        """Gives a node another address in the place of the one that it has."""
        old, new = self.addresses[node], f"{self._net}.{100 + node}"
        ip("-n", self.names[node], "address", "delete", f"{old}/24", "dev", "eth0")
        ip("-n", self.names[node], "address", "add", f"{new}/24", "dev", "eth0")
        self.addresses[node] = new

    def start(self, node: int, log: Path, environment: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
        """Starts ``python WORDS`` on a node; its output is appended to ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                with_parent(["ip", "netns", "exec", self.names[node], sys.executable, *words]),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


@contextlib.contextmanager
def node_network(nodes: int) -> Iterator[NodeNetwork]:
    """Makes a network of so many nodes; skips the test where the system has none."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: there is no command ip")
    network = NodeNetwork(nodes)
    try:
        network.make()
        yield network
    finally:
        network.remove()


class HeadNats(EmbeddedNats):
    """An embedded NATS server at an address of its own."""

    def __init__(self, directory: Path, address: str) -> None:
        super().__init__(directory)
        self._at = address
        self.address = (address, self.port)
        self.url = self.guest_url = self.url.replace("127.0.0.1", address)

    def _command(self) -> list[str]:
        command, config = super()._command(), self.directory / "nats.conf"
        config.write_text(config.read_text().replace("listen: 127.0.0.1", f"listen: {self._at}"))
        return command
