"""GPUs shared out among a run's services on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import devices
from shared.errors import ConfigError
from tests.support.run_config import run_config


def test_nothing_is_shared_out_on_a_cpu(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"rollout_device": "cpu"}, trainer={"train_device": "cpu"})
    assert devices.share_out(config) == {}


def test_the_trainer_comes_first_then_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 8)
    config = run_config(
        tmp_path,
        rollout={"rollout_device": "cuda", "rollout_replicas": 2, "rollout_num_gpus_per_engine": 2},
        trainer={"train_device": "cuda", "actor_num_gpus_per_node": 2},
    )
    assert devices.share_out(config) == {"trainer-0": "0,1", "rollout-0": "2,3", "rollout-1": "4,5"}


def test_too_few_gpus_are_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    config = run_config(tmp_path, rollout={"rollout_device": "cuda", "rollout_replicas": 2}, trainer={"train_device": "cuda"})
    with pytest.raises(ConfigError, match=r"needs 3 GPUs \(trainer-0 1, rollout-0 1, rollout-1 1\), this machine has 2"):
        devices.share_out(config)
