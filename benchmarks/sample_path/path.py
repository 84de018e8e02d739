"""The path itself: embedded servers, the real buffer, a producer and a consumer, and what they use while the samples flow."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
import tokenizers
from tokenizers import models

from benchmarks.sample_path.consumer import SAVE_EVERY
from benchmarks.sample_path.content import SAMPLES, Prompts
from services.buffer.rollout_keeper import HELD_BYTES
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.ledger import LedgerRecord
from shared.schema.ledger_audit import Audit

ROOT = Path(__file__).resolve().parents[2]
RUN = "sample-path"

BATCH_BYTES = 16 << 20
"""A batch has as many groups as about fit into this, between 16 and 256: what a step of a run with such samples reads at once."""

MAX_STALENESS = 4
"""Batches ahead of the trainer's, so that neither end waits for the other."""

LINE_SECONDS = 120.0
"""How long a step may take before the measurement is given up."""


@dataclass(frozen=True)
class Window:
    """A stretch of the run from one step's end to another's. ``cpu``: seconds by process."""

    seconds: float
    samples: int
    cpu: dict[str, float]

    @property
    def pace(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    def cost(self, process: str | None = None) -> float:
        """CPU seconds per 1,000 samples, of one process or of all."""
        return (sum(self.cpu.values()) if process is None else self.cpu[process]) * 1000 / self.samples


@dataclass(frozen=True)
class Servers:
    """NATS and Valkey as ``myxo up`` starts them."""

    nats: EmbeddedNats
    valkey: EmbeddedValkey

    def environment(self) -> dict[str, str]:
        """Where services find them."""
        return {"NATS_URL": self.nats.url, "REDIS_URL": self.valkey.url}


@contextlib.contextmanager
def servers(directory: Path, aof: str) -> Iterator[Servers]:
    """Runs both servers for as long as the body does."""
    nats, valkey = EmbeddedNats(directory / "nats"), EmbeddedValkey(directory / "valkey", aof)
    try:
        nats.start()
        valkey.start()
        yield Servers(nats, valkey)
    finally:
        valkey.stop()
        nats.stop()


def groups_per_batch(group_bytes: int) -> int:
    """`BATCH_BYTES` in groups."""
    return max(16, min(256, BATCH_BYTES // group_bytes))


def config(directory: Path, groups: int, length: int, aof: str) -> RunConfig:
    """The run's config, its prompt file and tokenizer written: defaults throughout but for the sizes. More steps than can be done."""
    prompts = Prompts()
    vocabulary = {letter: number for number, letter in enumerate(prompts.ALPHABET)}
    (directory / "model").mkdir()
    tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(directory / "model" / "tokenizer.json"))
    rows = (json.dumps({"prompt": text, "label": str(row)}) + "\n" for row, text in enumerate(prompts.texts))
    (directory / "prompts.jsonl").write_text("".join(rows))
    return parse(
        {
            "run": {"name": RUN, "dir": str(directory / "runs")},
            "model": {"hf_checkpoint": str(directory / "model")},
            "data": {"prompt_data": str(directory / "prompts.jsonl"), "rollout_shuffle": True},
            "rollout": {
                "num_rollout": 1_000_000,
                "rollout_batch_size": groups,
                "n_samples_per_prompt": SAMPLES,
                "max_staleness": MAX_STALENESS,
            },
            "reward": {"rm_type": "exact"},
            "trainer": {"max_tokens_per_gpu": max(length, 8192)},  # a sample fits into a micro-batch
            "store": {"appendfsync": aof},
        }
    )


class Ends:
    """The buffer, the producer and the consumer as processes; killed at the end of the body."""

    def __init__(self, running: Servers, run_config: RunConfig, length: int, directory: Path) -> None:
        environment = {**os.environ, **running.environment(), "MYXO_RUN": RUN, "PYTHONPATH": str(ROOT)}
        self._logs = {name: directory / f"{name}.log" for name in ("buffer", "producer", "consumer")}
        commands = {
            "buffer": ["services.buffer"],
            "producer": ["benchmarks.sample_path.producer", RUN, str(length)],
            "consumer": ["benchmarks.sample_path.consumer", RUN, str(length)],
        }
        self._processes = {}
        for name, command in commands.items():
            with self._logs[name].open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    with_parent([sys.executable, "-m", *command]),
                    cwd=ROOT,
                    env=environment,
                    bufsize=0,  # `select` knows nothing of a line that lies in a buffer here
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if name == "consumer" else log,
                    stderr=log,
                )
        assert running.nats.process is not None and running.valkey.process is not None  # they run
        pids = {name: process.pid for name, process in self._processes.items()}
        pids |= {"nats": running.nats.process.pid, "valkey": running.valkey.process.pid}
        self._watched = {name: psutil.Process(pid) for name, pid in pids.items()}

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def done(self) -> int:
        """Samples that the consumer has compared, at the end of its next step. Raises RuntimeError where one of the three has died."""
        output = self._processes["consumer"].stdout
        assert output is not None
        end = time.monotonic() + LINE_SECONDS
        while time.monotonic() < end:
            self._check()
            if select.select([output], [], [], 0.5)[0] and (line := output.readline()):
                return int(line)
        raise RuntimeError(f"the consumer finished no step within {LINE_SECONDS:g} s; {self._words()}")

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by process, with those of children that have ended (Valkey's rewrites of its log)."""
        times = {name: process.cpu_times() for name, process in self._watched.items()}
        return {name: one.user + one.system + one.children_user + one.children_system for name, one in times.items()}

    def window(self, seconds: float) -> Window:
        """Watches whole steps for at least so long."""
        before, used, begun = self.done(), self.cpu(), time.monotonic()
        while True:
            samples, now = self.done(), time.monotonic()
            if now - begun >= seconds:
                after = self.cpu()
                return Window(now - begun, samples - before, {name: after[name] - used[name] for name in after})

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended with {process.returncode}; {self._words()}")

    def _words(self) -> str:
        return "; ".join(f"{name}: {path.read_text(errors='replace').strip()[-600:]}" for name, path in self._logs.items())


async def make(running: Servers, run_config: RunConfig) -> None:
    """Makes the run on the bus."""
    bus = await Bus.connect(running.nats.url, "benchmark")
    await runs.create(bus, run_config, running.valkey.url)
    await bus.close()


async def check(running: Servers, run_config: RunConfig, group_bytes: int) -> None:
    """Proves that what was measured was a run: its ledger passes the audit, and payloads are freed behind checkpoints.

    Raises RuntimeError.
    """
    bus = await Bus.connect(running.nats.url, "benchmark")
    audit = Audit(run_config.rollout.max_staleness, run_config.rollout.rollout_batch_size)
    async for _, record in streams.read(bus, Subjects(RUN).ledger_stream, LedgerRecord):
        audit.see(record)
    await bus.close()
    report = audit.report()
    if report.violations:
        raise RuntimeError(f"the ledger does not pass the audit: {'; '.join(map(str, report.violations[:3]))}")
    with redis.Redis.from_url(running.valkey.url) as client:
        held = {tuple(key.split(b":")[:3]) for key in client.scan_iter(f"{RUN}:group:*", count=1000)}
    # in flight, not yet durable, and what the last checkpoint before the end let go of
    most = (MAX_STALENESS + 2 + 2 * SAVE_EVERY) * run_config.rollout.rollout_batch_size
    most += HELD_BYTES // group_bytes  # whose responses are still to be kept
    if len(held) > most:
        raise RuntimeError(f"the store holds payloads of {len(held)} groups where {most} may not be freed yet")


def room() -> tempfile.TemporaryDirectory[str]:
    """A directory for servers and run."""
    return tempfile.TemporaryDirectory(prefix="myxo-sample-path-")
