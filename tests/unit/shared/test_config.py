"""The run config: bad input is refused at the edge, with the field's name and what would be right."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from myxo.preflight import data_checks, model_checks
from myxo.preflight.inspection import Inspection
from services.rollout.agent_runner import agent_workers
from shared.bus import runs
from shared.config import flag_table, flags
from shared.config.config_layers import known_fields
from shared.config.config_reading import load, parse
from shared.config.run_config import RunConfig, changes, field_sections, section_model
from shared.config.section import Section
from shared.data.data_files import DataFile
from shared.rewards.names import VERIFIERS
from shared.runtime.errors import ConfigError, Problems
from tests.support.run_config import SERVED, run_config, values
from tests.support.tables import table

SECTIONS: dict[str, type[Section]] = {section: section_model(section) for section in RunConfig.model_fields}
MUTABLE_FIELDS = """
    speculation dir_mode accept_changed_data node_timeout console console_host console_port console_hosts episode_url episode_timeout
    sandbox_wall_time sandbox_cpu_time sandbox_memory_bytes sandbox_processes sandbox_output_bytes frozen_timeout full_timeout
    sync_interval max_bytes max_ledger_bytes max_queued_bytes buffer_replicas colocate check_weight_update_equal offload_train
    offload_rollout lend_gpus lent_mem_fraction_static num_rollout num_epoch num_rollout_per_epoch train_env_vars rollout_replicas
    engine_groups models eval_replicas external_engine_key_variable external_engines external_group_backend update_weight_engine_dir
    object_store_connections object_store_url_timeout rollout_concurrency rollout_num_gpus sglang_server_concurrency load
    custom_config_path dir engine_start_timeout generate_timeout agent_concurrency agent_cpus agent_memory_bytes agent_network
    agent_processes agent_runtime agent_service agent_timeout agent_tries agent_workers generate_workers constraints
    gateway_checkpoint_tokens gateway_host gateway_models gateway_port gateway_replica_requests gateway_replicas gateway_requests
    gateway_turn_timeout gateway_wait ignore_memory_plan ingest_bytes ingest_concurrency ingest_groups ingest_wait max_dead_in_a_row
    environment_concurrency worker_environment environments environment_url rm_url rm_timeout rm_tries judge_url judge_key_variable
    judge_concurrency judge_timeout judge_tries judge_cache reward_timeout reward_workers reward_replicas eval_interval eval_timeout
    save_at_start save_interval async_save keep_checkpoints save_hf save_hf_interval save_final_hf batch_timeout collective_timeout
    torch_threads tinker_tenants tinker_adapters tinker_samples tinker_checkpoint_steps tinker_body_bytes skip_unchanged push_timeout
    update_weight_mode update_weight_delta_encoding update_weight_full_interval snapshot_interval keep_snapshots join_from log_multi_turn
    log_passrate keep_rollouts keep_rollouts_bytes keep_rollouts_tokens use_wandb wandb_project
    wandb_group wandb_team wandb_mode wandb_dir wandb_host http_host logprob_alarm opd_teacher_concurrency opd_teacher_key_variable
    opd_teacher_timeout opd_teachers save_debug_rollout_data save_debug_train_data dump_details use_pytorch_profiler profile_step_start
    profile_step_end profile_target profile_engine_steps record_memory_history memory_recorder memory_snapshot_num_steps
    memory_snapshot_dir memory_snapshot_path
"""
MUTABLE = set(MUTABLE_FIELDS.split())


def refused(nested: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(nested)
    return caught.value


def test_field_names_are_unique_over_all_sections() -> None:
    counts = Counter(field for model in SECTIONS.values() for field in model.model_fields)
    assert [field for field, count in counts.items() if count > 1] == []
    assert set(field_sections()) == set(counts)


def test_every_field_is_described() -> None:
    assert [field for model in SECTIONS.values() for field, info in model.model_fields.items() if not info.description] == []


def test_the_smallest_config_gets_the_documented_defaults(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    assert config.rollout.max_staleness == 1
    assert config.algorithm.advantage_estimator == "grpo"
    assert config.weights.update_weights_interval == 1
    assert config.run.root == tmp_path / "runs" / "test"


def test_a_config_survives_json(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"sglang": {"mem-fraction-static": "0.8", "disable-radix-cache": True}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@table(
    ("given", "field", "words"),
    [
        ({"rollout": {"rollout_batchsize": 8}}, "rollout.rollout_batchsize", "= 8: unknown key; did you mean rollout_batch_size?"),
        ({"store": {"zzz": 1}}, "store.zzz", "valid are appendfsync, blob_bytes"),
        ({"rollout": {"lr": 1e-4}}, "rollout.lr", "belongs into the section [trainer]"),
        ({"lr": 1e-4}, "lr", "belongs into the section [trainer]"),
        ({"rolout": {"num_rollout": 1}}, "rolout", "did you mean [rollout]?"),
        ({"rollout": 3}, "rollout", "expected a section [rollout]"),
    ],
)
def test_an_unknown_key_or_section_is_refused_with_the_nearest_valid_one(
    given: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    sections = {name: value for name, value in given.items() if isinstance(value, dict) and name in SECTIONS}
    error = refused({**values(tmp_path, **sections), **{name: value for name, value in given.items() if name not in sections}})
    assert error.field == field and words in str(error)


def test_external_engines_are_all_the_engines_that_there_are(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"external_engines": ["h1:30000", "https://h2:30001/"], "rollout_num_gpus": 16})
    rollout, again = config.rollout, RunConfig.model_validate_json(config.model_dump_json())
    assert rollout.external_engines == ["http://h1:30000", "https://h2:30001"]
    assert (rollout.rollout_replicas, rollout.rollout_num_gpus, config.engines_read_snapshots) == (2, None, True)
    assert again == config


@table(
    ("sections", "field"),
    [
        ({"rollout": {"external_engines": ["h1"]}}, "rollout.external_engines.0"),
        ({"rollout": {"external_engines": ["http://user:word@h1:1"]}}, "rollout.external_engines.0"),
        ({"rollout": {"external_engines": ["http://:word@h1:1"]}}, "rollout.external_engines.0"),
        ({"rollout": {"external_engines": ["http://h1:1#part"]}}, "rollout.external_engines.0"),
        ({"rollout": {"external_engines": ["http://h1 :1"]}}, "rollout.external_engines.0"),
        ({"rollout": {"external_engine_key_variable": "KEY"}}, "rollout.external_engine_key_variable"),
        ({"weights": {"external_group_backend": "gloo"}}, "weights.external_group_backend"),
        ({"rollout": {"external_engines": ["H1:1", "http://h1:1"]}}, "rollout.external_engines"),
        ({"rollout": {"external_engines": ["h1:1"], "rollout_replicas": 2}}, "rollout.rollout_replicas"),
        ({"rollout": {"external_engines": ["h1:1"], "models": {"judge": {"hf_checkpoint": "/m"}}}}, "rollout.models"),
        ({"rollout": {"external_engines": ["h1:1"]}, "trainer": {"colocate": True}}, "rollout.external_engines"),
        ({"weights": {"update_weight_engine_dir": "/mnt/weights"}}, "weights.update_weight_engine_dir"),
    ],
)
def test_what_does_not_go_with_external_engines_is_refused(sections: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert refused(values(tmp_path, **sections)).field == field


@table(("section", "field"), [("run", "name"), ("model", "hf_checkpoint"), ("data", "prompt_data"), ("rollout", "num_rollout")])
def test_a_missing_field_is_named_with_what_it_means(tmp_path: Path, section: str, field: str) -> None:
    nested = values(tmp_path)
    del nested[section][field]
    error = refused(nested)
    assert error.field == f"{section}.{field}"
    assert f"required: {SECTIONS[section].model_fields[field].description}" in str(error)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    nested = values(tmp_path)
    del nested["model"]
    error = refused(nested)
    assert error.field == "model"
    assert "required" in str(error)


def beyond(info: FieldInfo) -> Iterator[Any]:
    """Values that a field's own bounds, which docs/config.md says, or its words do not have."""
    for limit in info.metadata:
        match limit:
            case Ge(bound):
                yield bound - 1  # type: ignore[operator]
            case Le(bound):
                yield bound + 1  # type: ignore[operator]
            case Gt(bound) | Lt(bound):
                yield bound
    kinds = {get_origin(kind) or kind for kind in (info.annotation, *get_args(info.annotation))}
    yield from ["none of these"] * (Literal in kinds and Annotated not in kinds)


FIELDS = [(section, field, info) for section, model in SECTIONS.items() for field, info in model.model_fields.items()]
BEYOND = [(section, field, value) for section, field, info in FIELDS for value in beyond(info)]


@table(
    ("section", "field", "value"),
    [
        ("rollout", "rollout_batch_size", "many"),
        ("rollout", "rollout_temperature", math.nan),
        ("rollout", "generate_timeout", math.inf),
        ("run", "custom_args", {"limits": [1.0, math.inf]}),
        ("rollout", "agent_options", {"limit": math.nan}),
        ("rollout", "rollout_stop", "text"),
        ("rollout", "sglang", 3),
        ("reward", "rm_type", "deep_scaler"),
        ("reward", "rm_type", "remote"),
        ("reward", "environment_url", "grader:8080"),
        ("reward", "environment_url", "nats://grader:4222"),
        ("reward", "environment_url", "http://169.254.169.254/"),
        *(("reward", "environments", {name: "http://grader:8080"}) for name in ("a.b", "", "math", "environment", "custom_rm")),
        ("reward", "custom_rm_path", "my rewards.score"),
        ("reward", "group_rm", True),
        ("rollout", "dynamic_sampling_filter_path", "nonzero"),
        *(("run", "name", name) for name in ("Upper", "with.dot", "", "a" * 64)),
        *BEYOND,
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(tmp_path: Path, section: str, field: str, value: Any) -> None:
    error = refused(values(tmp_path, **{section: {field: value}}))
    assert error.field == f"{section}.{field}" and len(BEYOND) > 200
    assert error.value is value or error.value == value
    assert error.expected


@table(
    ("sections", "field", "words"),
    [
        (
            {"trainer": {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 3}},
            "trainer.tensor_model_parallel_size",
            "does not divide",
        ),
        ({"rollout": {"rollout_stop": ["###", ""]}}, "rollout.rollout_stop.1", "at least 1 character"),
        ({"eval": {"sets": [{"name": "a", "path": "a.jsonl", "stop": [""]}]}}, "eval.sets.a.stop.0", "at least 1 character"),
        ({"trainer": {"num_steps_per_rollout": 3}}, "trainer.num_steps_per_rollout", "4 samples do not divide"),
        ({"rollout": {"n_samples_per_prompt": 1}}, "rollout.n_samples_per_prompt", "grpo compares the samples of a group"),
        (
            {
                "reward": {"rm_type": "tournament", "judge_url": "http://j/v1", "judge_model": "m"},
                "eval": {"sets": [{"name": "held", "path": "held.jsonl"}]},
            },
            "eval.sets.held",
            "1 sample a prompt; rm_type = tournament compares two at least",
        ),
        (
            {"rollout": {"agent": "my.agents:run"}, "gateway": {"gateway_replicas": 0}},
            "gateway.gateway_replicas",
            "agents ask the model through a gateway; use at least 1",
        ),
        ({"rollout": {"agent_roles": ["left"]}}, "rollout.agent_roles", "no agent plays the rollouts"),
        ({"rollout": {"agent": "my:run", "agent_roles": ["left", "left"]}}, "rollout.agent_roles", "a name stands there twice"),
        ({"rollout": {"agent": "my:run", "agent_roles": ["the left"]}}, "rollout.agent_roles.0", "pattern"),
        ({"rollout": {"agent_service": "serve"}}, "rollout.agent_service", "no agent of this run speaks to it"),
        ({"rollout": {"min_rollouts": 1}}, "rollout.min_rollouts", "grpo compares the rollouts of a group; use at least 2"),
        (
            {"rollout": {"missing_log_probs": "recompute"}},
            "rollout.missing_log_probs",
            "recompute, but algorithm.off_policy = decoupled (the default) with rollout.max_staleness = 1 reads them",
        ),
        (
            {"rollout": {"missing_log_probs": "recompute", "max_staleness": 0}, "algorithm": {"use_tis": True}},
            "rollout.missing_log_probs",
            "algorithm.use_tis = true reads them; the trainer's own stand in with max_staleness = 0",
        ),
        (
            {"rollout": {"surplus_rollouts": 1}},
            "rollout.surplus_rollouts",
            "aborted one by one only where agents, episodes or custom_generate_function_path make them; use over_sampling_batch_size",
        ),
        (
            {"rollout": {"surplus_rollouts": 4096, "agent": "my.agents:run"}},
            "rollout.surplus_rollouts",
            "with n_samples_per_prompt = 2 at most",
        ),
        ({"rollout": {"min_rollouts": 3}}, "rollout.min_rollouts", "a group has n_samples_per_prompt = 2 rollouts"),
        (
            {"rollout": {"rollout_batch_size": 6}, "trainer": {"global_batch_size": 8, "num_steps_per_rollout": 2}},
            "trainer.global_batch_size",
            "6 x 2 = 12 samples are not global_batch_size x num_steps_per_rollout = 8 x 2 = 16",
        ),
        ({"rollout": {"over_sampling_batch_size": 1}}, "rollout.over_sampling_batch_size", "1 groups do not fill a batch"),
        ({"rollout": {"rollout_window": 4}}, "rollout.rollout_window", "belongs to rollout_order = windowed_fifo, not to completion"),
        (
            {"rollout": {"in_flight_on_push": "retract", "sglang": {"enable_hierarchical_cache": True}}},
            "rollout.sglang",
            "disable-radix-cache = false beside enable-hierarchical-cache",
        ),
        ({"rollout": {"rollout_order": "windowed_fifo", "rollout_window": 1}}, "rollout.rollout_window", "1 groups do not fill a batch"),
        ({"reward": {"group_rm": True}}, "reward.group_rm", "needs custom_rm_path"),
        ({"trainer": {"offload_train": True}}, "trainer.offload_train", "belongs to colocate = true"),
        ({"trainer": {"offload_rollout": True}}, "trainer.offload_rollout", "belongs to colocate = true"),
        (
            {"trainer": {"colocate": True}, "rollout": {"rollout_replicas": 2}},
            "rollout.rollout_replicas",
            "2 engines of 1 GPUs do not fit on the trainer's 1",
        ),
        (
            {"trainer": {"colocate": True, "train_device": "cuda"}, "rollout": {"rollout_device": "cpu"}},
            "rollout.rollout_device",
            "cpu, but train_device is cuda",
        ),
        (
            {"trainer": {"colocate": True}, "weights": {"update_weight_transport": "disk"}},
            "weights.update_weight_transport",
            "colocated engines share the trainer's memory",
        ),
        ({"trainer": {"colocate": True}, "weights": {"join_from": "disk"}}, "weights.join_from", "get all weights from the trainer"),
        ({**SERVED, "sft": {"sft_data": "d.jsonl"}}, "sft.sft_data", "left out where commands come from outside (myxo serve)"),
        ({**SERVED, "trainer": {"custom_megatron_init_path": "m:f"}}, "trainer.custom_megatron_init_path", "(myxo serve)"),
        (
            {**SERVED, "trainer": {"megatron": {"moe-aux-loss-coeff": 0.01, "moe-z-loss-coeff": None}}},
            "trainer.megatron",
            "without moe_aux_loss_coeff where",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(tmp_path: Path, sections: dict[str, Any], field: str, words: str) -> None:
    error = refused(values(tmp_path, **sections))
    assert error.field == field
    assert words in str(error)


@table(
    ("sections", "words"),
    [
        ({"trainer": {"colocate": True}}, "trainer.colocate"),
        ({"trainer": {"actor_num_nodes": 2}}, "trainer.actor_num_nodes = 2"),
        ({"rollout": {"external_engines": ["h1:1"]}}, "rollout.external_engines"),
        ({"rollout": {"engine_groups": [{"num_gpus": 1}]}}, "rollout.engine_groups"),
        ({"rollout": {"models": {"judge": {"hf_checkpoint": "/m"}}}}, "rollout.models"),
        ({"rollout": {"rollout_function_path": "my.module:generate"}}, "rollout_function_path"),
        ({"rollout": {"agent": "my.module:agent"}}, "gateways"),
        ({"rollout": {"rollout_num_gpus_per_engine": 2}}, "does not fit on the trainer's 1"),
        ({"rollout": {"rollout_device": "cpu"}, "trainer": {"train_device": "cuda"}}, "differ"),
        ({"algorithm": {"advantage_estimator": "ppo"}}, "critic"),
        ({"weights": {"update_weight_transport": "disk"}}, "weights.update_weight_transport"),
        ({"episode": {"episode_url": "http://h:1"}}, "episode.episode_url"),
    ],
)
def test_what_does_not_go_with_lent_gpus_is_refused(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    lending = {**sections, "trainer": {**sections.get("trainer", {}), "lend_gpus": True}}
    with pytest.raises((ConfigError, Problems)) as caught:
        run_config(tmp_path, **lending)
    assert "trainer.lend_gpus" in str(caught.value) and words in str(caught.value)
    run_config(tmp_path, trainer={"lend_gpus": True})


def test_environments_are_named_by_type_url_and_table(tmp_path: Path) -> None:
    plain = run_config(tmp_path).reward
    assert (plain.environment_names(), plain.external) == (sorted(built_in := [*VERIFIERS, "given"]), {})
    kinds = ("ifbench", "math-verify", "reasoning-gym", "sandbox", "sympy")
    assert plain.queues() == ["verifiers", *(f"verifiers-{kind}" for kind in kinds)]
    one = run_config(tmp_path, reward={"rm_type": "environment", "environment_url": "http://grader:8080"}).reward
    assert (one.environment_names(), one.external) == (sorted([*built_in, "environment"]), {"environment": "http://grader:8080"})
    table = {"grader": "http://grader:8080", "my_tests": "nats:tests"}
    many = run_config(tmp_path, reward={"rm_type": "grader", "environments": table}).reward
    assert (many.environment_names(), many.external) == (sorted([*built_in, "grader", "my_tests"]), table)
    assert many.queues() == sorted([*plain.queues(), "grader", "my_tests"])
    assert (many.environment_of(None), many.environment_of("math")) == ("grader", "math")
    own = run_config(tmp_path, reward={"rm_type": "deepscaler", "environments": table, "custom_rm_path": "my.rewards:score"}).reward
    assert (own.environment_names(), own.external) == (["custom_rm"], {})
    assert (own.environment_of(None), own.environment_of("math")) == ("custom_rm", "custom_rm")


@table(
    ("reward", "field", "value", "words"),
    [
        ({"rm_type": "environment"}, "reward.environment_url", None, "required with rm_type = environment: http://host:port"),
        ({"rm_type": "remote_rm"}, "reward.rm_url", None, "required with rm_type = remote_rm: http://host:port/path"),
        ({"rm_type": "remote_rm", "rm_url": "judge:8000"}, "reward.rm_url", "judge:8000", "http://host:port/path"),
        ({"rm_url": "http://169.254.169.254/"}, "reward.rm_url", "http://169.254.169.254/", "link-local"),
        ({"rm_type": "judge"}, "reward.judge_url", None, "required with rm_type = judge: http://host:port/v1"),
        ({"rm_type": "tournament"}, "reward.judge_url", None, "required with rm_type = tournament: http://host:port/v1"),
        ({"judge_url": "http://judge:1/v1"}, "reward.judge_model", None, "required with judge_url"),
        ({"judge_pattern": "("}, "reward.judge_pattern", "(", "no regular expression"),
        ({"answer_pattern": "(a)(b)"}, "reward.answer_pattern", "(a)(b)", "has 2 groups; expected one at most"),
        ({"rm_type": "weighted"}, "reward.reward_weights", {}, "required with rm_type = weighted: name = weight"),
        ({"reward_weights": {"f1": 1.0}}, "reward.reward_weights", {"f1": 1.0}, "is for rm_type = weighted"),
        ({"rm_type": "weighted", "reward_weights": {"exac": 1.0}}, "reward.reward_weights", {"exac": 1.0}, "did you mean exact?"),
        ({"rm_type": "weighted", "reward_weights": {"judge": 1.0}}, "reward.judge_url", None, "required with reward_weights = judge"),
        ({"rm_type": "weighted", "reward_weights": {"custom_rm": 1.0}}, "reward.custom_rm_path", None, "package.module:function"),
        ({"rm_type": "graderr", "environments": {"grader": "nats:grader"}}, "reward.rm_type", "graderr", "did you mean grader?"),
        ({"environments": {"grader": "http://"}}, "reward.environments.grader", "http://", "names no host"),
        ({"environment_url": "http://me:hush@grader?x"}, "reward.environment_url", "http://…@grader?x", "query"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_field(
    tmp_path: Path, reward: dict[str, Any], field: str, value: object, words: str
) -> None:
    error = refused(values(tmp_path, reward=reward))
    assert (error.field, error.value) == (field, value)
    assert words in error.expected
    assert "hush" not in str(error)


TOML = """
[run]
name = "from-file"
[model]
hf_checkpoint = "model"
[data]
prompt_data = "/absolute/prompts.jsonl"
[rollout]
num_rollout = 4
rollout_batch_size = 2
n_samples_per_prompt = 2
[rollout.sglang]
mem-fraction-static = 0.8
page-size = 1
"""


def test_a_file_is_read_with_overrides_on_top_and_paths_made_absolute(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    config = load(path, {"rollout": {"num_rollout": "9", "sglang": {"page-size": "16"}}, "trainer": {"lr": "1e-4"}})
    assert config.rollout.num_rollout == 9
    assert config.trainer.lr == 1e-4
    assert config.rollout.sglang == {"mem-fraction-static": 0.8, "page-size": "16"}
    assert config.model.hf_checkpoint == Path(os.getcwd()) / "model"
    assert config.run.dir == Path(os.getcwd()) / "runs"
    assert config.data.prompt_data == [DataFile(Path("/absolute/prompts.jsonl"))]
    assert config.eval.eval_prompt_data is None


def test_a_missing_file_a_broken_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, words in (
        (tmp_path / "none.toml", "no such file"),
        (broken, "not a readable TOML"),
        (binary, "not a readable"),
        (tmp_path, "not a"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(path)


def test_overrides_do_not_hide_a_section_that_is_no_section(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('rollout = 3\n[run]\nname = "a"\n')
    with pytest.raises(Problems, match=r"expected a section \[rollout\]"):
        load(path, {"rollout": {"num_rollout": "9", "sglang": {"a": "b"}}})


RECORDED = {
    *("lr", "min_lr", "critic_lr", "weight_decay", "clip_grad", "eps_clip", "eps_clip_high", "eps_clip_c", "value_clip", "tis_clip"),
    *("tis_clip_low", "kl_loss_coef", "kl_coef", "entropy_coef", "rollout_temperature", "mtp_loss_scaling_factor"),
    *("max_tokens_per_gpu", "log_probs_chunk_size", "reset_optimizer_states", "passrate_threshold"),
}


def test_exactly_the_marked_fields_may_change_on_resume() -> None:
    def marked(mark: str) -> set[str]:
        fields = [item for model in SECTIONS.values() for item in model.model_fields.items()]
        return {field for field, info in fields if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(mark)}

    assert marked("recorded") == RECORDED
    assert marked("mutable") == MUTABLE | RECORDED


FIXED = "exists with another value"
NO_REFERENCE = "no reference policy"
PPO = {"advantage_estimator": "ppo"}
QAT: dict[str, Any] = {"trainer": {"train_env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}}


@table(
    ("old", "new", "refused"),
    [
        ({}, {"trainer": {"lr": 2e-6}}, ""),
        ({}, {"algorithm": {"eps_clip": 0.1, "eps_clip_high": 0.3}}, ""),
        ({}, {"algorithm": {"entropy_coef": 0.01}}, ""),
        ({}, {"rollout": {"rollout_temperature": 0.7}}, ""),
        (
            {"algorithm": {"off_policy": "none"}},
            {"algorithm": {"off_policy": "none"}, "rollout": {"rollout_temperature": 0.7}},
            "off_policy = none does not correct",
        ),
        ({"algorithm": {"kl_loss_coef": 0.01}}, {"algorithm": {"kl_loss_coef": 0.1}}, ""),
        ({"algorithm": {"kl_loss_coef": 0.01}}, {}, ""),
        ({}, {"algorithm": {"kl_loss_coef": 0.1}}, NO_REFERENCE),
        ({"algorithm": {"use_kl_loss": True}}, {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1}}, ""),
        ({"algorithm": PPO}, {"algorithm": {**PPO, "kl_coef": 0.1}}, NO_REFERENCE),
        ({}, {"trainer": {"train_env_vars": {"NCCL_DEBUG": "INFO", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "0"}}}, ""),
        ({}, QAT, FIXED),
        (QAT, {}, FIXED),
        ({}, {"rollout": {"rollout_batch_size": 8}}, FIXED),
        ({}, {"rollout": {"n_samples_per_prompt": 8}}, FIXED),
        ({}, {"rollout": {"max_staleness": 3}}, FIXED),
    ],
)
def test_what_may_change_of_a_run_that_goes_on(old: dict[str, Any], new: dict[str, Any], refused: str, tmp_path: Path) -> None:
    found = runs.differences(run_config(tmp_path, **old), run_config(tmp_path, **new))
    if not refused:
        assert found == []
        return
    assert found and all(refused in problem.expected and "myxo up CONFIG --from test --name NAME" in problem.expected for problem in found)


def test_changes_names_old_and_new_and_leaves_out_what_may_change(tmp_path: Path) -> None:
    old = run_config(tmp_path, eval={"eval_prompt_data": "heldout.jsonl"})
    new = run_config(
        tmp_path,
        rollout={"num_rollout": 50, "rollout_replicas": 4, "max_staleness": 3, "sglang": {"a": 1}},
        trainer={"lr": 1e-5, "save_interval": 7},
        eval={"eval_interval": 5, "eval_prompt_data": "heldout.jsonl"},
    )
    assert changes(old, old) == []
    assert changes(old, new) == ["rollout.max_staleness: 1 → 3", "rollout.sglang: {} → {'a': 1}"]
    assert changes(old, new, "recorded") == ["trainer.lr: 1e-06 → 1e-05"]


@table(
    ("trainer", "depends"),
    [
        ({"lr_decay_style": "linear"}, True),
        ({"lr_warmup_fraction": 0.5}, True),
        ({"lr_decay_style": "linear", "lr_decay_iters": 5}, False),
        ({"lr_warmup_iters": 2}, False),
    ],
)
def test_another_number_of_steps_is_a_change_of_the_training_where_the_rate_depends_on_it(
    trainer: dict[str, Any], depends: bool, tmp_path: Path
) -> None:
    old, new = (run_config(tmp_path, trainer=trainer, rollout={"num_rollout": steps}) for steps in (20, 50))
    assert changes(old, new, "recorded") == (["rollout.num_rollout: 20 → 50"] if depends else [])


def missing_files(config: RunConfig) -> list[ConfigError]:
    """What the checks of a config's files find, in their order."""
    inspection = Inspection(config)
    return [problem for check in (model_checks.check_files, data_checks.check_files) for problem in check(inspection)]


def test_paths_that_do_not_exist_are_refused_by_field(tmp_path: Path) -> None:
    config = run_config(tmp_path, eval={"eval_prompt_data": str(tmp_path / "eval.jsonl")}, sft={"sft_data": str(tmp_path / "sft.jsonl")})
    todo = [
        ("model.hf_checkpoint", lambda: (tmp_path / "model").mkdir()),
        ("model.hf_checkpoint", lambda: (tmp_path / "model" / "config.json").write_text("{}")),
        ("model.hf_checkpoint", lambda: (tmp_path / "model" / "tokenizer.json").write_text("{}")),
        ("data.prompt_data", lambda: (tmp_path / "prompts.jsonl").write_text("{}\n")),
        ("eval.eval_prompt_data", lambda: (tmp_path / "eval.jsonl").write_text("{}\n")),
        ("sft.sft_data", lambda: (tmp_path / "sft.jsonl").write_text("{}\n")),
    ]
    for field, remedy in todo:
        assert missing_files(config)[0].field == field
        remedy()
    assert not missing_files(config)


@table(
    ("trainer", "field", "words"),
    [
        ({"freeze_params_name_list": ["("]}, "trainer.freeze_params_name_list", "no regular expression"),
        ({"only_train_params_name_list": ["mlp"], "lora_rank": 8}, "trainer.only_train_params_name_list", "lora_rank"),
        ({"lora_rank": 0}, "trainer.lora_rank", "greater than 0"),
        ({"lora_rank": 8, "target_modules": []}, "trainer.target_modules", "at least 1 item"),
    ],
)
def test_what_trains_is_refused_by_field_where_it_makes_no_sense(tmp_path: Path, trainer: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_config(tmp_path, trainer=trainer)
    assert caught.value.field == field


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[trainer]\nlearning_rate = 1\nclip_grad = -1.0\n")
    config = tmp_path / "run.toml"
    config.write_text(
        'base = "base.toml"\n[run]\nname = "a"\n[model]\nhf_checkpoint = "m"\n[rollouts]\n[data]\nprompt_data = "a.jsonl"\n'
        "[rollout]\nnum_rollouts = 3\nrollout_batch_size = 0\nn_samples_per_prompt = 1\n"
    )
    with pytest.raises(Problems) as caught:
        load(config, {"eval": {"eval_interval": -1}})
    told = [(problem.field, problem.expected) for problem in caught.value.problems if isinstance(problem, ConfigError)]
    rollout = ["rollout.num_rollouts", "rollout.rollout_batch_size"]
    assert sorted(field for field, _ in told) == ["eval.eval_interval", *rollout, "rollouts", "trainer.clip_grad", "trainer.learning_rate"]
    assert all(expected.endswith(f"(in {tmp_path}/base.toml)") == field.startswith("trainer.") for field, expected in told)


def test_sizes_that_do_not_go_together_are_told_at_once(tmp_path: Path) -> None:
    rollout, trainer = {"rollout_batch_size": 3, "n_samples_per_prompt": 1}, {"global_batch_size": 7, "offload_train": True}
    with pytest.raises(Problems) as caught:
        run_config(tmp_path, rollout=rollout, trainer=trainer)
    assert [str(problem).partition(" =")[0] for problem in caught.value.problems] == [
        "trainer.global_batch_size",
        "rollout.n_samples_per_prompt",
        "trainer.offload_train",
    ]


def test_fields_that_do_not_go_together_are_told_beside_one_that_is_refused(tmp_path: Path) -> None:
    trainer = {"lr": "fast", "tensor_model_parallel_size": 3, "offload_train": True}
    with pytest.raises(Problems) as caught:
        run_config(tmp_path, trainer=trainer)
    fields = [str(problem).partition(" =")[0] for problem in caught.value.problems]
    assert fields == ["trainer.lr", "trainer.tensor_model_parallel_size", "trainer.offload_train"]


def test_what_follows_from_a_refused_field_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"n_samples_per_prompt"):
        run_config(tmp_path, rollout={"n_samples_per_prompt": "many"}, trainer={"global_batch_size": 7})


@pytest.mark.parametrize(("cores", "gateways", "workers"), [(2, 1, 2), (16, 2, 4), (128, 8, 16)])
def test_gateways_and_agents_processes_follow_the_cores(
    cores: int, gateways: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config = run_config(tmp_path, rollout={"agent": "my.agents:run", "rollout_replicas": 2})
    assert (config.gateways, agent_workers(config.rollout)) == (gateways, workers)
    assert run_config(tmp_path).gateways == 0
    assert run_config(tmp_path, gateway={"gateway_port": 8000}).gateways == 1
    assert run_config(tmp_path, rollout={"agent": "my.agents:run"}, gateway={"gateway_port": 8000}).gateways == 1
    assert run_config(tmp_path, rollout={"agent": "my.agents:run"}, gateway={"gateway_replicas": 5}).gateways == 5
    assert agent_workers(run_config(tmp_path, rollout={"agent_workers": 3}).rollout) == 3


def test_names_of_other_projects_lead_to_fields_and_sections_and_are_none_of_ours() -> None:
    fields, sections = flag_table.of_others("fields"), flag_table.of_others("sections")
    assert set(fields.values()) <= set(field_sections()) and set(sections.values()) <= set(RunConfig.model_fields)
    told = flag_table.of_others("sentences")
    assert not told.keys() & fields.keys() and all(set(re.findall(r"\w+_\w+", said)) <= set(field_sections()) for said in told.values())
    names = {*fields, *told}
    assert not [name for name in names if name in field_sections() or flag_table.of_slime(name) or name in flag_table.spellings()]
    assert not set(sections) & set(RunConfig.model_fields)


@table(
    ("name", "means"),
    [
        ("num_episodes", r"num.epoch\?"),
        ("vllm_num_engines", r"rollout.replicas\?"),
        ("gen_batch_size", r"over.sampling.batch.size\?"),
        ("train_batch_size", "rollout_batch_size where it counts the prompts of a batch"),
        ("ppo_mini_batch_size", "num_steps_per_rollout: the optimizer steps of a batch"),
        ("ppo_micro_batch_size_per_gpu", "use max_tokens_per_gpu"),
        ("max_epochs", "a batch is trained once"),
    ],
)
def test_a_name_of_another_project_leads_to_what_means_the_same(name: str, means: str) -> None:
    with pytest.raises(ConfigError, match=means):
        flags.parse([f"--{name.replace('_', '-')}", "4"])
    (problem,) = known_fields({"trainer": {name.replace("_", "-"): 4}}).problems
    assert re.search(means, str(problem))


@table(
    "weights",
    [
        {"update_weight_transport": "s3"},
        {"object_store_url": "https://s3.example.org/bucket"},
        *(
            {"update_weight_transport": "s3", "object_store_url": url}
            for url in (
                "s3://bucket",
                "https://h",
                "http://s3.example.org/bucket",
                "https://k:s@h/bucket",
                "https://h/bucket/../x",
                "https://h/B",
            )
        ),
    ],
)
def test_an_object_store_is_named_by_its_bucket_and_over_tls(weights: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path, weights=weights)
    assert caught.value.field == "weights.object_store_url"


def test_a_long_response_has_hours_and_work_waits_minutes_for_an_engine(tmp_path: Path) -> None:
    rollout = run_config(tmp_path).rollout
    assert (rollout.generate_timeout, rollout.patience) == (14400, 600)
    assert run_config(tmp_path, rollout={"generate_timeout": 20}).rollout.patience == 20
