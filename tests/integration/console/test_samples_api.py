"""``/api/samples`` of a console, on a ledger written by hand and real payloads: live, growing, and from a directory alone."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.bus import streams
from shared.bus.subjects import Subjects
from shared.data import rollout_files
from shared.data.rollout_files import RolloutRecord
from shared.schema.ledger import BatchFormed, BatchTrained, GroupDead, GroupsAdmitted, GroupsScored, VersionLive, group_id
from shared.schema.sample import Sample
from shared.store.payload_store import Store
from tests.integration.console.conftest import RUN, AskedConsole, ServedConsole, console_of
from tests.integration.written_run import append, scored_group
from tests.support.run_config import run_config

PICTURE = b"\x89PNG of a sample's screen"
HOSTILE = "<script>alert(1)</script> \u202eright to left \x1b[2J נייר"


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


async def fill(console: ServedConsole) -> AskedConsole:
    """Groups 0 (trained), 1 (in a batch), 2 (ready, its payload lost), 3 (dead), 4 (outstanding)."""
    store, groups = Store(console.valkey.url, RUN), []
    common = {"rollouts": (0, 0), "parts": ({"form": 1.0}, {"form": 0.5}), "replica": "rollout-0", "started": 100.0, "ended": 101.5}
    for number in range(3):
        group, blobs = scored_group(RUN, samples_of(number), rewards=[0.0, float(number)], **common)
        groups.append(group)
        if number < 2:
            await store.write(blobs)
    await store.close()
    await append(
        console.bus,
        RUN,
        VersionLive(version=0, at=100.0),
        GroupsAdmitted(first=0, count=5, version=0, at=100.0),
        GroupsScored(groups=groups, at=102.0),
        BatchFormed(step=0, version=1, groups=[group_id(0)], at=103.0),
        BatchTrained(step=0, version=1, started=103.0, ended=104.0, at=104.0),
        BatchFormed(step=1, version=1, groups=[group_id(1)], mask_below=1, at=105.0),
        GroupDead(group=group_id(3), reason=f"reward-0: {HOSTILE}", at=106.0),
    )
    return console.api


async def test_a_live_run(served: ServedConsole) -> None:
    live = await fill(served)
    listed = await live.until("samples", there=lambda answer: answer["total"] == 5 and answer["reading"]["read"] == 7)
    rows = {row["group"]: row for row in listed["groups"]}
    assert [row["group"] for row in listed["groups"]][:2] == [group_id(3), group_id(1)], "the last one that changed stands first"
    assert rows[group_id(0)]["where"] == "trained at step 0"
    assert (rows[group_id(1)]["rollouts"], rows[group_id(1)]["samples"], rows[group_id(1)]["truncated"]) == (1, 2, 1)
    assert rows[group_id(1)]["parts"] == {"form": 0.75}
    assert (await live.get("samples?step=1"))[1]["total"] == 1
    assert (await live.get("samples?reason=hung&status=dead"))[1]["total"] == 0
    _, facets = await live.get("samples/facets")
    assert facets["training"]["statuses"] == {"batched": 1, "dead": 1, "outstanding": 1, "ready": 1, "trained": 1}

    await live.until(f"samples/groups/{group_id(1)}", there=lambda answer: answer["source"] == "store")  # the store is connected
    await check_group(live, served.config.run.root)
    await check_sample(live)

    code, gone = await live.get(f"samples/groups/{group_id(2)}")
    assert (code, gone["source"]) == (200, "none")
    assert "no blob" in gone["absent"]
    assert [line["reward"] for line in gone["samples"]] == [0.0, 2.0], "the ledger's rewards are there all the same"
    assert (await live.get(f"samples/groups/{group_id(4)}"))[1]["absent"].startswith("its samples are still with")
    await check_refusals(live)

    await append(served.bus, RUN, GroupsAdmitted(first=5, count=3, version=1, at=107.0))
    await live.until("samples", there=lambda answer: answer["total"] == 8)


async def check_group(live: AskedConsole, root: Path) -> None:
    _, found = await live.get(f"samples/groups/{group_id(1)}")
    assert found["prompt"][0] == {"role": "user", "text": HOSTILE, "calls": ""}
    assert found["prompt"][1] == {"role": "tool", "text": "", "calls": '[{"name": "add"}]'}
    assert (found["label"], found["metadata"]["difficulty"], found["metadata"]["odd"]) == ("5", "1", "NaN")
    assert [step["event"] for step in found["provenance"]] == ["groups_admitted", "groups_scored", "batch_formed"]
    assert [line["advantage"] for line in found["samples"]] == [0.0, 0.0], "both are of one rollout, which is not compared with itself"
    assert [line["turns"] for line in found["samples"]] == [1, 1], "an untrained token with a log-prob is the model's as well"
    assert found["commands"][0]["command"] == f"myxo samples {root} {group_id(1)}"
    assert "--dump-details" in found["commands"][1]["what"]


async def check_sample(live: AskedConsole) -> None:
    _, found = await live.get(f"samples/groups/{group_id(1)}/1")
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
    assert await live.get(f"samples/groups/{group_id(1)}/1/pictures/{name}") == (200, PICTURE)
    code, refused = await live.get(f"samples/groups/{group_id(1)}/0/pictures/{name}")
    assert code == 404 and "shows no such picture" in refused["detail"]
    assert found["line"]["finish"] == "length"
    part = (await live.get(f"samples/groups/{group_id(1)}/1?first=3&count=2"))[1]["tokens"]
    assert (part["first"], part["ids"], part["log_probs"]) == (3, [23], [-2.0])
    assert (await live.get(f"samples/groups/{group_id(1)}/1?first=9"))[1]["tokens"]["ids"] == []
    masked = (await live.get(f"samples/groups/{group_id(1)}/0"))[1]["tokens"]
    assert masked["trained"] == [False, False, True, True], "tokens older than version 1 left the loss of step 1"
    assert (await live.get(f"samples/groups/{group_id(0)}/0"))[1]["tokens"]["trained"] == [True, False, True, True]


async def check_refusals(live: AskedConsole) -> None:
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
        code, body = await live.get(path)
        assert (code, word in json.dumps(body)) == (status, True), (path, body)


@pytest.mark.extra
async def test_servers_that_are_away_and_a_run_that_begins_anew(served: ServedConsole) -> None:
    live = await fill(served)
    await live.until("samples", there=lambda answer: answer["total"] == 5)
    await live.until(f"samples/groups/{group_id(1)}", there=lambda answer: answer["source"] == "store")
    await asyncio.to_thread(served.valkey.stop)
    found = await live.until(f"samples/groups/{group_id(1)}", there=lambda answer: answer["source"] == "none")
    assert "Redis" in found["absent"] or "store" in found["absent"]
    await asyncio.to_thread(served.nats.stop)
    assert (await live.get("samples"))[1]["total"] == 5, "what is known stays, whatever is away"
    assert (await live.get("samples?step=0"))[1]["total"] == 1
    await asyncio.to_thread(served.nats.start)
    await asyncio.to_thread(served.valkey.start)
    await live.until(f"samples/groups/{group_id(1)}", there=lambda answer: answer["source"] == "store")

    await served.bus.js.delete_stream(Subjects(RUN).ledger_stream)
    await streams.create(served.bus, served.config)
    await append(served.bus, RUN, *(GroupsAdmitted(first=2 * n, count=2, version=0, at=1.0) for n in range(10)))
    listed = await live.until("samples", there=lambda answer: answer["total"] == 20)
    assert {row["status"] for row in listed["groups"]} == {"outstanding"}, "nothing of the old ledger is left"


def kept(number: int, **fields: Any) -> RolloutRecord:
    made = samples_of(number)
    state = {"removed": False, "tokens": number % 2 == 0}
    written = [rollout_files.sample_of(one, made[0], float(one.index), {}, stale=one.index == 1, **state) for one in made]
    named = {"status": "trained", "step": number, "version": 1, "at": 10.0 + number, **fields}
    return RolloutRecord.model_construct(
        group=group_id(number), attempt=0, **named, prompt=made[0].prompt_text, label="5", metadata={"difficulty": number}, samples=written
    )


async def test_a_directory_alone(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    directory = config.run.root / rollout_files.DIRECTORY
    directory.mkdir(parents=True)
    lines = [kept(number).line() for number in range(3)]
    rollout_files.path_of(directory, 0).write_bytes(lines[0] + b"no record\n" + lines[1])
    rollout_files.path_of(directory, 1).write_bytes(lines[2] + lines[0][:40])
    async with console_of(config.run.name, None, None, config.run.root) as live:
        listed = await live.until("samples", there=lambda answer: answer["total"] == 3)
        assert (listed["reading"]["from_directory"], listed["reading"]["damaged"]) == (True, 1)
        assert [row["step"] for row in listed["groups"]] == [2, 1, 0]
        _, group = await live.get(f"samples/groups/{group_id(2)}")
        assert (group["source"], [line["rollout"] for line in group["samples"]]) == ("kept", [0, 0])
        assert [line["stale"] for line in group["samples"]] == [False, True]
        _, whole = await live.get(f"samples/groups/{group_id(2)}/1")
        assert (whole["tokens"]["ids"], whole["forks"]) == ([20, 21, 23, 23], [{"index": 0, "shared": 5}])
        assert whole["tokens"]["trained"] == [False] * 4, "its age took it out of the loss"
        _, text = await live.get(f"samples/groups/{group_id(1)}/0")
        assert (text["tokens"], text["response"]) == (None, "the answer of 1/0")
        assert "monitoring.keep_rollouts_tokens = true" in text["no_tokens"] and text["unknown"] == {}
