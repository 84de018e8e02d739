"""Versions of the weights over a simulated internet: bytes and seconds of each, by connections; what larger models take, on paper.

    python -m benchmarks.sites [--elements 596000000] [--json FILE]        as root
    python -m benchmarks.sites --engine [--json FILE]                      a real engine's pause, on loopback
    python -m benchmarks.sites --write                                     puts the results into the page

The replica's side runs in a network namespace behind a link of 100 Mbit/s, 80 ms there and back, that loses 1 % of its packets each way
(`tests/support/lossy_link.py`); a real object store (SeaweedFS) and the trainer's side are this machine. The uploads do not cross the link.
TLS is left out. Weights are random, of deviation 0.02, in bfloat16; a step is Adam's first at 1e-6, which moves the most.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.example_run import launch, lines, middle, prepare_example
from benchmarks.page_table import markdown_table, put_table
from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.process.child_process import ChildProcess
from shared.store.s3 import KEY_VARIABLE, SECRET_VARIABLE, ObjectStoreLocation, S3Client
from shared.transfer.object_weights import ObjectMirror, ObjectPublisher
from shared.transfer.weight_checkpoint import LocalCheckpoint, VersionId, WeightCheckpoints
from tests.support.lossy_link import INTERNET, lossy_link
from tests.support.object_store import TRAINER, running_object_store
from tests.support.service_process import ROOT

RESULTS = Path(__file__).parent / "results" / "sites.json"
PAGE = ROOT / "docs" / "two-sites.md"
LEARNING_RATE, DEVIATION = 1e-6, 0.02
PAPER = {"Qwen3-0.6B": 1.192e9, "70B": 140e9, "1T": 2e12}  # bytes in bfloat16


@dataclass(frozen=True)
class Figure:
    """One version over the link. ``apply_seconds``: of putting it together, during which an engine generates."""

    version: int
    form: str
    connections: int
    bytes: int
    share: float
    download_seconds: float
    apply_seconds: float


def bfloat16(weights: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the nearest bfloat16 values' bits."""
    bits = weights.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(elements: int, version: int) -> dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]:
    """Returns a version's tensors, of 2²⁴ elements each but the last; each later version lies one step further from the first."""
    made, random, longest = {}, np.random.default_rng(0), min(elements, 1 << 24)
    weights = random.standard_normal(longest, np.float32) * np.float32(DEVIATION)
    for _ in range(version):
        weights += np.float32(LEARNING_RATE) * random.choice(np.array([-1, 1], np.float32), longest)
    words = bfloat16(weights)
    for index, start in enumerate(range(0, elements, longest)):
        part = np.roll(words, 12345 * index)[: elements - start]  # no two have a chunk in common
        made[f"w{index}"] = ("bfloat16", part.shape, part.view(np.uint8))
    return made


def at_the_site(directory: Path, url: str, connections: int) -> None:
    """Downloads each version that is announced on standard input (name and bytes of its index, version, digest); prints its figures."""
    client = S3Client(ObjectStoreLocation.parse(url, "us-east-1", allow_http=True), TRAINER)
    mirror = ObjectMirror(directory / "site", lambda _, name: client.url(name, 3600), connections, 3600.0)
    copy = LocalCheckpoint(directory / "copy")
    for line in sys.stdin:
        name, size, version, digest = line.split()
        started, held, before = time.monotonic(), copy.held(), mirror.received
        chain = mirror.pull(name, int(size), VersionId(int(version), digest), None if held is None else held.id)
        downloaded = time.monotonic()
        if copy.follow_chain(chain) is chain[-1]:
            copy.copy_from(chain[-1])
        print(mirror.received - before, downloaded - started, time.monotonic() - downloaded, flush=True)


def measured(directory: Path, elements: int, versions: int, connections: int) -> Iterator[Figure]:
    """Uploads so many versions and has a site download each over the link."""
    checkpoints, current = WeightCheckpoints(directory / "w"), LocalCheckpoint(directory / "c")
    with lossy_link() as link, running_object_store(directory / "store", link.hub, volume_mb=8192) as store:
        publisher = ObjectPublisher(store.client("run"), 4, 3600.0)
        words = ["-m", "benchmarks.sites", "--site", str(directory), f"{store.url}/run", "--connections", str(connections)]
        site = ChildProcess("site", link.command(*words), None, {**os.environ, "PYTHONPATH": str(ROOT)})
        assert site.stdin is not None and site.stdout is not None
        for version in range(versions):
            written = WeightCheckpointWriter(checkpoints, version, current if version else None)
            for name, tensor in tensors(elements, version).items():
                written.add({name: tensor})
            published = written.publish()
            if not version:
                current.copy_from(published)
            index = publisher.publish(checkpoints.readable())
            site.stdin.write(f"{index.name} {index.bytes} {version} {published.digest}\n".encode())
            site.stdin.flush()
            took, download, applied = map(float, site.stdout.readline().split())
            times = round(download, 2), round(applied, 2)
            yield Figure(version, published.kind, connections, int(took), round(took / (2 * elements), 4), *times)
        site.kill()


def on_paper(share: float) -> dict[str, dict[str, float]]:
    """Returns seconds of a whole version and of a delta, where enough connections fill the link, at 100 Mbit/s and at 10 Gbit/s.

    ``share``: a delta's part of a model's bytes.
    """
    rates = {"100 Mbit/s": INTERNET.bytes_s, "10 Gbit/s": 100 * INTERNET.bytes_s}
    return {
        model: {
            f"{what}, {name}": round(size * part / rate, 1)
            for what, part in (("whole", 1.0), ("delta", share))
            for name, rate in rates.items()
        }
        for model, size in PAPER.items()
    }


def paper_table(share: float) -> str:
    """Returns what `on_paper` says, with the share, in Markdown."""
    head = ("model, bfloat16", *(f"{what}, {rate}" for rate in ("100 Mbit/s", "10 Gbit/s") for what in ("whole", "delta")))
    rows = [(model, *(_duration(seconds[name]) for name in head[1:])) for model, seconds in on_paper(share).items()]
    text = f"On paper, where enough connections fill the link, with deltas of {share:.2%}, the most that was measured of a whole model:"
    return f"{text}\n\n{markdown_table(head, rows)}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def in_a_run(directory: Path) -> dict[str, float]:
    """Returns what versions of the arithmetic example took in its CPU engine: medians of seconds, the run's exit code."""
    keys = {KEY_VARIABLE: TRAINER.key, SECRET_VARIABLE: TRAINER.secret}
    with running_object_store(directory / "objects", "127.0.0.1") as store:
        words = [*prepare_example(directory / "data"), "--num-rollout", "12", "--sft-steps", "20", "--dir", str(directory / "runs")]
        words += ["--update-weight-transport", "s3", "--update-weight-mode", "delta", "--object-store-url", store.url]
        words += ["--object-store-allow-http", "--fresh", "--hf-checkpoint", str(directory / "data" / "model")]
        words += ["--prompt-data", str(directory / "data" / "train.jsonl")]
        code = subprocess.run(launch(words), cwd=ROOT, env={**os.environ, **keys}, stdin=subprocess.DEVNULL, timeout=600).returncode
    logged = [line for log in directory.rglob("rollout-*.log") for line in lines(log) if line.get("event") == "caught_up"]
    found = {name: middle(line[name] for line in logged if line.get("source") == "objects") for name in ("pull_seconds", "load_seconds")}
    return {"exit": code, "versions": len(logged), **{name: value for name, value in found.items() if value is not None}}


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=3_000_000, help="of the model, two bytes each")
    parser.add_argument("--versions", type=int, default=2, help="the first is whole, the others are deltas")
    parser.add_argument("--connections", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--engine", action="store_true", help="measure a run with a real engine, and no link")
    parser.add_argument("--write", action="store_true", help="put the results into the documentation, and measure nothing")
    parser.add_argument("--site", nargs=2, metavar=("DIR", "URL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.site is not None:
        at_the_site(Path(asked.site[0]), asked.site[1], asked.connections[0])
        return 0
    if asked.write:
        deltas = [row["share"] for row in json.loads(RESULTS.read_text())["measured"] if row["form"] == "delta"]
        put_table(PAGE, "sites", paper_table(max(deltas)), "sites_on_paper")
        return 0
    if asked.engine:
        with tempfile.TemporaryDirectory() as scratch:
            found = in_a_run(Path(scratch))
        print(json.dumps(found))
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    figures: list[Figure] = []
    print("| version | connections | MB | of a whole one | download, s | put together, s |\n|---|---|---|---|---|---|", flush=True)
    for connections in asked.connections:
        with tempfile.TemporaryDirectory() as directory:
            for at in measured(Path(directory), asked.elements, asked.versions, connections):
                size = f"{at.bytes / 1e6:.2f} | {at.share:.1%} | {at.download_seconds} | {at.apply_seconds}"
                print(f"| {at.version}, {at.form} | {connections} | {size} |", flush=True)
                figures.append(at)
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    link = {**asdict(INTERNET), "congestion_control": congestion}
    share = max((figure.share for figure in figures if figure.form == "delta"), default=1.0)
    measured_rows = [asdict(figure) for figure in figures]
    result = {"link": link, "elements": asked.elements, "measured": measured_rows, "on_paper_seconds": on_paper(share)}
    print(json.dumps(result["on_paper_seconds"], indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
