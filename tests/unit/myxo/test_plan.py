"""Which processes a config asks for."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from myxo.launch import run_servers
from myxo.launch.node_launch import node_plan
from myxo.launch.service_plan import plan
from shared.config import devices
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
