"""What slime refuses at its start, a command line without a config is refused, too; and its file of roles."""

from pathlib import Path
from typing import Any

import pytest

from myxo.commands import up
from myxo.preflight import checked_config
from shared.config import flags
from shared.config.config_reading import ConfigReading, read
from shared.runtime.errors import BadInput, problems_of
from tests.support.tables import table

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
