"""Which processes a config asks for, on which nodes, and on how many GPUs where the config does not say how many there are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from myxo.launch import run_servers
from myxo.launch.node_launch import node_plan
from myxo.launch.node_placement import PlacedService, place
from myxo.launch.service_plan import filled, next_nodes, plan
from myxo.preflight import _with_all_engines
from shared.config import devices, flags, slime_defaults
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table


def test_as_many_of_each_kind_as_the_config_says(tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"buffer_replicas": 2}, reward={"reward_replicas": 3}, rollout={"rollout_replicas": 2})
    instances = [spec.instance for spec in plan(config, "nats://host")]
    assert instances == ["buffer-0", "buffer-1", "reward-0", "reward-1", "reward-2", "rollout-0", "rollout-1", "trainer-0"]


def test_the_server_that_agents_speak_to_is_the_users_own_command(tmp_path: Path) -> None:
    given = {"agent": "shared.agents.http_agent:play", "agent_service": "envs/bin/python 'my serve.py' --port 8600"}
    last = plan(run_config(tmp_path, rollout=given), "nats://user:hush@host")[-1]
    assert (last.instance, last.command, last.foreign) == ("agents-0", ("envs/bin/python", "my serve.py", "--port", "8600"), True)
    assert not any("hush" in value for value in last.environment.values())


def test_one_of_each_where_it_says_nothing(tmp_path: Path) -> None:
    assert [spec.service for spec in plan(run_config(tmp_path), "nats://host")] == ["buffer", "reward", "rollout", "trainer"]


def test_metrics_ports_follow_one_another_from_the_launchers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, rollout={"rollout_replicas": 2})
    assert not any("MYXO_HTTP" in spec.environment for spec in plan(config, "nats://host"))
    monkeypatch.setenv("MYXO_HTTP", "0.0.0.0:9464")
    given = [spec.environment.get("MYXO_HTTP") for spec in plan(config, "nats://host")]
    assert given == [f"0.0.0.0:{port}" for port in range(9464, 9469)]
    monkeypatch.setenv("MYXO_HTTP", "0.0.0.0:0")
    assert {spec.environment["MYXO_HTTP"] for spec in plan(config, "nats://host")} == {"0.0.0.0:0"}


def test_each_further_gateway_is_a_port_further_than_the_one_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, gateway={"gateway_replicas": 3})
    monkeypatch.setenv("MYXO_GATEWAY", "0.0.0.0:8800")
    given = [spec.environment["MYXO_GATEWAY"] for spec in plan(config, "nats://host") if spec.service == "gateway"]
    assert given == [f"0.0.0.0:{port}" for port in (8800, 8801, 8802)]
    monkeypatch.setenv("MYXO_GATEWAY", "0.0.0.0:65534")
    with pytest.raises(ConfigError, match="MYXO_GATEWAY = "):
        plan(config, "nats://host")


def test_a_further_node_has_a_port_for_each_service_and_the_console_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, trainer={"actor_num_nodes": 2, "colocate": True}, rollout={"rollout_replicas": 2})
    monkeypatch.setenv("MYXO_HTTP", "0.0.0.0:9464")
    addresses = [spec.environment["MYXO_HTTP"] for spec in node_plan(config, "nats://host", 1)]
    assert addresses == ["0.0.0.0:9464", "0.0.0.0:9465"]
    given = list[Mapping[str, str]]()
    monkeypatch.setattr(run_servers, "ChildProcess", lambda *words: given.append(words[-1]))
    run_servers.ConsoleProcess(config.console, tmp_path / "log", {})
    assert given[0]["MYXO_CONSOLE"] and not given[0]["MYXO_HTTP"]


def test_each_life_of_a_gateway_has_the_same_address(tmp_path: Path) -> None:
    free = [spec.environment["MYXO_GATEWAY"] for spec in plan(run_config(tmp_path, gateway={"gateway_replicas": 2}), "nats://host")[3:5]]
    assert all(address.startswith("127.0.0.1:") and int(address.partition(":")[2]) for address in free) and len(set(free)) == 2
    given = run_config(tmp_path, gateway={"gateway_replicas": 1, "gateway_port": 8000})
    assert not any("MYXO_GATEWAY" in spec.environment for spec in plan(given, "nats://host"))


@table("http", ["9464", "host:port", "host:65533", "host:-1"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYXO_HTTP", http)
    with pytest.raises(ConfigError, match="MYXO_HTTP = "):
        plan(run_config(tmp_path), "nats://host")


def test_where_nothing_is_trained_there_is_no_critic_and_no_gpu_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    given = {
        "algorithm": {"advantage_estimator": "ppo"},
        "trainer": {"train_device": "cuda", "actor_num_gpus_per_node": 2},
        "rollout": {"rollout_device": "cuda", "rollout_replicas": 2},
    }
    alone = plan(run_config(tmp_path, debug={"debug_rollout_only": True}, **given), "nats://host")
    gpus = {spec.instance: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in alone}
    assert gpus == {"buffer-0": None, "reward-0": None, "rollout-0": "0", "rollout-1": "1", "trainer-0": None}
    with pytest.raises(ConfigError, match="needs 6 GPUs"):
        plan(run_config(tmp_path, **given), "nats://host")


def test_a_further_node_has_the_engines_that_share_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    trainer = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "colocate": True}
    config = run_config(tmp_path, trainer=trainer, rollout={"rollout_replicas": 4, "rollout_batch_size": 4})
    first = {spec.instance for spec in plan(config, "nats://host") if spec.service == "rollout"}
    found = {spec.instance: (spec.service, spec.environment.get("CUDA_VISIBLE_DEVICES")) for spec in node_plan(config, "nats://host", 1)}
    assert first == {"rollout-0", "rollout-1"}
    assert found == {"trainer-node-1": ("node", "0,1"), "rollout-2": ("rollout", "0,1"), "rollout-3": ("rollout", "1,0")}


def test_a_further_node_has_gpus_of_its_own_for_its_part_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its CUDA_VISIBLE_DEVICES lists, and as many engines as the first node has counted."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    engines = {"rollout_device": "cuda", "rollout_num_gpus_per_engine": 4, "sglang": {"nnodes": 2}}
    trainer = {"train_device": "cuda", "actor_num_nodes": 2, "actor_num_gpus_per_node": 2}
    config = run_config(tmp_path, rollout=engines, trainer=trainer)
    found = {spec.instance: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in node_plan(config, "nats://host", 1)}
    assert found == {"trainer-node-1": "2,3", "rollout-0-node-1": "6,7"}
    more = config.with_fields(rollout={"rollout_replicas": 2})
    with pytest.raises(ConfigError, match=r"rollout_num_gpus_per_engine = 2: 0 of them at most: node 1 has no more of the 4"):
        node_plan(more, "nats://host", 1)


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
    words = ["--colocate", "--actor-num-gpus-per-node", "8"]
    assert slime_defaults.defaults(flags.parse(words))["rollout"]["rollout_num_gpus"] == 8
    for fewer in (["--rollout-num-gpus", "4"], ["--rollout-replicas", "2"]):
        given = flags.parse([*words, *fewer])
        assert not slime_defaults.settle_defaults(given) and "rollout_num_gpus" not in slime_defaults.defaults(given)["rollout"]
        assert fewer[1] in given["rollout"].values()
