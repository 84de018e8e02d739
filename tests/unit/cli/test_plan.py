"""Which processes a config asks for."""

from __future__ import annotations

from pathlib import Path

from shared.cli.plan import plan
from tests.support.run_config import run_config


def test_as_many_of_each_kind_as_the_config_says(tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"buffer_replicas": 2}, reward={"reward_replicas": 3}, rollout={"rollout_replicas": 2})
    instances = [spec.instance for spec in plan(config, "nats://host")]
    assert instances == ["buffer-0", "buffer-1", "reward-0", "reward-1", "reward-2", "rollout-0", "rollout-1", "trainer-0"]


def test_one_of_each_where_it_says_nothing(tmp_path: Path) -> None:
    assert [spec.service for spec in plan(run_config(tmp_path), "nats://host")] == ["buffer", "reward", "rollout", "trainer"]
