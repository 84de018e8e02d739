"""``myxo train``: what a command line without a config stands for."""

import argparse
import contextlib
import random
import shlex
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from myxo.commands import up
from myxo.commands.evaluate import evaluating
from myxo.preflight import Source, engine_checks, inspect, objective_checks
from myxo.preflight.inspection import Inspection, Note
from shared.bus import runs
from shared.config import config_reading, flags, slime_defaults
from shared.config.config_reading import read
from shared.config.run_config import RunConfig
from shared.hooks.arguments import Arguments
from shared.model.architecture_flags import described_shape
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.runtime.addresses import RANK_VARIABLES
from shared.runtime.errors import ConfigError, Problems, raise_problems
from tests.support.run_config import run_config
from tests.support.slime_scripts import SCRIPTS

NOW = datetime(2026, 8, 1, 9, 30)
LEAST = "--hf-checkpoint /m/Qwen3-4B --prompt-data p.jsonl --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rm-type math"

FILES = (
    *("model.hf_checkpoint", "model.ref_load", "data.prompt_data", "sft.sft_data", "algorithm.opd_teacher_load"),
    *("run.dir", "trainer.save", "trainer.load"),
)
MACHINE = [
    *("trainer.actor_num_nodes", "trainer.megatron.fp8"),
    *("rollout.rollout_num_gpus_per_engine", "rollout.rollout_replicas", "rollout.engine_groups"),
]
"""Where a script may ask for files and machines that are not there."""

MISSING = ("Transformer Engine's layers have it", "No module named", "install the package", "is not installed", "needs a GPU")
"""What is said of a package that is not there: a user's own, or one that SGLang, Megatron or a logger needs."""

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
SPLIT_BY_CONTEXT = {
    "scripts/run-qwen3-next-80B-A3B.sh": "qwen3-next-80b-a3b",
    "scripts/run-qwen3.5-27B.sh": "qwen3.5-27b",
    "examples/coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes.sh": "qwen3.5-35b-a3b",
    "scripts/run-glm5-744B-A40B.sh": "glm-5",
    "scripts/run-glm5.2-744B-A40B.sh": "glm-5.2",
}
"""Scripts with context parallelism of models with linear or sparse attention, and the published sizes."""

MIS = """use_tis: true
use_rs: true
tis_level: "token"
rs_level: "token"
tis_mode: "truncate"
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""
"""The file that one of the scripts names: fields, and what only its own function reads."""


APART = """sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 64}
      - {worker_type: decode, num_gpus: 192, num_gpus_per_engine: 64}
"""
"""The groups of engines that another one names."""


@pytest.fixture(autouse=True)
def beside_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(MIS)
    (tmp_path / "engines.yaml").write_text(APART)
    monkeypatch.chdir(tmp_path)


def config_of(words: list[str], fresh: bool = False) -> RunConfig:
    """The config that a command line stands for."""
    path, given = up.train_source(None, words, now=NOW, fresh=fresh)
    raise_problems(given.problems)
    config, problems, *_ = read(path, given.overrides)
    raise_problems(problems)
    assert config is not None
    return config


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_published_script_is_a_config_and_its_toml_is_the_same_one(script: str, tmp_path: Path) -> None:
    config = config_of(SCRIPTS[script])
    printed = tmp_path / "printed.toml"
    printed.write_text(config_reading.dump(config))
    assert read(printed).config == config


@pytest.mark.parametrize("script", [pytest.param(one, marks=pytest.mark.extra if number % 4 else ()) for number, one in enumerate(SCRIPTS)])
def test_only_files_and_machines_are_missing_for_a_published_script(script: str) -> None:
    config = config_of(SCRIPTS[script])
    for problem in inspect(Inspection(config, starts=True)):
        assert isinstance(problem, ConfigError)
        if problem.field.startswith(("eval.", "rollout.engine_groups.")) or problem.field in (*FILES, *MACHINE):
            continue
        assert any(words in problem.expected for words in MISSING), str(problem)


@pytest.mark.parametrize(("script", "shape"), list(SPLIT_BY_CONTEXT.items()))
def test_a_script_that_splits_sequences_divides_its_model(script: str, shape: str) -> None:
    config, ready = config_of(SCRIPTS[script]), tomllib.loads((CONFIGS / f"{shape}.toml").read_text())["trainer"]["megatron"]
    architecture = described_shape(ready)
    assert config.trainer.context_parallel_size > 1 and architecture is not None
    assert not list(division_problems(architecture, ParallelLayout.of(config.trainer), config.trainer.megatron))


def test_an_engine_files_sizes_go_with_those_of_the_command_line(tmp_path: Path) -> None:
    """The words of a command line are text when the file is laid over them."""
    (tmp_path / "engines.yaml").write_text("sglang: [{name: actor, server_groups: [{num_gpus: 4}]}]")
    words = [*shlex.split(LEAST), "--sglang-config", "engines.yaml", "--rollout-num-gpus-per-engine"]
    rollout = config_of([*words, "2"]).rollout
    assert (rollout.rollout_replicas, rollout.rollout_num_gpus_per_engine) == (2, 2)
    for size in ("0", "two"):
        with pytest.raises(ConfigError, match=f"rollout_num_gpus_per_engine = '{size}': a whole number"):
            config_of([*words, size])


def test_the_toml_of_any_part_of_a_script_gives_the_same_config(tmp_path: Path) -> None:
    dice = random.Random(14)
    parts = {script: split(words) for script, words in SCRIPTS.items()}
    tried = 0
    while tried < 60:
        flags = [*dice.choice(list(parts.values())), *dice.choice(list(parts.values()))]
        chosen = dice.sample(flags, dice.randrange(len(flags)))
        try:
            config = config_of([*shlex.split(LEAST), *(word for flag in chosen for word in flag)])
        except ConfigError:
            continue  # parts that do not go together
        except Exception as error:
            assert "problems" in vars(error), error
            continue
        printed = tmp_path / "printed.toml"
        printed.write_text(config_reading.dump(config))
        assert read(printed).config == config, chosen
        tried += 1


def split(words: list[str]) -> list[list[str]]:
    """The flags of a command line, each with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


def test_without_a_name_the_models_and_the_time_make_one() -> None:
    assert config_of(shlex.split(LEAST)).run.name == "qwen3-4b-20260801-093000"
    assert config_of([*shlex.split(LEAST), "--name", "mine"]).run.name == "mine"
    assert config_of(shlex.split(LEAST.replace("/m/Qwen3-4B", "Qwen/Qwen3-4B@main"))).run.name == "qwen3-4b-20260801-093000"


def test_slimes_defaults_hold_where_no_flag_is_given() -> None:
    config = config_of(shlex.split(LEAST))
    assert (config.data.input_key, config.data.label_key) == ("input", None)
    assert (config.trainer.adam_beta2, config.trainer.weight_decay, config.trainer.lr_decay_style) == (0.999, 0.01, "linear")
    assert (config.rollout.max_staleness, config.algorithm.correction) == (0, "none")
    assert config.rollout.rollout_replicas == 1
    engine = [*shlex.split(LEAST), "--rollout-num-gpus-per-engine", "16"]
    assert config_of(engine).rollout.nodes_per_engine == 2
    assert config_of([*engine, "--num-gpus-per-node", "4"]).rollout.nodes_per_engine == 4
    assert config_of([*engine, "--enable-mtp-training", "--mtp-num-layers", "1"]).trainer.mtp_loss_scaling_factor == 0.2
    given = "--label-key answer --adam-beta2 0.98 --max-staleness 2 --use-kl-loss --colocate --actor-num-gpus-per-node 8 --use-tis"
    config = config_of([*shlex.split(LEAST), *given.split(), "--rollout-num-gpus-per-engine", "2"])
    assert (config.data.label_key, config.trainer.adam_beta2, config.rollout.max_staleness) == ("answer", 0.98, 2)
    assert (config.algorithm.correction, config.algorithm.kl_loss_type) == ("decoupled", "k1")
    assert (config.rollout.rollout_num_gpus, config.rollout.rollout_replicas) == (8, 4)


@pytest.mark.parametrize(
    ("words", "bound", "correction"),
    [
        ("--partial-rollout --mask-offpolicy-in-partial-rollout", 0, "none"),  # tokens of the present weights alone are trained
        ("--partial-rollout --mask-offpolicy-in-partial-rollout --max-staleness 2", 2, "decoupled"),
        ("--partial-rollout", 1, "decoupled"),
        ("--partial-rollout --max-staleness 0", 0, "none"),
        ("--max-staleness 0", 0, "none"),
    ],
)
def test_what_is_of_the_present_weights_alone_has_no_importance_weight(words: str, bound: int, correction: str) -> None:
    config = config_of([*shlex.split(LEAST), *words.split()])
    assert (config.rollout.max_staleness, config.algorithm.correction) == (bound, correction)


OF_SLIME: dict[str, dict[str, Any]] = {
    "data": {"rollout_seed": 42, "rollout_shuffle": False, "apply_chat_template": False, "metadata_key": "metadata", "tool_key": "tools"},
    "rollout": {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_context_len": None},
    "trainer": {"lr": 1e-6, "min_lr": 0.0, "lr_warmup_iters": 0, "adam_beta1": 0.9, "adam_eps": 1e-8, "clip_grad": 1.0, "seed": 1234},
    "algorithm": {
        **{"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None, "value_clip": 0.2, "kl_coef": 0.0},
        **{"kl_loss_coef": 0.0, "entropy_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "normalize_advantages": False, "tis_clip": 2.0},
        **{"tis_clip_low": 0.0, "use_rollout_logprobs": False, "use_opsm": False, "opsm_delta": 1e-4, "opd_kl_coef": 1.0},
        **{"disable_grpo_std_normalization": False, "calculate_per_token_loss": False, "use_unbiased_kl": False},
    },
}


def test_what_decides_what_is_trained_is_slimes_where_its_default_is_ours() -> None:
    config = config_of(shlex.split(LEAST))
    assert {section: {name: getattr(getattr(config, section), name) for name in fields} for section, fields in OF_SLIME.items()} == OF_SLIME


def test_biases_of_routers_that_slime_would_move_are_told() -> None:
    def said(words: str) -> bool:
        given = up.train_source(None, [*shlex.split(LEAST), *words.split()], now=NOW)[1]
        return any("router biases keep the checkpoint's values" in note for note in given.notes)

    assert said("--moe-router-enable-expert-bias")
    assert not any(map(said, ("", "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0", "--no-moe-router-enable-expert-bias")))


def notes(words: str) -> str:
    """What is said at the start of a run with these flags besides `LEAST`."""
    inspection = Inspection(config_of([*shlex.split(LEAST), *words.split()]))
    return " | ".join(found.text for found in objective_checks.check_needs(inspection) if isinstance(found, Note))


def test_masking_sequences_switches_no_importance_weight_on() -> None:
    algorithm = config_of([*shlex.split(LEAST), "--use-opsm"]).algorithm
    assert (algorithm.correction, algorithm.use_opsm) == ("none", True)
    assert "algorithm.use_opsm: without effect, as this needs several optimizer steps a batch" in notes("--use-opsm")
    assert notes("--use-opsm --num-steps-per-rollout 4") == notes("--use-opsm --use-rollout-logprobs") == ""
    with pytest.raises(ConfigError, match=r"custom_tis_function_path = .* belongs to the importance weight"):
        config_of([*shlex.split(LEAST), "--custom-tis-function-path", "m.f"])


@pytest.mark.parametrize(
    "words",
    [
        "--partial-rollout",
        "--max-staleness 2",
        f"--rollout-function-path {slime_defaults.FULLY_ASYNC}",
        "--rollout-function-path slime.rollout.fully_async_rollout:generate_rollout_fully_async",
    ],
)
def test_a_correction_that_is_on_by_default_is_said_at_the_start(words: str) -> None:
    def said(words: str) -> bool:
        config_of([*shlex.split(LEAST), *words.split()])
        notes = up.train_source(None, [*shlex.split(LEAST), *words.split()], now=NOW)[1].notes
        return any("the loss corrects for it by --off-policy decoupled, an importance weight within 0 to 2" in note for note in notes)

    assert said(words)
    assert not any(map(said, (f"{words} --use-tis", f"{words} --no-use-tis", "--max-staleness 0", "")))


def test_another_temperature_than_a_teachers_is_said_at_the_start(tmp_path: Path) -> None:
    def said(temperature: float) -> list[str]:
        taught = {"use_opd": True, "opd_type": "sglang", "opd_teachers": {"a": "http://a:1"}}
        found = objective_checks.check_teachers(
            Inspection(run_config(tmp_path, algorithm=taught, rollout={"rollout_temperature": temperature}))
        )
        return [note.text for note in found if isinstance(note, Note)]

    assert said(1.0) == []
    assert "asked for log-probs at rollout_temperature = 0.7" in said(0.7)[0] and "opd_type = megatron" in said(0.7)[0]


def test_samples_are_to_come_with_their_rewards_where_nothing_is_named_that_scores_them() -> None:
    nameless = shlex.split(LEAST.replace(" --rm-type math", ""))
    assert config_of(nameless).reward.rm_type == "given"
    assert config_of([*nameless, "--custom-rm-path", "own.reward"]).reward.rm_type == "math_verify", "which custom_rm_path replaces"
    assert config_of(shlex.split(LEAST)).reward.rm_type == "math"
    assert Arguments(config_of(nameless)).rm_type is None, "as slime's functions know it"


def test_slimes_defaults_are_not_laid_over_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config_reading.dump(config_of([*shlex.split(LEAST), "--max-staleness", "3"])))
    found = up.train_source(path, ["--lr", "2e-6"])
    config = read(found.path, found.given.overrides).config
    assert config is not None and (config.rollout.max_staleness, config.trainer.lr) == (3, 2e-6)


def test_the_run_lies_in_save_and_goes_on_from_load(tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    words = [*shlex.split(LEAST), "--save", place, "--load", place]
    first = config_of(words)
    assert first.run.root == Path(place) / "qwen3-4b-20260801-093000"
    assert first.trained == first.run.root
    first.run.root.mkdir(parents=True)
    (first.run.root / runs.FROZEN).write_text(first.model_dump_json())
    later = up.train_source(None, words, now=datetime(2026, 8, 2))
    assert later.given.overrides["run"]["name"] == "qwen3-4b-20260801-093000"
    assert any("continues" in note for note in later.given.notes)
    anew = up.train_source(None, words, now=datetime(2026, 8, 2), fresh=True)
    assert anew.given.overrides["run"]["name"] == "qwen3-4b-20260802-000000"


def test_a_name_alone_goes_on_with_the_run_of_that_name(tmp_path: Path) -> None:
    first = config_of([*shlex.split(LEAST), "--name", "mine", "--dir", str(tmp_path), "--sglang-cuda-graph-bs", "1", "2", "--swiglu"])
    first.run.root.mkdir()
    (first.run.root / runs.FROZEN).write_text(first.model_dump_json())
    assert config_of(["--name", "mine", "--dir", str(tmp_path)]) == first
    assert config_of(["--name", "mine", "--dir", str(tmp_path), "--num-rollout", "9"]).rollout.num_rollout == 9
    epochs = config_of(["--name", "mine", "--dir", str(tmp_path), "--num-epoch", "5"]).rollout
    assert epochs.num_epoch == 5 and "num_rollout" not in epochs.model_fields_set, "its steps are counted anew"
    more = config_of(["--name", "mine", "--dir", str(tmp_path), "--sglang-page-size", "8"]).rollout.sglang
    assert more == {**first.rollout.sglang, "page-size": "8"}
    with pytest.raises(ConfigError, match="run.name = 'other': a run that lies in runs; a new one needs --hf-checkpoint"):
        config_of(["--name", "other", *shlex.split(LEAST)[2:]])


def test_other_weights_than_those_of_the_model_are_refused_and_a_conversion_is_told(tmp_path: Path) -> None:
    from myxo.preflight.model_checks import check_given_checkpoints

    other, converted = tmp_path / "other", tmp_path / "m_torch_dist"
    other.mkdir()
    (other / "config.json").write_text("{}")
    converted.mkdir()
    (converted / "latest_checkpointed_iteration.txt").write_text("release")
    for flag, path, message in (
        ("--load", other, "trainer.load = .*another model than hf_checkpoint"),
        ("--load", converted, "trainer.load = .*`myxo convert` makes a checkpoint of Megatron's"),
    ):
        (found,) = check_given_checkpoints(Inspection(config_of([*shlex.split(LEAST), flag, str(path)])))
        with pytest.raises(ConfigError, match=message):
            raise_problems([found] if not isinstance(found, Note) else [])
    (told,) = check_given_checkpoints(Inspection(config_of([*shlex.split(LEAST), "--ref-load", str(converted)])))
    assert isinstance(told, Note) and "is not read" in told.text
    for words in (["--load", str(other.parent), "--name", "mine"], ["--load", "runs", "--save", str(tmp_path)]):
        (told,) = check_given_checkpoints(Inspection(config_of([*shlex.split(LEAST), *words])))
        assert isinstance(told, Note) and "begins or continues in" in told.text
    assert not list(check_given_checkpoints(Inspection(config_of([*shlex.split(LEAST), "--load", "runs", "--save", "runs"]))))
    assert not list(check_given_checkpoints(Inspection(config_of([*shlex.split(LEAST), "--ref-load", "/m/Qwen3-4B"]))))


def test_the_printed_toml_has_a_key_for_no_label(tmp_path: Path) -> None:
    text = config_reading.dump(config_of(shlex.split(LEAST)))
    assert tomllib.loads(text)["data"]["label_key"] == ""


def test_a_script_for_demonstrations_is_a_run_of_its_own_kind() -> None:
    config = config_of(SCRIPTS["scripts/run-qwen3-235B-A22B-sft.sh"])
    assert config.rollout.num_rollout == 0
    sft = config.sft
    assert [str(file) for file in sft.sft_data or []] == ["/root/prompts.jsonl"]
    assert (sft.sft_messages_key, sft.sft_batch_size, sft.sft_num_epoch, sft.sft_lr, sft.sft_min_lr) == ("messages", 128, 3, 1e-5, 1e-6)
    assert (sft.sft_lr_decay_style, sft.sft_warmup_fraction, config.trainer.adam_beta2) == ("cosine", 0.1, 0.98)
    steps = "--num-rollout 6 --rollout-batch-size 8 --global-batch-size 4 --loss-type sft_loss --hf-checkpoint /m --prompt-data d.jsonl"
    config = config_of([*steps.split(), "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"])
    assert (config.sft.sft_steps, config.sft.sft_batch_size, config.sft.sft_messages_key) == (12, 4, "input")


def test_slimes_own_rollout_functions_are_what_the_services_do() -> None:
    words = [*shlex.split(LEAST), "--rollout-function-path"]
    config = config_of([*words, "slime.rollout.sglang_rollout.generate_rollout"])
    assert (config.rollout.rollout_function_path, config.rollout.max_staleness) == (None, 0)
    config = config_of([*words, "slime.rollout.fully_async_rollout.generate_rollout_fully_async"])
    assert (config.rollout.rollout_function_path, config.rollout.max_staleness) == (None, 1)
    assert config_of([*words, "my.own.function"]).rollout.rollout_function_path == "my.own.function"


def test_the_file_of_a_script_sets_fields_and_what_its_function_reads() -> None:
    config = config_of(SCRIPTS["examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh"])
    assert (config.algorithm.use_rs, config.algorithm.rs_veto_threshold, config.algorithm.tis_mode) == (True, 1e-4, "truncate")
    assert config.run.custom_args == {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0}


def test_what_is_required_is_asked_for_by_name() -> None:
    problems = read(None, up.train_source(None, []).given.overrides).problems
    fields = [problem.field for problem in problems if isinstance(problem, ConfigError)]
    assert fields == ["model.hf_checkpoint", "rollout.rollout_batch_size"]


def test_a_misspelt_flag_of_slimes_is_refused_with_the_nearest() -> None:
    (problem,) = up.train_source(None, [*shlex.split(LEAST), "--balance-dat"]).given.problems
    assert "did you mean --balance-data?" in str(problem)


def test_a_sample_may_be_longer_than_a_micro_batch_as_for_slime() -> None:
    words = [*shlex.split(LEAST), "--max-tokens-per-gpu", "64", "--rollout-max-response-len", "512"]
    alone, masked = config_of(words), config_of([*words, "--overlong-samples", "mask"])
    assert (alone.longest_sample > 512, masked.longest_sample) == (True, 64)
    assert not list(engine_checks.check_lengths(Inspection(alone)))
    (problem,) = engine_checks.check_lengths(Inspection(masked))
    assert isinstance(problem, ConfigError) and problem.field == "trainer.max_tokens_per_gpu"


GEO3K = "examples/geo3k_vlm/run_geo3k_qwen35.sh"


def test_the_script_with_pictures_runs_on_the_torch_backend() -> None:
    path, given = up.train_source(None, SCRIPTS[GEO3K], now=NOW)
    config, problems, notes, *_ = read(path, given.overrides)
    assert config is not None and not problems
    trainer = config.trainer
    assert (trainer.trainer_backend, trainer.tensor_model_parallel_size, trainer.expert_model_parallel_size, trainer.megatron) == (
        "torch", 1, 1, {},
    )  # fmt: skip
    assert not any("speculative" in name for name in config.rollout.sglang)
    assert any("trainer_backend = torch" in note and "speculative-algorithm" in note and "spec," in note for note in notes)
    with pytest.raises(Problems, match="megatron trains text alone; use torch"):
        config_of([*SCRIPTS[GEO3K], "--trainer-backend", "megatron"])
    words = [word for word in SCRIPTS[GEO3K] if word not in ("--multimodal-keys", '{"image":"images"}')]
    assert config_of(words).trainer.trainer_backend == "megatron"


def test_the_command_that_continues_a_serve_has_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[str]()

    async def run() -> int:
        return 0

    def serving(*_: object, again: str, **__: object) -> SimpleNamespace:
        printed.append(again)
        return SimpleNamespace(run=run)

    monkeypatch.setattr(up, "Serving", serving)
    monkeypatch.setattr(up, "checked_config", lambda *_, **__: run_config(tmp_path))
    for name in ("claimed", "logged"):
        monkeypatch.setattr(up, name, lambda *_: contextlib.nullcontext())
    (tmp_path / "my serve.toml").touch()
    given = argparse.Namespace(config=tmp_path / "my serve.toml", flags=["--lora-rank", "16"], fresh=False)
    assert up._serve(given, Console()) == 0
    assert printed[0].endswith(f"myxo serve '{tmp_path}/my serve.toml' --lora-rank 16")


def test_none_is_no_directory_to_load_from_or_to_save_in() -> None:
    given = up.train_source(None, shlex.split(f"{LEAST} --load none --save none"), now=NOW).given.overrides
    assert "dir" not in given["run"] and (given["trainer"]["load"], given["trainer"]["save"]) == (None, None)


def test_the_run_that_evaluates_one_of_a_long_name_has_its_end(tmp_path: Path) -> None:
    long = run_config(tmp_path, run={"name": "a" * 8 + "-" + "model" * 8 + "-20260801-0930"})
    name = evaluating(long, 120, tmp_path).run.name
    assert len(name) <= 63 and name.endswith("-20260801-0930-eval-v120")
    assert evaluating(run_config(tmp_path), 3, tmp_path).run.name == "test-eval-v3"


@pytest.mark.parametrize("table", ['{"api_key": "s3cret", "n": 1}', "{'api_key': 's3cret', 'n': 1}"])
def test_the_command_that_continues_a_run_has_no_credentials(table: str) -> None:
    words = ["--wandb-key", "s3cret", "--lr", "1e-5", "--wandb-key=s3cret", "--judge-url", "http://me:s3cret@host/v1", "--custom-args"]
    again = up.continuing(run_config(Path("/r")), Source.of(Path("run.toml"), [*words, table, "--rm-type", "math"]))
    assert "s3cret" not in again and "wandb" not in again
    kept = ["run.toml", "--lr", "1e-5", "--judge-url", "http://…@host/v1", "--custom-args", '{"api_key": "…", "n": 1}', "--rm-type", "math"]
    assert shlex.split(again)[-9:] == kept
    assert shlex.split(up.continuing(run_config(Path("/r")), Source.of(Path("run.toml"), ["--rm-url", "{{}}"])))[-1] == "{{}}"


def test_what_is_checked_follows_from_the_settled_rank_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = run_config(tmp_path), run_config(tmp_path, trainer={"actor_num_nodes": 2})
    seen = list[bool]()

    def checked(source: Source, *, starts: Callable[[RunConfig], bool], fresh: bool) -> None:
        seen.append(starts(cases[len(seen)][0]))
        raise ConfigError("checked", None, "only")

    monkeypatch.setattr(up, "checked", checked)
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    cases: list[tuple[RunConfig, dict[str, str], int | None, bool]] = [
        (one, {"MYXO_NODE_RANK": "1"}, None, True),
        (one, {"MYXO_NODE_RANK": ""}, None, True),
        (one, {}, 1, False),
        (two, {"MYXO_NODE_RANK": "1"}, 0, True),
        (two, {"MYXO_NODE_RANK": "1"}, None, False),
        (two, {"SLURM_NODEID": "1"}, None, False),
        (two, {"SLURM_NODEID": "0"}, None, True),
        (two, {}, None, True),
    ]
    for _, environment, rank, _ in cases:
        with monkeypatch.context() as patched, pytest.raises(ConfigError, match="checked"):
            for variable, value in environment.items():
                patched.setenv(variable, value)
            up.up(Source(None, flags.read([])), Console(), node_rank=rank)
    assert seen == [first for *_, first in cases]
