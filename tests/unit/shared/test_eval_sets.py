"""Evaluation sets: by flags, tables and slime's YAML; what they leave to the run; what is refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import config_reading, flags
from shared.config.config_reading import load, parse, read
from shared.config.eval_views import agents, eval_view, eval_views, group_config, reward_field, reward_key
from shared.config.rollout_section import GENERATORS
from shared.config.run_config import RunConfig
from shared.runtime.errors import BadInput, ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import table


def sets_of(directory: Path, **held_out: Any) -> RunConfig:
    return run_config(directory, eval=held_out)


@table(
    ("words", "expected"),
    [
        ("aime a.jsonl gpqa b.jsonl@[:5]", {"aime": ["a.jsonl"], "gpqa": ["b.jsonl@[:5]"]}),
        ("a.jsonl", {"heldout": ["a.jsonl"]}),
        ("aime-2024 a.jsonl", {"aime-2024": ["a.jsonl"]}),
        ("math hf:org/name:test", {"math": ["hf:org/name:test"]}),
    ],
)
def test_pairs_are_sets(tmp_path: Path, words: str, expected: dict[str, list[str]]) -> None:
    overrides = flags.parse(f"--eval-prompt-data {words} --eval-interval 2".split())
    config = run_config(tmp_path, eval=overrides["eval"])
    assert {view.name: [str(file) for file in view.files] for view in eval_views(config)} == expected
    table = run_config(tmp_path, eval={"eval_prompt_data": expected})
    assert table.eval.eval_prompt_data == config.eval.eval_prompt_data


def test_a_config_with_sets_comes_back_from_json_and_toml(tmp_path: Path) -> None:
    own = {"temperature": 0.5, "stop": ["\n"], "metadata_overrides": {"a": {"b": 1}}, "custom_rm_path": "my.rewards:score"}
    config = sets_of(
        tmp_path, eval_prompt_data=["x", "x.jsonl"], sets=[{"name": "y", "path": ["a", "b"], **own}, {"name": "z", "path": "c"}]
    )
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    text = config_reading.dump(config)
    assert "[[eval.sets]]" in text and parse(tomllib.loads(text)) == config
    assert parse({**values(tmp_path), "eval": {"sets": [json.dumps({"name": "y", "path": "a"})]}}).eval.sets[0].name == "y"  # by a flag
    absolute = config.absolute(Path("/base"))
    assert [str(file) for item in absolute.eval.named.values() for file in item.path] == ["/base/x.jsonl", "/base/a", "/base/b", "/base/c"]


def test_a_set_with_a_function_of_its_own_is_not_scored_as_the_run_is(tmp_path: Path) -> None:
    reward = {"rm_type": "tournament", "judge_url": "http://j/v1", "judge_model": "m"}
    own = {"name": "held", "path": "held.jsonl", "custom_rm_path": "my.rewards:score"}
    assert run_config(tmp_path, reward=reward, eval={"sets": [own]}).queues()


def test_what_generates_for_a_set_takes_the_place_of_whatever_generates_for_the_run(tmp_path: Path) -> None:
    kinds = {"f": {"custom_generate_function_path": "my.own:f"}, "a": {"agent": "my.own:a"}, "c": {"agent_command": ["./own"]}, "none": {}}
    sets = [{"name": name, "path": "x", **own} for name, own in kinds.items()]
    runs = [{"agent": "my.run:a"}, {"agent_command": ["./run"]}, {"custom_generate_function_path": "my.run:f"}]
    for of_run in runs:
        config = run_config(tmp_path, rollout=of_run, eval={"sets": sets})
        assert config.has_agents and config.gateways
        for view, own in zip(eval_views(config), kinds.values(), strict=True):
            found = {name: value for name in GENERATORS if (value := getattr(view.config.rollout, name))}
            assert found == (own or of_run)
    config = run_config(tmp_path, eval={"sets": sets})
    assert agents(config) == {"eval.sets.a.agent": "my.own:a", "eval.sets.c.agent_command": ["./own"]}
    assert config.has_agents and not run_config(tmp_path, eval={"sets": sets[:1]}).gateways


@pytest.mark.parametrize(
    ("words", "command"),
    [(["python agent.py --steps 'a b'"], ["python", "agent.py", "--steps", "a b"]), (["python", "my agent.py"], ["python", "my agent.py"])],
)
def test_a_command_is_a_list_or_text_as_for_a_shell(tmp_path: Path, words: list[str], command: list[str]) -> None:
    assert run_config(tmp_path, **flags.parse(["--agent-command", *words])).rollout.agent_command == command
    config = run_config(
        tmp_path, rollout={"agent_command": command}, eval={"sets": [{"name": "x", "path": "x", "agent_command": words[0]}]}
    )
    assert config.rollout.agent_command == command
    assert parse(tomllib.loads(config_reading.dump(config))) == config


def test_only_one_can_generate(tmp_path: Path) -> None:
    for name, field in (("custom_generate_function_path", "agent"), ("rollout_function_path", "agent"), ("agent_command", "agent_command")):
        with pytest.raises(ConfigError, match="only one of agent") as caught:
            run_config(tmp_path, rollout={"agent": "m:a", name: ["./a"] if name == "agent_command" else "m:f"})
        assert caught.value.field == f"rollout.{field}"
    with pytest.raises(ConfigError, match="set 'x': agent and agent_command; only one of them can generate"):
        run_config(tmp_path, eval={"sets": [{"name": "x", "path": "x", "agent": "m:a", "agent_command": ["./a"]}]})


def test_a_set_wins_over_eval_and_that_over_the_run(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        rollout={"rollout_temperature": 0.8, "rollout_top_p": 0.9, "rollout_stop": ["#"], "rollout_max_prompt_len": 7},
        reward={"reward_key": "score", "eval_reward_key": "acc"},
        data={"apply_chat_template_kwargs": {"a": 1, "b": 2}},
        eval={
            "eval_temperature": 0.6,
            "eval_input_key": "question",
            "eval_min_new_tokens": 2,
            "n_samples_per_eval_prompt": 3,
            "sets": [
                {
                    "name": "own",
                    "path": "a",
                    "apply_chat_template_kwargs": {"b": 2, "c": 3},
                    "temperature": 0.0,
                    "input_key": "q",
                    "min_new_tokens": 0,
                    "reward_key": "mine",
                    "stop": [],
                },
                {"name": "left", "path": "b", "max_prompt_len": 50, "max_context_len": 20, "custom_rm_path": "my.rewards:score"},
            ],
        },
    )
    own, left = eval_views(config)
    assert (own.config.rollout.rollout_temperature, left.config.rollout.rollout_temperature) == (0.0, 0.6)
    assert own.config.rollout.rollout_top_p == left.config.rollout.rollout_top_p == 0.9
    assert (own.config.rollout.rollout_stop, left.config.rollout.rollout_stop) == ([], ["#"])
    assert (own.config.data.input_key, left.config.data.input_key) == ("q", "question")
    assert (own.min_new_tokens, left.min_new_tokens) == (0, 2)
    assert own.config.rollout.n_samples_per_prompt == 3
    assert (own.template_variables, left.template_variables) == ({"a": None, "c": 3}, {})
    assert (own.config.rollout.rollout_max_prompt_len, left.config.rollout.rollout_max_prompt_len) == (None, 19)  # none of the run's
    groups = ("eval.own.3.0", "eval.left.3.0", "eval.gone.3.0", "g00000001")
    assert [reward_key(config, group) for group in groups] == ["mine", "acc", "score", "score"]
    custom = "eval.sets.left.custom_rm_path"
    assert [reward_field(config, group) for group in groups[:2]] == ["reward.custom_rm_path", custom]
    assert eval_view(config, "eval.gone.3.0") is None
    assert "custom_rm" in config.queues() and "custom_rm" not in config.reward.queues()
    config.reward.rm_type, config.reward.reward_weights = "weighted", {"exact": 1.0}
    assert [group_config(config, group).reward.environment_of(None) for group in groups[:2]] == ["weighted", "custom_rm"]
    assert config.rollout.rollout_temperature == 0.8  # nothing of the run's own has changed


@table(
    ("held_out", "field", "words"),
    [
        ({"eval_prompt_data": ["a.jsonl", "b.jsonl"]}, "eval.eval_prompt_data", "'a.jsonl' stands where a set's name should"),
        ({"eval_prompt_data": ["a", "b", "c"]}, "eval.eval_prompt_data", "3 words are no pairs"),
        ({"eval_prompt_data": "a.jsonl*2"}, "eval.eval_prompt_data", "has a weight"),
        ({"sets": [{"name": "a", "path": "p", "temprature": 1}]}, "eval.sets.a", "did you mean temperature"),
        ({"sets": [{"name": "a", "path": "p", "temperature": -1}]}, "eval.sets.a.temperature", "greater than or equal to 0"),
        ({"sets": [{"name": "a.b", "path": "p"}]}, "eval.sets.0.name", "pattern"),
        ({"sets": [{"path": "p"}]}, "eval.sets.0.name", "required"),
        ({"sets": [{"name": "a", "path": "p", "rm_type": "mth"}]}, "eval.sets.a.rm_type", "no such verifier or environment"),
        ({"sets": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]}, "eval.sets.name", "['a', 'a']: two sets are called 'a'; "),
        ({"eval_prompt_data": ["a", "p", "a", "q"]}, "eval.eval_prompt_data", "['a', 'p', 'a', 'q']: two sets are called 'a'"),
        ({"eval_prompt_data": ["a", "p"], "sets": [{"name": "a", "path": "q"}]}, "eval.sets.name", "one of them in eval_prompt_data"),
        ({"sets": [{"name": "a", "path": "p", "custom_rm_path": "no"}]}, "eval.sets.a.custom_rm_path", "package.module:function"),
        ({"eval_interval": 3}, "eval.eval_interval", "needs sets of held-out prompts"),
    ],
)
def test_what_is_no_set_is_refused_by_field(tmp_path: Path, held_out: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sets_of(tmp_path, **held_out)
    assert caught.value.field == field and words in str(caught.value)


# --- slime's file


def written(directory: Path, content: object) -> Path:
    path = directory / "eval.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def toml(directory: Path, eval_config: Path, more: str = "") -> Path:
    path = directory / "run.toml"
    config = run_config(directory).model_copy()
    path.write_text(config_reading.dump(config).replace("[eval]\n", f'[eval]\neval_config = "{eval_config}"\n{more}', 1).replace(
        "# eval_config = none\n", ""
    ))  # fmt: skip
    return path


SLIMES = """
eval:
  defaults:
    max_response_len: 16384
    top_p: 0.7
    repetition_penalty: 1.05
    rm_type: exact
  datasets:
    - name: aime
      path: /data/aime.jsonl
      rm_type: math_verify
      n_samples_per_eval_prompt: 16
    - name: gpqa
      path: /data/gpqa.jsonl
      temperature: 1e-1
      stop: ["</answer>"]
"""


def test_slimes_file_gives_data_sets_defaults_and_then_the_flags(tmp_path: Path) -> None:
    config = load(toml(tmp_path, written(tmp_path, SLIMES)), {"eval": {"eval_temperature": "0.3", "n_samples_per_eval_prompt": "2"}})
    aime, gpqa = eval_views(config)
    assert [(view.name, str(view.files[0])) for view in (aime, gpqa)] == [("aime", "/data/aime.jsonl"), ("gpqa", "/data/gpqa.jsonl")]
    for view, temperature, n, kind in ((aime, 0.3, 16, "math_verify"), (gpqa, 0.1, 2, "exact")):
        rollout = view.config.rollout
        assert (rollout.rollout_max_response_len, rollout.rollout_top_p, view.own.repetition_penalty) == (16384, 0.7, 1.05)
        assert (rollout.rollout_temperature, rollout.n_samples_per_prompt, view.metadata) == (temperature, n, {"rm_type": kind})
    assert gpqa.config.rollout.rollout_stop == ["</answer>"]
    again = parse(tomllib.loads(config_reading.dump(config)))
    assert again == config  # what is printed holds the sets, and still says where they come from


@pytest.mark.parametrize(
    "content",
    [
        {"datasets": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]},
        {"eval": {"datasets": {"a": {"path": "/a"}, "b": {"path": "/b"}}}},
        json.dumps({"eval": {"defaults": None, "datasets": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]}}),
    ],
)
def test_slimes_file_has_several_forms(tmp_path: Path, content: object) -> None:
    config = load(toml(tmp_path, written(tmp_path, content)))
    assert {view.name: str(view.files[0]) for view in eval_views(config)} == {"a": "/a", "b": "/b"}


def test_slimes_file_takes_the_place_of_the_pairs_and_says_so(tmp_path: Path) -> None:
    path = toml(tmp_path, written(tmp_path, SLIMES))
    config, problems, notes, *_ = read(path, {"eval": {"eval_prompt_data": ["other", "x.jsonl"]}})
    assert config is not None and not problems
    assert [view.name for view in eval_views(config)] == ["aime", "gpqa"]
    assert any("eval.eval_prompt_data" in note and "takes its place" in note for note in notes)


@table(
    ("content", "words"),
    [
        ("a: [", "not a readable YAML file"),
        ("- a", "expected a mapping with datasets"),
        ({"datasets": []}, "expected a list of data sets"),
        ({"datasets": [{"path": "/a"}]}, "datasets[0] = None: needs a name"),
        ({"datasets": [{"name": "a"}]}, "needs a path"),
        ({"datasets": [{"name": "a", "path": "/a", "temperture": 1}]}, "unknown key; did you mean temperature?"),
        ({"defaults": {"temperture": 1}, "datasets": [{"name": "a", "path": "/a"}]}, "defaults.temperture"),
        ({"defaults": {}, "dataset": []}, "unknown key; did you mean datasets?"),
        ({"datasets": [{"name": "a", "path": "/a", "multimodal_keys": {"image": "i"}}]}, "by data.multimodal_keys"),
        ({"datasets": [{"name": "a", "path": "/a", "min_eval_samples": 3}]}, "nothing in slime reads it"),
        ({"datasets": [{"name": "a", "path": "${oc.env:DATA}/a"}]}, "interpolations are not read"),
        ("datasets:\n  - {name: a, path: /a, path: /b}", "'path' is there twice"),
        ({"datasets": [{"name": "a", "path": "/a", "temperature": -1}]}, "eval.sets.a.temperature = -1: "),
        ({"datasets": [{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]}, "eval.sets.name = ['a', 'a']: two sets are called 'a'"),
    ],
)
def test_what_is_wrong_in_slimes_file_is_named(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(toml(tmp_path, written(tmp_path, content)))
    text = str(caught.value)
    assert words in text.replace("'None'", "None") or words.split(" = None")[0] in text, text
    assert str(tmp_path / "eval.yaml") in text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.eval_config = .*gone.yaml.*: no such file"):
        load(toml(tmp_path, tmp_path / "gone.yaml"))


# --- without steps


@pytest.mark.parametrize(
    ("sections", "half"),
    [
        ({"eval": {"eval_prompt_data": "h.jsonl"}}, (True, False)),
        ({"sft": {"sft_data": "s.jsonl"}}, (False, True)),
        ({"sft": {"sft_data": "s.jsonl"}, "eval": {"eval_prompt_data": "h.jsonl"}}, (False, False)),
    ],
)
def test_a_run_without_steps_is_the_half_that_it_needs(tmp_path: Path, sections: dict[str, Any], half: tuple[bool, bool]) -> None:
    nested = {**values(tmp_path, rollout={"num_rollout": 0, "n_samples_per_prompt": 1}), **sections}
    del nested["data"]
    config = parse(nested)
    assert not config.has_steps and (config.debug.debug_rollout_only, config.debug.trains_only) == half
    assert parse(tomllib.loads(config_reading.dump(config))) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_run_with_nothing_to_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.num_rollout = 0: 0, with neither prompts to evaluate on .* nor demonstrations"):
        run_config(tmp_path, rollout={"num_rollout": 0})
    nested = values(tmp_path)
    del nested["data"]
    with pytest.raises(ConfigError, match=r"data.prompt_data = None: required"):
        parse(nested)
