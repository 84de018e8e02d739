"""A trainer and replicas that die and come back within a second: everything that a push is made of, but for SGLang.

The trainer is Megatron's with the real pusher; a replica is the real protocol (`WeightsReceiver`), the real receiver and its lanes, on a
plain torch module. Only SGLang's HTTP calls stand in: they answer yes. Every parameter of version v is the number v, so that a replica can
see at any moment whether what it serves is of one version, and of the one that it says.
"""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.receiver.command_session import CommandSession
from services.rollout.engine.receiver.receiver import Receiver
from services.rollout.replica import Replica
from services.rollout.weight_receiver import WeightsReceiver
from services.trainer.actor import Actor
from services.trainer.backend import TrainerSettings
from services.trainer.control_client import ControlClient
from services.trainer.weights.pusher import Pusher
from shared.config.engine_limits import Capabilities
from shared.config.trainer_section import TrainerSection
from shared.service.service_base import attended, connect
from tests.support.engine_process import serve

BUCKET_BYTES = 40_000
"""The tiny model travels in about a dozen buckets, so that a death in the middle of one is likely."""

PUSH_SECONDS = 30.0

HUNG = "hung-"
"""How the name of a file begins that has a replica's scheduler stand still."""


class Weights(torch.nn.Module):
    """What an engine holds: each tensor under its own name."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        from safetensors.torch import load_file

        self.names = sorted(load_file(model / "model.safetensors"))
        held = load_file(model / "model.safetensors")
        self.held = torch.nn.ParameterList([torch.nn.Parameter(held[name], requires_grad=False) for name in self.names])

    def load_weights(self, tensors: Any) -> None:
        by_name = dict(zip(self.names, self.held, strict=True))
        for name, tensor in tensors:
            by_name[name].data.copy_(tensor)

    def versions(self) -> set[float]:
        """The numbers that the parameters consist of."""
        return {number for parameter in self.held for number in (float(parameter.min()), float(parameter.max()))}


class Yes:
    """In the place of an engine's HTTP side."""

    url = "http://nobody"

    async def post(self, path: str, body: Any, deadline: float, then: str) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


class Schedule(threading.Event):
    """That of a replica's scheduler: it stands still for as long as there is a file of that name."""

    def __init__(self, hung: Path) -> None:
        super().__init__()
        self._hung = hung

    def wait(self, timeout: float | None = None) -> bool:
        while self._hung.exists():
            time.sleep(0.01)
        return super().wait(timeout)


def replica(instance: str, directory: str, model: str, environment: dict[str, str]) -> None:
    """A process that serves weights until it is killed. What it sees that must not be is written to ``<directory>/wrong``."""
    os.environ |= {**environment, "MYXO_INSTANCE": instance}
    torch.set_num_threads(1)
    place = Path(directory, f"{instance}-{os.getpid()}")
    place.mkdir()
    weights = Weights(Path(model))
    session = CommandSession(place, Receiver(weights, 0, "cpu"))
    threading.Thread(target=serve, args=(session, Schedule(Path(directory, f"{HUNG}{instance}"))), daemon=True).start()

    async def live() -> None:
        service = await connect("rollout")
        serving = Replica(service)
        capabilities = Capabilities("none", vocab_size=1, max_sequence=1, weight_sessions=False, overlaps=False)
        client = EngineClient(Yes(), capabilities, -1, place)  # type: ignore[arg-type]
        await client.open_receivers(deadline=60)
        await serving.attach(client)
        await WeightsReceiver(service, serving).listen()
        async with attended(service):
            while True:
                version = serving.version
                if serving.serving and (found := weights.versions()) != {float(version)}:
                    Path(directory, "wrong").write_text(f"{instance} serves version {version} and holds {sorted(found)}")
                await asyncio.sleep(0.01)

    asyncio.run(live())


def trainer(directory: str, model: str, environment: dict[str, str]) -> None:
    """A process that makes a version and pushes it, again and again, until it is killed. It continues where the one before it was."""
    os.environ |= {**environment, "MYXO_INSTANCE": "trainer-0"}
    torch.set_num_threads(1)
    begun = Path(directory, "version")
    with ControlClient() as link:
        actor = Actor.create(TrainerSettings(TrainerSection(train_dtype="float32")), model)
        weights = link.config.weights.model_copy(update={"update_weight_buffer_size": BUCKET_BYTES, "push_timeout": PUSH_SECONDS})
        pusher = Pusher(link, actor.model, weights)
        while True:
            version = int(begun.read_text()) + 1 if begun.exists() else 0
            scratch = begun.with_suffix(".part")
            scratch.write_text(str(version))
            scratch.rename(begun)
            actor.model.readers.wait("next version")
            with torch.no_grad():
                for module in actor.model.modules:
                    for parameter in module.parameters():
                        parameter.fill_(version)
            end = time.monotonic() + 0.2
            while time.monotonic() < end:  # replicas that were left out get the same version before the next is made
                if (push := pusher.due(version)) is not None:
                    pusher.begin(push)
                    pusher.wait()
                time.sleep(0.005)
