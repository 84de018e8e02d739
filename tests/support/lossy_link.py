"""A site behind the internet: a network namespace whose one link to this machine has a rate, a delay, and loses packets.

    with lossy_link(Internet()) as link:
        link.start(log, environment, "-m", "services.rollout")   # at the site; this machine is `link.hub` there
        link.cut(True)

Packets pass through this module's process, between two TUN devices: the kernel's TCP is real on both sides, and so are losses and queues.
tc's netem would do the same, but many kernels of CI machines lack it.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from shared.process.child_process import ChildProcess
from tests.support.network_nodes import ip
from tests.support.service_process import ROOT

TUNSETIFF, TUN_NO_HEADER, CLONE_NEWNET = 0x400454CA, 0x1001, 0x40000000


@dataclass(frozen=True)
class Internet:
    """``bytes_s``: each way. ``delay_s``: one way. ``loss``: of packets. ``queue_s``: what the narrowest router holds at most. ``port``: of
    the hub, the one that a firewall lets through; 0: all."""

    bytes_s: float = 12.5e6
    delay_s: float = 0.04
    loss: float = 0.01
    queue_s: float = 0.1
    port: float = 0


INTERNET = Internet()


class LossyLink:
    """``hub``, ``site``: the addresses of this machine and of the namespace."""

    def __init__(self, internet: Internet) -> None:
        mark = secrets.token_hex(3)
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.name, self.hub, self.site = f"myxo-{mark}-site", f"{net}.1", f"{net}.2"
        self._device, self._internet = f"mx{mark}", internet
        self._process: ChildProcess | None = None

    def make(self) -> None:
        ip("netns", "add", self.name)
        words = [self.name, self._device, self.hub, self.site, *map(str, astuple(self._internet))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = ChildProcess("lossy link", [sys.executable, "-m", "tests.support.lossy_link", *words], None, environment)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def cut(self, cut: bool) -> None:
        """Loses every packet, or no more than usual."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(b"1" if cut else b"0")
        self._process.stdin.flush()

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs ``python WORDS`` at the site."""
        return ["ip", "netns", "exec", self.name, sys.executable, *words]

    def start(self, log: Path, environment: Mapping[str, str], *words: str) -> ChildProcess:
        return ChildProcess(" ".join(words), self.command(*words), log, {**os.environ, "PYTHONPATH": str(ROOT), **environment})

    def remove(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)


@contextlib.contextmanager
def lossy_link(internet: Internet = INTERNET) -> Iterator[LossyLink]:
    """Makes a site; skips the test where the system has no namespaces or TUN devices."""
    if shutil.which("ip") is None or not os.path.exists("/dev/net/tun") or os.geteuid() != 0:
        pytest.skip("needs the command ip, /dev/net/tun, and root")
    link = LossyLink(internet)
    try:
        link.make()
        yield link
    finally:
        link.remove()


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TUN_NO_HEADER))
    return device


def _pass_packets(ends: tuple[int, int], internet: Internet) -> None:
    """Passes packets between two devices until standard input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []
    free, numbers, cut = [0.0, 0.0], 0, False
    watched = select.poll()
    for descriptor in (*ends, sys.stdin.fileno()):
        watched.register(descriptor, select.POLLIN)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 10.0
        for descriptor, _ in watched.poll(pause * 1000):
            if descriptor == sys.stdin.fileno():
                if not (word := os.read(descriptor, 1 << 10)):
                    return
                cut = word[-1:] == b"1"
                continue
            way = ends.index(descriptor)
            for packet in _read(descriptor):
                now = time.monotonic()
                begun = max(now, free[way])
                if internet.port and not _is_tcp_of(packet, int(internet.port), way):
                    continue
                if cut or begun - now > internet.queue_s or random.random() < internet.loss:
                    continue
                free[way] = begun + len(packet) / internet.bytes_s
                numbers += 1
                heapq.heappush(waiting, (free[way] + internet.delay_s, numbers, ends[1 - way], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            if not cut:
                with contextlib.suppress(OSError):
                    os.write(target, packet)


def _is_tcp_of(packet: bytes, port: int, way: int) -> bool:
    """Returns whether an IPv4 packet is TCP from (``way`` 0: it comes from the hub) or to the hub's port."""
    start = (packet[0] & 15) * 4
    return packet[0] >> 4 == 4 and packet[9] == 6 and struct.unpack_from("!HH", packet, start)[way] == port


def _read(descriptor: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return


def main() -> None:
    """Makes both devices, and passes packets between them."""
    name, device, hub, site, *numbers = sys.argv[1:]
    near = _tun(device)
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    far = _tun("eth0")
    for words in (["address", "add", site, "peer", hub, "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
        subprocess.run(["ip", *words], check=True)
    for words in (["address", "add", hub, "peer", site, "dev", device], ["link", "set", device, "up"]):
        subprocess.run(["nsenter", "-t", str(os.getppid()), "-n", "ip", *words], check=True)
    print("ready", flush=True)
    _pass_packets((near, far), Internet(*map(float, numbers)))


if __name__ == "__main__":
    main()
