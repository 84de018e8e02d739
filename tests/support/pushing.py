"""A run that has replicas and nothing else: real servers, real rollout services, and in this process the trainer's link to them."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from services.trainer.control_client import ControlClient
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.service_messages import ServiceStatus
from tests.support.run_config import run_config, write_jsonl
from tests.support.service_process import ServiceProcess

START_SECONDS = 600


class Replicated:
    """Use as a context manager; inside, ``link`` is the trainer's, and ``replicas`` are the rollout services by name.

    Args:
        directory: for everything that is written. model: the checkpoint that the engines start from. sections: of the run's config.
        environment: of replica number so and so, on top of this process's.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        replicas: int = 1,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        **sections: dict[str, Any],
    ) -> None:
        self.directory, self._count, self._environment = directory, replicas, environment
        directory.mkdir(parents=True, exist_ok=True)
        write_jsonl(directory / "prompts.jsonl")
        sections["model"] = {"hf_checkpoint": str(model)}
        self.config: RunConfig = run_config(directory, **sections)
        self.replicas: dict[str, ServiceProcess] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Replicated":
        import asyncio

        nats, valkey = EmbeddedNats(self.directory / "nats"), EmbeddedValkey(self.directory / "valkey")
        for server in (nats, valkey):
            server.start()
            self._open.callback(server.stop)
        self._addresses = {"NATS_URL": nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": self.config.run.name}

        async def create() -> None:
            bus = await Bus.connect(nats.url, "test")
            await runs.create(bus, self.config, valkey.url)
            await bus.close()

        asyncio.run(create())
        os.environ.update(self._addresses)
        for number in range(self._count):
            self.start(number)
        self.link = self._open.enter_context(ControlClient())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()
        for name in self._addresses:
            os.environ.pop(name, None)

    def start(self, number: int) -> ServiceProcess:
        """Starts (again) replica number so and so."""
        name = f"rollout-{number}"
        environment = {**self._addresses, "MYXO_INSTANCE": name, "MYXO_LOG_DIR": str(self.directory), **self._environment(number)}
        process = self._open.enter_context(ServiceProcess("rollout", self.directory / f"{name}.log", environment))
        self.replicas[name] = process
        return process

    def cards(self) -> dict[str, ServiceStatus]:
        """Of the replicas whose engines are up."""
        return {card.instance: card for card in self.link.replicas}

    def until(
        self, what: str, condition: Callable[[dict[str, ServiceStatus]], bool], seconds: float = START_SECONDS, *, fragile: bool = True
    ) -> None:
        """Waits for the replicas' cards to be so. ``fragile``: unless one of the services has ended."""
        end = time.monotonic() + seconds
        while not condition(self.cards()):
            if time.monotonic() > end or (fragile and any(one.process.poll() is not None for one in self.replicas.values())):
                said = "\n".join(f"--- {name}\n{one.words()[-3000:]}" for name, one in self.replicas.items())
                raise AssertionError(f"{what} did not come within {seconds:g} s; cards {self.cards()}\n{said}")
            time.sleep(0.05)
