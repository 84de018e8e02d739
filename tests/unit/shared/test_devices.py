"""GPUs shared out among services, and engines over several nodes."""

from pathlib import Path
from typing import Any

import pytest

from myxo.launch.service_plan import plan
from myxo.preflight.inspection import Inspection
from myxo.preflight.model_checks import check_layout_reach
from services.rollout.request_slots import evaluates
from shared.bus.subjects import Subjects
from shared.config import devices
from shared.config.sglang_flags import CATALOGUE, EngineFlags, plain_name
from shared.runtime.addresses import node_rank
from shared.runtime.errors import ConfigError, MyxoError
from tests.support.run_config import run_config
from tests.support.tables import table


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


# --- engines over several nodes, as a config has them

GPUS = {"rollout_num_gpus_per_engine": 16}
SHARED = {"colocate": True, "actor_num_gpus_per_node": 2}


@table(("given", "nodes"), [({}, 2), ({"nnodes": 2}, 2), ({"--nnodes": "4"}, 4), ({"nnodes": 1}, 1)])
def test_the_nodes_of_an_engine_are_sglangs_flag_or_machines_of_eight(tmp_path: Path, given: dict[str, Any], nodes: int) -> None:
    assert run_config(tmp_path, rollout={**GPUS, "sglang": given}).rollout.nodes_per_engine == nodes


@table(
    ("gpus", "machine", "given", "nodes"),
    [(16, 8, {}, 2), (8, 8, {}, 1), (4, 8, {}, 1), (8, 4, {}, 2), (64, 8, {}, 8), (16, 8, {"nnodes": 4}, 4)],
)
def test_nodes_follow_from_the_gpus_of_a_machine_as_with_slime(
    tmp_path: Path, gpus: int, machine: int, given: dict[str, Any], nodes: int
) -> None:
    rollout = {"rollout_num_gpus_per_engine": gpus, "gpus_per_node": machine, "sglang": given}
    assert run_config(tmp_path, rollout=rollout).rollout.nodes_per_engine == nodes


@pytest.mark.parametrize(
    ("rollout", "trainer", "said"),
    [
        ({"rollout_num_gpus_per_engine": 3}, {}, r"2 nodes do not share rollout_num_gpus_per_engine = 3 GPUs evenly"),
        (
            {"rollout_num_gpus_per_engine": 2},
            {"colocate": True, "actor_num_gpus_per_node": 2},
            r"on 2 nodes has all of the trainer's 2 GPUs of each, 4, not rollout_num_gpus_per_engine = 2",
        ),
    ],
)
def test_what_does_not_go_with_several_nodes_is_named(tmp_path: Path, rollout: dict[str, Any], trainer: dict[str, Any], said: str) -> None:
    with pytest.raises(MyxoError, match=rf"rollout.sglang.nnodes = 2: .*{said}"):
        run_config(tmp_path, rollout={"sglang": {"nnodes": 2}, **rollout}, trainer=trainer)


@pytest.mark.parametrize(
    ("rollout", "most"),
    [({"rollout_num_gpus_per_engine": 12}, 8), ({**GPUS, "sglang": {"nnodes": 1}}, 8), ({**GPUS, "gpus_per_node": 6}, 12)],
)
def test_an_engine_with_more_gpus_than_its_machines_have_is_refused_with_the_numbers(
    tmp_path: Path, rollout: dict[str, Any], most: int
) -> None:
    [problem] = check_layout_reach(Inspection(run_config(tmp_path, rollout=rollout)))
    assert isinstance(problem, ConfigError) and f"at most {most}: gpus_per_node = " in problem.expected


def test_a_flag_is_known_by_each_of_its_names() -> None:
    same = {"--speculative-algo": "speculative-algorithm", "data_parallel_size": "dp-size", "mem-fraction": "mem-fraction-static"}
    own = {name: name for name in ("no-dllm-fdfo", "cuda-graph-max-bs", "of-tomorrow", "speculative", "dtype")}
    assert {name: plain_name(name) for name in same | own} == same | own


@pytest.mark.parametrize("flags", [{"speculative_algo": "NGRAM"}, {"speculative-algorithm": "EAGLE3"}])
def test_no_flag_may_ask_for_speculation_that_is_off(tmp_path: Path, flags: dict[str, Any]) -> None:
    for rollout in ({"sglang": flags}, {"engine_groups": [{"replicas": 1}, {"replicas": 1, "sglang": flags}]}):
        with pytest.raises(ConfigError, match=r"rollout.speculation = 'off': another than off, or no speculative-algorithm"):
            run_config(tmp_path, rollout={"speculation": "off", **rollout})
    none = {"speculation": "off", "sglang": {"speculative-algorithm": "NONE"}}
    assert run_config(tmp_path, rollout=none).rollout.speculation == "off"


@pytest.mark.parametrize("flag", ["node-rank", "dist_init_addr", "nccl-init-addr"])
def test_what_the_nodes_agree_upon_is_not_given(flag: str) -> None:
    (problem,) = EngineFlags.of_json(CATALOGUE.read_text()).problems({flag: "1"})
    assert f"rollout.sglang.{flag}" in str(problem) and "set nnodes alone" in str(problem)


def test_a_rank_is_one_of_the_engines_nodes() -> None:
    assert node_rank(2, {"LWS_WORKER_INDEX": "1"}, of="the engine") == 1
    with pytest.raises(MyxoError, match="MYXO_NODE_RANK.*0 to 1: the engine has 2 nodes"):
        node_rank(2, {"MYXO_NODE_RANK": "2"}, of="the engine")


def test_an_engines_nodes_have_leases_that_no_trainers_node_has() -> None:
    assert Subjects.node_lease(Subjects.engine_nodes("actor"), 1) != Subjects.node_lease(Subjects.trainer_nodes("actor"), 1)
