"""Engines fill the GPUs that there are, where the config does not say how many there are."""

from pathlib import Path
from typing import Any

import pytest

from myxo.launch.node_placement import place
from myxo.launch.service_plan import filled, next_nodes
from myxo.preflight import Source, _with_all_engines
from shared.config import devices, flags, slime_script
from shared.config.run_config import RunConfig
from tests.support.run_config import run_config

LEAST = {"num_rollout": 4, "rollout_batch_size": 64, "n_samples_per_prompt": 2, "rollout_device": "cuda"}
TWO = {"rollout_num_gpus_per_engine": 2}
OVER = {"rollout_num_gpus_per_engine": 16, "sglang": {"nnodes": 2}}


def config_of(directory: Path, rollout: dict[str, Any], trainer: dict[str, Any], **sections: Any) -> RunConfig:
    return run_config(directory, rollout={**LEAST, **rollout}, trainer={"train_device": "cuda", **trainer}, **sections)


@pytest.mark.parametrize(
    ("nodes", "trainer", "rollout", "engines", "idle"),
    [
        pytest.param(1, {}, {}, 7, 0, id="one trains, seven generate"),
        pytest.param(1, {"actor_num_gpus_per_node": 4}, TWO, 2, 0, id="four of eight train"),
        pytest.param(1, {"actor_num_gpus_per_node": 2}, {"rollout_num_gpus_per_engine": 4}, 1, 2, id="a remainder is idle"),
        pytest.param(1, {"actor_num_gpus_per_node": 8}, {}, 1, 0, id="no room: one, which is refused elsewhere"),
        pytest.param(1, {"actor_num_gpus_per_node": 8, "colocate": True}, TWO, 4, 0, id="colocated: all GPUs of the trainer"),
        pytest.param(1, {"actor_num_gpus_per_node": 4, "colocate": True}, TWO, 2, 0, id="colocated: and no others"),
        pytest.param(0, {"actor_num_gpus_per_node": 8, "colocate": True}, TWO, 4, 0, id="colocated: on any machine"),
        pytest.param(1, {"actor_num_gpus_per_node": 8, "colocate": True}, {"rollout_num_gpus_per_engine": 3}, 2, 2, id="and a remainder"),
        pytest.param(2, {"actor_num_gpus_per_node": 8}, TWO, 4, 0, id="2 x 8: one node trains"),
        pytest.param(32, {"actor_num_gpus_per_node": 8, "actor_num_nodes": 16}, {"rollout_num_gpus_per_engine": 8}, 16, 0, id="32 x 8"),
        pytest.param(5, {"actor_num_gpus_per_node": 8}, OVER, 2, 0, id="engines over two nodes"),
        pytest.param(4, {"actor_num_gpus_per_node": 8}, OVER, 1, 8, id="a node without a partner is idle"),
        pytest.param(0, {}, {}, 1, 0, id="unknown machines: as it is"),
    ],
)
def test_engines_fill_what_the_trainer_leaves(
    nodes: int, trainer: dict[str, Any], rollout: dict[str, Any], engines: int, idle: int, tmp_path: Path
) -> None:
    config, told = filled(config_of(tmp_path, rollout, trainer), nodes, 8, trains=True)
    assert config.rollout.rollout_replicas == engines
    assert bool(told) == (engines > 1 or idle > 0) and (f"but for {idle}" in told) == (idle > 0)
    if nodes and not trainer.get("colocate") and engines > 1:
        assert len({each.instance for each in place(config, nodes, 8) if each.role == "rollout"}) == engines


def test_a_critic_has_gpus_of_its_own_and_half_a_run_has_the_others(tmp_path: Path) -> None:
    critic = config_of(
        tmp_path, {}, {"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 1}, algorithm={"advantage_estimator": "ppo"}
    )
    assert filled(critic, 1, 8, trains=True)[0].rollout.rollout_replicas == 5
    alone = config_of(tmp_path, TWO, {"actor_num_gpus_per_node": 4, "colocate": True}, debug={"debug_rollout_only": True})
    assert filled(alone, 1, 8, trains=True)[0].rollout.rollout_replicas == 4
    assert filled(config_of(tmp_path, {}, {"train_device": "cpu"}), 1, 8, trains=False)[0].rollout.rollout_replicas == 8


@pytest.mark.parametrize("given", [{"rollout_replicas": 1}, {"rollout_replicas": 3}, {"rollout_num_gpus": 2}])
def test_what_the_config_says_wins(given: dict[str, int], tmp_path: Path) -> None:
    config = config_of(tmp_path, {**TWO, **given}, {"actor_num_gpus_per_node": 2})
    assert filled(config, 1, 8, trains=True) == (config, "")


def test_the_next_engine_over_nodes_takes_those_with_most_room() -> None:
    assert next_nodes([4, 4, 8], 2, 4) == (0, 2)
    assert next_nodes([4, 3, 3], 2, 4) is None
    assert next_nodes([0, 2, 8], 1, 2) == (1,)


def test_only_the_gpus_that_may_be_seen_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 8)
    config = config_of(tmp_path, {}, {})
    assert _with_all_engines(config, True, None)[0].rollout.rollout_replicas == 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,GPU-7f")
    config, told = _with_all_engines(config, True, None)
    assert (config.rollout.rollout_replicas, told) == (2, "rollout_replicas = 2, of 1 GPU each: they fill the 2 that there are for engines")
    assert devices.assign_gpus(config) == {"trainer-0": "3", "rollout-0": "5", "rollout-1": "GPU-7f"}
    shared = config_of(tmp_path, {}, {"colocate": True, "actor_num_gpus_per_node": 2})
    assert _with_all_engines(shared, False, None) == (shared, ""), "somebody else starts its services"
    on_cpus = config_of(tmp_path, {"rollout_device": "cpu"}, {"train_device": "cpu"})
    assert _with_all_engines(on_cpus, True, None) == (on_cpus, "")


def test_slimes_command_line_has_all_gpus_of_a_colocated_trainer() -> None:
    words = ["--colocate", "--rollout-num-gpus", "4", "--actor-num-gpus-per-node", "8"]
    given = Source(None, flags.read(words)).given.overrides
    assert "all are taken" in slime_script.settle_defaults(given)[0]
    assert slime_script.defaults(given)["rollout"]["rollout_num_gpus"] == 8
    given = flags.read([*words, "--rollout-replicas", "2"]).overrides
    assert not slime_script.settle_defaults(given) and "rollout_num_gpus" not in slime_script.defaults(given)["rollout"]
