"""``/api/samples`` of a console as a process, on a ledger written by hand and real payloads: live, growing, and from a directory alone."""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data import rollout_files
from shared.data.rollout_files import RolloutRecord
from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.ledger import BatchFormed, BatchTrained, GroupDead, GroupsAdmitted, GroupsScored, LedgerRecord, VersionLive, group_id
from shared.schema.messages import ScoredGroup
from shared.schema.sample import Sample
from shared.store.payload_store import Store
from tests.support.run_config import run_config
from tests.support.waiting import until

TOKEN = "a-token-that-nobody-guesses-0123456789"

PICTURE = b"\x89PNG of a sample's screen"
HOSTILE = "<script>alert(1)</script> \u202eright to left \x1b[2J נייר"


class Console:
    """A console as a process. ``url``: where it serves."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer."""
        request = urllib.request.Request(f"{self.url}/api/{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                body = answer.read()
                return answer.status, json.loads(body) if answer.headers["Content-Type"] == "application/json" else body
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def wait(self, path: str, there: Callable[[Any], bool]) -> Any:
        """Returns an answer once it is as expected."""
        found: Any = None

        def fits() -> bool:
            nonlocal found
            code, found = self.get(path)
            return code == 200 and bool(there(found))

        asyncio.run(until(fits, f"{path} as expected", pause=0.2))
        return found


@contextmanager
def console(run: str, **environment: str) -> Iterator[Console]:
    port = free_port()
    given = {"MYXO_RUN": run, "MYXO_CONSOLE": f"127.0.0.1:{port}", "MYXO_CONSOLE_TOKEN": TOKEN, **environment}
    clean = {name: value for name, value in os.environ.items() if name not in ("NATS_URL", "REDIS_URL")}
    process = subprocess.Popen(with_parent([sys.executable, "-m", "services.console"]), env=clean | given)
    try:
        yield Console(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


def samples_of(number: int) -> list[Sample]:
    """Two samples of a rollout that forked: the second holds the first's beginning, of which nothing is trained again."""
    return [
        Sample(
            group=group_id(number),
            index=index,
            prompt=np.array([1, 2, 3], np.int32),
            response=np.array([20, 21, 22 + index, 23], np.int32),
            log_probs=np.array([-0.25, -0.5, -1.0, -2.0], np.float32),
            mask=np.array([1 - index, 0, 1, 1], np.uint8),
            segments=[(0, 2, 0), (2, 4, 1)],
            finish="length" if index else "stop",
            text=f"the answer of {number}/{index}",
            prompt_text=[{"role": "user", "content": HOSTILE}, {"role": "tool", "content": None, "tool_calls": [{"name": "add"}]}],
            label="5",
            metadata={"difficulty": number, "odd": float("nan"), "text": HOSTILE},
            rollout=0,
            pictures=(PICTURE,) * index,
        )
        for index in range(2)
    ]


def scored(names: Subjects, number: int) -> tuple[ScoredGroup, dict[str, bytes]]:
    made = samples_of(number)
    blobs = {names.payload_key(group_id(number), 0, part): blob for part, blob in enumerate(sample.encode(made, 1))}
    group = ScoredGroup(
        group=group_id(number),
        attempt=0,
        payload=reference(names.run, blobs, [entry.length for entry in made]),
        samples=[entry.meta() for entry in made],
        rollouts=(0, 0),
        rewards=[0.0, float(number)],
        parts=({"form": 1.0}, {"form": 0.5}),
        replica="rollout-0",
        started=100.0,
        ended=101.5,
    )
    return group, blobs


async def publish(url: str, run: str, *records: LedgerRecord) -> None:
    bus = await Bus.connect(url, "test")
    for record in records:
        await bus.publish(Subjects(run).ledger(record.event()), record)
    await bus.close()


async def fill(nats: EmbeddedNats, valkey: EmbeddedValkey, config: RunConfig) -> None:
    """Groups 0 (trained), 1 (in a batch), 2 (ready, its payload lost), 3 (dead), 4 (outstanding)."""
    names, bus, store = Subjects(config.run.name), await Bus.connect(nats.url, "test"), Store(valkey.url, config.run.name)
    await runs.create(bus, config, valkey.url)
    groups = []
    for number in range(3):
        group, blobs = scored(names, number)
        groups.append(group)
        if number < 2:
            await store.write(blobs)
    await store.close()
    await bus.close()
    await publish(
        nats.url,
        config.run.name,
        VersionLive(version=0, at=100.0),
        GroupsAdmitted(first=0, count=5, version=0, at=100.0),
        GroupsScored(groups=groups, at=102.0),
        BatchFormed(step=0, version=1, groups=[group_id(0)], at=103.0),
        BatchTrained(step=0, version=1, started=103.0, ended=104.0, at=104.0),
        BatchFormed(step=1, version=1, groups=[group_id(1)], mask_below=1, at=105.0),
        GroupDead(group=group_id(3), reason=f"reward-0: {HOSTILE}", at=106.0),
    )


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, run={"name": "samples-page"}, rollout={"n_samples_per_prompt": 2})


@pytest.fixture
def live(mortal_nats: EmbeddedNats, mortal_valkey: EmbeddedValkey, config: RunConfig) -> Iterator[Console]:
    asyncio.run(fill(mortal_nats, mortal_valkey, config))
    with console(config.run.name, NATS_URL=mortal_nats.url, REDIS_URL=mortal_valkey.url) as found:
        yield found


def test_a_live_run(live: Console, mortal_nats: EmbeddedNats, mortal_valkey: EmbeddedValkey, config: RunConfig) -> None:
    listed = live.wait("samples", lambda answer: answer["total"] == 5 and answer["reading"]["read"] == 7)
    rows = {row["group"]: row for row in listed["groups"]}
    assert [row["group"] for row in listed["groups"]][:2] == [group_id(3), group_id(1)], "the last one that changed stands first"
    assert rows[group_id(0)]["where"] == "trained at step 0"
    assert (rows[group_id(1)]["rollouts"], rows[group_id(1)]["samples"], rows[group_id(1)]["truncated"]) == (1, 2, 1)
    assert rows[group_id(1)]["parts"] == {"form": 0.75}
    assert live.get("samples?step=1")[1]["total"] == 1
    assert live.get("samples?reason=hung&status=dead")[1]["total"] == 0
    assert live.get("samples/facets")[1]["training"]["statuses"] == {"batched": 1, "dead": 1, "outstanding": 1, "ready": 1, "trained": 1}

    live.wait(f"samples/groups/{group_id(1)}", lambda answer: answer["source"] == "store")  # the store is connected
    check_group(live)
    check_sample(live)

    code, gone = live.get(f"samples/groups/{group_id(2)}")
    assert (code, gone["source"]) == (200, "none")
    assert "no blob" in gone["absent"]
    assert [line["reward"] for line in gone["samples"]] == [0.0, 2.0], "the ledger's rewards are there all the same"
    assert live.get(f"samples/groups/{group_id(4)}")[1]["absent"].startswith("its samples are still with")
    check_refusals(live)

    asyncio.run(publish(mortal_nats.url, config.run.name, GroupsAdmitted(first=5, count=3, version=1, at=107.0)))
    live.wait("samples", lambda answer: answer["total"] == 8)


def check_group(live: Console) -> None:
    _, found = live.get(f"samples/groups/{group_id(1)}")
    assert found["prompt"][0] == {"role": "user", "text": HOSTILE, "calls": ""}
    assert found["prompt"][1] == {"role": "tool", "text": "", "calls": '[{"name": "add"}]'}
    assert (found["label"], found["metadata"]["difficulty"], found["metadata"]["odd"]) == ("5", "1", "NaN")
    assert [step["event"] for step in found["provenance"]] == ["groups_admitted", "groups_scored", "batch_formed"]
    assert [line["advantage"] for line in found["samples"]] == [0.0, 0.0], "both are of one rollout, which is not compared with itself"
    assert [line["turns"] for line in found["samples"]] == [1, 1], "an untrained token with a log-prob is the model's as well"
    assert found["commands"][0]["command"] == f"myxo samples samples-page {group_id(1)}"
    assert "--dump-details" in found["commands"][1]["what"]


def check_sample(live: Console) -> None:
    _, found = live.get(f"samples/groups/{group_id(1)}/1")
    tokens = found["tokens"]
    assert (tokens["total"], tokens["ids"], tokens["versions"]) == (4, [20, 21, 23, 23], [0, 0, 1, 1])
    assert tokens["trained"] == [False, False, True, True]
    assert tokens["log_probs"] == [-0.25, -0.5, -1.0, -2.0]
    assert tokens["difference"] == [None] * 4
    assert "--dump-details" in found["unknown"]["difference"]
    assert "tokenizer" in found["unknown"]["text"]
    assert [(turn["kind"], turn["start"], turn["end"]) for turn in found["turns"]] == [("given", 0, 2), ("sampled", 2, 4)]
    assert found["forks"] == [{"index": 0, "shared": 5}]
    [name] = found["pictures"]
    assert name == hashlib.sha256(PICTURE).hexdigest()
    assert live.get(f"samples/groups/{group_id(1)}/1/pictures/{name}") == (200, PICTURE)
    code, refused = live.get(f"samples/groups/{group_id(1)}/0/pictures/{name}")
    assert code == 404 and "shows no such picture" in refused["detail"]
    assert found["line"]["finish"] == "length"
    part = live.get(f"samples/groups/{group_id(1)}/1?first=3&count=2")[1]["tokens"]
    assert (part["first"], part["ids"], part["log_probs"]) == (3, [23], [-2.0])
    assert live.get(f"samples/groups/{group_id(1)}/1?first=9")[1]["tokens"]["ids"] == []
    masked = live.get(f"samples/groups/{group_id(1)}/0")[1]["tokens"]
    assert masked["trained"] == [False, False, True, True], "tokens older than version 1 left the loss of step 1"
    assert live.get(f"samples/groups/{group_id(0)}/0")[1]["tokens"]["trained"] == [True, False, True, True]


def check_refusals(live: Console) -> None:
    for path, status, word in (
        (f"samples/groups/{group_id(99)}", 404, group_id(99)),
        ("samples/groups/eval.heldout.0.0", 404, "held-out"),
        ("samples/groups/no%20id", 422, "group"),
        (f"samples/groups/{group_id(1)}/2", 404, "no sample 2"),
        (f"samples/groups/{group_id(1)}/-1", 422, "sample"),
        (f"samples/groups/{group_id(1)}/1?count=999999", 422, "count"),
        ("samples/batches/77", 404, "step 77"),
        ("samples?limit=9999", 422, "limit"),
        ("samples?stpe=1", 422, "stpe"),
        ("samples?min_reward=nan", 422, "min_reward"),
    ):
        code, body = live.get(path)
        assert (code, word in json.dumps(body)) == (status, True), (path, body)


@pytest.mark.extra
def test_servers_that_are_away_and_a_run_that_begins_anew(
    live: Console, mortal_nats: EmbeddedNats, mortal_valkey: EmbeddedValkey, config: RunConfig
) -> None:
    live.wait("samples", lambda answer: answer["total"] == 5)
    live.wait(f"samples/groups/{group_id(1)}", lambda answer: answer["source"] == "store")
    mortal_valkey.stop()
    found = live.wait(f"samples/groups/{group_id(1)}", lambda answer: answer["source"] == "none")
    assert "Redis" in found["absent"] or "store" in found["absent"]
    mortal_nats.stop()
    assert live.get("samples")[1]["total"] == 5, "what is known stays, whatever is away"
    assert live.get("samples?step=0")[1]["total"] == 1
    mortal_nats.start()
    mortal_valkey.start()
    live.wait(f"samples/groups/{group_id(1)}", lambda answer: answer["source"] == "store")

    async def anew() -> None:
        bus = await Bus.connect(mortal_nats.url, "test")
        await bus.js.delete_stream(Subjects(config.run.name).ledger_stream)
        await streams.create(bus, config)
        await bus.close()
        await publish(mortal_nats.url, config.run.name, *(GroupsAdmitted(first=2 * n, count=2, version=0, at=1.0) for n in range(10)))

    asyncio.run(anew())
    listed = live.wait("samples", lambda answer: answer["total"] == 20)
    assert {row["status"] for row in listed["groups"]} == {"outstanding"}, "nothing of the old ledger is left"


def kept(number: int, **fields: Any) -> RolloutRecord:
    made = samples_of(number)
    state = {"removed": False, "tokens": number % 2 == 0}
    written = [rollout_files.sample_of(one, made[0], float(one.index), {}, stale=one.index == 1, **state) for one in made]
    named = {"status": "trained", "step": number, "version": 1, "at": 10.0 + number, **fields}
    return RolloutRecord.model_construct(
        group=group_id(number), attempt=0, **named, prompt=made[0].prompt_text, label="5", metadata={"difficulty": number}, samples=written
    )


def test_a_directory_alone(config: RunConfig) -> None:
    directory = config.run.root / rollout_files.DIRECTORY
    directory.mkdir(parents=True)
    lines = [kept(number).line() for number in range(3)]
    rollout_files.path_of(directory, 0).write_bytes(lines[0] + b"no record\n" + lines[1])
    rollout_files.path_of(directory, 1).write_bytes(lines[2] + lines[0][:40])
    with console(config.run.name, MYXO_RUN_DIRECTORY=str(config.run.root)) as found:
        listed = found.wait("samples", lambda answer: answer["total"] == 3)
        assert (listed["reading"]["from_directory"], listed["reading"]["damaged"]) == (True, 1)
        assert [row["step"] for row in listed["groups"]] == [2, 1, 0]
        _, group = found.get(f"samples/groups/{group_id(2)}")
        assert (group["source"], [line["rollout"] for line in group["samples"]]) == ("kept", [0, 0])
        assert [line["stale"] for line in group["samples"]] == [False, True]
        _, whole = found.get(f"samples/groups/{group_id(2)}/1")
        assert (whole["tokens"]["ids"], whole["forks"]) == ([20, 21, 23, 23], [{"index": 0, "shared": 5}])
        assert whole["tokens"]["trained"] == [False] * 4, "its age took it out of the loss"
        _, text = found.get(f"samples/groups/{group_id(1)}/0")
        assert (text["tokens"], text["response"]) == (None, "the answer of 1/0")
        assert "monitoring.keep_rollouts_tokens = true" in text["no_tokens"] and text["unknown"] == {}
