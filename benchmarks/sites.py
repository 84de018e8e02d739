"""Versions of the weights over a simulated internet: bytes and seconds of each, by connections; what larger models take, on paper.

    python -m benchmarks.sites [--write]

A real object store (SeaweedFS) lies behind a link of 100 Mbit/s, 80 ms there and back, and 1 % loss. No packet is lost here: what losses
cost a connection is taken from Mathis et al. 1997, at most MSS / RTT × 1.22 / √p bytes a second, here 0.22 MB/s, which is why several
connections are needed at all. The link's queue, its recovery from losses, and TLS are left out.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.transfer.object_weights import ObjectMirror, ObjectPublisher, PublishedIndex
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoint, WeightCheckpoints
from tests.support.object_store import TRAINER, running_object_store

RESULTS = Path(__file__).parent / "results" / "sites.json"
BYTES_S, ROUND_TRIP_S, LOSS, SEGMENT = 12.5e6, 0.08, 0.01, 1460
CONNECTION_BYTES_S = SEGMENT / ROUND_TRIP_S * 1.22 / math.sqrt(LOSS)
CHANGED = 0.036  # of the elements of Qwen3-0.6B in bfloat16 by a step of 1e-6: benchmarks/results/weight_delta.json
PAPER = {"Qwen3-0.6B": (1.192e9, 41.33 / 1192.16), "70B": (140e9, 0.01), "1T": (2e12, 0.01)}  # bytes in bfloat16, a delta's share of them


class SlowLink:
    """A proxy with the link's rate, delay, and rate of each connection."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._free, self.port = (host, port), 0.0, 0
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run(ready)), daemon=True).start()
        ready.wait()

    async def _run(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(ROUND_TRIP_S)  # the handshake
        answers, requests = await asyncio.open_connection(*self._server)
        ways = [asyncio.create_task(self._pass(*way)) for way in ((reader, requests), (answers, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(ROUND_TRIP_S)
        for end in (writer, requests):
            end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = 0.0
        while data := await reader.read(1 << 14):
            now = asyncio.get_running_loop().time()
            self._free = max(now, self._free) + len(data) / BYTES_S
            own = max(now + ROUND_TRIP_S / 2 if not own else now, own) + len(data) / CONNECTION_BYTES_S
            await asyncio.sleep(max(self._free, own) - now)
            writer.write(data)
            await writer.drain()


@dataclass(frozen=True)
class Figure:
    """One version over the link. ``apply_seconds``: of putting it together, during which an engine generates."""

    version: int
    form: str
    connections: int
    bytes: int
    share: float
    upload_seconds: float
    download_seconds: float
    apply_seconds: float


def measured(directory: Path, elements: int, versions: int, connections: int) -> list[Figure]:
    """Uploads and downloads so many versions of a tensor in bfloat16, both over the link."""
    figures, random = [], np.random.default_rng(3)
    weights = (random.standard_normal(elements, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    checkpoints, current, copy = (
        kind(directory / name) for kind, name in ((WeightCheckpoints, "w"), (LocalCheckpoint, "c"), (LocalCheckpoint, "l"))
    )
    with running_object_store(directory / "store") as store:
        plain = store.client("run")
        host, port = plain.location.endpoint.rpartition("/")[2].split(":")
        slow = replace(plain.location, endpoint=f"http://{host}:{SlowLink(host, int(port)).port}")
        client = type(plain)(slow, TRAINER)
        publisher = ObjectPublisher(client, connections, 600.0)
        mirror = ObjectMirror(directory / "site", lambda _, name: client.url(name, 600), connections, 600.0)

        def step(version: int) -> tuple[WeightCheckpoint, PublishedIndex, float]:
            weights[random.integers(0, elements, int(CHANGED * elements))] ^= 1
            tensors = {"w": ("bfloat16", (elements,), weights.view(np.uint8).copy())}
            written = WeightCheckpointWriter(checkpoints, version, current if version else None).add(tensors).publish()
            if not version:
                current.copy_from(written)
            started = time.monotonic()
            return written, publisher.publish(checkpoints.readable()), time.monotonic() - started

        for version in range(versions):
            written, index, upload = step(version)
            started, held, before = time.monotonic(), copy.held(), mirror.received
            chain = mirror.pull(index.name, index.bytes, written.id, None if held is None else held.id)
            downloaded = time.monotonic()
            if copy.follow_chain(chain) is chain[-1]:
                copy.copy_from(chain[-1])
            took = mirror.received - before
            times = round(upload, 2), round(downloaded - started, 2), round(time.monotonic() - downloaded, 3)
            figures.append(Figure(version, written.kind, connections, took, round(took / (2 * elements), 4), *times))
    return figures


def on_paper() -> dict[str, dict[str, float]]:
    """Returns seconds of a whole version and of a delta, where enough connections fill the link, at 100 Mbit/s and at 10 Gbit/s."""
    rates = {"100 Mbit/s": BYTES_S, "10 Gbit/s": 100 * BYTES_S}
    return {
        model: {
            f"{what}, {name}": round(size * part / rate, 1)
            for what, part in (("whole", 1.0), ("delta", share))
            for name, rate in rates.items()
        }
        for model, (size, share) in PAPER.items()
    }


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=3_000_000, help="of the model, two bytes each")
    parser.add_argument("--versions", type=int, default=2, help="the first is whole, the others are deltas")
    parser.add_argument("--connections", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/sites.json")
    asked = parser.parse_args()
    figures: list[Figure] = []
    for connections in asked.connections:
        with tempfile.TemporaryDirectory() as directory:
            figures += measured(Path(directory), asked.elements, asked.versions, connections)
    link = {"bytes_s": BYTES_S, "round_trip_s": ROUND_TRIP_S, "loss": LOSS, "connection_bytes_s": round(CONNECTION_BYTES_S)}
    result = {"link": link, "measured": [asdict(figure) for figure in figures], "on_paper_seconds": on_paper()}
    print("| version | connections | MB | of a whole one | upload, s | download, s | put together, s |\n|---|---|---|---|---|---|---|")
    for at in figures:
        name, size = f"{at.version}, {at.form}", f"{at.bytes / 1e6:.2f}"
        print(f"| {name} | {at.connections} | {size} | {at.share:.1%} | {at.upload_seconds} | {at.download_seconds} | {at.apply_seconds} |")
    print(json.dumps(result["on_paper_seconds"], indent=1))
    if asked.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
