"""GPUs shared out among a run's services on one machine."""

from pathlib import Path
from typing import Any

import pytest

from myxo.launch.service_plan import plan
from services.rollout.request_slots import evaluates
from shared.config import devices
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config


def test_nothing_is_shared_out_on_a_cpu(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"rollout_device": "cpu"}, trainer={"train_device": "cpu"})
    assert devices.assign_gpus(config) == {}


def test_the_trainer_comes_first_then_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 8)
    config = run_config(
        tmp_path,
        rollout={"rollout_device": "cuda", "rollout_replicas": 2, "rollout_num_gpus_per_engine": 2},
        trainer={"train_device": "cuda", "actor_num_gpus_per_node": 2},
    )
    assert devices.assign_gpus(config) == {"trainer-0": "0,1", "rollout-0": "2,3", "rollout-1": "4,5"}


def test_colocated_engines_have_the_trainers_gpus_their_own_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 4)
    config = run_config(
        tmp_path,
        rollout={"rollout_replicas": 2, "rollout_num_gpus_per_engine": 2},
        trainer={"actor_num_gpus_per_node": 4, "colocate": True},
    )
    assert devices.assign_gpus(config) == {"trainer-0": "0,1,2,3", "rollout-0": "0,1,2,3", "rollout-1": "2,3,0,1"}
    assert devices.trainer_offloads(config)
    assert devices.engines_release(config)
    assert not devices.engines_back_up(config)


def test_lent_engines_come_after_the_runs_own_on_the_trainers_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 8)
    config = run_config(
        tmp_path,
        rollout={"rollout_replicas": 2, "rollout_num_gpus_per_engine": 2, "sglang": {"mem-fraction-static": 0.9}},
        trainer={"actor_num_gpus_per_node": 4, "lend_gpus": True, "lent_mem_fraction_static": 0.4},
        weights={"push_timeout": 300},
    )
    engines = {"rollout-0": "4,5", "rollout-1": "6,7", "rollout-2": "0,1,2,3", "rollout-3": "2,3,0,1"}
    assert devices.assign_gpus(config) == {"trainer-0": "0,1,2,3", **engines}
    assert [spec.instance for spec in plan(config, "nats://x") if spec.service == "rollout"] == list(engines)
    own, lent = (devices.engine_of(config, instance)[1] for instance in ("rollout-1", "rollout-2"))
    assert not own.trainer.lent and not devices.engines_release(own) and own.rollout.engine_flags["mem-fraction-static"] == 0.9
    assert lent.trainer.lent and devices.engines_release(lent) and not devices.trainer_offloads(lent)
    assert lent.rollout.engine_flags["mem-fraction-static"] == 0.4
    assert (own.weights.push_timeout, lent.weights.push_timeout) == (300, devices.LENT_PUSH_SECONDS)
    assert evaluates(own) is None and evaluates(lent) is False
    half = config.model_copy(update={"debug": config.debug.model_copy(update={"debug_rollout_only": True})})
    assert devices.lent_instances(half) == []


def test_an_engine_over_several_of_the_trainers_machines_has_a_part_on_each(tmp_path: Path) -> None:
    rollout = {"rollout_replicas": 2, "rollout_num_gpus_per_engine": 8, "gpus_per_node": 4, "rollout_batch_size": 20}
    trainer = {"actor_num_nodes": 5, "actor_num_gpus_per_node": 4, "colocate": True}
    config = run_config(tmp_path, rollout=rollout, trainer=trainer)
    assert [devices.colocated_engines(config, node) for node in range(6)] == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [], []]


@pytest.mark.parametrize(("replicas", "shares"), [(4, [[0, 1], [2, 3], []]), (3, [[0, 1], [2], []]), (1, [[0], [], []])])
def test_each_of_the_trainers_machines_has_the_engines_that_share_its_gpus(replicas: int, shares: list[list[int]], tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        rollout={"rollout_replicas": replicas, "rollout_num_gpus_per_engine": 2, "rollout_batch_size": 8},
        trainer={"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "colocate": True},
    )
    assert [devices.colocated_engines(config, node) for node in range(3)] == [[(index, 0) for index in share] for share in shares]
    assert devices.shared_gpus(config, ["4", "5", "6", "7"], 1) == ["6", "7", "4", "5"]


def test_colocated_on_a_cpu_there_is_nothing_to_give_back(tmp_path: Path) -> None:
    where = {"rollout": {"rollout_device": "cpu"}}
    config = run_config(tmp_path, **where, trainer={"train_device": "cpu", "colocate": True})
    assert devices.assign_gpus(config) == {}
    assert not devices.trainer_offloads(config)
    assert not devices.engines_release(config)
    asked = run_config(tmp_path, **where, trainer={"train_device": "cpu", "colocate": True, "offload_train": True, "offload_rollout": True})
    assert devices.trainer_offloads(asked)
    assert not devices.engines_release(asked)


@pytest.mark.parametrize("kept", [{"weights": {"update_weights_interval": 2}}, {"trainer": {"lora_rank": 8}}])
def test_engines_keep_a_copy_of_weights_that_the_next_push_does_not_bring(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    apart, trainer = run_config(tmp_path, **kept), kept.get("trainer", {})
    assert not devices.engines_back_up(apart) and devices.engines_back_up(devices.as_lent(apart))
    assert devices.engines_back_up(run_config(tmp_path, **kept | {"trainer": trainer | {"colocate": True}}))
    assert not devices.engines_back_up(run_config(tmp_path, **kept | {"trainer": trainer | {"colocate": True, "offload_rollout": False}}))


def test_colocated_services_that_turn_out_to_be_on_different_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    config = run_config(tmp_path, trainer={"colocate": True, "train_device": "cpu"})
    with pytest.raises(ConfigError, match=r"rollout\.rollout_device = 'cuda'"):
        devices.assign_gpus(config)


def test_too_few_gpus_are_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    config = run_config(tmp_path, rollout={"rollout_device": "cuda", "rollout_replicas": 2}, trainer={"train_device": "cuda"})
    with pytest.raises(ConfigError, match=r"needs 3 GPUs \(trainer-0 1, rollout-0 1, rollout-1 1\), this machine has 2"):
        devices.assign_gpus(config)
