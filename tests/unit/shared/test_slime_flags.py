"""slime's flags, its rules for them, and its file of roles."""

from pathlib import Path
from typing import Any

import pytest

from myxo.commands import up
from myxo.commands.evaluate import evaluating
from myxo.preflight import checked_config
from shared.config import config_reading, flag_table, flags
from shared.config.config_layers import known_fields
from shared.config.config_reading import ConfigReading, parse, read
from shared.config.run_config import field_sections
from shared.runtime.errors import BadInput, ConfigError, problems_of
from tests.support.run_config import run_config, values
from tests.support.tables import table


def test_no_flag_of_the_table_is_a_field_or_megatrons() -> None:
    assert flag_table.SLIME.keys() & field_sections().keys() == set(), "delete from the table what the config has a field for"
    assert flag_table.SLIME.keys() & flag_table.catalogue().keys() == set()


def test_what_the_table_says_names_flags_and_fields_that_there_are() -> None:
    known = {*flags.flags(), *(f"--{spelling.replace('_', '-')}" for spelling in flag_table.spellings())}
    values = {"switch": True, "int": 3, "float": 2.5, "text": "x", "texts": ["x"]}
    wrong = []
    for name, flag in flag_table.SLIME.items():
        named = {word.strip(".,:;") for word in flag.reason.split() if word.startswith("--")}
        fields = flag.sets(values[flag.kind]) if flag.sets else {}
        if not flag.reason or not named <= known or not fields.keys() <= field_sections().keys() or (fields and flag.variable):
            wrong.append(name)
    assert wrong == []
    assert {flag.outcome.kind for flag in flag_table.SLIME.values()} == {"renamed", "no-op", "refused"}


@table(
    ("words", "fields", "note"),
    [
        ("--offload", {"trainer": {"offload_train": True, "offload_rollout": True}}, "--offload is --offload-train --offload-rollout"),
        ("--partial-rollout", {"rollout": {"staleness_policy": "continue"}}, "--partial-rollout is --staleness-policy continue"),
        ("--distributed-timeout-minutes 3", {"trainer": {"collective_timeout": 180.0}}, "is --collective-timeout, in seconds"),
        (
            "--rollout-external-engine-addrs h1:30000 h2:30000",
            {"rollout": {"external_engines": ["h1:30000", "h2:30000"]}},
            "is --external-engines: SGLang servers of somebody else's",
        ),
        ("--bf16", {"trainer": {"train_dtype": "bfloat16"}}, "--bf16 is --train-dtype bfloat16"),
        ("--deterministic-mode", {"trainer": {"deterministic": True}}, "--deterministic-mode is --deterministic"),
        ("--balance-data", {}, "--balance-data changes nothing: batches are always balanced"),
        ("--data-pad-size-multiplier 1024", {}, "--data-pad-size-multiplier changes nothing: micro-batches are padded"),
        ("--loss-mask-type qwen3_5", {}, "turns are trained, by any template"),
        ("--router-policy cache_aware --router-verbose", {}, "there is no router"),
    ],
)
def test_what_is_renamed_or_without_effect_is_told(words: str, fields: dict[str, Any], note: str) -> None:
    given = flags.read(words.split())
    assert (given.overrides, given.problems) == (fields, [])
    assert note in " | ".join(given.notes)


@pytest.mark.parametrize(
    ("flag", "instead"), [("--keep-old-actor", "--use-rollout-logprobs"), ("--get-mismatch-metrics", "--use-tis calls it")]
)
def test_a_flag_that_changes_the_loss_with_slime_is_not_told_as_without_effect(flag: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        flags.parse([flag])


@pytest.mark.parametrize(
    "words", ["--partial-rollout --mask-offpolicy-in-partial-rollout", "--mask-offpolicy-in-partial-rollout --partial-rollout"]
)
def test_what_masks_stands_over_what_goes_on_in_any_order(words: str) -> None:
    assert flags.parse(words.split()) == {"rollout": {"staleness_policy": "mask"}}
    assert flags.parse([*words.split(), "--staleness-policy", "drop"]) == {"rollout": {"staleness_policy": "drop"}}


def test_a_key_of_wandb_goes_into_the_environment_and_nowhere_else() -> None:
    given = flags.read(["--wandb-key", "s3cret", "--wandb-project", "p"])
    assert given.environment == {"WANDB_API_KEY": "s3cret"}
    assert given.overrides == {"monitoring": {"wandb_project": "p"}}
    assert "s3cret" not in " ".join(given.notes)


def test_the_last_of_a_flag_given_twice_counts_and_that_is_told() -> None:
    given = flags.read(["--lr", "1e-5", "--rotary-base", "1", "--lr", "1e-6", "--rotary-base", "2", "--swiglu", "--swiglu"])
    assert given.overrides == {"trainer": {"lr": "1e-6", "megatron": {"rotary_base": 2.0, "swiglu": True}}}
    assert given.notes == ["--lr is given twice: 1e-6 counts, the last", "--rotary-base is given twice: 2 counts, the last"]
    assert flags.read(["--colocate", "--no-colocate"]).notes == ["--colocate is given twice: --no-colocate counts, the last"]
    hooks = flags.read(["--rollout-sample-hook-path", "a:f", "--rollout-sample-hook-path=b.g", "--rollout-sample-hook-path", "c:h", "d:i"])
    assert (hooks.overrides, hooks.notes) == ({"rollout": {"rollout_sample_hook_path": ["a:f", "b.g", "c:h", "d:i"]}}, [])


def test_a_flag_under_another_name_that_loses_to_the_field_is_said_to() -> None:
    said = "train_dtype = float32 is given itself, and counts: bfloat16, by a flag under another name, does not"
    given = flags.read(["--bf16", "--train-dtype", "float32"])
    assert given.overrides == {"trainer": {"train_dtype": "float32"}} and said in given.notes
    assert said in known_fields({"trainer": {"bf16": True, "train_dtype": "float32"}}).notes
    assert not any("counts" in note for note in flags.read(["--bf16", "--train-dtype", "bfloat16"]).notes)


def test_an_engines_flag_takes_several_values() -> None:
    given = flags.parse(["--sglang-cuda-graph-bs", "1", "2", "4", "--sglang-enable-dp-attention", "--sglang-page-size", "64"])
    assert given == {"rollout": {"sglang": {"cuda-graph-bs": ["1", "2", "4"], "enable-dp-attention": True, "page-size": "64"}}}


def test_json_and_python_mappings_are_read() -> None:
    for text in ('{"enable_thinking": false}', "{'enable_thinking': False}"):
        assert flags.parse(["--apply-chat-template-kwargs", text]) == {"data": {"apply_chat_template_kwargs": {"enable_thinking": False}}}


def test_keys_of_slimes_mean_the_same_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nname = "x"\n[model]\nhf_checkpoint = "{tmp_path}"\n[data]\nprompt_data = "p.jsonl"\n'
        "[rollout]\nnum_rollout = 3\nrollout_batch_size = 4\nn_samples_per_prompt = 4\npartial_rollout = true\n"
        "[trainer]\nbalance_data = true\nspec = ['a', 'b']\ndistributed-timeout-minutes = 3\n[trainer.megatron]\nbf16 = true\n"
    )
    config, problems, notes, *_ = read(path)
    assert problems == [] and config is not None
    assert config.rollout.staleness_policy == "continue"
    assert (config.trainer.collective_timeout, config.trainer.train_dtype) == (180, "bfloat16")
    assert (config.trainer.spec, config.trainer.megatron) == (["a", "b"], {})
    assert len(notes) == 4


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("trainer", "start_rollout_id", 3, r"trainer.start_rollout_id = 3: a flag of slime's; a run continues after its last checkpoint"),
        ("trainer", "balance_data", "maybe", r"trainer.balance_data = 'maybe': true or false"),
        ("monitoring", "wandb_key", "k", r"monitoring.wandb_key = 'k': a config holds no secrets; set WANDB_API_KEY in the environment"),
    ],
)
def test_what_is_refused_is_refused_in_toml_too(tmp_path: Path, section: str, key: str, value: Any, message: str) -> None:
    nested = values(tmp_path)
    nested.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError, match=message):
        parse(nested)


def test_fields_that_follow_from_others_are_filled_in(tmp_path: Path) -> None:
    batch = {"rollout_batch_size": 8, "n_samples_per_prompt": 4}
    engines = {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2, "sglang_server_concurrency": 512, "rollout_max_context_len": 100}
    config = run_config(tmp_path, rollout={**batch, **engines}, trainer={"global_batch_size": 8})
    assert config.trainer.num_steps_per_rollout == 4
    assert (config.rollout.rollout_replicas, config.rollout.rollout_concurrency, config.rollout.rollout_max_prompt_len) == (4, 512, 99)
    assert parse(values(tmp_path)).trainer.num_steps_per_rollout == 1, "a section's default is nobody else's"
    with pytest.raises(ConfigError, match=r"rollout.rollout_num_gpus = 6: rollout_replicas x rollout_num_gpus_per_engine = 1 x 4"):
        run_config(tmp_path, rollout={**batch, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 4})
    with pytest.raises(ConfigError, match=r"rollout_max_prompt_len = 100: below rollout_max_context_len = 100"):
        run_config(tmp_path, rollout={**batch, "rollout_max_context_len": 100, "rollout_max_prompt_len": 100})
    with pytest.raises(
        ConfigError, match=r"trainer.global_batch_size = 12: .* 32 samples are not global_batch_size x num_steps_per_rollout"
    ):
        run_config(tmp_path, rollout=batch, trainer={"global_batch_size": 12})


def test_wandb_may_be_disabled_as_by_slime(tmp_path: Path) -> None:
    assert run_config(tmp_path, monitoring={"use_wandb": True}).monitoring.use_wandb
    assert not run_config(tmp_path, monitoring={"use_wandb": True, "wandb_mode": "disabled"}).monitoring.use_wandb


def test_a_warm_up_may_be_a_share_of_the_decay(tmp_path: Path) -> None:
    trainer = run_config(tmp_path, trainer={"lr_warmup_fraction": 0.1}).trainer
    assert (trainer.warmup_steps(100), trainer.decay_steps(100)) == (10, 100)
    trainer = run_config(tmp_path, trainer={"lr_warmup_fraction": 0.1, "lr_decay_iters": 50}).trainer
    assert (trainer.warmup_steps(100), trainer.decay_steps(100)) == (5, 50)
    with pytest.raises(ConfigError, match="lr_warmup_fraction = 0.1: none beside lr_warmup_iters = 3"):
        run_config(tmp_path, trainer={"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3})
    with pytest.raises(ConfigError, match="sft_warmup_fraction = 0.1: none beside sft_warmup_iters = 3"):
        run_config(tmp_path, sft={"sft_warmup_fraction": 0.1, "sft_warmup_iters": 3})


def test_a_custom_config_file_stands_over_all_and_its_other_keys_go_to_the_users_functions(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("lr: 3.0e-6\neps-clip: 0.3\nmax_turns: 7\nnested: {a: [1, 2]}\nrs_lower_bound: null\n")
    given = values(tmp_path)
    given["run"]["custom_config_path"] = str(own)
    given["trainer"] = {"lr": 1e-4}
    config, problems, notes, *_ = read(None, given)
    assert problems == [] and config is not None
    assert (config.trainer.lr, config.algorithm.eps_clip) == (3e-6, 0.3)
    assert config.run.custom_args == {"max_turns": 7, "nested": {"a": [1, 2]}}
    assert any("lr, eps-clip" in note for note in notes)
    own.write_text("num_rollout: 9\nhf_checkpoint: /other\nname: mine\nmax_turns: null\n")
    config, printed, weights = (
        read(None, given | {"eval": {"eval_prompt_data": ["a", "/a.jsonl"]}}).config,
        tmp_path / "v3.toml",
        tmp_path / "v3",
    )
    assert config is not None
    printed.write_text(config_reading.dump(evaluating(config, 3, weights)))
    again = read(printed).config
    assert again is not None and again.run.custom_args == {"max_turns": None}
    more = read(printed, {"run": {"custom_args": {"other": 2}}}).config
    assert more is not None and more.run.custom_args == {"max_turns": None, "other": 2}, "as over any table"
    assert (again.rollout.num_rollout, again.model.hf_checkpoint, again.run.name) == (0, weights, "mine-eval-v3"), "it is laid once"
    own.write_text("partial_rollout: true\nmoe_router_dtype: fp32\nmax_turns: 7\n")  # slime's and Megatron's flags too
    config, problems, notes, *_ = read(None, given)
    assert problems == [] and config is not None
    assert config.rollout.staleness_policy == "continue" and config.trainer.megatron == {"moe_router_dtype": "fp32"}
    assert config.run.custom_args == {"max_turns": 7}
    own.write_text("moe_router_dtype: fp33\nkeep_old_actor: true\n")
    router, refused = map(str, read(None, given).problems)
    assert "trainer.megatron.moe_router_dtype" in router + refused and "run.keep_old_actor" in router + refused
    assert router.endswith(f"(in {own})") and refused.endswith(f"(in {own})")
    own.write_text("lr: 1.0e-6\nlr: 1.0e-5\n")
    assert "the key 'lr' is there twice" in str(read(None, given).problems[0]), "the first value would be lost"
    own.write_text("first: {inner: &one {<<: &zero {lr: 1, n: 2}, lr: 3}}\nother: {<<: *one, <<: *zero}\n")
    config, problems, *_ = read(None, given)
    assert problems == [] and config is not None, "a key of one's own beside a merged one is no second"
    assert config.run.custom_args["first"] == {"inner": {"lr": 3, "n": 2}}
    own.write_text("- 1\n")
    assert [str(problem) for problem in read(None, given).problems] == [f"run.custom_config_path = '{own}': a mapping: field = value"]
    own.unlink()
    assert "no such file" in str(read(None, given).problems)


@pytest.mark.parametrize("key", ["mem_fraction_static", "mem-fraction-static"])
def test_an_engines_flag_of_a_custom_config_file_stands_over_the_same_in_any_spelling(tmp_path: Path, key: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("sglang_mem_fraction_static: 0.5\nsglang_server_concurrency: 7\nsglang_judge_url: http://j\nsglang_chunked: m\n")
    given = values(tmp_path, run={"custom_config_path": str(own)}, rollout={"sglang": {key: 0.8, "page-size": 1}})
    config = read(None, given).config
    assert config is not None and config.rollout.sglang == {"mem_fraction_static": 0.5, "page-size": 1}
    assert config.run.custom_args == {"sglang_judge_url": "http://j", "sglang_chunked": "m"}, "attributes of one's own, as with slime"


# --- what slime refuses at its start, a command line without a config is refused, too; and its file of roles

LEAST = "--hf-checkpoint /no/model --prompt-data /no/p --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rm-type math"
SFT = "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --input-key messages"


def refused(words: str) -> dict[str, str]:
    """Flag → what is said of it, but for the files that are not there."""
    with pytest.raises(BadInput) as caught:
        checked_config(up.train_source(None, f"{LEAST} {words}".split()))
    told = [str(problem).split(" ", 1) for problem in problems_of(caught.value)]
    return {flag: text for flag, text in told if "/no/" not in text}


@table(
    ("words", "flag", "says"),
    [
        ("--advantage-estimator reinforce_plus_plus", "--normalize-advantages", "whitens its advantages"),
        ("--advantage-estimator reinforce_plus_plus_baseline", "--normalize-advantages", "whitens its advantages"),
        ("--only-train-params-name-list a --freeze-params-name-list b", "--freeze-params-name-list", "give one of them"),
        ("--update-weight-mode delta", "--update-weight-mode", "--update-weight-transport disk"),
        ("--update-weight-mode delta --colocate", "--update-weight-mode", "full with --colocate"),
        ("--rollout-temperature 0", "--rollout-temperature", "greedy decoding is no policy"),
        (f"{SFT} --lr-decay-iters 9", "--lr-decay-iters", "their rate decays over all their steps"),
    ],
)
def test_what_slime_asserts_is_refused(words: str, flag: str, says: str) -> None:
    found = refused(words)
    assert list(found) == [flag] and says in found[flag]


@table(
    "words",
    [
        "--advantage-estimator reinforce_plus_plus --normalize-advantages",
        "--freeze-params-name-list b",
        "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /tmp --update-weight-local-checkpoint-dir /tmp",
        "--rollout-temperature 0 --num-rollout 0 --eval-prompt-data aime /no/e",
        "--lr 0",
        "--save-debug-rollout-data /tmp/one.pt --num-rollout 1",
        "--colocate --rollout-num-gpus 8 --load-debug-rollout-data /no/dump.pt",  # nobody generates: no engine has to fit
        "--sglang-router-policy round_robin --router-policy cache_aware",
        "--release-train --save /no/s --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /tmp",
        "--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming",
    ],
)
def test_what_slime_takes_is_taken(words: str) -> None:
    assert refused(words) == {}


def test_each_steps_dump_needs_a_path_of_its_own() -> None:
    assert "each step's file would replace the one before" in refused("--save-debug-rollout-data /tmp/one.pt")["--save-debug-rollout-data"]


@pytest.mark.parametrize(
    ("words", "batch", "steps", "rate"),
    [("", 4, 3, 1e-6), ("--num-steps-per-rollout 4", 1, 12, 1e-6), ("--global-batch-size 2 --lr 1e-4", 2, 6, 1e-4)],
)
def test_demonstrations_have_slimes_batches_steps_and_rate(words: str, batch: int, steps: int, rate: float) -> None:
    config = read(None, up.train_source(None, f"{LEAST} {SFT} {words}".split()).given.overrides).config
    assert config is not None and (config.sft.sft_batch_size, config.sft.sft_steps, config.sft.sft_lr) == (batch, steps, rate)


def test_a_config_file_may_have_what_slime_refuses(tmp_path: Path) -> None:
    words = f"{LEAST} --name r --max-staleness 1 --update-weight-mode delta".split()
    config, problems, *_ = read(None, {**flags.parse(words)})
    assert config is not None and not problems


def test_a_coefficient_of_a_kl_that_is_not_used_changes_nothing() -> None:
    source = up.train_source(None, f"{LEAST} --kl-loss-coef 0.1 --kl-loss-type k2".split())
    config = read(None, source.given.overrides).config
    assert config is not None and not config.algorithm.measures_kl
    assert "--kl-loss-coef 0.1 changes nothing without --use-kl-loss, as with slime" in source.given.notes
    used = read(None, up.train_source(None, f"{LEAST} --kl-loss-coef 0.1 --use-kl-loss".split()).given.overrides).config
    assert used is not None and used.algorithm.kl_loss_coef == 0.1


@table(
    ("words", "text", "expected"),
    [
        ("", "use_kl_loss: true\nkl_loss_coef: 0.001", {"kl_loss_type": "k1", "kl_loss_coef": 0.001}),
        ("", "kl_loss_coef: 0.001", {"kl_loss_coef": 0.0, "use_kl_loss": False}),
        ("--kl-loss-coef 0.01", "use_kl_loss: true", {"kl_loss_coef": 0.01, "use_kl_loss": True}),
        ("", "partial_rollout: true", {"max_staleness": 1, "correction": "decoupled"}),
        ("--partial-rollout", "partial_rollout: false", {"max_staleness": 0, "correction": "none", "staleness_policy": "drop"}),
        ("--partial-rollout false", "mask_offpolicy_in_partial_rollout: false", {"max_staleness": 0, "staleness_policy": "drop"}),
        ("--partial-rollout", "mask_offpolicy_in_partial_rollout: false", {"staleness_policy": "continue"}),
        ("--mask-offpolicy-in-partial-rollout=no --partial-rollout=1", "", {"staleness_policy": "continue"}),
        ("--kl-loss-coef 0.01", "use_kl_loss: 1", {"kl_loss_coef": 0.01, "use_kl_loss": True}),
        ("--kl-loss-coef 0.01 --use-kl-loss=yes", "", {"kl_loss_coef": 0.01, "use_kl_loss": True}),
        ("--kl-loss-coef 0.01 --use-kl-loss off", "", {"kl_loss_coef": 0.0, "use_kl_loss": False}),
        ("--kl-loss-coef 0.01 --preset grpo", "", {"kl_loss_coef": 0.01}),
        ("--colocate=1 --actor-num-gpus-per-node 4", "", {"rollout_replicas": 4}),
    ],
)
def test_slimes_defaults_are_for_what_a_file_sets_as_for_flags(words: str, text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (file := tmp_path / "own.yaml").write_text(text)
    config = read(None, up.train_source(None, f"{LEAST} {words} --custom-config-path {file}".split()).given.overrides).config
    assert config is not None
    assert expected.items() <= {**vars(config.rollout), **vars(config.algorithm), "correction": config.algorithm.correction}.items()
    file.write_text("lr: high")
    assert refused(f"--custom-config-path {file}")[f"{file}:"].startswith("lr (trainer.lr) = 'high'")


# --- roles


def of_roles(directory: Path, text: str, words: str = "--advantage-estimator ppo --lr 1e-3") -> ConfigReading:
    file = directory / "roles.yaml"
    file.write_text(text)
    return read(None, up.train_source(None, f"{LEAST} {words} --megatron-config-path {file}".split()).given.overrides)


def test_actor_and_critic_have_what_is_their_own(tmp_path: Path) -> None:
    text = """
megatron:
  - {name: default, role: critic, overrides: {lr: 1e-5, load: /m/critic, num_gpus_per_node: 2}}
  - {name: default, role: actor, overrides: {lr: 1e-6, lr_warmup_iters: 5, recompute_granularity: full, moe_router_dtype: fp32}}
"""
    config, problems, notes, *_ = of_roles(tmp_path, text)
    assert config is not None and not problems
    trainer = config.trainer
    assert (trainer.lr, trainer.critic_lr, trainer.critic_load, trainer.lr_warmup_iters) == (1e-6, 1e-5, Path("/m/critic"), 5)
    assert (trainer.recompute_granularity, trainer.megatron, trainer.megatron_config_path) == ("full", {"moe_router_dtype": "fp32"}, None)
    assert any("stands over what is given elsewhere: lr, load of the critic; lr, lr_warmup_iters" in note for note in notes)
    alone = "megatron: [{role: actor, overrides: {lr: 1e-6, distributed_timeout_minutes: 2, deterministic_mode: true}}]"
    words = "--advantage-estimator ppo --collective-timeout 300"
    (own := tmp_path / "own.yaml").write_text("advantage_estimator: ppo\nlr: 1e-5")
    laid = of_roles(tmp_path, alone, f"--custom-config-path {own}").config
    plain = read(
        None, {**flags.parse(f"{LEAST} --name r --custom-config-path {own} --megatron-config-path {tmp_path}/roles.yaml".split())}
    ).config
    for config in (laid, plain, of_roles(tmp_path, alone, "--preset ppo --lr 1e-5").config):
        assert config is not None and (config.trainer.lr, config.trainer.critic_lr) == (1e-6, 1e-5), "roles stand over everybody's values"
    for more, rate in (("", 1e-6), ("--lr 1e-5", 1e-5), ("--lr 1e-5 --critic-lr 2e-5", 2e-5)):
        config = of_roles(tmp_path, alone.replace("1e-6", "1e-7"), f"{words} {more}").config
        assert config is not None and (config.trainer.lr, config.trainer.critic_lr) == (1e-7, rate), "the critic's is the flags'"
        assert (config.trainer.collective_timeout, config.trainer.deterministic, config.trainer.megatron) == (120, True, {})


@table(
    ("text", "says"),
    [
        ("actor: {lr: 1}", "megatron: a list of entries"),
        ("megatron: {role: actor}", "megatron: a list of entries"),
        ("megatron: [{role: actr}]", "did you mean actor?"),
        ("megatron: [{role: actor, overrides: {lr: 1}}, {role: actor, overrides: {lr: 2}}]", "each once at most"),
        ("megatron: [{role: critic, overrides: {weight_decay: 0.1}}]", "critic: weight_decay': the critic has the actor's value"),
        ("megatron: [{role: critic, overrides: {save: /s}}]", "critic: save': leave it out"),
        ("megatron: [{role: actor, overrides: {load: /l}}]", "actor: load': give it as a flag"),
        ("megatron: [", "not a readable YAML file"),
    ],
)
def test_what_is_wrong_in_a_file_of_roles_is_named(tmp_path: Path, text: str, says: str) -> None:
    [problem] = of_roles(tmp_path, text).problems
    assert says in str(problem) and str(tmp_path / "roles.yaml") in str(problem)
