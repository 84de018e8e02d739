"""Which services are away, by what the registry shows over time, with no other clock than the looker's; and what cannot be read."""

import os
import sqlite3
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.console import run_source
from services.console.run_histories import EventHistory, OtherRuns, RunIndex
from services.console.run_source import FILE, LEDGER, SAMPLES, AbsentServices, ChangeFeed, RunSource
from shared.bus import runs
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data.metric_files import METRIC_LINES
from shared.runtime.errors import BadMessage
from shared.schema.ledger import GroupsAdmitted
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsPushed
from shared.view.group_index import GroupIndex, GroupQuery
from shared.view.metric_history import PUSH_METRICS
from tests.support.run_config import SERVED, run_config

KINDS = ("buffer", "reward", "rollout", "trainer")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, bus={"registry_ttl": 10})


def statuses(at: float, *without: str, **states: str) -> list[ServiceStatus]:
    """A status of each kind, renewed at ``at`` by a clock that is a day ahead."""
    return [
        ServiceStatus(service=kind, instance=f"{kind}-0", host="h", pid=1, http="", state=states.get(kind, "ready"), at=at + 86400)
        for kind in KINDS
        if kind not in without
    ]


def test_all_is_well_while_all_renew(config: RunConfig) -> None:
    services = AbsentServices()
    for second in range(0, 60, 2):
        assert services.look(config, statuses(second), second, second) == {}


def test_what_has_not_started_yet_is_told_as_such(config: RunConfig) -> None:
    absent = AbsentServices().look(config, statuses(0, "trainer"), 0, 0)
    assert {name: away.why for name, away in absent.items()} == {"trainer": "not started yet"}
    services = AbsentServices()
    assert services.look(config, statuses(0, trainer="starting"), 0, 0) == {}, "the first start is no trouble"


def test_one_that_falls_silent_is_away_from_its_last_sign_on_until_it_speaks(config: RunConfig) -> None:
    services = AbsentServices()
    services.look(config, statuses(0), 0, 100)
    silent = [*statuses(4, "buffer"), *[status for status in statuses(0) if status.service == "buffer"]]
    assert services.look(config, silent, 2, 102) == services.look(config, silent, 4, 104) == {}
    absent = services.look(config, silent, 6, 106)
    assert [*absent] == ["buffer-0"] and absent["buffer-0"].since == 100 and "silent" in absent["buffer-0"].why
    gone = services.look(config, statuses(8, "buffer"), 12, 112)
    assert [*gone] == ["buffer"] and gone["buffer"].since == 100 and "gone" in gone["buffer"].why
    again = services.look(config, statuses(14, buffer="starting"), 14, 114)
    assert again["buffer-0"].why == "starting again"
    assert services.look(config, statuses(16), 16, 116) == {}


def test_a_replica_that_left_is_not_missed_while_another_is_there(config: RunConfig) -> None:
    services = AbsentServices()
    second = ServiceStatus(service="rollout", instance="rollout-1", host="h", pid=1, http="", state="ready", at=1)
    services.look(config, [*statuses(0), second], 0, 0)
    assert services.look(config, statuses(2), 2, 2) == {}


def test_nothing_is_expected_of_a_run_that_is_over() -> None:
    services = AbsentServices()
    assert services.look(None, [], 0, 0) == {}


def test_a_critic_and_a_gateway_are_needed_where_the_run_has_them(tmp_path: Path) -> None:
    config = run_config(tmp_path, algorithm={"advantage_estimator": "ppo"}, gateway={"gateway_replicas": 1})
    assert set(AbsentServices().look(config, statuses(0), 0, 0)) == {"critic", "gateway"}


def test_a_run_of_myxo_serve_needs_neither_buffer_nor_rewards(tmp_path: Path) -> None:
    config = run_config(tmp_path, **SERVED)
    assert set(AbsentServices().look(config, [], 0, 0)) == {"rollout", "trainer", "gateway"}


def test_a_looker_that_was_held_up_calls_nobody_silent(config: RunConfig) -> None:
    services = AbsentServices()
    services.look(config, statuses(0), 0, 0)
    assert services.look(config, statuses(0), 60, 60) == {}


def write_metrics(root: Path, tag: str, steps: range) -> None:
    """Writes the lines of metrics of a run's directory anew."""
    (root / "tensorboard").mkdir(parents=True, exist_ok=True)
    lines = root / "tensorboard" / METRIC_LINES
    lines.unlink(missing_ok=True)
    lines.write_text("".join(f'[{step}.5, {step}, {{"{tag}": 1.0}}]\n' for step in steps))


async def test_versions_that_the_stream_has_dropped_are_known_by_the_metrics(tmp_path: Path) -> None:
    async def read(*_given: object, **_named: object) -> AsyncIterator[tuple[int, Any]]:
        for version in (5, 6):
            yield version, WeightsPushed(version=version, replicas=[], seconds=2.0, at=1.0)

    write_metrics(tmp_path, PUSH_METRICS["seconds"], range(3, 7))
    source: Any = SimpleNamespace(directory=tmp_path, life="a", live=True, names=Subjects("r"), followers=[], read=read, feed=ChangeFeed())
    history = EventHistory(source)
    await history.follow()
    pushes = {version: [push.seconds for push in item.pushes] for version, item in history.pushes.versions.items()}
    assert pushes == {3: [1.0], 4: [1.0], 5: [2.0], 6: [2.0]}


async def test_a_run_beside_that_was_begun_anew_is_drawn_anew(tmp_path: Path) -> None:
    root = tmp_path / "other"
    others = OtherRuns(RunSource("own", None, None, tmp_path / "own"))
    found = []
    for life, steps in enumerate((4, 1)):
        write_metrics(root, "train/loss", range(steps))
        (root / runs.FROZEN).write_text("{}")
        os.utime(root / runs.FROZEN, ns=(life, life))
        history = await others.metrics("other")
        assert history is not None
        found.append(history.series["train/loss"].steps.tolist())
    assert found == [[0.0, 1.0, 2.0, 3.0], [0.0]]


class _Over(Exception):
    """All rounds were seen."""


async def test_what_one_page_cannot_read_is_named_until_it_can_and_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "POLL_SECONDS", 0.0)
    source = RunSource("run", None, None, None)
    rounds: list[Exception | None] = [BadMessage("odd"), BadMessage("odd"), OSError("no room"), sqlite3.Error("full"), None, None]
    seen: list[list[str]] = []

    async def broken() -> Collection[str]:
        if (error := rounds[len(seen)]) is not None:
            raise error
        return ()

    async def whole() -> Collection[str]:
        seen.append(sorted(source.away))
        if len(seen) == len(rounds):
            raise _Over
        return ()

    source.followers = [broken, whole]
    with pytest.raises(_Over):
        await source._follow()
    assert seen == [[], [LEDGER], [LEDGER], [FILE], [FILE], []]


async def test_an_index_whose_disk_was_full_or_whose_run_began_anew_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [GroupsAdmitted(first=number, count=1, version=0, at=1.0) for number in range(3)]

    async def read(*_given: object, after: int) -> AsyncIterator[tuple[int, Any]]:
        for entry in list(enumerate(records, 1))[after:]:
            yield entry

    async def ledger_end() -> int:
        return len(records)

    def full(*_given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    known: dict[str, Any] = {"names": Subjects("r"), "directory": None, "followers": [], "read": read}
    source = SimpleNamespace(**known, live=True, life="old", ledger_end=ledger_end)
    index = RunIndex(source)  # type: ignore[arg-type]
    with monkeypatch.context() as patched, pytest.raises(sqlite3.Error):
        patched.setattr(GroupIndex, "_put", full)
        await index.follow()
    assert await index.follow() == [SAMPLES] and index.groups.page(GroupQuery())[1] == 3
    source.life = "new"
    del records[1:]
    assert await index.follow() == [SAMPLES] and index.groups.page(GroupQuery())[1] == 1
