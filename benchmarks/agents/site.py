"""Where the measurements take place: embedded servers, and the real services of a run that trains nothing, each a process of its own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command_line import first_gpus
from services.rollout.engine.engine_client import EngineClient
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.config_reading import parse
from shared.config.devices import VISIBLE
from shared.config.run_config import RunConfig
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store

ROOT = Path(__file__).resolve().parents[2]

READY_SECONDS = 600.0
POLL_SECONDS = 0.1

GROUP = 8
"""Rollouts of a group, by default."""

MEMORY_SHARE = 0.8
"""What the engines of one GPU take of its memory together."""

ENGINE_MARKS = ("cpu_launcher.py", "gpu_launcher.py", "sglang")
"""By what the command line of an engine's process is known; others below a rollout service run its agents."""


@dataclass(frozen=True)
class Machine:
    """What the measurements run on. ``device``: of the engines. ``gpus``: how many they share, in turn. ``sglang``: further flags."""

    device: str
    gpus: int
    dtype: str
    sglang: Mapping[str, str] = field(default_factory=dict)

    def environment(self, replica: int) -> dict[str, str]:
        """Returns the variables of a replica's process: its share of the first GPUs that this process sees."""
        if self.device != "cuda":
            return {}
        own = first_gpus(self.gpus)
        return {VISIBLE: own[replica % len(own)]}

    def flags(self, replicas: int, prefixes: bool) -> dict[str, Any]:
        """Returns the engines' flags."""
        flags: dict[str, Any] = {"disable-radix-cache": not prefixes, "dtype": self.dtype}
        if self.device == "cuda":
            flags["mem-fraction-static"] = round(MEMORY_SHARE / -(-replicas // self.gpus), 2)
        return {**flags, **self.sglang}


class Site:
    """One run's services.

    Attributes:
        urls: of the gateways that serve. sessions: the run's.
    """

    def __init__(self, directory: Path, nats: EmbeddedNats, valkey: EmbeddedValkey, config: RunConfig, machine: Machine, bus: Bus) -> None:
        self.directory, self.config, self.machine, self.bus = directory, config, machine, bus
        self.run, self._nats, self._valkey = config.run.name, nats, valkey
        self.store = Store(valkey.url, self.run)
        self.sessions, self.registry, self.subjects = SessionStore(self.store, self.run), Registry(bus, self.run), Subjects(self.run)
        self.urls: list[str] = []
        self._processes: dict[str, ChildProcess] = {}

    async def start_gateways(self, count: int) -> None:
        """Starts as many gateways as are lacking, and waits until they serve. Raises MyxoError where one does not."""
        names = [f"gateway-{number}" for number in range(count)]
        for name in names:
            if name not in self._processes:
                self._start("gateway", name, {})
        self.urls = [(await self._ready(name)).engine for name in names]

    async def start_replica(self) -> str:
        """Starts another replica with its engine; returns the URL of its door once it serves. Raises MyxoError where it does not."""
        number = self.replicas
        scratch = self._scratch(number)
        scratch.mkdir()
        self._start("rollout", f"rollout-{number}", {"TMPDIR": str(scratch), **self.machine.environment(number)})
        return (await self._ready(f"rollout-{number}")).engine

    @property
    def replicas(self) -> int:
        """Returns how many replicas have been started."""
        return sum(name.startswith("rollout") for name in self._processes)

    async def engine(self, number: int) -> EngineClient:
        """Returns a client of a replica's engine itself, which no door and no gateway stands before."""
        [receiver] = self._scratch(number).glob("myxo-engine-*")
        return await EngineClient.connect(receiver)

    async def close(self) -> None:
        """Kills the services."""
        for process in self._processes.values():
            await asyncio.to_thread(process.stop, 0)
        await self.store.close()

    def cpu(self) -> dict[str, float]:
        """Returns the CPU seconds so far, by who used them: this process is the clients'."""
        used = dict.fromkeys(("clients", "gateway", "agents", "rollout", "engine", "store", "bus"), 0.0)
        used["clients"] = _seconds(psutil.Process())
        for name, server in (("store", self._valkey), ("bus", self._nats)):
            assert server.process is not None  # it runs
            used[name] = _seconds(psutil.Process(server.process.pid))
        for name, process in self._processes.items():
            kind = name.split("-")[0]
            for one in _family(process.pid):
                used[_role(one, kind)] += _seconds(one)
        return used

    def memory(self) -> float:
        """Returns the resident memory of all gateways in MB."""
        pids = [process.pid for name, process in self._processes.items() if name.startswith("gateway")]
        return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6

    def _scratch(self, number: int) -> Path:
        return self.directory / f"{self.run[-1]}{number}"  # a socket's path has few bytes

    def _start(self, service: str, name: str, further: dict[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"NATS_URL": self._nats.url, "REDIS_URL": self._valkey.url, "MYXO_RUN": self.run, "MYXO_INSTANCE": name, "PYTHONPATH": path}
        command = [sys.executable, "-m", f"services.{service}"]
        self._processes[name] = ChildProcess(name, command, self.directory / f"{self.run}-{name}.log", {**os.environ, **own, **further})

    async def _ready(self, name: str) -> ServiceStatus:
        loop, process = asyncio.get_running_loop(), self._processes[name]
        end = loop.time() + READY_SECONDS
        while loop.time() < end:
            if process.exit_code() is not None:
                raise MyxoError(f"{name} has ended: {' | '.join(process.last_lines())}")
            for one in await self.registry.alive(name.split("-")[0]):
                serves = one.version >= 0 if one.service == "rollout" else bool(one.engine) and one.state == "ready"
                if one.instance == name and serves:
                    return one
            await asyncio.sleep(POLL_SECONDS)
        raise DeadlineExceeded(f"{name} to serve", "its process", READY_SECONDS, f"its log ends: {process.last_lines()}")


def _family(pid: int) -> list[psutil.Process]:
    this = psutil.Process(pid)
    return [this, *this.children(recursive=True)]


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _role(process: psutil.Process, kind: str) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return kind
    if "function_worker" in command:
        return "agents"
    return "engine" if any(mark in command for mark in ENGINE_MARKS) else kind


def run_config(directory: Path, name: str, model: Path, machine: Machine, replicas: int, prefixes: bool, **rollout: Any) -> RunConfig:
    """Returns the config of a run that trains nothing: its replicas serve the checkpoint's weights."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return parse(
        {
            "run": {"name": name, "dir": str(directory / "runs")},
            "model": {"hf_checkpoint": str(model)},
            "data": {"prompt_data": str(prompts)},
            "rollout": {
                "num_rollout": 1000,
                "rollout_batch_size": GROUP,
                "n_samples_per_prompt": GROUP,
                "rollout_device": machine.device,
                "sglang": machine.flags(replicas, prefixes),
                "agent": "benchmarks.agents.player:run",
                **rollout,
            },
            "gateway": {"gateway_models": ["*"]},
            "reward": {"rm_type": "exact"},
            "debug": {"debug_rollout_only": True},
        }
    )


@asynccontextmanager
async def site(directory: Path, config: RunConfig, machine: Machine) -> AsyncIterator[Site]:
    """Makes the run on servers of its own, and ends all of it after the body."""
    servers = directory / config.run.name
    nats, valkey = EmbeddedNats(servers / "nats"), EmbeddedValkey(servers / "valkey")
    try:
        nats.start()
        valkey.start()
        bus = await Bus.connect(nats.url, "benchmark")
        await runs.create(bus, config, valkey.url)
        made = Site(directory, nats, valkey, config, machine, bus)
        try:
            yield made
        finally:
            await made.close()
            await bus.close()
    finally:
        valkey.stop()
        nats.stop()


def used_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns the CPU seconds between two calls of `Site.cpu`, by who used them."""
    return {name: round(after[name] - before.get(name, 0.0), 3) for name in after}


def median_of(figures: Sequence[float], read: Callable[[float], float] = float) -> float:
    """Returns the middle of some figures."""
    found = sorted(map(read, figures))
    middle = len(found) // 2
    return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2
