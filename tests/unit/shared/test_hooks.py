"""The user's own functions: found or refused by field, and what they are given."""

import copy
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config.run_config import RunConfig, field_sections, section_model
from shared.hooks import Arguments, DynamicFilterOutput, HookSample, arguments, load, nonzero_std, paths
from shared.hooks.loading import EVAL_LOG, RUN_BY, SAMPLE_HOOKS
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.service_process import ROOT
from tests.support.tables import table

MODULES = {
    "fine": "def f(args):\n    return 3\nnumber = 3\nclass Called:\n    def __call__(self):\n        return 4\ncalled = Called()\n",
    "broken": "def f(:\n",
    "raising": "raise RuntimeError('no\\n  GPU here')\n",
    "leaving": "import sys\nsys.exit('bye')\n",
    "lacking": "import a_package_that_is_not_there\n",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in MODULES.items():
        (tmp_path / f"some_{name}_hooks.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(f"some_{name}_hooks", None)


@pytest.mark.usefixtures("modules")
def test_functions_are_found() -> None:
    assert load("a.b", "some_fine_hooks:f")(None) == 3
    assert load("a.b", "some_fine_hooks:called")() == 4


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("some_fine_hooks:absent", "cannot be imported: module 'some_fine_hooks' has no attribute 'absent'; name a function that is in it"),
        ("some_fine_hooks:number", "expected a function, found a int"),
        ("no_such_hooks:f", "cannot be imported: No module named 'no_such_hooks'; install the package or put its directory on PYTHONPATH"),
        ("some_broken_hooks:f", "cannot be imported: SyntaxError: "),
        ("some_raising_hooks:f", "cannot be imported: RuntimeError: no GPU here; "),
        ("some_leaving_hooks:f", "cannot be imported: SystemExit: bye; "),
        ("some_lacking_hooks:f", "cannot be imported: No module named 'a_package_that_is_not_there'; "),
    ],
)
def test_what_cannot_be_used_is_refused_by_field(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("reward.custom_rm_path", path)
    assert (caught.value.field, caught.value.value) == ("reward.custom_rm_path", path)
    assert caught.value.expected.startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(("name", "at"), [("broken", ":1; "), ("raising", ":1, in <module>; "), ("lacking", ":1, in <module>; ")])
def test_what_fails_while_it_is_imported_names_its_file_and_line(name: str, at: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("reward.custom_rm_path", f"some_{name}_hooks:f")
    assert f"; at {tmp_path / f'some_{name}_hooks.py'}{at}" in caught.value.expected


def test_an_async_function_is_refused_where_nothing_awaits_it() -> None:
    for field in RUN_BY:
        if RUN_BY[field] in ("rollout", "reward"):
            assert load(field, "shared.runtime.tasks:settled")
        else:
            with pytest.raises(ConfigError, match="a plain function: an async one would never run") as caught:
                load(field, "shared.runtime.tasks:settled")
            assert caught.value.field == field


def test_every_field_of_a_function_has_a_service_that_runs_it(tmp_path: Path) -> None:
    owners = field_sections()
    files = {"custom_config_path", "megatron_config_path", "memory_snapshot_path"}
    hooks = {f"{owners[field]}.{field}" for field in owners if field.endswith("_path") and field not in files}
    assert hooks | {"data.data_source", "rollout.agent"} == set(RUN_BY)
    sections: dict[str, dict[str, Any]] = {}
    for field in RUN_BY:
        section, _, name = field.partition(".")
        sections.setdefault(section, {})[name] = ["my.hooks:f"] if field == SAMPLE_HOOKS else "my.hooks:f"
    sections["algorithm"]["loss_type"] = "custom_loss"
    config = run_config(tmp_path)
    for section, fields in sections.items():  # not all of them go together
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})
    fields = {f"{field}[0]" if field == SAMPLE_HOOKS else field for field in RUN_BY}
    assert paths(config) == dict.fromkeys(fields, "my.hooks:f")
    assert set(paths(config, "rollout")) == {
        "rollout.custom_generate_function_path",
        "rollout.rollout_function_path",
        f"{SAMPLE_HOOKS}[0]",
        "rollout.agent",
        "eval.eval_function_path",
    }
    assert set(paths(config, "buffer")) == {"rollout.buffer_filter_path", "data.data_source", EVAL_LOG}
    of_trainer = {field for field in RUN_BY if field.startswith(("algorithm.", "trainer.", "monitoring."))} - {EVAL_LOG}
    assert set(paths(config, "trainer")) == of_trainer
    of_services = [set(paths(config, service)) for service in ("buffer", "rollout", "reward", "trainer")]
    assert set().union(*of_services) == fields


def test_what_comes_with_myxo_is_no_function_of_the_users(tmp_path: Path) -> None:
    assert paths(run_config(tmp_path)) == {}
    assert paths(run_config(tmp_path, rollout={"dynamic_sampling_filter_path": "nonzero_std"})) == {}


def apart(config: RunConfig, directory: Path) -> subprocess.CompletedProcess[str]:
    """What checks a config's functions, started in a directory, where they are found as by a service that is started there."""
    command, environment = [sys.executable, "-m", "shared.hooks"], {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, cwd=directory, env=environment)


def test_a_process_apart_checks_what_agents_are_called_with(tmp_path: Path) -> None:
    (tmp_path / "some_agents.py").write_text("def good(data, base_url, api_key=None, *more): ...\nasync def bad(data, url): ...\n")
    for name, code in (("good", 0), ("bad", 2)):
        own = {"name": "x", "path": "x", "agent": f"some_agents:{name}"}
        done = apart(run_config(tmp_path, rollout={"agent": "some_agents:good"}, eval={"sets": [own]}), tmp_path)
        assert done.returncode == code, done.stderr
    field, path, expected = json.loads(done.stdout.splitlines()[-1])
    assert (field, path) == ("eval.sets.x.agent", "some_agents:bad")
    assert expected == "expected a function of (data, base_url, api_key): too many positional arguments"


def test_a_process_apart_says_what_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "some_talking_hooks.py").write_text("print('hello')\ndef f(args): ...\n")
    for name, code, last in (("f", 0, "hello"), ("g", 2, '["reward.custom_rm_path", "some_talking_hooks:g", "cannot be imported: ')):
        config = run_config(tmp_path, reward={"custom_rm_path": f"some_talking_hooks:{name}"})
        done = apart(config, tmp_path)
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines()[-1].startswith(last)


def test_arguments_are_the_whole_config_under_the_flags_names(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"rollout": {"sglang": {"mem-fraction-static": 0.8}}, "reward": {"reward_key": "match"}}
    config = run_config(
        tmp_path, trainer={"megatron": {"moe_router_dtype": "fp32"}, "max_tokens_per_gpu": 64, "log_probs_chunk_size": 32}, **sections
    )
    args = Arguments(config, sglang_router_ip="127.0.0.1", sglang_router_port=30000)
    for field, section in field_sections().items():
        value = getattr(getattr(config, section), field)
        if isinstance(value, bool | int | float | str | dict):
            assert getattr(args, field) == value, field
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.hf_checkpoint, args.reward_key) == (
        2,
        2,
        str(tmp_path / "model"),
        "match",
    )
    assert (args.sglang_mem_fraction_static, args.sglang_router_ip, args.sglang_router_port) == (0.8, "127.0.0.1", 30000)
    assert (args.prompt_data, args.moe_router_dtype) == (str(tmp_path / "prompts.jsonl"), "fp32")
    assert vars(args)["lr"] == config.trainer.lr


READ_BY_SLIMES_FILES = {
    "partial_rollout": False,
    "sglang_server_concurrency": 512,
    "sglang_dp_size": 1,
    "rollout_skip_special_tokens": False,
    "rollout_max_context_len": None,
    "eval_max_context_len": None,
    "context_parallel_size": 1,
    "max_tokens_per_gpu": 8192,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_global_dataset": True,
    "multimodal_keys": None,
    "ci_test": False,
    "use_rollout_routing_replay": False,
    "sglang_speculative_algorithm": None,
    "rollout_num_engines": 1,
}


@table("name", READ_BY_SLIMES_FILES)
def test_arguments_have_what_slimes_files_read(name: str, tmp_path: Path) -> None:
    assert getattr(Arguments(run_config(tmp_path)), name) == READ_BY_SLIMES_FILES[name]


def test_a_field_of_the_config_has_no_fixed_value_beside_it(tmp_path: Path) -> None:
    fixed = {*arguments.NOT_SET.split(), *arguments.OFF.split(), *arguments.ON.split(), *arguments.OTHERS}
    given = {name for name, section in field_sections().items() if section_model(section).model_fields[name].default is not None}
    assert fixed & given == set()
    assert Arguments(config := run_config(tmp_path)).save_interval == config.trainer.save_interval


def test_arguments_follow_the_run(tmp_path: Path) -> None:
    args = Arguments(run_config(tmp_path, rollout={"staleness_policy": "continue", "rollout_stop": ["x"], "rollout_concurrency": 3}))
    assert (args.partial_rollout, args.mask_offpolicy_in_partial_rollout, args.rollout_stop) == (True, False, ["x"])
    assert args.sglang_server_concurrency == 3
    assert args.rewards_normalization and args.grpo_std_normalization
    plain = {"custom_reward_post_process_path": "some:f", "disable_rewards_normalization": True, "disable_grpo_std_normalization": True}
    apart = Arguments(run_config(tmp_path, algorithm=plain))
    assert not (apart.rewards_normalization or apart.grpo_std_normalization)
    assert not hasattr(args, "num_layers"), "there is no model"
    (tmp_path / "model").mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 16}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape, **settings}))
    there = Arguments(run_config(tmp_path))
    assert (there.num_layers, there.hidden_size, there.num_query_groups) == (2, 64, 2)


def test_arguments_have_the_evaluation_sets_as_slime_has_them(tmp_path: Path) -> None:
    own = {"rm_type": "exact", "metadata_overrides": {"level": 2}, "n_samples_per_eval_prompt": 4, "label_key": "answer"}
    own |= {"max_context_len": 20}
    args = Arguments(
        run_config(
            tmp_path,
            rollout={"rollout_top_p": 0.9, "rollout_max_context_len": 100},
            eval={
                "eval_prompt_data": ["a", "/a.jsonl"],
                "sets": [{"name": "b", "path": "/b.jsonl", **own}],
                "eval_temperature": 0.5,
                "eval_max_prompt_len": 30,
            },
        )
    )
    assert (args.eval_prompt_data, args.eval_max_context_len) == (["a", "/a.jsonl", "b", "/b.jsonl"], 100)
    first, second = args.eval_datasets
    assert (first.max_prompt_len, first.max_context_len, second.max_prompt_len, second.max_context_len) == (30, None, 19, 20)
    assert (first.name, first.path, first.temperature, first.top_p, first.n_samples_per_eval_prompt) == ("a", "/a.jsonl", 0.5, 0.9, 1)
    assert (second.n_samples_per_eval_prompt, second.label_key, second.input_key, second.stop) == (4, "answer", "prompt", None)
    assert second.inject_metadata({"level": 1, "x": 1}) == {"level": 2, "x": 1, "rm_type": "exact"}
    assert Arguments(run_config(tmp_path)).eval_prompt_data is None
    sets = [{"name": "theirs", "path": "/a"}, {"name": "own", "path": "/b", "custom_rm_path": "own:f"}]
    for rm_type, functions in (("exact", ["run:f", "own:f"]), ("weighted", [None, "own:f"])):
        weighted = {"rm_type": rm_type, "custom_rm_path": "run:f", "reward_weights": {"exact": 1.0} if rm_type == "weighted" else {}}
        of_sets = Arguments(run_config(tmp_path, reward=weighted, eval={"sets": sets})).eval_datasets
        assert [one.custom_rm_path for one in of_sets] == functions


def test_arguments_may_be_written_and_copied(tmp_path: Path) -> None:
    args = Arguments(run_config(tmp_path))
    args.results, args.lr = {"solver": []}, 3.0
    other = copy.deepcopy(args)
    other.results["solver"].append(1)
    assert (args.results, other.results, other.lr, isinstance(args, Namespace)) == ({"solver": []}, {"solver": [1]}, 3.0, True)
    assert Arguments(run_config(tmp_path)).lr != 3.0


def test_arguments_name_the_nearest(tmp_path: Path) -> None:
    args = Arguments(run_config(tmp_path))
    with pytest.raises(AttributeError, match=r"args has no rollout_batchsize; did you mean rollout_batch_size\?"):
        _ = args.rollout_batchsize
    assert getattr(args, "no_such_thing", None) is None and not hasattr(args, "sglang_router_ip")


@table(
    ("rewards", "verdict"),
    [
        ([1.0, 0.0], DynamicFilterOutput(True)),
        ([1.0, 1.0], DynamicFilterOutput(False, "zero_std_1")),
        ([0.0], DynamicFilterOutput(False, "zero_std_0")),
        ([0.25, 0.25], DynamicFilterOutput(False, "zero_std_0.2")),
        ([-1.0, -1.0], DynamicFilterOutput(False, "zero_std_-1")),
        ([{"match": 1.0, "length": 2.0}, {"match": 1.0, "length": 3.0}], DynamicFilterOutput(False, "zero_std_1")),
    ],
)
def test_groups_of_equal_rewards_teach_nothing(tmp_path: Path, rewards: list[Any], verdict: DynamicFilterOutput) -> None:
    args = Arguments(run_config(tmp_path, reward={"reward_key": "match"}))
    assert nonzero_std(args, [HookSample(reward=reward) for reward in rewards]) == verdict


@pytest.mark.parametrize(("rewards", "kept"), [([1.0, -1.0, 1.0, -1.0], False), ([1.0, -1.0, -1.0, 1.0], True)])
def test_rewards_that_are_equal_within_each_role_teach_nothing(tmp_path: Path, rewards: list[float], kept: bool) -> None:
    samples = [HookSample(reward=reward) for reward in rewards]
    for index, sample in enumerate(samples):
        sample.role = ("left", "right")[index % 2]
    assert nonzero_std(Arguments(run_config(tmp_path)), samples).keep is kept


def test_the_reward_that_counts(tmp_path: Path) -> None:
    by_key, plain = Arguments(run_config(tmp_path, reward={"reward_key": "match"})), Arguments(run_config(tmp_path))
    assert HookSample(reward=0.5).get_reward_value(by_key) == HookSample(reward=0.5).get_reward_value(plain) == 0.5
    named = HookSample(reward={"match": 1.0, "reward": 0.0})
    assert (named.get_reward_value(by_key), named.get_reward_value(plain)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="no reward is named match; there are length"):
        HookSample(reward={"length": 1.0}).get_reward_value(by_key)
    with pytest.raises(ValueError, match="no reward yet"):
        HookSample().get_reward_value(plain)
