"""What the model lacks for flags of SGLang's is refused before the start, and what samples otherwise is said."""

import fnmatch
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from myxo.preflight.engine_checks import check_alignment, check_engine_model, check_external_engines
from myxo.preflight.inspection import Findings, Inspection, Note
from myxo.preflight.model_checks import check_engine_context, check_engines, check_training
from myxo.preflight.objective_checks import NEEDS, check_needs, check_support
from shared.config.run_config import field_sections
from tests.support.run_config import run_config
from tests.support.tables import table

SHARED = {"enable-dp-attention": True, "dp-size": 2}


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def said(findings: Findings) -> str:
    return " | ".join(f"note: {found.text}" if isinstance(found, Note) else str(found) for found in findings)


def checked(directory: Path, flags: dict[str, Any], **sections: dict[str, Any]) -> str:
    sections.setdefault("rollout", {})["sglang"] = flags
    return said(check_engine_model(Inspection(run_config(directory, **sections))))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"speculative-algorithm": "EAGLE"}, "a model with layers that draft, or speculative-draft-model-path: its config.json names none"),
        ({"speculative_algorithm": "nextn"}, "its config.json names none (num_nextn_predict_layers)"),
        ({"--speculative-algorithm": "EAGLE3"}, "speculative-draft-model-path besides"),
        (
            {"speculative-algorithm": "STANDALONE", "speculative-draft-model": "/none"},
            "speculative-draft-model = '/none': the directory of",
        ),
        ({"speculative-algorithm": "EAGEL"}, "did you mean EAGLE?"),
        ({"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "org/draft"}, "note: .*draft-model-path: the draft is not tr"),
        ({"speculative-num-steps": 3}, "note: rollout.sglang.speculative-num-steps: without effect, as no speculative-algorithm is given"),
        ({"quantization": "fp8"}, "quantization = 'fp8': none: engines load the trainer's weights with each push"),
        ({"quantization": "awq"}, "quantization = 'awq': none: the weights of hf_checkpoint are not quantized"),
        ({"quantization": "w8a8_int8"}, "the weights of hf_checkpoint are not quantized"),
        ({"kv-cache-dtype": "fp8_e4m3"}, "note: rollout.sglang.kv-cache-dtype = fp8_e4m3: engines compute with fewer bits"),
        ({"dtype": "half"}, "note: rollout.sglang.dtype = half: engines compute with fewer bits"),
        ({"enable-dp-attention": True, "dp-size": 3}, "dp-size = 3: a divisor of rollout_num_gpus_per_engine = 1"),
        ({"enable-lora": True}, "note: rollout.sglang.enable-lora changes nothing"),
        ({"enable_lmcache": True}, "rollout.sglang.enable_lmcache = True: none in engines that get pushes: it finds prefixes by"),
        ({"enable-cp-decode-attn-tp": True}, "none in engines that get pushes: decode steps compute with slices"),
        ({"dcp-replicate-q-proj": True}, "none in engines that get pushes: decode steps compute queries"),
        (
            {"offload_group_size": 4},
            "rollout.sglang.offload_group_size = 4: none in engines that get pushes: experts are computed with copies",
        ),
        ({"kt-weight-path": "/experts"}, "kt-weight-path = '/experts': none in engines that get pushes: the experts on the CPU stay"),
    ],
)
def test_what_the_model_lacks_for_an_engines_flag_is_named(tmp_path: Path, model: Path, flags: dict[str, Any], words: str) -> None:
    found = checked(tmp_path, flags)
    assert all(part in found for part in words.split(".*")), found


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"speculative-algorithm": "NGRAM"},
        {"quantization": "unquant", "kv-cache-dtype": "auto", "dtype": "bfloat16"},
        {"quantization": None, "enable-lmcache": False, "enable-hierarchical-cache": True, "hicache-storage-backend": "file"},
        {"speculative-algorithm": "none"},
        {"offload-group-size": -1, "dcp-replicate-q-proj": False},
    ],
)
def test_what_every_model_has_is_taken(tmp_path: Path, model: Path, flags: dict[str, Any]) -> None:
    assert checked(tmp_path, flags) == ""


IN_BLOCKS = {"num_experts": 8, "quantization_config": {"quant_method": "fp8"}}
DRAFT_RUNNER, MTP = {"speculative-moe-runner-backend": "flashinfer_trtllm"}, {"trainer": {"enable_mtp_training": True}}
BY_DISK = {"weights": {"update_weight_transport": "disk"}}


@table(
    ("flags", "entries", "sections", "refused"),
    [
        ({"moe-runner-backend": "flashinfer_trtllm_routed"}, {"num_experts": 8}, {}, True),
        ({"moe_runner_backend": "flashinfer_trtllm_routed"}, {"num_experts": 8}, BY_DISK, False),
        ({"moe-runner-backend": "flashinfer_trtllm"}, {"n_routed_experts": 8}, BY_DISK, True),
        ({"moe-runner-backend": "experimental_sgl_trtllm"}, {"num_experts": 8}, {}, True),
        ({"moe-runner-backend": "flashinfer_trtllm"}, {"num_experts": 8}, {"debug": {"debug_rollout_only": True}}, False),
        ({"moe-runner-backend": "flashinfer_trtllm"}, {}, {}, False),
        ({"moe-a2a-backend": "megamoe"}, {"num_experts": 8}, {}, False),  # it is for 8-bit experts alone
        ({"moe-a2a-backend": "megamoe"}, {"num_experts": 8}, {"rollout": {"rollout_precision": "fp8"}}, True),
        ({"moe-a2a-backend": "megamoe"}, IN_BLOCKS, {}, True),
        ({"moe-runner-backend": "megamoe"}, IN_BLOCKS, {}, True),
        ({"moe-runner-backend": "flashinfer_trtllm"}, IN_BLOCKS, {}, False),
        ({"moe-runner-backend": "flashinfer_trtllm"}, {"num_experts": 8}, {"rollout": {"rollout_precision": "int4"}}, True),
        (DRAFT_RUNNER, {"num_experts": 8}, MTP, True),
        (DRAFT_RUNNER, {"num_experts": 8}, {}, False),  # no push brings the draft's
        (DRAFT_RUNNER | {"speculative-draft-model-path": "/other"}, {"num_experts": 8}, MTP, False),
    ],
)
def test_kernels_take_experts_as_they_are_pushed(
    flags: dict[str, Any], entries: dict[str, Any], sections: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """SGLang would rearrange those that it loads itself, and not those that are pushed: these would not fit, or lie in the wrong places."""
    (tmp_path / "config.json").write_text(json.dumps(entries))
    found = checked(tmp_path, flags, model={"hf_checkpoint": str(tmp_path)}, **{name: dict(section) for name, section in sections.items()})
    assert ("it wants experts in another layout than they are pushed in" in found) == refused, found


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({}, []),
        ({"rollout": {"rollout_top_p": 0.9}}, ["rollout_top_p"]),
        ({"trainer": {"train_dtype": "bfloat16", "lora_rank": 8}}, ["trainer.train_dtype", "trainer.lora_rank"]),
        ({"trainer": {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}}, ["trainer.tensor_model_parallel_size"]),
        ({"rollout": {"sglang": {"kv-cache-dtype": "fp8_e5m2"}}}, ["rollout.sglang.kv-cache-dtype"]),
        ({"rollout": {"rollout_precision": "int4"}}, ["rollout.rollout_precision"]),
        ({"weights": {"update_weight_dtype": "bfloat16"}}, ["weights.update_weight_dtype"]),
        ({"trainer": {"trainer_backend": "torch", "fsdp_float8": "rowwise"}}, ["trainer.fsdp_float8"]),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, ["model.hf_checkpoint (quantized)"]),
    ],
)
def test_what_keeps_both_sides_from_the_same_bits_is_named(tmp_path: Path, model: Path, sections: dict[str, Any], named: list[str]) -> None:
    given = sections | {"rollout": {"alignment": "bitwise", "rollout_device": "cpu", **sections.get("rollout", {})}}
    given["trainer"] = {"train_device": "cpu", "train_dtype": "float32", **sections.get("trainer", {})}
    entries = json.loads((model / "config.json").read_text()) | given.pop("config", {})
    (model / "config.json").write_text(json.dumps(entries))
    found = said(check_alignment(Inspection(run_config(tmp_path, **given))))
    assert all(name in found for name in named) and ("in the way" in found) == bool(named)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"speculation": "mtp"}}, "rollout.speculation = 'EAGLE': a model with layers that draft"),
        ({"rollout": {"speculation": "draft"}}, "rollout.speculation = 'STANDALONE': speculative-draft-model-path besides"),
        ({"trainer": {"use_rollout_routing_replay": True}}, "use_rollout_routing_replay = True: false, or speculation by mtp"),
        ({"eval": {"eval_min_new_tokens": 4}}, "min_new_tokens = 4: none where the engine speculates"),
        ({"rollout": {"sglang": {"enable-deterministic-inference": True}}}, "inference = True: left out beside speculation"),
        ({"rollout": {"alignment": "close"}}, "rollout.alignment = 'close': left out beside speculation"),
        ({"rollout": {"sglang": {"preferred-sampling-params": '{"min_p": 0.1}'}}}, "preferred-sampling-params: min_p = 0.1: none where"),
        ({"rollout": {"sglang": {"speculative-algorithm": "EAGLE3", "speculative-eagle-topk": 4}}}, "1 on a CPU: a chain of drafts"),
        (
            {"rollout": {"sglang": {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 0}}},
            "num-steps = 0: an integer of at least 1",
        ),
        ({"rollout": {"sglang": {"speculative-num-draft-tokens": -2}}}, "num-draft-tokens = -2: an integer of at least 1"),
        (
            {"rollout": {"speculation": "draft", "sglang": {"speculative-num-steps": 2, "speculative-num-draft-tokens": 8}}},
            "num-draft-tokens = 8: 3, one more than speculative-num-steps",
        ),
        ({"rollout": {"speculation": "auto"}}, ""),
        ({"rollout": {"speculation": "auto"}, "trainer": {"colocate": True}}, "note: rollout.speculation = auto chooses the kind"),
    ],
)
def test_what_speculation_lacks_or_leaves_out_is_refused(tmp_path: Path, model: Path, sections: dict[str, Any], words: str) -> None:
    sections["rollout"] = {"speculation": "ngram", "rollout_device": "cpu", **sections.get("rollout", {})}
    held_out = {"eval_prompt_data": ["held-out", str(tmp_path / "eval.jsonl")], "eval_interval": 1}
    sections |= {"eval": held_out | sections["eval"]} if "eval" in sections else {}
    found = said(check_engine_model(Inspection(run_config(tmp_path, **sections))))
    assert words in found and (words or not found), found


@pytest.mark.parametrize(
    ("rollout", "sections", "words"),
    [
        ({"rollout_num_gpus_per_engine": 4}, {}, ""),
        ({"rollout_num_gpus_per_engine": 4, "in_flight_on_push": "abort"}, {}, ""),
        ({}, {}, "pp-size = 2: a divisor of rollout_num_gpus_per_engine = 1"),
        (
            {"rollout_num_gpus_per_engine": 6, "sglang": {"pipeline_parallel_size": "4"}},
            {},
            "pp-size = 4: a divisor of .* = 6.*model's 2 layers",
        ),
        ({"rollout_num_gpus_per_engine": 4, "sglang": {"pp-size": "+2", "ep_size": 4}}, {}, "ep_size = 4: a divisor of .* / 2 stages = 2"),
        ({"in_flight_on_push": "retract"}, {}, "in_flight_on_push = 'retract': abort, or leave it out, with pp-size = 2"),
        ({"speculation": "ngram"}, {}, "rollout.speculation = 'ngram': none with pp-size"),
        ({"sglang": {"pp-size": 2, "speculative-algorithm": "NGRAM"}}, {}, "speculative-algorithm = 'NGRAM': none with pp-size"),
        ({}, {"trainer": {"use_rollout_routing_replay": True}}, "use_rollout_routing_replay = True: false with pp-size = 2"),
    ],
)
def test_what_engines_with_stages_cannot_do_is_refused(
    tmp_path: Path, model: Path, rollout: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    config = run_config(tmp_path, rollout={"sglang": {"pp-size": 2}, **rollout}, **sections)
    found = said(check_engine_model(Inspection(config)))
    assert re.search(words, found) and (words or not found), found
    assert config.rollout.pause_on_push == "abort"


def test_experts_that_there_are_not_are_not_replayed(tmp_path: Path, model: Path) -> None:
    for backend in ("megatron", "torch"):
        trainer = {"trainer_backend": backend, "use_routing_replay": True}
        assert "use_routing_replay = True: false; no experts of" in said(check_training(Inspection(run_config(tmp_path, trainer=trainer))))
        assert not said(check_training(Inspection(run_config(tmp_path, trainer={"trainer_backend": backend}))))


@pytest.mark.parametrize(
    ("topk", "tokens", "most", "refused"),
    [(64, 4096, None, True), (64, 64, None, False), (None, 4096, None, False), (64, 4096, 65, True), (64, 4096, 64, False)],
)
def test_a_context_that_torch_would_train_densely_is_refused(
    tmp_path: Path, model: Path, topk: int | None, tokens: int, most: int | None, refused: bool
) -> None:
    entries = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**entries, "index_topk": topk}))
    trainer = {"trainer_backend": "torch", "max_tokens_per_gpu": tokens}
    rollout = {"rollout_device": "cuda", "rollout_max_context_len": most, "rollout_max_response_len": 32}
    found = said(check_engine_context(Inspection(run_config(tmp_path, trainer=trainer, rollout=rollout))))
    assert ("context-length = None: at most 64 with trainer_backend = torch" in found) == refused


@pytest.mark.parametrize(
    ("kind", "heads", "rollout", "words"),
    [
        ("qwen3", (28, 4), {"rollout_num_gpus_per_engine": 7}, "per_engine = 7: a divisor of the model's 4 key/value heads"),
        ("qwen3", (28, 4), {"rollout_num_gpus_per_engine": 7, "rollout_device": "cpu"}, ""),
        ("qwen3", (32, 4), {"rollout_num_gpus_per_engine": 8}, ""),
        ("qwen3", (40, 8), {"rollout_num_gpus_per_engine": 16}, "per_engine = 16: a divisor of the model's 40 attention heads"),
        ("qwen3", (40, 8), {"rollout_num_gpus_per_engine": 16, "sglang": SHARED}, ""),
        ("qwen3", (36, 4), {"rollout_num_gpus_per_engine": 16, "sglang": SHARED}, "36 attention heads, divided by dp-size = 2"),
        ("qwen2", (40, 8), {"rollout_num_gpus_per_engine": 16, "sglang": SHARED}, "a divisor of the model's 40 attention heads"),
        ("gemma3_text", (4, 1), {"rollout_num_gpus_per_engine": 8, "sglang": SHARED}, "a divisor of the model's 4 attention heads"),
    ],
)
def test_an_engines_gpus_share_the_models_heads(
    tmp_path: Path, model: Path, kind: str, heads: tuple[int, int], rollout: dict[str, Any], words: str
) -> None:
    inspection = Inspection(run_config(tmp_path, rollout={"rollout_device": "cuda", **rollout}))
    assert inspection.architecture is not None
    shape = {"model_type": kind, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    inspection.architecture = replace(inspection.architecture, **shape)
    found = said(check_engines(inspection))
    assert words in found and (words or not found), found


def test_a_draft_has_the_models_vocabulary(tmp_path: Path, model: Path) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    flags = {"speculative-algorithm": "STANDALONE", "speculative-draft-model-path": str(draft)}
    assert checked(tmp_path, flags).startswith("note: ")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    assert f"a draft with vocab_size = {config['vocab_size']}, as the model has; its config.json has 7" in checked(tmp_path, flags)


def test_float32_that_engines_on_gpus_cast_is_said(tmp_path: Path, model: Path) -> None:
    def of(device: str, flags: dict[str, Any], train_dtype: str = "float32") -> str:
        return checked(tmp_path, flags, rollout={"rollout_device": device}, trainer={"train_dtype": train_dtype})

    assert "note: trainer.train_dtype = float32, rollout.sglang.dtype = bfloat16: engines compute with fewer bits" in of("cuda", {})
    assert of("cuda", {"dtype": "float32"}) == of("cpu", {}) == of("cuda", {}, "bfloat16") == ""
    alone = {"rollout": {"rollout_device": "cuda"}, "trainer": {"train_dtype": "float32"}, "debug": {"debug_rollout_only": True}}
    assert checked(tmp_path, {}, **alone) == "", "such engines get no weights"


def test_a_run_that_only_generates_may_quantize_as_it_loads(tmp_path: Path, model: Path) -> None:
    alone = {"debug": {"debug_rollout_only": True}}
    assert checked(tmp_path, {"quantization": "fp8"}, **alone) == ""
    assert "not quantized" in checked(tmp_path, {"quantization": "gptq"}, **alone)


def test_layers_that_draft_have_to_have_weights(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert "its files have no weights of them" in checked(tmp_path, {"speculative-algorithm": "EAGLE"})
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1, "num_hidden_layers": 1}))
    assert "note: rollout.sglang.speculative-algorithm: the layers that draft are not trained" in checked(
        tmp_path, {"speculative-algorithm": "EAGLE"}
    )


def test_layers_that_draft_are_found_behind_a_prefix(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"text_config": {"num_nextn_predict_layers": 1}, "num_hidden_layers": 61}))
    monkeypatch.setattr(Inspection, "weight_headers", {"language_model.model.layers.61.eh_proj.weight": ("BF16", [1, 1])})
    assert checked(tmp_path, {"speculative-algorithm": "EAGLE"}).startswith("note: ")


def test_a_quantized_checkpoint_is_not_said_to_have_no_quantization(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert checked(tmp_path, {"quantization": "awq"}) == ""  # another check refuses the checkpoint


@table(
    ("rollout", "words"),
    [
        (
            {"rollout_top_p": 0.95, "sglang": {"speculative-algorithm": "NGRAM"}},
            "rollout_top_p = 0.95: this run trains another distribution than it samples (no support_replay: "
            "rollout.sglang.speculative-algorithm = NGRAM verifies drafts",
        ),
        ({"rollout_top_k": 5000}, "rollout_top_k = 5000: this run"),
        ({"sglang": {"preferred-sampling-params": '{"min_p": 0.1, "repetition_penalty": 1.05}'}}, "repetition_penalty = 1.05: this run"),
        ({"sglang": {"preferred_sampling_params": {"frequency_penalty": 0.5}}}, "frequency_penalty = 0.5"),
        ({"sglang": {"speculative-accept-threshold-single": "0.8"}}, "rollout.sglang.speculative-accept-threshold-single = 0.8"),
        (
            {"engine_groups": [{"replicas": 1}, {"replicas": 1, "sglang": {"speculative_accept_threshold_single": 0.8}}]},
            "rollout.engine_groups.sglang.speculative-accept-threshold-single = 0.8",
        ),
        (
            {
                "engine_groups": [
                    {"replicas": 1, "sglang": {"preferred-sampling-params": {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.05}}},
                    {"replicas": 1},
                ]
            },
            "rollout.engine_groups.sglang.preferred-sampling-params: repetition_penalty = 1.05: this run",
        ),
    ],
)
def test_a_run_that_samples_otherwise_than_it_trains_is_told_so(tmp_path: Path, rollout: dict[str, Any], words: str) -> None:
    found = said(check_support(Inspection(run_config(tmp_path, rollout=rollout))))
    assert words in found and "train/support_mismatch is 1" in found
    assert not run_config(tmp_path, rollout=rollout, debug={"debug_rollout_only": True}).support_mismatch


@table(
    "rollout",
    [
        {},
        {"rollout_temperature": 0.7},
        {"rollout_top_p": 0.95, "rollout_top_k": 20, "sglang": {"preferred-sampling-params": '{"min_p": 0.1}'}},
        {"sglang": {"preferred-sampling-params": '{"min_p": 0, "top_p": 0.9}', "speculative-accept-threshold-acc": 1.0}},
        {"engine_groups": [{"replicas": 1}, {"replicas": 1, "sglang": {"preferred-sampling-params": '{"min_p": 0.1}'}}]},
        {"sglang": {"enable-strict-thinking": True}, "engine_groups": [{"replicas": 1, "sglang": {"enable-strict-thinking": False}}]},
    ],
)
def test_a_run_that_samples_what_it_trains_is_not(tmp_path: Path, rollout: dict[str, Any]) -> None:
    assert run_config(tmp_path, rollout=rollout).support_mismatch == []


def test_sizes_of_own_engines_are_said_to_change_nothing_beside_external_ones(tmp_path: Path, model: Path) -> None:
    away = {"external_engines": ["http://127.0.0.1:1"]}
    given = {"rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 8, "rollout_device": "cuda"}
    for rollout, notes in ((away, 0), (away | given, len(given)), (given, None)):
        found = said(check_external_engines(Inspection(run_config(tmp_path, model={"hf_checkpoint": str(model)}, rollout=rollout))))
        assert found.count("changes nothing") == (notes or 0), found
        assert all(f"rollout.{name} changes nothing" in found for name in given if notes), found


@pytest.mark.parametrize(
    ("sections", "idle"),
    [
        ({"trainer": {"lora_alpha": 32, "target_modules": ["q_proj"]}}, "trainer.lora_alpha, trainer.target_modules: .* needs lora_rank"),
        ({"trainer": {"lora_alpha": 32, "lora_rank": 8}}, ""),
        ({"trainer": {"min_lr": 1e-7, "lr_decay_iters": 9}}, "trainer.min_lr: .*trainer.lr_decay_iters: "),
        ({"trainer": {"min_lr": 1e-7, "lr_decay_iters": 9, "lr_decay_style": "cosine"}}, ""),
        ({"trainer": {"lr_decay_iters": 9, "lr_warmup_fraction": 0.5}}, ""),
        ({"trainer": {"save_hf_interval": 2, "critic_lr": 1e-5}}, "trainer.critic_lr: .*trainer.save_hf_interval: "),
        ({"monitoring": {"wandb_project": "mine"}}, "monitoring.wandb_project: .* needs use_wandb"),
        ({"monitoring": {"wandb_project": "mine", "wandb_mode": "disabled"}}, ""),
        ({"monitoring": {"keep_rollouts": 0, "keep_rollouts_tokens": True}}, "monitoring.keep_rollouts_tokens: "),
        ({"weights": {"update_weight_mode": "delta", "snapshot_interval": 0}}, "weights.update_weight_mode: .* needs snapshots"),
        ({"weights": {"update_weight_mode": "delta", "update_weight_full_interval": 3}}, ""),
        ({"rollout": {"rollout_concurrency": 9, "sglang_server_concurrency": 8}}, "rollout.sglang_server_concurrency: "),
        ({"rollout": {"sglang_server_concurrency": 8}}, ""),
        ({"reward": {"judge_timeout": 9, "rm_tries": 2}}, "reward.rm_tries: .*reward.judge_timeout: "),
        ({"curriculum": {"level_spread": 2}, "sft": {"sft_lr": 1e-4}}, "curriculum.level_spread: .*sft.sft_lr: "),
        ({"curriculum": {"level_spread": 2}, "data": {"data_source": "a.b:c"}, "sft": {"sft_lr": 1}}, "^note: sft.sft_lr: .* but for func"),
        ({"run": {"custom_args": {"lr_": 1}}}, "run.custom_args: .* needs a function"),
        ({"gateway": {"gateway_host": "0.0.0.0"}, "ingest": {"ingest_wait": 9}}, "gateway.gateway_host: .*ingest.ingest_wait: "),
        ({"gateway": {"gateway_host": "0.0.0.0", "gateway_port": 8000}}, ""),
    ],
)
def test_fields_without_what_they_need_are_said_to_have_no_effect(tmp_path: Path, sections: dict[str, Any], idle: str) -> None:
    found = said(check_needs(Inspection(run_config(tmp_path, **sections))))
    assert re.search(idle, found) if idle else not found, found


def test_what_needs_something_is_a_field() -> None:
    fields = [f"{section}.{field}" for field, section in field_sections().items()]
    for pattern in (pattern for _, _, patterns in NEEDS for pattern in patterns.split()):
        assert fnmatch.filter(fields, pattern), pattern
