"""Deaths at each stage of a push. Of a replica: the other serves the version all the same, the dead one nothing until it has caught up. Of
the bus, which comes back: the push continues."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from services.trainer.actor import Actor
from services.trainer.backend import TrainerSettings
from services.trainer.control_client import ControlClient
from services.trainer.parallel import runtime
from services.trainer.weights import pusher
from services.trainer.weights.pusher import Pusher, PushRequest
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.trainer_section import TrainerSection
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive, WeightsPushed
from shared.transfer.group_channel import GroupSender
from tests.chaos.parts import BUCKET_BYTES, HUNG, PUSH_SECONDS
from tests.chaos.test_weights import Parts
from tests.support.run_config import run_config

SECONDS = 120.0
VICTIM, SURVIVOR = "rollout-1", "rollout-0"
BUCKET = 3
"""In whose middle a replica dies."""


class Stages(PushRequest[Any]):
    """Has something done just before the replicas are asked for a step."""

    before: ClassVar[dict[str, Callable[[], None]]] = {}

    def __init__(self, link: ControlClient, members: Any, verb: str, *rest: Any) -> None:
        self.before.pop(verb, lambda: None)()
        super().__init__(link, members, verb, *rest)


class Trainer:
    """A trainer whose version v is a model full of the number v."""

    def __init__(self, link: ControlClient, model: Path) -> None:
        self.link = link
        weights = link.config.weights.model_copy(update={"update_weight_buffer_size": BUCKET_BYTES, "push_timeout": PUSH_SECONDS})
        self.actor = Actor.create(TrainerSettings(TrainerSection(train_dtype="float32")), model)
        self.pusher = Pusher(link, self.actor.model, weights)
        self.version = -1

    def next_version(self) -> None:
        self.version += 1
        self.actor.model.readers.wait("next version")
        with torch.no_grad():
            for module in self.actor.model.modules:
                for parameter in module.parameters():
                    parameter.fill_(self.version)

    def until(self, what: str, condition: Callable[[dict[str, ServiceStatus]], bool]) -> None:
        """Pushes to whoever is behind, until the replicas' cards are so."""
        end = time.monotonic() + SECONDS
        while not condition(cards := {card.instance: card for card in self.link.replicas}):
            assert time.monotonic() < end, f"{what} did not come within {SECONDS:g} s: {cards}"
            if (push := self.pusher.due(self.version)) is not None:
                self.pusher.begin(push)
                self.pusher.wait()
            time.sleep(0.02)

    def close(self) -> None:
        self.pusher.close()
        runtime.stop()


@pytest.fixture
def replicas(
    mortal_nats: EmbeddedNats, valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Parts]:
    config = run_config(tmp_path, model={"hf_checkpoint": str(tiny_model)}, rollout={"rollout_device": "cpu", "num_rollout": 100})

    async def create() -> None:
        bus = await Bus.connect(mortal_nats.url, "test")
        await runs.create(bus, config, valkey.url)
        await bus.close()

    asyncio.run(create())
    environment = {"NATS_URL": mortal_nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": config.run.name, "MYXO_LOG_LEVEL": "ERROR"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    running = Parts(tmp_path, tiny_model, environment, [VICTIM, SURVIVOR])
    yield running
    running.stop()


@pytest.mark.timeout(900)
def test_a_death_at_each_stage(replicas: Parts, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send, dying = GroupSender.send, list[str]()

    def send_or_kill(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        if dying and index == BUCKET:
            replicas.kill(dying.pop())
        send(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", send_or_kill)
    monkeypatch.setattr(pusher, "PushRequest", Stages)
    with ControlClient() as link:
        trainer = Trainer(link, tiny_model)
        try:
            for stage in ("offer", "prepare", "receive", "in the middle of a bucket", "commit", "after"):
                trainer.next_version()
                trainer.until(f"two replicas before {stage}", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
                trainer.next_version()
                if stage == "in the middle of a bucket":
                    dying.append(VICTIM)
                elif stage != "after":
                    if stage == "prepare":
                        trainer.pusher.schedule.members = ()  # channels are made anew only where that is needed
                    Stages.before[stage] = lambda: replicas.kill(VICTIM)
                trainer.until(f"the survivor's version after a death at {stage}", lambda cards: serve(cards, trainer.version, SURVIVOR))
                if stage == "after":
                    replicas.kill(VICTIM)
                assert not replicas.running[VICTIM].is_alive(), f"nobody died at {stage}"
                replicas.start(VICTIM)
                assert not (tmp_path / "wrong").exists(), (tmp_path / "wrong").read_text()
            announced_by_the_next_life(trainer)
        finally:
            trainer.close()
        events = link.call(pushes(link), SECONDS)
    told = {part.failure.partition(":")[0] for event in events for part in event.replicas if part.replica == VICTIM and part.failure}
    assert told >= {"offer", "prepare", "receive", "commit"}, events
    for event in events:
        serving = [part for part in event.replicas if not part.failure]
        assert bool(serving) == (not event.failure), event
        assert all(part.paused and part.loading and event.bytes and event.transfer > 0 for part in serving), event
        assert event.seconds >= event.joining + event.transfer + event.activation - 1e-6


def announced_by_the_next_life(trainer: Trainer) -> None:
    """A trainer dies between its version's commit and its announcement: its next life, which finds nobody behind, announces it."""
    link = trainer.link
    trainer.next_version()  # or the card of the life that has just died would do
    trainer.until("two replicas", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
    bucket, earlier = link.service.subjects.weights_bucket, WeightsLive(version=trainer.version - 1, replicas=[], seconds=0, bytes=0, at=0)
    link.call(link.service.bus.put(bucket, "live", earlier.encode()), SECONDS)
    trainer.pusher.close()
    weights = link.config.weights.model_copy(update={"update_weight_buffer_size": BUCKET_BYTES, "push_timeout": PUSH_SECONDS})
    trainer.pusher = Pusher(link, trainer.actor.model, weights)
    trainer.until("the announcement", lambda _: link.live_version() == trainer.version)


DOWN_SECONDS = 0.3
STAGES = ("offer", "prepare", "receive", "in the middle of a bucket", "commit")


@pytest.mark.extra
@pytest.mark.timeout(900)
def test_the_bus_dies_at_each_stage(
    replicas: Parts,
    mortal_nats: EmbeddedNats,
    crash: Callable[[EmbeddedNats], None],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was under way when it died, the request or its answers, is lost; it is back at once, with nobody's request."""
    send, dying, restarts, over = GroupSender.send, list[bool](), list[threading.Thread](), threading.Event()

    def restart() -> None:
        time.sleep(DOWN_SECONDS)
        mortal_nats.start()
        over.wait()  # a server dies with the thread that has started it

    def die() -> None:
        crash(mortal_nats)
        restarts.append(threading.Thread(target=restart, daemon=True))
        restarts[-1].start()

    def send_or_die(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        if dying and index == BUCKET:
            dying.pop()
            die()
        send(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", send_or_die)
    monkeypatch.setattr(pusher, "PushRequest", Stages)
    with ControlClient() as link:
        trainer = Trainer(link, tiny_model)
        try:
            trainer.next_version()
            trainer.until("two replicas", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
            for stage in STAGES:
                trainer.next_version()
                if stage == "in the middle of a bucket":
                    dying.append(True)
                else:
                    if stage == "prepare":
                        trainer.pusher.schedule.members = ()
                    Stages.before[stage] = die
                trainer.until(f"the version after a death at {stage}", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
                assert not dying and not Stages.before, f"nobody died at {stage}"
                assert not (tmp_path / "wrong").exists(), (tmp_path / "wrong").read_text()
            live = link.call(link.service.bus.get(link.service.subjects.weights_bucket, "live"), SECONDS)
            events, results = link.call(pushes(link), SECONDS), {result.version: result for result in trainer.pusher.results()}
        finally:
            trainer.close()
    over.set()
    for thread in restarts:
        thread.join()
    assert live is not None and WeightsLive.decode(live).digest == results[trainer.version].digest
    failures = [part.failure for event in events for part in event.replicas if part.failure and not part.failure.startswith("offer")]
    assert not failures, "a push that the bus's death interrupts continues; it does not end, to be made again"


@pytest.mark.extra
@pytest.mark.timeout(900)
def test_a_replica_whose_engine_hangs_is_left_out(replicas: Parts, tiny_model: Path, tmp_path: Path) -> None:
    """Its scheduler does not begin to receive: the other serves the version before the push's own deadline, and it follows once it can."""
    hung = tmp_path / f"{HUNG}{VICTIM}"
    with ControlClient() as link:
        trainer = Trainer(link, tiny_model)
        try:
            trainer.next_version()
            trainer.until("two replicas", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
            hung.touch()
            trainer.next_version()
            trainer.until("the survivor's version", lambda cards: serve(cards, trainer.version, SURVIVOR))
            hung.unlink()
            trainer.until("the other's", lambda cards: serve(cards, trainer.version, VICTIM, SURVIVOR))
            assert not (tmp_path / "wrong").exists(), (tmp_path / "wrong").read_text()
        finally:
            trainer.close()
        events = link.call(pushes(link), SECONDS)
    broken = next(event for event in events if event.failure)
    blamed = {part.replica: part.failure for part in broken.replicas}
    assert "whose schedulers do not run" in blamed[VICTIM] and blamed[SURVIVOR] == "receive: the push failed for others"
    assert broken.transfer < PUSH_SECONDS, "it is left out by a deadline of its own"


async def pushes(link: ControlClient) -> list[WeightsPushed]:
    """Returns what the run's events tell of its pushes."""
    names = Subjects(link.service.run)
    events = streams.read(link.service.bus, names.events_stream, WeightsPushed, names.event("weights", "pushed"))
    return [event async for _, event in events]


def serve(cards: dict[str, ServiceStatus], version: int, *names: str) -> bool:
    return all(name in cards and cards[name].version == version and cards[name].state == "ready" for name in names)
