"""``/api/run``, ``/api/weights`` and the sessions in flight over real servers: live, while NATS is away, and from a directory alone."""

import contextlib
import json
import math
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nats.js.errors import NotFoundError
from torch.utils.tensorboard import SummaryWriter

from services.console.run_source import NATS
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.messages import Sampling
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsLive, WeightsPushed
from shared.sessions.session import Session, SessionEnded, SessionLog, TurnBegun, TurnEnded, TurnExtended, new_key
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store
from tests.integration.console.conftest import console_of
from tests.support.intended_rights import every_stream
from tests.support.run_config import run_config


async def publish_step(bus: Bus, names: Subjects, step: int, **values: float) -> None:
    metrics = {name.replace("__", "/"): value for name, value in values.items()}
    event = MetricsWritten(role="actor", step=step, values=metrics, at=time.time())
    await bus.publish(names.event("trainer", "metrics"), event)


def directory_of(config: RunConfig, **series: list[float]) -> Path:
    """Writes a run's directory: its frozen config, and its metric files."""
    config.run.root.mkdir(parents=True, exist_ok=True)
    (config.run.root / runs.FROZEN).write_text(config.model_dump_json())
    writer = SummaryWriter(str(config.run.root / "tensorboard"))
    for name, values in series.items():
        for step, value in enumerate(values):
            writer.add_scalar(name.replace("__", "/"), value, step)
    writer.close()
    return config.run.root


@pytest.fixture
def config(tmp_path: Path, run_name: str) -> RunConfig:
    return run_config(tmp_path, run={"name": run_name, "dir": str(tmp_path / "runs")})


async def test_a_live_run(mortal_nats: EmbeddedNats, valkey: EmbeddedValkey, config: RunConfig, tmp_path: Path) -> None:
    """Its curves grow by events and files, over those of another run; pushes and restarts are told; NATS goes and comes back."""
    names = Subjects(config.run.name)
    root = directory_of(config, train__loss=[9.0, 8.0])
    beside = run_config(tmp_path, run={"name": "beside", "dir": str(tmp_path / "runs")})
    directory_of(beside, train__loss=[5.0, math.nan], custom__metric=[1.0])
    bus = await Bus.connect(mortal_nats.url, "test")
    await runs.create(bus, config, valkey.url)
    await publish_step(bus, names, 1, train__loss=7.0, rollout__raw_reward=0.5)
    async with console_of(config.run.name, mortal_nats.url, valkey.url, root) as console:
        loss = ("tag", "train/loss")
        own = await console.until("run/curves", loss, there=lambda found: found["curves"] and found["curves"][0]["values"] == [9.0, 7.0])
        assert own["curves"][0]["run"] == config.run.name and own["curves"][0]["steps"] == [0, 1]
        both = await console.until("run/curves", loss, ("run", "beside"), there=lambda found: len(found["curves"]) == 2)
        assert both["curves"][1]["values"] == [5.0, None] and both["curves"][1]["unusual"] == [{"x": 1.0, "step": 1, "value": "nan"}]
        panels = await console.until("run/panels", ("run", "beside"))
        assert [panel["panel"] for panel in panels["panels"]] == ["reward", "loss"] and panels["further"] == ["custom/metric"]

        await publish_step(bus, names, 2, train__loss=6.0)
        await console.until("run/curves", loss, there=lambda found: found["curves"][0]["values"] == [9.0, 7.0, 6.0])
        for what, detail in (("joined", ""), ("failed", "boom <b>"), ("restarted", "killed by signal 9")):
            event = ServiceEvent(service="reward", instance="reward-0", what=what, detail=detail, at=time.time())
            await bus.publish(names.event("service", what), event)
        parts = [ReplicaPush(replica="rollout-0", paused=0.5, loading=0.25), ReplicaPush(replica="rollout-1", failure="commit: late")]
        push = WeightsPushed(version=1, replicas=parts, transfer=0.5, seconds=1.0, bytes=10**9, at=time.time())
        await bus.publish(names.event("weights", "pushed"), push)
        await bus.publish(
            names.event("weights", "live"), WeightsLive(version=1, replicas=["rollout-0"], seconds=1.0, bytes=1, at=time.time())
        )
        status = ServiceStatus(service="rollout", instance="rollout-0", host="h", pid=1, http="", state="ready", version=1, at=time.time())
        await Registry(bus, config.run.name).renew(status)
        marks = await console.until("run/marks", there=lambda found: len(found["marks"]) == 2)
        assert [(mark["kind"], mark["text"]) for mark in marks["marks"]] == [
            ("restarted", "killed by signal 9"),
            ("push failed", "version 1 rollout-1: commit: late"),
        ]
        rows = await console.until("weights/versions", there=lambda found: found["versions"] and found["versions"][0]["replicas"][0]["now"])
        assert rows["versions"][0]["gb_per_s"] == 2.0 and rows["versions"][0]["paused"] == 0.5
        assert (await console.until("weights/now"))["live"] == 1
        assert (await console.until("weights/events"))["events"][0]["who"] == "rollout-1"

        await bus.close()
        mortal_nats.stop()
        await console.until("overview", there=lambda found: NATS in [part["name"] for part in found["away"]])
        status_code, kept = await console.get("run/curves", loss)
        assert status_code == 200 and kept["curves"][0]["values"] == [9.0, 7.0, 6.0], "the page keeps what it had"
        mortal_nats.start()
        again = await Bus.connect(mortal_nats.url, "test")
        await publish_step(again, names, 3, train__loss=5.0)
        await console.until("run/curves", loss, there=lambda found: found["curves"][0]["values"] == [9.0, 7.0, 6.0, 5.0])
        await again.close()


@pytest.mark.extra
async def test_a_directory_alone(config: RunConfig) -> None:
    root = directory_of(config, train__loss=[float(step) for step in range(3000)], rollout__raw_reward=[0.0])
    critic = SummaryWriter(str(root / "tensorboard" / "critic"))
    critic.add_scalar("critic/value_loss", 0.5, 0)
    critic.close()
    writer = SummaryWriter(str(root / "tensorboard"))
    for version in range(2):
        for figure, value in {"time": 1.0, "wire_time": 0.5, "stall": 0.25, "bytes": 1e9}.items():
            writer.add_scalar(f"perf/update_weights_{figure}", value, version)
    writer.add_scalar("perf/update_weights_time", math.nan, 2)
    writer.close()
    async with console_of(config.run.name, None, None, root) as console:
        panels = await console.until("run/panels", there=lambda found: len(found["panels"]) == 3)
        assert [panel["panel"] for panel in panels["panels"]] == ["reward", "loss", "critic"]
        assert panels["unreadable"] == {}
        query = (("tag", "train/loss"), ("points", 100), ("window", 3), ("first", 100), ("last", 2000))
        (curve,) = (await console.until("run/curves", *query))["curves"]
        assert curve["steps"][0] == 100 and curve["steps"][-1] == 2000 and curve["total"] == 1901 and len(curve["x"]) <= 104
        assert all(mean == value - 1 for mean, value in zip(curve["smoothed"], curve["values"], strict=True))
        assert (await console.until("weights/now"))["live"] == 1 and not (await console.until("weights/events"))["recorded"]
        rows = (await console.until("weights/versions"))["versions"]
        assert all(row[figure] is None for row in rows for figure in ("joining", "activation", "paused")), "no metric has them"
        assert [(row["version"], row["served"], row["seconds"], row["transfer"], row["stall"], row["gb_per_s"]) for row in rows] == [
            (version, True, 1.0, 0.5, 0.25, 2.0) for version in (1, 0)
        ]


async def test_bad_questions_are_refused_with_the_name_of_the_parameter(config: RunConfig) -> None:
    wrong: list[tuple[list[tuple[str, str]], int, str]] = [
        ([], 422, "tag"),
        ([("tag", "a"), ("points", "1")], 422, "points"),
        ([("tag", "a"), ("window", "0")], 422, "window"),
        ([("tag", "a"), ("first", "nan")], 422, "first"),
        ([("tag", "a"), ("axis", "parsecs")], 422, "axis"),
        ([("tag", f"t{index}") for index in range(129)], 422, "tag"),
        ([("tag", "a"), *(("run", f"r{index}") for index in range(8))], 422, "run"),
        ([("tag", "a"), ("run", "../beside")], 404, "run"),
        ([("tag", "a"), ("run", "")], 404, "run"),
    ]
    async with console_of(config.run.name, None, None, directory_of(config)) as console:
        for query, status, named in wrong:
            found, told = await console.get("run/curves", *query)
            assert found == status and named in json.dumps(told["detail"]), query


@pytest.mark.extra
async def test_a_run_that_is_begun_anew_is_read_from_its_beginning(nats: EmbeddedNats, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    """`myxo up --fresh` beside a console of its own: its streams are others, though their names are the same."""
    config = run_config(tmp_path, run={"name": "anew"})
    names, bus = Subjects("anew"), await Bus.connect(nats.url, "test")
    try:
        await runs.create(bus, config, valkey.url)
        for step in range(9):
            await publish_step(bus, names, step, train__loss=float(step))
        async with console_of("anew", nats.url, valkey.url, None) as console:
            tag = ("tag", "train/loss")
            await console.until("run/curves", tag, there=lambda found: found["curves"] and len(found["curves"][0]["x"]) == 9)
            for stream in every_stream("anew"):
                with contextlib.suppress(NotFoundError):  # one that only clients of the endpoint need
                    await bus.js.delete_stream(stream)
            await runs.create(bus, run_config(tmp_path, run={"name": "anew"}, rollout={"num_rollout": 77}), valkey.url)
            await publish_step(bus, names, 0, train__loss=-1.0)
            found = await console.until("run/curves", tag, there=lambda found: found["curves"] and len(found["curves"][0]["x"]) == 1)
            assert found["curves"][0]["values"] == [-1.0]
            assert (await console.until("overview", there=lambda found: found["of"] == 77))["away"] is not None
    finally:
        await bus.close()


GATEWAY = "gateway-0.abcd"


async def opened(sessions: SessionStore, number: int) -> SessionLog:
    name = f"g{number:08d}.1.2.{uuid.uuid4().hex}"
    now = time.time()
    session = Session(
        id=name, group=f"g{number:08d}", rollout=2, attempt=1, key_digest=new_key(name)[1], deadline=now + 600, opened=now,
        replica="rollout-7", sampling=Sampling(temperature=1.0, max_new_tokens=8),
    )  # fmt: skip
    await sessions.open(session)
    return await sessions.read(name)


def drawn(tokens: int, version: int) -> dict[str, Any]:
    return {
        "completion": np.arange(tokens, dtype=np.int32),
        "log_probs": np.zeros(tokens, np.float32),
        "spans": ((0, tokens, version),),
        "replica": "rollout-3",
        "holder": GATEWAY,
    }


async def begun(sessions: SessionStore, log: SessionLog, request: str, prompt: int, **more: Any) -> None:
    now = time.time()
    rest = np.arange(prompt, dtype=np.int32)
    await sessions.begin(log, TurnBegun(request=request, holder=GATEWAY, at=now, until=now + 60, rest=rest, **more))


async def test_sessions_are_listed_while_they_are_played(nats: EmbeddedNats, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    run = f"sessions-{uuid.uuid4().hex[:8]}"
    config = run_config(tmp_path, run={"name": run}, rollout={"agent": "examples.agents.openai_calculator:run"})
    bus, store = await Bus.connect(nats.url, "test"), Store(valkey.url, run)
    try:
        await runs.create(bus, config, valkey.url)
        sessions = SessionStore(store, run)
        logs = [await opened(sessions, number) for number in range(4)]
        await sessions.make_gateway_key()
        await begun(sessions, logs[0], "one", 10)
        await sessions.append(logs[0], TurnEnded(request="one", finish="stop", **drawn(5, 1)))
        await begun(sessions, logs[0], "two", 3, parent="one", shared=15)
        await sessions.extend(logs[0], TurnExtended(request="two", start=0, until=time.time() + 60, **drawn(4, 2)))
        await sessions.end(logs[2].session.id, SessionEnded(at=time.time(), reward=1.0))
        async with console_of(run, nats.url, valkey.url, None) as console:
            found = await console.until("samples/sessions", there=lambda page: page["total"] == 3)
            assert [row["group"] for row in found["sessions"]] == ["g00000000", "g00000001", "g00000003"] and found["agents"]
            first, second, _ = found["sessions"]
            figures = ("turns", "drawing", "tokens", "context", "oldest", "newest", "gateway", "engine", "replica", "rollout", "attempt")
            assert [first[name] for name in figures] == [1, 1, 9, 22, 1, 2, "gateway-0", "rollout-3", "rollout-7", 2, 1]
            assert first["opened"] <= first["asked"] <= found["now"] < first["deadline"]
            assert (second["turns"], second["drawing"], second["asked"], second["oldest"]) == (0, 0, None, None)
            status, page = await console.get("samples/sessions", ("offset", 2), ("limit", 2))
            assert status == 200 and [row["group"] for row in page["sessions"]] == ["g00000003"]
            await sessions.append(logs[0], TurnEnded(request="two", finish="length", **drawn(6, 2)))
            await sessions.end(logs[1].session.id, SessionEnded(at=time.time()))
            await opened(sessions, 9)
            wanted = ["g00000000", "g00000003", "g00000009"]
            later = await console.until("samples/sessions", there=lambda page: [row["group"] for row in page["sessions"]] == wanted)
            assert [later["sessions"][0][name] for name in ("turns", "drawing", "tokens", "context")] == [2, 0, 11, 24]
    finally:
        await store.close()
        await bus.close()
