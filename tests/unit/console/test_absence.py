"""Which services are away: by what the registry shows over time, with no other clock than the looker's."""

from pathlib import Path

import pytest

from services.console.run_source import AbsentServices
from shared.config.run_config import RunConfig
from shared.schema.service_messages import ServiceStatus
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
