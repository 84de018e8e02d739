"""Flags: every config field answers to one, SGLang's pass through, and a wrong one is refused with the nearest."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docs.slime_page import classify
from shared.config import flags
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.runtime.errors import ConfigError
from tests.support.run_config import values
from tests.support.slime_scripts import FLAGS, SCRIPTS
from tests.support.tables import table


def test_every_field_has_a_flag_and_a_line_of_help() -> None:
    text = "\n".join(flags.help_lines())
    for field in field_sections():
        flag = "--" + field.replace("_", "-")
        assert flag in flags.flags()
        assert f"{flag} " in text
    for section in RunConfig.model_fields:
        assert f"[{section}]" in text


@table(
    ("words", "expected"),
    [
        ("--rollout-batch-size 32", {"rollout": {"rollout_batch_size": "32"}}),
        ("--rollout-batch-size=32", {"rollout": {"rollout_batch_size": "32"}}),
        ("--n-samples-per-prompt 8 --lr 1e-4", {"rollout": {"n_samples_per_prompt": "8"}, "trainer": {"lr": "1e-4"}}),
        ("--rollout-top-k -1", {"rollout": {"rollout_top_k": "-1"}}),
        ("--rollout-shuffle", {"data": {"rollout_shuffle": True}}),
        ("--rollout-shuffle --lr 1", {"data": {"rollout_shuffle": True}, "trainer": {"lr": "1"}}),
        ("--no-rollout-shuffle", {"data": {"rollout_shuffle": False}}),
        ("--rollout-shuffle false", {"data": {"rollout_shuffle": False}}),
        ("--rollout-shuffle 0 --lr 1", {"data": {"rollout_shuffle": False}, "trainer": {"lr": "1"}}),
        ("--rollout-shuffle=true", {"data": {"rollout_shuffle": True}}),
        ("--no-use-distributed-optimizer", {"trainer": {"use_distributed_optimizer": False}}),
        ("--rollout-stop a b --lr 1", {"rollout": {"rollout_stop": ["a", "b"]}, "trainer": {"lr": "1"}}),
        ("--rollout-stop-token-ids 1 2", {"rollout": {"rollout_stop_token_ids": ["1", "2"]}}),
        ("--label-key none", {"data": {"label_key": None}}),
        ("--eval-interval None", {"eval": {"eval_interval": None}}),
        ("--input-key none", {"data": {"input_key": "none"}}),
        ("--apply-chat-template-kwargs {'a':1}", {"data": {"apply_chat_template_kwargs": {"a": 1}}}),
        (
            "--rm-type environment --environment-url http://arithmetic-node:8080",
            {"reward": {"rm_type": "environment", "environment_url": "http://arithmetic-node:8080"}},
        ),
        ("--environments {'judge':'nats:judge'}", {"reward": {"environments": {"judge": "nats:judge"}}}),
        ("--advantage-estimator gspo", {"algorithm": {"advantage_estimator": "gspo"}}),
        ("--tensor-model-parallel-size 2", {"trainer": {"tensor_model_parallel_size": "2"}}),
        ("", {}),
    ],
)
def test_flags_become_sections_and_fields(words: str, expected: dict[str, Any]) -> None:
    assert flags.parse(words.split()) == expected


@table(
    ("words", "expected"),
    [
        ("--sglang-mem-fraction-static 0.8", {"mem-fraction-static": "0.8"}),
        ("--sglang-mem-fraction-static=0.8", {"mem-fraction-static": "0.8"}),
        ("--sglang-disable-radix-cache", {"disable-radix-cache": True}),
        ("--sglang-disable-radix-cache --sglang-page-size 16", {"disable-radix-cache": True, "page-size": "16"}),
        ("--sglang-random-seed -1", {"random-seed": "-1"}),
    ],
)
def test_engine_flags_pass_through_verbatim(words: str, expected: dict[str, Any]) -> None:
    assert flags.parse(words.split()) == {"rollout": {"sglang": expected}}


@table(
    ("words", "message"),
    [
        ("--rollout-batchsize 3", r"--rollout-batchsize = '': unknown flag; did you mean --rollout-batch-size\?"),
        ("--rollout-batchsize=3", r"--rollout-batchsize = '3': unknown flag"),
        ("--no-lr 3", r"--no-lr = '': unknown flag; did you mean --lr\?"),
        ("--no-such-thing", r"--no-such-thing = '': unknown flag"),
        ("--no-colocate=false", "--no-colocate = 'false': no value: it turns --colocate off, which takes true or false"),
        ("--rolloutbatchsize 3", r"did you mean --rollout-batch-size\?"),
        ("--eval-prompts x", r"did you mean --eval-prompt-data\?"),
        ("--moe-router-dtypes x", r"did you mean --moe-router-dtype\?"),
        ("--sft-cadence 3", r"unknown flag; `myxo up --help` lists all, `myxo flags` Megatron's"),
        ("--tuning-data x", r"unknown flag; `myxo up --help` lists all"),
        ("--balance-data maybe", r"maybe = 'maybe': expected a flag"),
        ("--balance-data=maybe", r"--balance-data = 'maybe': true or false"),
        ("--num-gpus-per-node many", "--num-gpus-per-node = 'many': a whole number"),
        ("--loss-mask-type llama", "one of qwen, qwen3, qwen3_5, distill_qwen"),
        ("--start-rollout-id 3", "a flag of slime's; a run continues after its last checkpoint by itself"),
        ("--rollout-batch 3", r"unknown flag; did you mean --rollout-batch-size\?"),
        ("rollout 3", "expected a flag that starts with --"),
        ("--lr", "--lr = '': needs a value: learning rate"),
        ("--lr --seed 3", "--lr = '': needs a value: learning rate"),
        ("--apply-chat-template-kwargs {", "expected a mapping"),
    ],
)
def test_a_wrong_flag_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.parse(words.split())


def test_text_of_flags_becomes_typed_values_in_the_config(tmp_path: Path) -> None:
    nested = values(tmp_path)
    words = "--num-rollout 7 --lr 1e-4 --no-save-final-hf --rollout-stop-token-ids 1 2 --eval-interval 3 --eval-prompt-data held.jsonl"
    words += " --eps-clip-high 0.28"
    for section, fields in flags.parse(words.split()).items():
        nested.setdefault(section, {}).update(fields)
    config = parse(nested)
    assert config.rollout.num_rollout == 7
    assert config.trainer.lr == 1e-4
    assert config.trainer.save_final_hf is False
    assert config.rollout.rollout_stop_token_ids == [1, 2]
    assert config.eval.eval_interval == 3
    assert config.algorithm.eps_clip_high == 0.28


def test_each_field_takes_its_own_default_back_as_a_flag(tmp_path: Path) -> None:
    plain = parse(values(tmp_path))
    for field, section in field_sections().items():
        info = section_model(section).model_fields[field]
        default = getattr(getattr(plain, section), field)
        if info.is_required() or isinstance(default, list):
            continue
        nested = values(tmp_path)
        for owner, fields in flags.parse([f"--{field.replace('_', '-')}={default}"]).items():
            nested.setdefault(owner, {}).update(fields)
        assert parse(nested) == plain, field


def test_every_flag_that_cannot_be_taken_is_told() -> None:
    given = flags.read(["--num-rolout", "3", "--rollout-batch-size", "8", "stray", "--lr"])
    assert given.overrides == {"rollout": {"rollout_batch_size": "8"}}
    assert [problem.field for problem in given.problems if isinstance(problem, ConfigError)] == ["--num-rolout", "stray", "--lr"]


# --- every flag of slime's and of its scripts is in one class

GIVEN = sorted({word for words in SCRIPTS.values() for word in words if word.startswith("--")})


def name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_the_lists_are_whole() -> None:
    assert (len(SCRIPTS), len(GIVEN), len(FLAGS)) == (40, 219, 231)


def test_every_flag_of_slimes_has_a_class_and_words_for_it_and_those_of_its_scripts_are_accepted() -> None:
    assert [flag for flag in FLAGS if (found := classify(name(flag))) is None or not found.meaning] == []
    assert [flag for flag in GIVEN if (found := classify(name(flag))) is None or found.kind == "refused"] == []


def test_all_classes_are_used() -> None:
    kinds = Counter(found.kind for flag in {*FLAGS, *GIVEN} if (found := classify(name(flag))))
    assert kinds.keys() == {"taken", "renamed", "no-op", "refused"}
    assert kinds["refused"] < 50 < kinds["taken"]


def test_what_is_no_flag_has_no_class() -> None:
    assert classify("balance_dat") is None
    assert classify("no_lr") is None
