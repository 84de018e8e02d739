"""``myxo audit``, ``summary`` and ``status`` on a ledger written by hand: on a given NATS server, and on a stopped run's own store."""

import asyncio
import gzip
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from myxo.run.run_directory import RunDirectory
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data.rollout_files import DIRECTORY, RolloutRecord, path_of
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.digests import attest_scored
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalEnded,
    GroupDead,
    GroupsAdmitted,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    VersionLive,
    group_id,
)
from shared.schema.messages import Attestation, Payload, SampleMeta, ScoredGroup, Trained
from shared.schema.service_messages import ServiceEvent
from tests.integration.myxo.command import Myxo
from tests.integration.written_run import append
from tests.support.run_config import run_config

BEGIN = 1_700_000_000.0


def scored(number: int, reward: float, oldest: int, at: float) -> ScoredGroup:
    samples = [
        SampleMeta(tokens=10, oldest=oldest, newest=oldest, finish="stop", trained=10, digest=number << 32 | index) for index in range(2)
    ]
    fields = {"samples": samples, "rewards": [reward, reward], "replica": "rollout-0", "started": BEGIN + at, "ended": BEGIN + at + 2}
    return ScoredGroup(group=group_id(number), attempt=0, payload=Payload(keys=[f"k{number}"], bytes=1), **fields)


def attested(*numbers: int) -> Attestation:
    """What an honest trainer says of these groups."""
    return attest_scored([(group.group, group.samples, group.removed) for group in (scored(n, 0.0, 0, 0) for n in numbers)], 0)


def evaluation(version: int, mean: float, at: float) -> EvalEnded:
    versions = {"version": version, "oldest": version, "newest": version, "live": version}
    return EvalEnded(at=BEGIN + at, dataset="heldout", **versions, prompts=4, failed=0, samples=4, mean_reward=mean)


def records() -> list[LedgerRecord]:
    """Two steps of two groups of two samples, the second one version stale."""
    return [
        VersionLive(version=0, at=BEGIN),
        evaluation(0, 0.25, 0),
        GroupsAdmitted(first=0, count=4, version=0, at=BEGIN),
        GroupsScored(groups=[scored(n, 0.0, 0, 0) for n in (0, 1)], at=BEGIN + 2),
        BatchFormed(step=0, version=0, groups=[group_id(0), group_id(1)], at=BEGIN + 2),
        GroupsScored(groups=[scored(n, 1.0, 0, 2) for n in (2, 3)], at=BEGIN + 4),
        BatchTrained(step=0, version=0, started=BEGIN + 3, ended=BEGIN + 5, attestation=attested(0, 1), at=BEGIN + 5),
        VersionLive(version=1, at=BEGIN + 5),
        BatchFormed(step=1, version=1, groups=[group_id(2), group_id(3)], at=BEGIN + 5),
        BatchTrained(step=1, version=1, started=BEGIN + 5, ended=BEGIN + 6, attestation=attested(2, 3), at=BEGIN + 6),
        VersionLive(version=2, at=BEGIN + 6),
        evaluation(2, 0.75, 7),
        CheckpointDurable(steps=2, at=BEGIN + 8),
        RunFinished(steps=2, at=BEGIN + 8),
    ]


async def write(bus: Bus, config: RunConfig, ledger: Sequence[LedgerRecord]) -> None:
    """A run on the bus with this ledger, and what a trainer that was restarted after step 0 reported."""
    names = Subjects(config.run.name)
    await runs.create(bus, config, "unix:///nowhere")
    await append(bus, config.run.name, *ledger)
    for step, diff in ((0, 1.0), (0, 99.0), (1, 3.0)):
        metrics = {"agreement_abs_diff": diff, "agreement_tokens": 20.0}
        await bus.publish(names.event("trainer", "step"), Trained(step=step, version=step, started=0, ended=1, metrics=metrics))
    event = ServiceEvent(service="trainer", instance="trainer-0", what="restarted", at=BEGIN)
    await bus.publish(names.event("service", "restarted"), event)
    await bus.publish(names.event("service", "joined"), event.model_copy(update={"what": "joined"}))
    if isinstance(ledger[-1], RunFinished):
        await runs.set_phase(bus, config.run.name, runs.FINISHED)


@asynccontextmanager
async def embedded(config: RunConfig) -> AsyncIterator[Bus]:
    """A bus on the run's own store, as the launcher runs it."""
    server = EmbeddedNats(RunDirectory(config.run.root).nats)
    server.start()
    bus = await Bus.connect(server.url, "test")
    yield bus
    await bus.close()
    server.stop()


@pytest.fixture
def stopped_run(tmp_path: Path) -> Callable[[Sequence[LedgerRecord]], RunConfig]:
    """Makes a run that once ran and does not any more."""

    def make(ledger: Sequence[LedgerRecord]) -> RunConfig:
        config = run_config(tmp_path, rollout={"num_rollout": 2}, eval={"eval_prompt_data": "heldout.jsonl"})

        async def fill() -> None:
            async with embedded(config) as bus:
                await write(bus, config, ledger)

        asyncio.run(fill())
        return config

    return make


def test_the_summary_of_a_stopped_run(myxo: Myxo, stopped_run: Callable[..., RunConfig]) -> None:
    config = stopped_run(records())
    code, out, err = myxo.run("summary", config.run.root)
    assert (code, err) == (0, "")
    summary = json.loads((config.run.root / "summary.json").read_text())
    expected = {
        "run": "test",
        "steps": 2,
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "max_staleness": 1,
        "max_staleness_seen": 1,
        "mean_staleness": 0.5,
        "staleness_histogram": {"0": 4, "1": 4},
        "overlap_seconds": 1.0,
        "generation_seconds": 4.0,
        "training_seconds": 3.0,
        "reward_first": 0.0,
        "reward_last": 1.0,
        "mean_abs_logprob_diff": 0.1,
        "trained_tokens": 80,
        "wall_seconds": 8.0,
        "groups": {"admitted": 4, "trained": 4, "dropped": {}, "dead": {}, "faults": {}, "in_flight": 0},
        "restarts": {"trainer-0": 1},
        "audit": "ok",
    }
    assert {key: summary[key] for key in expected} == expected and "warm_start" in summary
    assert (config.run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
    for part in ("0.250 → 0.750", "0.000 → 1.000", "trainer-0 1", "audit", "ok"):
        assert part in out
    assert not RunDirectory(config.run.root).is_held()
    code, out, _ = myxo.run("summary", config.run.root, "--json")
    assert (code, json.loads(out)) == (0, summary)


def test_the_audit_of_a_stopped_run_tells_of_trained_groups_that_have_no_responses_on_disk(
    myxo: Myxo, stopped_run: Callable[..., RunConfig]
) -> None:
    config = stopped_run(records())
    code, out, _ = myxo.run("audit", "test", "--dir", config.run.dir)
    assert code == 0
    assert "4 admitted = 4 trained + 0 in flight" in out
    code, out, _ = myxo.run("audit", "test", "--dir", config.run.dir, "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["violations"], report["steps"], report["trained"]) == (0, True, [], 2, 4)
    directory = config.run.root / DIRECTORY
    directory.mkdir()
    lines = [RolloutRecord(group=group_id(number), attempt=0, status="trained", at=1.0).line() for number in (0, 1, 1, 2)]
    lines.append(RolloutRecord(group=group_id(9), attempt=0, status="dropped", at=1.0).line())
    path_of(directory, 0).write_bytes(b"".join(lines))
    code, out, _ = myxo.run("audit", config.run.root)
    assert (code, "3 of 4 trained groups are in rollouts/" in out) == (0, True)
    assert "the ledger is ok; 1 trained groups have no responses" in out
    path_of(directory, 1).write_bytes(RolloutRecord(group=group_id(3), attempt=0, status="trained", at=1.0).line())
    assert json.loads(myxo.run("audit", config.run.root, "--json")[1])["without_responses"] == 0
    path_of(directory, 0).unlink()  # as the bound on the directory has it
    assert json.loads(myxo.run("audit", config.run.root, "--json")[1])["without_responses"] is None


def test_the_trace_of_a_stopped_run(myxo: Myxo, stopped_run: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = stopped_run([*records()[:5], GroupDead(group=group_id(3), reason="broken", at=BEGIN + 3), *records()[6:8]])
    assert myxo.run("trace", config.run.root)[0] == 0
    events = json.loads(gzip.decompress((config.run.root / "trace.json.gz").read_bytes()))["traceEvents"]
    assert myxo.run("trace", config.run.root, "-o", tmp_path / "trace.json")[0] == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events
    slices = slices_of(events)
    assert slices[group_id(0)] == [
        ("generating", 0, 2), ("in batch", 2, 3), ("training", 3, 5), ("group", 0, 5),
    ]  # fmt: skip
    assert slices[group_id(2)] == [("outstanding", 0, 5), ("group", 0, 5)]
    assert slices[group_id(3)] == [("outstanding", 0, 3), ("group", 0, 3)]
    [step] = [event for event in events if event["ph"] == "X"]
    assert (step["name"], step["dur"], step["args"]["agreement_abs_diff"]) == ("step 0", 2_000_000, 1.0)
    assert {event["name"] for event in events if event["ph"] == "i"} == {"restarted", "joined"}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[-1] == {"outstanding": 1, "ready": 0, "in batch": 0}
    code, _, err = myxo.run("trace", config.run.root, "-o", "/nowhere/trace.json")
    assert (code, err.count("\n"), "--output" in err) == (2, 1, True)


def slices_of(events: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """The slices of each group, (name, begin, end) in seconds of the run, in the order of their ends; each is closed by its own name."""
    found, stacks = defaultdict(list), defaultdict(list)
    for event in events:
        if event.get("cat") == "groups" and event["ph"] in "be":
            at, stack = event["ts"] / 1e6 - BEGIN, stacks[event["id"]]
            if event["ph"] == "b":
                stack.append((event["name"], at))
            else:
                name, began = stack.pop()
                assert name == event["name"]
                found[event["id"]].append((name, began, at))
    assert not any(stacks.values())
    return found


def changed_by_one_token(told: Attestation) -> dict[str, Attestation]:
    """The trainer's account of step 1, with one token that is another than was scored."""
    others = [scored(number, 1.0, 0, 2) for number in (2, 3)]
    others[1].samples[1].digest ^= 1  # what one token id makes of a sample's digest
    other = attest_scored([(group.group, group.samples, group.removed) for group in others], 0)
    return {
        "tokens": told.model_copy(update={"tokens": told.tokens - 1}),
        "digest": told.model_copy(update={"digest": other.digest}),
        "oldest": told.model_copy(update={"oldest": told.oldest + 1}),
        "samples": told.model_copy(update={"samples": told.samples + 1}),
    }


@pytest.mark.parametrize("name", ["tokens", "digest", "oldest", "samples"])
def test_the_audit_finds_a_trainers_account_that_is_wrong_by_one_token(
    myxo: Myxo, stopped_run: Callable[..., RunConfig], name: str
) -> None:
    ledger, told = records(), attested(2, 3)
    at = next(index for index, record in enumerate(ledger) if isinstance(record, BatchTrained) and record.step == 1)
    ledger[at] = ledger[at].model_copy(update={"attestation": changed_by_one_token(told)[name]})
    code, out, _ = myxo.run("audit", stopped_run(ledger).run.root, "--json")
    wrong, right = getattr(changed_by_one_token(told)[name], name), getattr(told, name)
    assert code == 1
    assert json.loads(out)["violations"] == [f"step 1: by the trainer's account its {name} is {wrong}, by what was scored {right}"]


def test_the_audit_of_a_run_that_broke_its_rules(myxo: Myxo, stopped_run: Callable[..., RunConfig]) -> None:
    """A step trained twice and a group that ends twice, in a ledger no buffer would write."""
    ledger = [*records()[:-1], BatchTrained(step=1, version=1, started=0, ended=1, at=BEGIN + 9)]
    config = stopped_run(ledger)
    code, out, _ = myxo.run("audit", config.run.root)
    assert code == 1
    assert "violation: step 1 was trained after 2 steps" in out
    code, out, _ = myxo.run("audit", config.run.root, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    code, _, _ = myxo.run("summary", config.run.root)
    assert code == 1
    assert "step 1 was trained after 2 steps" in json.loads((config.run.root / "summary.json").read_text())["audit"][0]


def test_the_status_of_a_stopped_run(myxo: Myxo, stopped_run: Callable[..., RunConfig]) -> None:
    config = stopped_run(records()[:7])
    code, out, _ = myxo.run("status", config.run.root)
    assert code == 0
    assert "not running: 1 of 2 steps trained, 2 groups in flight" in out
    code, out, _ = myxo.run("status", config.run.root, "--json")
    figures = {"phase": "running", "running": False, "run": "test", "steps": 1, "of": 2, "in_flight": 2, "restarts": 1}
    assert json.loads(out) == {**figures, "reason": "", "dead": {}, "eval_failed": {}, "errors": {}, "alarms": []}


def test_a_run_without_any_step_has_a_summary_but_no_picture(myxo: Myxo, stopped_run: Callable[..., RunConfig]) -> None:
    config = stopped_run(records()[:3])
    code, out, _ = myxo.run("summary", config.run.root)
    assert code == 0
    assert "No picture: no step is trained yet." in out
    assert not (config.run.root / "reward.png").exists()


async def test_a_run_on_a_given_server(myxo: Myxo, bus: Bus, nats: EmbeddedNats, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": 2})
    await write(bus, config, records())
    given = {"NATS_URL": nats.url}
    code, out, err = await asyncio.to_thread(myxo.run, "audit", run_name, "--json", environment=given)
    assert (code, err) == (0, "")
    assert json.loads(out)["ok"] is True
    code, _, err = await asyncio.to_thread(myxo.run, "audit", "no-such-run", environment=given)
    assert code == 2
    assert "RUN = 'no-such-run': no such run on the NATS server at nats://127.0.0.1" in err
    assert "@" not in err


async def test_the_status_of_a_run_whose_services_are_alive(
    myxo: Myxo, bus: Bus, nats: EmbeddedNats, run_name: str, tmp_path: Path
) -> None:
    from shared.schema.service_messages import ServiceStatus

    config = run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": 2})
    await write(bus, config, records()[:7])
    registry = Registry(bus, run_name)
    gauges = {"trained_steps": 1.0, "in_flight": 2.0, "queue_task": 5.0, "queue_task_held": 1.0}
    evaluated = {"reward": 0.5, "version": 1.0, "newest": 1.0, "lag": 2.0, "prompts": 8.0}
    gauges |= {f"eval_{name}.gsm8k": value for name, value in evaluated.items()}
    card = ServiceStatus(service="buffer", instance="buffer-7", host="h", pid=1, http="127.0.0.1:9464", state="ready", gauges=gauges, at=0)

    async def beat() -> None:
        while True:
            await registry.renew(card.model_copy(update={"at": time.time()}))
            await asyncio.sleep(1)

    beating = asyncio.create_task(beat())
    try:
        code, out, _ = await asyncio.to_thread(myxo.run, "status", run_name, environment={"NATS_URL": nats.url})
        assert code == 0
        metrics = "metrics of buffer-7: http://127.0.0.1:9464/metrics"
        for part in ("buffer-7", "ready", "1/2", "task 5 waiting + 1 held", "eval/gsm8k", "0.500 (v1, 2 behind)", metrics):
            assert part in out
        code, out, _ = await asyncio.to_thread(myxo.run, "status", run_name, "--json", environment={"NATS_URL": nats.url})
    finally:
        beating.cancel()
    status = json.loads(out)
    assert (status["running"], status["steps"], status["queues"]) == (True, 1, {"task": [5, 1]})
    assert status["evaluations"] == {"gsm8k": {"mean_reward": 0.5, "version": 1, "newest": 1, "lag": 2, "missing": 0, "prompts": 8}}
    assert [service["http"] for service in status["services"]] == ["127.0.0.1:9464"]


async def test_submit_puts_the_run_on_the_bus(
    myxo: Myxo, bus: Bus, nats: EmbeddedNats, valkey: object, run_name: str, config_file: Callable[..., Path]
) -> None:
    given = {"NATS_URL": nats.url, "REDIS_URL": valkey.url}  # type: ignore[attr-defined]
    config = config_file(run={"name": run_name})
    code, out, err = await asyncio.to_thread(myxo.run, "submit", config, "--num-rollout", "7", environment=given)
    assert (code, err) == (0, "")
    assert f"MYXO_RUN={run_name}" in out
    frozen = await runs.load(bus, run_name)
    assert frozen.rollout.num_rollout == 7
    assert not frozen.run.root.exists(), "its services make it, as their user"
    assert await runs.store_url(bus, run_name) == given["REDIS_URL"]
    assert await runs.phase(bus, run_name) == runs.RUNNING
    prompts = (config.parent / "prompts.jsonl").rename(config.parent / "away.jsonl")
    again = ("submit", config, "--num-rollout", "7")
    code, out, err = await asyncio.to_thread(myxo.run, *again, environment=given)
    assert (code, err) == (0, "") and "already, with these values: nothing is to do" in out, "data are not read once more"
    await runs.set_phase(bus, run_name, runs.FAILED)
    code, _, err = await asyncio.to_thread(myxo.run, *again, environment=given)
    assert code == 2 and "prompts.jsonl" in err, "a run that failed is checked"
    prompts.rename(config.parent / "prompts.jsonl")
    assert (await asyncio.to_thread(myxo.run, *again, environment=given))[0] == 0
    assert await runs.phase(bus, run_name) == runs.RUNNING
    assert (
        "MYXO_INSTANCE=rollout-1 python -m services.rollout (lend_gpus)"
        in (await asyncio.to_thread(myxo.run, *again, "--lend-gpus", environment=given))[1]
    )
    await runs.append(bus, run_name, BatchTrained(step=2, version=2, started=0.0, ended=1.0, at=1.0))
    changed = await asyncio.to_thread(myxo.run, *again, "--lr", "2e-6", environment=given)
    assert changed[0] == 2 and "3 steps are trained, and the newest checkpoint here is of 0" in changed[2]
    saved = frozen.trained / "checkpoints" / "step_00000003" / "checkpoint.json"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert (await asyncio.to_thread(myxo.run, *again, "--lr", "2e-6", environment=given))[0] == 0, "as with an orderly stop"
    code, _, err = await asyncio.to_thread(myxo.run, "submit", config, "--rollout-batch-size", "4", environment=given)
    assert code == 2
    assert "rollout.rollout_batch_size" in err
    assert "2 → 4" in err
