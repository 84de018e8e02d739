"""Engines over several nodes, as a config has them."""

from pathlib import Path
from typing import Any

import pytest

from myxo.preflight.inspection import Inspection
from myxo.preflight.model_checks import check_layout_reach
from shared.bus.subjects import Subjects
from shared.config.sglang_flags import CATALOGUE, EngineFlags, plain_name
from shared.runtime.addresses import node_rank
from shared.runtime.errors import ConfigError, MyxoError
from tests.support.run_config import run_config
from tests.support.tables import table

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
