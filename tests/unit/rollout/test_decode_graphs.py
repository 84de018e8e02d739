"""Flags of an engine: decode steps are captured for as many requests as a replica has slots, within bounds; experts are recorded."""

from pathlib import Path
from typing import Any

import pytest

from services.rollout.client_adapters import adapter_flags
from services.rollout.replica_command import FLAG, RUNNER, captured_requests, graph_flags, parameter_flags, routing_flags
from services.rollout.request_slots import EngineLoad, SlotLimit
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.trainer.megatron.tiny import make_checkpoint

SERVED: dict[str, Any] = {"tinker": {"tinker_endpoint": True}}


@table(
    ("rollout", "captured", "flags"),
    [
        ({}, 512, {FLAG: 512}),
        ({"rollout_concurrency": 40}, 256, {FLAG: 256}),
        ({"rollout_concurrency": 300}, 300, {FLAG: 300}),
        ({"rollout_concurrency": 2000}, 512, {FLAG: 512}),
        ({"sglang": {"cuda_graph_max_bs_decode": 32}}, 32, {}),
        ({"sglang": {"--cuda-graph-bs-decode": ["8", "64"]}}, 64, {}),
        ({"sglang": {"disable-cuda-graph": True}}, None, {}),
    ],
)
def test_what_an_engine_captures(rollout: dict[str, Any], captured: int | None, flags: dict[str, int], tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout=rollout)
    assert captured_requests(config, "cuda") == captured
    assert graph_flags(config, "cuda") == flags
    assert (captured_requests(config, "cpu"), graph_flags(config, "cpu")) == (None, {})


def test_a_colocated_engine_is_left_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"colocate": True})
    assert (captured_requests(config, "cuda"), graph_flags(config, "cuda")) == (256, {})


def test_slots_stay_within_what_is_captured() -> None:
    limit = SlotLimit(None, least=8, batch=2000, most=512)
    seen = {limit.note(EngineLoad(512, 0, 0.1), 512, 10_000 * now * now, now) for now in range(60)}
    assert seen == {512}


def test_a_record_of_experts_needs_kernels_that_leave_one(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path / "oss")
    make_checkpoint("qwen3_moe", tmp_path / "qwen")
    plain = {"enable-return-routed-experts": True}

    def flags(model: str, device: str, **sglang: str) -> dict[str, Any]:
        sections: dict[str, Any] = {"model": {"hf_checkpoint": str(tmp_path / model)}, "rollout": {"sglang": sglang}}
        return routing_flags(run_config(tmp_path, **sections, trainer={"use_rollout_routing_replay": True}), device)

    assert flags("oss", "cuda") == flags("oss", "cuda", moe_runner_backend="triton") == {**plain, RUNNER: "triton"}
    assert flags("oss", "cpu") == flags("qwen", "cuda") == plain
    with pytest.raises(ConfigError, match="moe-runner-backend = 'triton_kernel': triton with use_rollout_routing_replay"):
        flags("oss", "cuda", moe_runner_backend="triton_kernel")
    assert routing_flags(run_config(tmp_path), "cuda") == {"enable-return-routed-experts": False}


def test_engines_compute_adapters_of_what_trains(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model")

    def targets(**trainer: Any) -> Any:
        sections: dict[str, Any] = {"model": {"hf_checkpoint": str(tmp_path / "model")}, "rollout": {"num_rollout": 0}}
        config = run_config(tmp_path, **sections, trainer=trainer, **SERVED)
        return adapter_flags(config, "cuda").get("lora-target-modules")

    assert sorted(targets(lora_rank=4)) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert targets(lora_rank=4, target_modules=["q_proj", "o_proj"]) == ["q_proj", "o_proj"]
    assert targets() is None


def test_engines_on_gpus_hold_trained_parameters_in_bfloat16(tmp_path: Path) -> None:
    def flags(device: str, train_dtype: str, **sections: Any) -> dict[str, Any]:
        return parameter_flags(run_config(tmp_path, trainer={"train_dtype": train_dtype}, **sections), device)

    assert flags("cuda", "float32") == flags("cuda", "bfloat16", rollout={"num_rollout": 0}, **SERVED) == {"dtype": "bfloat16"}
    assert flags("cpu", "bfloat16") == flags("cuda", "bfloat16", debug={"debug_rollout_only": True}) == {}
