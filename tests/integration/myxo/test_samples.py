"""``myxo samples`` on a ledger written by hand and real payloads: on given servers, on a live run's own, and on a stopped run's files."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from myxo.run.run_directory import RunDirectory, ServerUrls
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.run_config import RunConfig
from shared.data import rollout_files
from shared.data.rollout_files import RolloutRecord
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    GroupDead,
    GroupsAdmitted,
    GroupsScored,
    VersionLive,
    group_id,
)
from shared.schema.sample import Sample
from shared.store.payload_store import Store
from tests.integration.myxo.command import Myxo
from tests.integration.written_run import append, scored_group
from tests.support.run_config import run_config

BEGIN = 1_700_000_000.0


def samples_of(number: int) -> list[Sample]:
    """Two samples of three and four tokens, the second made under two versions."""
    return [
        Sample(
            group=group_id(number),
            index=index,
            prompt=np.array([1, 2, 3], dtype=np.int32),
            response=np.arange(20, 23 + index, dtype=np.int32),
            log_probs=np.array([-0.25, -0.5, -1.0, -2.0][: 3 + index], dtype=np.float32),
            mask=np.array([1, 1, 1, 0][: 3 + index], dtype=np.uint8),
            segments=[(0, 3, 0)] if index == 0 else [(0, 2, 0), (2, 4, 1)],
            finish="stop",
            text=f"the answer of {number}/{index}",
            prompt_text=f"prompt {number}",
            label="5",
            metadata={"difficulty": number},
        )
        for index in range(2)
    ]


async def fill(bus: Bus, store: Store, config: RunConfig, store_url: str | None) -> None:
    """A run of five groups: 0 trained and freed, 1 trained, 2 in a batch (its payload lost), 3 dead, 4 ready."""
    await runs.create(bus, config, store_url)
    scored = []
    for number in (0, 1, 2, 4):
        known = {"rewards": [0.0, float(number)], "replica": f"rollout-{number}", "started": BEGIN, "ended": BEGIN + number}
        group, blobs = scored_group(config.run.name, samples_of(number), **known)
        scored.append(group)
        assert len(blobs) == 2
        if number not in (0, 2):
            await store.write(blobs)
    await append(
        bus,
        config.run.name,
        VersionLive(version=0, at=BEGIN),
        GroupsAdmitted(first=0, count=5, version=0, at=BEGIN),
        GroupsScored(groups=scored, at=BEGIN + 5),
        *(BatchFormed(step=number, version=0, groups=[group_id(number)], at=BEGIN + 6) for number in range(3)),
        *(BatchTrained(step=number, version=0, started=BEGIN + 6, ended=BEGIN + 8, at=BEGIN + 8) for number in range(2)),
        CheckpointDurable(steps=1, at=BEGIN + 9),
        GroupDead(group=group_id(3), reason="reward-0: the verifier hung", at=BEGIN + 10),
    )


@asynccontextmanager
async def embedded(config: RunConfig) -> AsyncIterator[tuple[Bus, Store, ServerUrls]]:
    """Servers on the run's own files, as the launcher runs them."""
    files = RunDirectory(config.run.root)
    nats, valkey = EmbeddedNats(files.nats), EmbeddedValkey(files.valkey)
    nats.start()
    valkey.start()
    bus, store = await Bus.connect(nats.url, "test"), Store(valkey.url, config.run.name)
    yield bus, store, ServerUrls(nats.url, valkey.url, 1)
    await store.close()
    await bus.close()
    valkey.stop()
    nats.stop()


def check_list(myxo: Myxo, run: str | Path, *more: str | Path, environment: dict[str, str] | None = None) -> None:
    code, out, err = myxo.run("samples", run, *more, environment=environment)
    assert (code, err) == (0, "")
    for part in ("5 groups", "trained at step 0", "in batch of step 2", "dead (reward-0: the verifier hung)", "ready", "rollout-4", "0–1"):
        assert part in out
    chosen = ("--json", "--sort", "reward", "--limit", "2", "--status", "trained")
    code, out, _ = myxo.run("samples", run, *more, *chosen, environment=environment)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["group"], row["rewards"], row["durable"]) for row in rows] == [("g00000000", [0, 0], True), ("g00000001", [0, 1], False)]


def check_sample(myxo: Myxo, run: str | Path, *more: str | Path, environment: dict[str, str] | None = None) -> None:
    code, out, err = myxo.run("samples", run, "g4/1", *more, environment=environment)
    assert (code, err) == (0, "")
    for part in ("g00000004/1", "prompt 4", "the answer of 4/1", "-2.000", "tokens 2–3 under version 1", "admitted while version 0"):
        assert part in out
    code, out, err = myxo.run("samples", run, "4", *more, "--json", environment=environment)
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    shown = json.loads(out)
    assert (shown["status"], shown["absent"]) == ("ready", None)
    for entry, made in zip(shown["samples"], samples_of(4), strict=True):
        assert (entry["text"], entry["prompt_text"], entry["reward"]) == (made.text, made.prompt_text, 4.0 * made.index)
        for field in ("prompt", "response", "mask", "log_probs"):
            assert entry[field] == getattr(made, field).tolist()
        assert entry["versions"] == made.versions().tolist()


def stopped(directory: Path) -> RunConfig:
    """A run that once ran on this machine and does not any more."""
    config = run_config(directory)

    async def make() -> None:
        async with embedded(config) as (bus, store, servers):
            await fill(bus, store, config, servers.redis_url)

    asyncio.run(make())
    return config


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """One that tests only read."""
    return stopped(tmp_path_factory.mktemp("stopped"))


def test_a_stopped_run(myxo: Myxo, stopped_run: RunConfig) -> None:
    root = stopped_run.run.root
    check_list(myxo, "test", "--dir", stopped_run.run.dir)
    check_sample(myxo, root)
    code, out, _ = myxo.run("samples", root, "g4")
    assert code == 0
    for part in ("the answer of 4/0", "the answer of 4/1", "prompt 4", "rollout-4"):
        assert part in out
    assert not RunDirectory(root).is_held()


def test_what_is_gone_is_said_and_the_ledger_shown(myxo: Myxo, stopped_run: RunConfig) -> None:
    for group, why in (
        ("g0", "its samples were freed: step 0 is trained and in a durable checkpoint"),
        ("g2", "the store holds no blob test:group:g00000002:0:0"),
        ("g3", "it was given up; samples that it had were freed"),
    ):
        code, out, err = myxo.run("samples", stopped_run.run.root, group)
        assert (code, err) == (0, "")
        assert f"No samples to show: {why}" in out
        assert "admitted while version 0 was live" in out
    code, out, _ = myxo.run("samples", stopped_run.run.root, "g0/1", "--json")
    shown = json.loads(out)
    assert (code, shown["samples"], shown["durable"], shown["rewards"]) == (0, [], True, [0, 0])
    assert [passage["event"] for passage in shown["provenance"]][-1] == "checkpoint_durable"


def test_what_is_not_there_is_refused(myxo: Myxo, stopped_run: RunConfig) -> None:
    for words, part in (
        (("g5",), "GROUP = 'g00000005': no such group in run test; it has g00000000 to g00000004"),
        (("g4/2",), "GROUP = 'g00000004/2': the group has 2 samples; give 0 to 1"),
        (("g0/2",), "the group has 2 samples"),
    ):
        code, out, err = myxo.run("samples", stopped_run.run.root, *words)
        assert (code, out) == (2, "")
        assert part in err
    assert not RunDirectory(stopped_run.run.root).is_held()


async def test_given_servers(
    myxo: Myxo, bus: Bus, store: Store, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    await fill(bus, store, config, "redis://user:secret@127.0.0.1:1/0")
    url = tmp_path / "redis_url"
    url.write_text(valkey.url)
    given = {"NATS_URL": nats.url}
    await asyncio.to_thread(check_list, myxo, run_name, environment=given)  # the ledger alone
    await asyncio.to_thread(check_sample, myxo, run_name, environment={**given, "REDIS_URL": valkey.url})
    await asyncio.to_thread(check_sample, myxo, run_name, environment={**given, "REDIS_URL_FILE": str(url)})
    code, out, err = await asyncio.to_thread(myxo.run, "samples", run_name, "g4", environment=given)
    assert (code, out) == (2, "")
    assert "REDIS_URL = None: required in the environment" in err
    wrong = {**given, "REDIS_URL": f"unix://{tmp_path}/nobody.sock"}
    code, out, err = await asyncio.to_thread(myxo.run, "samples", run_name, "g4", environment=wrong)
    assert (code, out) == (2, "")
    assert "REDIS_URL" in err
    await runs.create(bus, config, valkey.url)  # a store without credentials is named in the run itself
    await asyncio.to_thread(check_sample, myxo, run_name, environment=given)


async def test_a_live_runs_own_servers(myxo: Myxo, tmp_path: Path) -> None:
    config = run_config(tmp_path)
    files = RunDirectory(config.run.root)
    with files.held():
        async with embedded(config) as (bus, store, servers):
            await fill(bus, store, config, servers.redis_url)
            files.write_servers(servers)
            await asyncio.to_thread(check_list, myxo, config.run.root)
            await asyncio.to_thread(check_sample, myxo, config.run.root)
            files.remove_servers()


async def test_a_given_bus_beside_a_stopped_runs_own_store(myxo: Myxo, bus: Bus, nats: EmbeddedNats, run_name: str, tmp_path: Path) -> None:
    """`myxo up` with NATS_URL alone keeps the payloads on this machine."""
    config = run_config(tmp_path, run={"name": run_name})
    files = RunDirectory(config.run.root)
    files.logs.mkdir(parents=True)
    own = EmbeddedValkey(files.valkey)
    own.start()
    store = Store(own.url, run_name)
    await fill(bus, store, config, own.url)
    await store.close()
    own.stop()
    await asyncio.to_thread(check_sample, myxo, run_name, "--dir", config.run.dir, environment={"NATS_URL": nats.url})
    assert not files.is_held()


# --- what is kept in rollouts/


def keep(config: RunConfig, number: int, status: str = "trained", **fields: object) -> RolloutRecord:
    """The record that the buffer writes of a group, appended to the run's files."""
    made = samples_of(number)
    values = {"group": group_id(number), "attempt": 0, "step": number, "version": 0, "at": BEGIN + 8, "label": "5", **fields}
    kept = [rollout_files.sample_of(one, made[0], 1.0, {}, removed=False, stale=False, tokens=False) for one in made]
    values = {"prompt": f"prompt {number}", "metadata": {"difficulty": number}, "samples": kept, **values}
    record = RolloutRecord.model_construct(status=status, **values)
    directory = config.run.root / rollout_files.DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    with rollout_files.path_of(directory, 0).open("ab") as file:
        file.write(record.line())
    return record


def test_what_the_store_has_freed_is_read_from_the_kept_responses(myxo: Myxo, tmp_path: Path) -> None:
    run = stopped(tmp_path)
    root = run.run.root
    keep(run, 0)
    keep(run, 3, "dead", step=None, reason="reward-0: the verifier hung", samples=[])
    code, out, err = myxo.run("samples", root, "g0")
    assert (code, err) == (0, "")
    for part in ("the answer of 0/0", "the answer of 0/1", "prompt 0", "trained at step 0", "admitted while version 0 was live"):
        assert part in out
    code, out, _ = myxo.run("samples", root, "g0/1", "--json")
    (sample,) = json.loads(out)["samples"]
    assert (code, sample["text"], sample["segments"], sample["response"]) == (0, "the answer of 0/1", [[0, 2, 0], [2, 4, 1]], None)
    code, out, _ = myxo.run("samples", root, "--step", "0")
    assert code == 0
    for part in ("trained at step 0", "prompt 0", "the answer of 0/0", "the answer of 0/1"):
        assert part in out
    with rollout_files.files(root / rollout_files.DIRECTORY)[0].open("ab") as file:
        file.write(b'{"group":"g0000')
    code, out, err = myxo.run("samples", root, "--responses", "--json")
    rows = {row["group"]: row for row in map(json.loads, out.splitlines())}
    assert (code, len(rows), "1 line of rollouts/ cut off" in err) == (0, 5, True)
    texts = [[one["text"] for one in row["samples"]] for row in rows.values()]
    assert sorted(map(len, texts)) == [0, 0, 2, 2, 2], "kept or still in the store; the dead one has none, and one is lost"
    assert "test:group:g00000002" in rows["g00000002"]["absent"] and "given up" in rows["g00000003"]["absent"]


def test_where_only_the_kept_responses_are_left_they_are_the_list(myxo: Myxo, tmp_path: Path) -> None:
    config = run_config(tmp_path)
    for number in range(3):
        keep(config, number)
    for number, version in ((10, 0), (11, 2)):
        keep(config, number, "evaluated", group=f"eval.heldout.{version}.0", dataset="heldout", step=None, version=version)
    keep(config, 12, "evaluated", group="eval.heldout.2.01", dataset="heldout", step=None, version=2)
    where = ("--dir", config.run.dir)
    code, out, err = myxo.run("samples", "test", "--group", "eval.heldout.2.0", *where)
    assert (code, err, "1 groups" in out, "the answer of 11/0" in out, "the answer of 12" in out) == (0, "", True, True, False)
    code, out, err = myxo.run("samples", "test", *where)
    assert (code, err) == (0, "")
    assert "3 groups" in out and "trained at step 2" in out and "eval." not in out
    code, out, err = myxo.run("samples", "test", "--step", "1", *where)
    assert (code, err, "1 groups" in out, "the answer of 1/1" in out) == (0, "", True, True)
    code, out, err = myxo.run("samples", "test", "--eval", "--version", "2", *where)
    assert (code, err) == (0, "")
    assert "evaluated at version 2" in out and "the answer of 11/0" in out and "the answer of 10/0" not in out
    code, out, err = myxo.run("samples", "test", "eval.heldout.2.0/1", *where)
    assert (code, err) == (0, "")
    assert "the answer of 11/1" in out and "keep_rollouts_tokens" in out
    code, out, err = myxo.run("samples", "test", "g9", *where)
    assert (code, out) == (2, "")
    assert "which is all that is left of run test" in err


def test_words_and_options_stand_in_any_order(myxo: Myxo, tmp_path: Path) -> None:
    config = run_config(tmp_path)
    keep(config, 1)
    where = ("--dir", config.run.dir)
    for words in (("test", *where, "1"), (*where, "test", "1"), ("test", "--json", "1", *where), ("--json", "test", *where, "1")):
        code, out, err = myxo.run("samples", *words)
        assert (code, err, "the answer of 1/1" in out) == (0, "", True)
    code, _, err = myxo.run("samples", "test", *where, "1", "2")
    assert (code, "unrecognized arguments: 2" in err) == (2, True)
