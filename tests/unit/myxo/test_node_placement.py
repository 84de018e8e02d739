"""On which nodes of a cluster the services of a run are placed."""

from pathlib import Path
from typing import Any

import pytest

from myxo.launch.node_placement import PlacedService, place
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config

GPU = {"train_device": "cuda"}


def placed(directory: Path, nodes: int, gpus: int, trainer: dict[str, Any], **rollout: Any) -> list[PlacedService]:
    rollout = {"num_rollout": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 2, "rollout_device": "cuda", **rollout}
    return place(run_config(directory, trainer={**GPU, **trainer}, rollout=rollout), nodes, gpus)


def on(services: list[PlacedService], role: str) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(service.node, service.instance, service.gpus) for service in services if service.role == role]


def test_engines_take_the_gpus_that_the_trainer_leaves(tmp_path: Path) -> None:
    """2 x 8 GPUs: one node trains; a trainer of four ranks leaves room for engines beside it."""
    services = placed(tmp_path, 2, 8, {"actor_num_gpus_per_node": 8}, rollout_replicas=4, rollout_num_gpus_per_engine=2)
    assert on(services, "trainer") == [(0, "trainer-0", tuple(range(8)))]
    assert on(services, "rollout") == [(1, f"rollout-{index}", (2 * index, 2 * index + 1)) for index in range(4)]
    beside = placed(tmp_path, 2, 8, {"actor_num_gpus_per_node": 4}, rollout_replicas=3, rollout_num_gpus_per_engine=4)
    assert [(node, gpus[0]) for node, _, gpus in on(beside, "rollout")] == [(0, 4), (1, 0), (1, 4)]


def test_a_trainer_and_its_critic_over_nodes(tmp_path: Path) -> None:
    trainer = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "critic_num_nodes": 1, "critic_num_gpus_per_node": 4}
    config = run_config(
        tmp_path,
        trainer={**GPU, **trainer},
        rollout={
            "num_rollout": 4,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 2,
            "rollout_device": "cuda",
            "rollout_replicas": 2,
            "rollout_num_gpus_per_engine": 4,
        },
        algorithm={"advantage_estimator": "ppo"},
    )
    low, high = (0, 1, 2, 3), (4, 5, 6, 7)
    services = place(config, 3, 8)
    assert on(services, "trainer") == [(0, "trainer-0", low), (0, "critic-0", high), (1, "trainer-node-1", low)]
    assert on(services, "rollout") == [(1, "rollout-0", high), (2, "rollout-1", low)]
    assert {str(service) for service in services} >= {
        "0 0 trainer critic-0 4,5,6,7 services.trainer critic",
        "1 1 trainer trainer-node-1 0,1,2,3 services.trainer",
        "0 0 buffer buffer-0 - services.buffer",
    }


def test_the_parts_of_an_engine_over_nodes_share_its_name_and_have_ranks(tmp_path: Path) -> None:
    engines = {"rollout_num_gpus_per_engine": 8, "sglang": {"nnodes": 2}}
    services = placed(tmp_path, 4, 8, {"actor_num_gpus_per_node": 4}, rollout_replicas=3, **engines)
    parts = [(each.instance, each.rank, each.node, each.gpus[0]) for each in services if each.role == "rollout"]
    assert sorted(parts) == [
        ("rollout-0", 0, 1, 0),
        ("rollout-0", 1, 2, 0),
        ("rollout-1", 0, 0, 4),
        ("rollout-1", 1, 3, 0),
        ("rollout-2", 0, 1, 4),
        ("rollout-2", 1, 2, 4),
    ]
    on_cpus = {"rollout_device": "cpu", "rollout_replicas": 2, "rollout_num_gpus_per_engine": 2, "sglang": {"nnodes": 2}}
    parts = [
        (each.instance, each.rank, each.node)
        for each in placed(tmp_path, 3, 0, {"train_device": "cpu"}, **on_cpus)
        if each.role == "rollout"
    ]
    assert sorted(parts) == [("rollout-0", 0, 1), ("rollout-0", 1, 2), ("rollout-1", 0, 1), ("rollout-1", 1, 2)]


def test_on_cpus_engines_are_where_the_trainer_is_not(tmp_path: Path) -> None:
    services = placed(tmp_path, 3, 0, {"train_device": "cpu"}, rollout_device="cpu", rollout_replicas=3)
    assert on(services, "rollout") == [(1, "rollout-0", ()), (1, "rollout-2", ()), (2, "rollout-1", ())]


def test_colocated_engines_have_the_trainers_gpus_their_own_first(tmp_path: Path) -> None:
    trainer = {"actor_num_gpus_per_node": 4, "colocate": True}
    services = placed(tmp_path, 1, 8, trainer, rollout_replicas=2, rollout_num_gpus_per_engine=2)
    assert on(services, "rollout") == [(0, "rollout-0", (0, 1, 2, 3)), (0, "rollout-1", (2, 3, 0, 1))]


def test_colocated_engines_are_on_each_of_the_trainers_nodes(tmp_path: Path) -> None:
    trainer = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "colocate": True}
    services = placed(tmp_path, 2, 2, trainer, rollout_replicas=4)
    engines = [(0, "rollout-0", (0, 1)), (0, "rollout-1", (1, 0)), (1, "rollout-2", (0, 1)), (1, "rollout-3", (1, 0))]
    assert on(services, "rollout") == engines


def test_lent_gpus_have_their_engines_on_the_trainers_node(tmp_path: Path) -> None:
    services = placed(tmp_path, 2, 2, {"actor_num_gpus_per_node": 2, "lend_gpus": True}, rollout_replicas=2)
    own = [(1, "rollout-0", (0,)), (1, "rollout-1", (1,))]
    assert on(services, "rollout") == [(0, "rollout-2", (0, 1)), (0, "rollout-3", (1, 0)), *own]


@pytest.mark.parametrize(
    ("nodes", "trainer", "rollout", "field", "why"),
    [
        (1, {"actor_num_nodes": 2}, {}, "trainer.actor_num_nodes", "at most 1"),
        (1, {"actor_num_gpus_per_node": 8}, {}, "rollout.rollout_replicas", "at most 0: 0 engines of 1 GPUs fit"),
        (
            2,
            {"actor_num_gpus_per_node": 8},
            {"rollout_replicas": 3, "rollout_num_gpus_per_engine": 4},
            "rollout.rollout_replicas",
            "at most 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(
    nodes: int, trainer: dict[str, Any], rollout: dict[str, Any], field: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(tmp_path, nodes, 8, trainer, **rollout)
    assert refused.value.field == field and why in str(refused.value)


def test_a_trainer_larger_than_its_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 GPUs are left on node 0"):
        placed(tmp_path, 1, 4, {"actor_num_gpus_per_node": 8})
