"""A config that builds on other files: ``base = …``."""

import tomllib
from pathlib import Path

import pytest

from shared.config import config_reading, flags
from shared.config.config_layers import over
from shared.config.config_reading import load, read
from shared.data.data_files import DataFile
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A whole config in a file of its own."""
    path = tmp_path / "plain.toml"
    path.write_text(config_reading.dump(run_config(tmp_path, rollout={"sglang": {"page-size": 16, "mem-fraction-static": 0.5}})))
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_stands_over_its_base_table_by_table(plain: Path, tmp_path: Path) -> None:
    over = write(
        tmp_path / "deep" / "run.toml",
        'base = "../plain.toml"\n[rollout]\nnum_rollout = 77\n[rollout.sglang]\npage-size = 32\n'
        '[trainer.megatron]\nmoe-router-dtype = "fp64"\n',
    )
    below, above = load(plain), load(over)
    assert above.rollout.num_rollout == 77
    assert above.rollout.sglang == {"page-size": 32, "mem-fraction-static": 0.5}
    assert above.trainer.megatron == {"moe_router_dtype": "fp64"}
    assert above.model == below.model
    assert above.rollout.rollout_batch_size == below.rollout.rollout_batch_size


def test_later_bases_stand_over_earlier_ones_and_bases_have_bases(plain: Path, tmp_path: Path) -> None:
    write(tmp_path / "models" / "root.toml", "[trainer]\nlr = 1e-3\nmin_lr = 1e-4\nseed = 5\n[trainer.megatron]\nnum-layers = 2\n")
    write(tmp_path / "models" / "small.toml", 'base = "root.toml"\n[trainer]\nmin_lr = 1e-5\n[trainer.megatron]\nno-rope-fusion = true\n')
    write(tmp_path / "fast.toml", "[trainer]\nlr = 2e-3\n[trainer.megatron]\napply_rope_fusion = true\n")
    config = load(write(tmp_path / "run.toml", 'base = ["plain.toml", "models/small.toml", "fast.toml"]\n[trainer]\nseed = 9\n'))
    assert (config.trainer.lr, config.trainer.min_lr, config.trainer.seed) == (2e-3, 1e-5, 9)
    assert config.trainer.megatron == {"num_layers": 2, "apply_rope_fusion": True}


def test_flags_stand_over_all_and_the_dump_shows_the_whole(plain: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", 'base = "plain.toml"\n[trainer]\nlr = 1e-3\n')
    config = load(path, flags.parse(["--lr", "5e-4", "--num-layers", "4"]))
    assert config.trainer.lr == 5e-4
    shown = tomllib.loads(config_reading.dump(config))
    assert "base" not in shown
    assert (shown["trainer"]["lr"], shown["trainer"]["megatron"]) == (5e-4, {"num_layers": 4})


def test_a_published_model_is_a_base(plain: Path, tmp_path: Path) -> None:
    models = sorted((Path(__file__).parents[3] / "configs" / "models").glob("*.toml"))
    assert models
    for model in models:
        text = f'base = ["{model}", "plain.toml"]\n[trainer]\nactor_num_gpus_per_node = 8\ntensor_model_parallel_size = 1\n'
        config = load(write(tmp_path / "run.toml", text), {"rollout": {"rollout_batch_size": 256}})
        assert config.trainer.megatron["num_layers"] > 0
        assert config.model.hf_checkpoint == tmp_path / "model"


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("[trainer]\nlrr = 1\n", r"trainer.lrr = 1: unknown key; did you mean lr\? \(in .*base.toml\)"),
        ("[trainer]\nlr = -1\n", r"trainer.lr = -1: .*greater than or equal to 0 \(in .*base.toml\)"),
        ("[trainer.megatron]\nnum-layer = 1\n", r"trainer.megatron.num-layer = 1: unknown flag.*\(in .*base.toml\)"),
        ("[trainer\n", r"base = 'base.toml': not a readable TOML file: .*\(in .*run.toml\)"),
        ('base = "run.toml"\n', r"base = 'run.toml': a file that does not lead back to itself: .*run.toml → .*base.toml → .*run.toml"),
        ('base = "gone.toml"\n', r"base = 'gone.toml': no such file; give a TOML run config \(in .*base.toml\)"),
        ("base = 3\n", "base = 3: the path of a TOML file, relative to .*, or a list of such paths"),
    ],
)
def test_what_is_wrong_in_a_base_is_refused_with_its_file(plain: Path, tmp_path: Path, base: str, message: str) -> None:
    write(tmp_path / "base.toml", base)
    path = write(tmp_path / "run.toml", 'base = ["plain.toml", "base.toml"]\n')
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_what_the_file_itself_says_wrong_is_not_laid_to_its_base(plain: Path, tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "[trainer]\nlr = 1e-3\n")
    path = write(tmp_path / "run.toml", 'base = ["plain.toml", "base.toml"]\n[trainer]\nlr = -1\n')
    with pytest.raises(ConfigError, match=r"trainer.lr = -1: [^(]*$"):
        load(path)


SWITCHED = "[rollout]\npartial_rollout = {0}\n[trainer]\noffload = {0}\nbf16 = {0}\ncolocate = true\nupdate_weight_disk_keep_files = {0}\n"


@pytest.mark.parametrize("words", ["", "--partial-rollout false --offload false --bf16 no --update-weight-disk-keep-files=0"])
def test_a_switch_that_is_off_takes_back_what_stands_below(plain: Path, tmp_path: Path, words: str) -> None:
    off = "" if words else SWITCHED.format("false")
    write(tmp_path / "base.toml", SWITCHED.format("true"))
    path = write(tmp_path / "run.toml", 'base = ["plain.toml", "base.toml"]\n' + off)
    config = load(path, over({"rollout": {"rollout_batch_size": 8}}, flags.parse(words.split())))
    trainer, kept = config.trainer, config.weights.keep_snapshots
    assert (config.rollout.staleness_policy, trainer.offload_train, trainer.train_dtype, kept) == ("drop", None, "float32", 2)
    write(tmp_path / "base.toml", "[weights]\nkeep_snapshots = 5\n[trainer]\noffload_train = false\n")
    config = load(path, flags.parse(words.split()))
    assert (config.weights.keep_snapshots, config.trainer.offload_train) == (5, False), "what the switch has not set stays"


def test_a_file_of_prompts_is_one_value(plain: Path, tmp_path: Path) -> None:
    [prompts] = tomllib.loads(plain.read_text())["data"]["prompt_data"]
    write(tmp_path / "base.toml", f'[data]\nprompt_data = {{ path = "{prompts}", weight = 3.0 }}\n')
    path = write(tmp_path / "run.toml", f'base = ["plain.toml", "base.toml"]\n[data]\nprompt_data = {{ path = "{prompts}" }}\n')
    assert load(path).data.prompt_data == [DataFile(Path(prompts))]


def test_a_table_of_ones_own_keys_is_merged_also_with_a_key_path(plain: Path, tmp_path: Path) -> None:
    keys = '[run.custom_args]\npath = "{0}"\n[rollout.agent_options.servers]\npath = "{0}"\n'
    write(tmp_path / "base.toml", keys.format("a") + "deep = 1\n[run.custom_args.more]\nn = 3\n")
    path = write(tmp_path / "run.toml", f'base = ["plain.toml", "base.toml"]\n{keys.format("b")}')
    config = load(path, flags.parse(["--custom-args", '{"path": "c"}']))
    assert config.run.custom_args == {"path": "c", "more": {"n": 3}}
    assert config.rollout.agent_options == {"servers": {"path": "b", "deep": 1}}
    assert over({"run": {"custom_args": {"path": "a", "n": 3}}}, {"run": {"custom_args": {"path": "b"}}, "data": {}}) == {
        "run": {"custom_args": {"path": "b", "n": 3}},
        "data": {},
    }


def test_an_engines_flag_stands_over_the_same_one_spelled_otherwise(plain: Path, tmp_path: Path) -> None:
    model = "[rollout.models.judge.sglang]\n"
    write(tmp_path / "base.toml", f'base = "plain.toml"\n[rollout.sglang]\nmem_fraction_static = 0.6\ndp-size = 1\n{model}tp_size = 1\n')
    path = write(tmp_path / "run.toml", f'base = "base.toml"\n[rollout.sglang]\ndata_parallel_size = 2\n{model}tensor-parallel-size = 2\n')
    rollout = load(path, flags.parse(["--sglang-mem-fraction-static", "0.7"])).rollout
    assert rollout.sglang == {"page-size": 16, "mem-fraction-static": "0.7", "data_parallel_size": 2}
    assert rollout.models["judge"].sglang == {"tensor-parallel-size": 2}
    assert over({"rollout": {"sglang": {"a_b": {"x": 1}, 3: 4}}}, {"rollout": {"sglang": {"a-b": {"y": 2}, 3: 5}}}) == {
        "rollout": {"sglang": {"a-b": {"x": 1, "y": 2}, 3: 5}}
    }
    twice = write(tmp_path / "twice.toml", 'base = "plain.toml"\n[rollout.sglang]\npage_size = 1\npage-size = 2\n')
    assert load(twice).rollout.sglang.keys() == {"page_size", "page-size", "mem-fraction-static"}, "as it was refused"


def test_a_switch_is_no_number_in_a_field_a_list_a_table_or_a_set(plain: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("save_interval: on\n")
    sets = '[[eval.sets]]\nname = "held"\npath = "held.jsonl"\nn_samples_per_eval_prompt = true\n'
    run = f'[run]\ncustom_config_path = "{own}"\n[trainer]\nlr = true\ncritic_lr = false\nmax_tokens_per_gpu = true\n{sets}'
    tables = (
        "[rollout]\nrollout_stop_token_ids = [7, true]\nengine_groups = [{ replicas = true }]\n[reward.reward_weights]\nlength = true\n"
    )
    path = write(tmp_path / "run.toml", 'base = "plain.toml"\n' + run + tables)
    problems = read(path).problems
    fields = [
        "trainer.lr",
        "critic_lr",
        "max_tokens_per_gpu",
        "save_interval",
        "sets.held",
        "rollout_stop_token_ids",
        "replicas",
        "reward_weights",
    ]
    assert [field for field in sorted(fields) if not any(field in str(problem) for problem in problems)] == []
    assert all("expected a number" in str(problem) for problem in problems), problems


def test_switches_words_and_numbers_are_taken_where_they_are_meant(plain: Path, tmp_path: Path) -> None:
    text = (
        'base = "plain.toml"\n[trainer]\nmax_tokens_per_gpu = "auto"\ntrainer_backend = "torch"\noffload_train = false\ncolocate = true\n'
    )
    path = write(tmp_path / "run.toml", text + "[run.custom_args]\ndeep = [true, 1]\n[rollout.sglang]\nenable-mixed-chunk = true\n")
    config = load(path, flags.parse(["--lr", "1e-5", "--num-rollout", "7", "--critic-lr", "none", "--rollout-stop-token-ids", "1", "2"]))
    assert (config.trainer.lr, config.rollout.num_rollout, config.trainer.critic_lr) == (1e-5, 7, None)
    assert config.rollout.rollout_stop_token_ids == [1, 2] and config.trainer.max_tokens_per_gpu == "auto"
    assert config.run.custom_args == {"deep": [True, 1]} and config.rollout.sglang["enable-mixed-chunk"] is True


def test_no_text_is_no_path(tmp_path: Path) -> None:
    """As ``--save "$UNSET"`` gives it: it would be the working directory."""
    with pytest.raises(ConfigError, match="trainer.save = '': expected a path"):
        run_config(tmp_path, trainer={"save": ""})
    assert run_config(tmp_path, trainer={"save": "."}).trainer.save is not None
