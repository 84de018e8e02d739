"""The pages *Flow* and *Health* of a console on real servers: what they tell while a run continues, while NATS is away, and after it."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.console.run_histories import RunPipeline
from services.console.run_source import ChangeFeed
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.ledger import BatchFormed, BatchTrained, GroupDead, GroupsAdmitted, GroupsScored, LedgerRecord, LedgerRepaired, group_id
from shared.schema.messages import SampleMeta, ScoredGroup
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from tests.integration.console.conftest import console_of
from tests.integration.written_run import append
from tests.support.run_config import run_config
from tests.support.valid_messages import example


def scored(number: int, began: float, seconds: float, replica: str, reward: float) -> ScoredGroup:
    fields = {"samples": [SampleMeta(tokens=20, oldest=0, newest=0, finish="length", trained=20)] * 2, "rewards": [reward, reward]}
    return example(ScoredGroup, group=group_id(number), replica=replica, started=began, ended=began + seconds, **fields)


def step(number: int, began: float) -> list[LedgerRecord]:
    """A step that lasts 10 s, of which the trainer waits 8 s for the generation of its one group."""
    return [
        GroupsAdmitted(first=number, count=1, version=0, at=began),
        GroupsScored(groups=[scored(number, began, 8.0, "rollout-3", 1.0)], at=began + 8.0),
        BatchFormed(step=number, version=0, groups=[group_id(number)], at=began + 8.0),
        BatchTrained(step=number, version=0, started=began + 8.0, ended=began + 10.0, at=began + 10.0),
    ]


def status(run: str, service: str, instance: str, **given: Any) -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="", state="ready", version=1, at=time.time(), **given)


async def event(bus: Bus, run: str, what: str, detail: str) -> None:
    told = ServiceEvent(service="rollout", instance="rollout-3", what=what, detail=detail, at=time.time())
    await bus.publish(Subjects(run).event("service", what), told)


async def test_the_pages_follow_the_run(bus: Bus, run_name: str, nats: EmbeddedNats, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    await runs.create(bus, run_config(tmp_path, run={"name": run_name}, rollout={"max_staleness": 1}), valkey.url)
    async with console_of(run_name, nats.url, valkey.url, tmp_path) as console:
        empty = await console.until("flow", there=lambda flow: True)
        assert empty["services"] == [] and "Too few steps" in empty["bottleneck"]["sentence"]

        began = time.time() - 60
        for number in range(4):
            await append(bus, run_name, *step(number, began + 10 * number))
        flow = await console.until("flow", there=lambda flow: flow["ages"]["tokens"] == {"0": 160})
        assert flow["bottleneck"]["sentence"] == "The trainer waits 80 % of the time for rollout-3."
        assert flow["bottleneck"]["advice"][0] == {"text": flow["bottleneck"]["advice"][0]["text"], "withheld": ""}
        assert flow["waits"] == pytest.approx({"waiting for rollout": 0.8, "training": 0.2}) and not flow["live"]
        assert [line["trained"] for line in flow["lengths"]] == [160]
        health = await console.until("health", there=lambda health: len(health["alarms"]) >= 2)
        assert [alarm["kind"] for alarm in health["alarms"]] == ["every reward is the same", "responses are cut off"]

        for number in (4, 5):
            written = {"train/agreement_abs_diff": 50.0, "train/agreement_tokens": 100.0}
            told = MetricsWritten(role="actor", step=number, values=written, at=time.time())
            await bus.publish(Subjects(run_name).event("trainer", "metrics"), told)
        await event(bus, run_name, "restarted", "after signal 9")
        await append(bus, run_name, GroupDead(group=group_id(99), reason="<b>too long</b>", at=time.time()))
        health = await console.until("health", there=lambda health: health["reasons"] and len(health["alarms"]) == 5)
        assert {"services restart", "engine and trainer differ", "groups die"} <= {alarm["kind"] for alarm in health["alarms"]}
        assert health["reasons"][0]["reason"] == "<b>too long</b>" and health["events"][0]["what"] == "restarted"
        assert [(line["instance"], line["state"], line["restarts"]) for line in health["services"]] == [("rollout-3", "", 1)]
        _, flow = await console.get("flow", ("window", 300))
        assert "engine and trainer differ" in flow["bottleneck"]["advice"][0]["withheld"], "a larger bound presumes that both agree"
        cut = await streams.last_sequence(bus, Subjects(run_name).ledger_stream)
        await bus.js.delete_msg(Subjects(run_name).ledger_stream, cut)
        await append(bus, run_name, LedgerRepaired(resume=0, cut_after=cut - 1, cut_last=cut, at=time.time()))
        assert (await console.until("health", there=lambda health: not health["reasons"]))["events"], (
            "the record of the dead group was cut off"
        )

        registry = Registry(bus, run_name)
        await registry.renew(status(run_name, "rollout", "rollout-3", gauges={"running_groups": 2}))
        await registry.renew(status(run_name, "buffer", "buffer-0", gauges={"queue_task": 7, "ready": 1}, held_back="the store is full"))
        flow = await console.until("flow", there=lambda flow: flow["live"] and flow["stages"][1]["groups"] == 2)
        assert flow["bottleneck"]["sentence"].startswith("The run waits for room: buffer-0 holds back (the store is full)")
        assert flow["stalled"] and flow["waiting_since"] > 0 and flow["waiting_for"] in flow["bottleneck"]["sentence"]
        assert "room: buffer-0 holds back" in (await console.get("health"))[1]["waiting_for"]
        assert {line["instance"]: line["doing"] for line in flow["services"]}["rollout-3"] == "generating"
        for wrong in ("nan", "inf", "-1", "5", "1e9", "x"):
            code, told = await console.get("flow", ("window", wrong))
            assert code == 422 and "window" in json.dumps(told)


@pytest.mark.extra
async def test_a_continued_run_is_shown_with_its_new_config_and_judged_at_its_end(
    bus: Bus, run_name: str, nats: EmbeddedNats, valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    config = run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": 2})
    await runs.create(bus, config, valkey.url)
    async with console_of(run_name, nats.url, valkey.url, tmp_path) as console:
        await console.until("overview", there=lambda found: (found["steps"], found["of"]) == (0, 2))
        longer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_rollout": 3})})
        await runs.create(bus, longer, valkey.url)
        registry, trainer = Registry(bus, run_name), status(run_name, "trainer", "trainer-0", gauges={"step": 1})
        await registry.renew(trainer)
        await console.until("overview", there=lambda found: (found["steps"], found["of"]) == (1, 3))
        began = time.time() - 7200
        for number in range(3):
            await append(bus, run_name, *step(number, began + 10 * number))
        await registry.leave(trainer)
        await runs.set_phase(bus, run_name, runs.FINISHED)
        await console.until("overview", there=lambda found: (found["phase"], found["steps"]) == ("finished", 3))
        health = await console.until("health", there=lambda health: not health["services"])
        assert health["disk"] is None and health["memory"] is None, "whoever looks may be on another machine"


async def test_a_run_that_begins_anew_makes_new_steps(tmp_path: Path) -> None:
    async def read(*_given: object, **_named: object) -> AsyncIterator[tuple[int, Any]]:
        for entry in ():
            yield entry

    async def ledger_end() -> int:
        return 0

    known: dict[str, Any] = {"directory": None, "away": {}, "reported": None, "connected": True, "over": False}
    known |= {"config": run_config(tmp_path), "read": read, "ledger_end": ledger_end, "feed": ChangeFeed(), "followers": [], "lookers": []}
    source: Any = SimpleNamespace(run="r", **known)
    pipeline, since = RunPipeline(source), []
    for source.life, steps in (("old", 50), ("new", 0)):
        source.statuses = [status("r", "trainer", "trainer-0", gauges={"step": steps})]
        await source.followers[0]()
        source.lookers[0](source.statuses)
        wait = pipeline.wait()
        assert wait is not None
        since.append(wait.still_since)
    assert 0 < since[0] < since[1], "the new life's first step is a step, however many the old one had"


async def test_a_run_of_which_only_the_directory_is_left_says_so(run_name: str, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    async with console_of(run_name, None, valkey.url, tmp_path) as console:
        for page in ("flow", "health"):
            code, told = await console.get(page)
            assert code == 503 and "NATS" in told["detail"]
