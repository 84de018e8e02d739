"""What rollout and evaluation functions return, read and checked."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.data.pass_rates import eval_figures
from shared.hooks import HookSample, Sample, import_names
from shared.hooks.loading import last_rollout
from shared.hooks.returned_output import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    eval_metrics,
    eval_output,
    returned_groups,
    returned_sets,
    train_output,
)
from shared.hooks.slime.prompt_sources import Dataset, pop_first, read_file
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import table

Status = HookSample.Status


def test_a_result_in_its_older_and_newer_form() -> None:
    data = {"a": {"rewards": [1.0]}}
    assert eval_output(data) == RolloutFnEvalOutput(data, None)
    assert eval_output(SimpleNamespace(data=data, metrics={"m": 1})) == RolloutFnEvalOutput(data, {"m": 1})


@table("returned", [None, {}, [], RolloutFnEvalOutput({}), RolloutFnEvalOutput([1])])
def test_what_is_no_result_is_refused(returned: Any) -> None:
    with pytest.raises(ValueError, match="expected RolloutFnEvalOutput.data, metrics. with at least one set"):
        eval_output(returned)


def test_figures_come_from_what_is_given() -> None:
    one = HookSample(response_length=3, weight_versions=[2, 2, 3], status=Status.TRUNCATED)
    two = HookSample(response_length=5, weight_versions=[(0, 5, 4)])
    other = HookSample(response_length=1, weight_versions=["v7"])
    found = returned_sets(
        {
            "all": {"rewards": np.array([1.0, 0.0, 1.0, 1.0]), "samples": [one, [two, other]]},
            "bare": {"rewards": [True, 2], "truncated": [0, 1]},
        }
    )
    assert (found["all"].lengths, found["all"].truncated, found["all"].versions) == ([3, 5, 1], 1, (2, 4))
    assert (found["bare"].rewards, found["bare"].lengths, found["bare"].truncated, found["bare"].versions) == ([1.0, 2.0], [], 1, None)
    assert found["all"].groups(2) == [[1.0, 0.0], [1.0, 1.0]]
    assert found["all"].groups(3) == [[1.0], [0.0], [1.0], [1.0]], "not so many as there are samples a prompt"
    figures = eval_figures(found["all"].groups(2), found["all"].lengths, 1, passes=1.0)
    assert figures["rates"] == {"pass@1": 0.75, "pass@2": 1.0, "pass^1": 0.75, "pass^2": 0.5}
    assert (figures["samples"], figures["mean_reward"], figures["truncated"], figures["lengths"]["mean"]) == (4, 0.75, 0.25, 3.0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a.b": {"rewards": [1.0]}}, "has a set 'a.b'; a set's name has 1 to 64 letters"),
        ({3: {"rewards": [1.0]}}, "has a set 3"),
        ({"a": [1.0]}, r"data\['a'\] is a list; expected a dict with rewards"),
        ({"a": {}}, r"data\['a'\]\['rewards'\] is empty"),
        ({"a": {"rewards": 1.0}}, r"data\['a'\]\['rewards'\] is a float; expected a list"),
        ({"a": {"rewards": [1.0, float("nan")]}}, r"data\['a'\]\['rewards'\]\[1\]: .*finite"),
        ({"a": {"rewards": [{"acc": 1.0}]}}, r"data\['a'\]\['rewards'\]\[0\] has several by name"),
        ({"a": {"rewards": [None]}}, r"data\['a'\]\['rewards'\]\[0\]: a reward is"),
        ({"a": {"rewards": [1.0], "truncated": [True, False]}}, "'truncated'. has 2 entries for 1 rewards"),
        ({"a": {"rewards": [1.0], "samples": ["text"]}}, "'samples'. holds a str; expected samples"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        returned_sets(data)


def test_metrics_that_go_along() -> None:
    given = {"a/b": 1, "array": np.float32(0.5), "text": "x", "nan": float("nan"), "i" * 65: 1.0, "inf": float("inf")}
    assert eval_metrics(given) == {"a/b": 1.0, "array": 0.5}
    assert eval_metrics(None) == {} and len(eval_metrics({str(number): number for number in range(99)})) == 64


def test_the_number_of_the_last_rollout(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"num_rollout": 10}, weights={"update_weights_interval": 4})
    assert [last_rollout(config, version) for version in (0, 1, 2, 3)] == [0, 3, 7, 9]


class Characters:
    """A tokenizer of characters, with a template."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, add_generation_prompt: bool, **more: Any) -> str:
        assert not tokenize and add_generation_prompt
        return f"{messages[0]['content']}|{tools}|{more}"


def test_a_file_of_prompts_as_samples(tmp_path: Path) -> None:
    rows = [{"text": "a" * size, "answer": size, "metadata": {"level": size}, "fns": '[{"name": "add"}]'} for size in (1, 2, 9, 3)]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    data = Dataset(f"{path}@[1:]", Characters(), None, 5, label_key="answer", tool_key="fns")
    assert [(one.prompt, one.label, one.metadata["level"]) for one in data.samples] == [("aa", 2, 2), ("aaa", 3, 3)]
    assert data[0].metadata["tools"] == [{"name": "add"}] and len(data) == 2
    order = [one.prompt for one in data.samples]
    data.shuffle(0)
    first = [one.prompt for one in data.samples]
    data.shuffle(1)
    data.shuffle(0)
    assert [one.prompt for one in data.samples] == first and sorted(first) == order
    chat = Dataset(path, Characters(), apply_chat_template=True, apply_chat_template_kwargs={"deep": 1}, tool_key="fns")
    assert chat[0].prompt == "a|[{'name': 'add'}]|{'deep': 1}" and chat[0].label is None
    assert [row["answer"] for row in read_file(f"{path}@[:2]")] == [1, 2]
    with pytest.raises(ConfigError, match="prompt"):
        Dataset(path, Characters(), prompt_key="prompt")
    with pytest.raises(ValueError, match="multimodal_keys"):
        Dataset(path, Characters(), multimodal_keys={"image": "i"})


def test_groups_leave_a_buffer_oldest_first() -> None:
    import_names.install_slime_names()
    buffer = [[HookSample(group_index=number)] for number in range(3)]
    assert [group[0].group_index for group in pop_first(None, None, buffer, 2)] == [0, 1]
    assert [group[0].group_index for group in buffer] == [2]


# --- what a rollout function returns, in every form that slime takes: by group, and by rollout


def sample(group: int, rollout: int | None = None, **changes: Any) -> Sample:
    return Sample(group_index=group, rollout_id=rollout, **changes)


def shape(returned: list[Any]) -> list[tuple[int, list[int]]]:
    return [(group.number, group.rollouts) for group in returned_groups(returned)]


def test_groups_of_samples() -> None:
    a, b, c, d = sample(4), sample(4), sample(7), sample(7)
    groups = returned_groups([[a, b], [c, d]])
    assert [(group.number, group.rollouts) for group in groups] == [(4, [0, 1]), (7, [0, 1])]
    assert [one for group in groups for one in group.samples] == [a, b, c, d]
    assert shape([a, b, c, d]) == shape([[c, d], [a, b]])[::-1] == shape(([a, c], [b, d])), "flat, or mixed: group_index says it"


def test_a_rollout_that_fans_out() -> None:
    assert shape([[[sample(4), sample(4)], [sample(4)]]]) == [(4, [0, 0, 1])], "by the lists inside the group"
    assert shape([[sample(4, 8), sample(4, 8), sample(4, 9)]]) == [(4, [0, 0, 1])], "by rollout_id"
    one = sample(4, 8)
    assert shape([[[one, copy.deepcopy(one)], [sample(4, 9)]]]) == [(4, [0, 0, 1])], "a copy has its id"
    assert shape([[[sample(4, 8), sample(4, 9)]]]) == [(4, [0, 1])], "ids win over lists, as with a list too many around the groups"


def test_the_output_and_its_older_forms() -> None:
    groups = [[sample(1)]]
    assert train_output(groups) == RolloutFnTrainOutput(groups)
    assert train_output(RolloutFnTrainOutput(groups, {"a": 1})).metrics == {"a": 1}
    assert train_output([]).samples == []


@table(
    ("returned", "words"),
    [
        (None, "it returned a NoneType; expected RolloutFnTrainOutput"),
        ({"samples": []}, "it returned a dict"),
        ([[3]], "a int in the place of a sample"),
        ([[Sample()]], "group_index is None; expected that of a sample of data_source.get_samples"),
    ],
)
def test_what_is_no_output_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        returned_groups(train_output(returned).samples)
