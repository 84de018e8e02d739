"""Prompts: read, rendered and tokenised, or refused with file, line, key and what would be right."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxo.preflight import data_checks
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.model_checks import check_tokenizer
from services.reward.scorer import VerifierScorer
from shared.config.eval_views import eval_views
from shared.data.chat_template import BrokenTemplate
from shared.data.media import PROCESSOR_FILES
from shared.data.prompts import PromptFile, TrainingPrompts, eval_prompts, fingerprint, present
from shared.data.tokenizer import Tokenizer
from shared.model.hf_checkpoint import SIDE_FILES, TEMPLATE_FOLDER
from shared.rewards.reference import Reference, label_text
from shared.runtime.errors import ConfigError
from tests.support import call_templates
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import table
from tests.support.train_samples import train_sample


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def prompts(
    tmp_path: Path, tokenizer: Tokenizer, *rows: object, longest: int | None = None, reward: dict[str, Any] | None = None, **data: Any
) -> PromptFile:
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    sections = {"data": {"prompt_data": str(path), **data}, "reward": reward or {}, "rollout": {"rollout_max_prompt_len": longest}}
    return TrainingPrompts(run_config(tmp_path, **sections), tokenizer)


def test_text_is_taken_as_it_stands(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2", "metadata": {"level": 1}})[0]
    assert (prompt.content, prompt.label, prompt.metadata) == ("1+1=", "2", {"level": 1})
    np.testing.assert_array_equal(prompt.tokens, tokenizer.encode("1+1="))
    assert prompt.tokens.dtype == np.int32


def test_metadata_that_no_task_can_carry_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Within the bytes of a message, and far over the memory that a message may take."""
    file = prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2", "metadata": {"cases": [{}] * 400_000}})
    with pytest.raises(ConfigError, match="far more memory than they were sent in") as caught:
        file[0]
    assert "prompts.jsonl:1" in str(caught.value)


def test_chat_messages_and_text_go_through_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    file = prompts(tmp_path, tokenizer, {"prompt": chat, "label": "2"}, {"prompt": "1+1=", "label": "2"}, apply_chat_template=True)
    for row in range(2):
        np.testing.assert_array_equal(file[row].tokens, tokenizer.encode(tokenizer.render(chat, {})))
    assert file[0].content == chat
    assert file[1].content == "1+1="


@table("template", ["DEEPSEEK_V3", "FIRST_DEEPSEEK", "GLM_4_5", "QWEN_2_5", "MISTRAL"])
def test_tool_calls_of_rows_are_shown_whether_their_arguments_are_text_or_an_object(template: str, tmp_path: Path) -> None:
    chat_model = Tokenizer(write_qwen3_tokenizer(tmp_path / "model", getattr(call_templates, template), settings={"bos_token": "<s>"}))
    rows = []
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        call = {"id": "call_0", "type": "function", "function": {"name": "go", "arguments": arguments}}
        rows += [[{"role": "assistant", "content": None, "tool_calls": [call]}], [{"role": "assistant", "tool_calls": [call]}]]
    ask, result = {"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "call_0", "content": "fine"}
    file = prompts(tmp_path, chat_model, *({"prompt": [ask, *said, result], "label": "2"} for said in rows), apply_chat_template=True)
    first, *others = [chat_model.decode(file[row].tokens, skip_special_tokens=False) for row in range(4)]
    assert "Paris" in first and "fine" in first and others == [first] * 3
    assert file[3].content == [ask, *rows[3], result], "what a reward or an agent gets stands as in the file"


GENERATED = [{"custom_generate_function_path": "own.generate"}, {"rollout_function_path": "own.rollout"}, {"agent": "own:play"}]


@table("generates", GENERATED)
@table("label", [None, {"goal": 3}])
def test_no_label_is_demanded_where_samples_may_come_with_their_reward(
    tmp_path: Path, tokenizer: Tokenizer, generates: dict[str, Any], label: object
) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1=", "label": label}])
    sections = {"data": {"prompt_data": str(path)}, "reward": {"rm_type": "math"}}
    prompt = TrainingPrompts(run_config(tmp_path, **sections, rollout=generates), tokenizer)[0]
    assert (prompt.label is None) == (label is None)
    with pytest.raises(ConfigError, match="for math to compare with|that math compares with"):
        TrainingPrompts(run_config(tmp_path, **sections), tokenizer)[0]


@pytest.mark.parametrize("name", ["math", "boxed_math", "dapo", "exact"])
async def test_with_a_teacher_a_prompt_without_label_is_taken_and_earns_0(tmp_path: Path, tiny_model: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1="}] * 2)
    taught = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}
    sections = {"data": {"prompt_data": str(path), "label_key": None}, "reward": {"rm_type": name}}
    config = run_config(tmp_path, **sections, model={"hf_checkpoint": str(tiny_model)}, algorithm=taught)
    assert TrainingPrompts(config, Tokenizer(tiny_model))[0].label is None
    scorer = VerifierScorer("verifiers", None, config)  # type: ignore[arg-type]  # nothing is asked of its pool
    scores = await scorer.score(None, [train_sample([1], [2])] * 2, name, None)  # type: ignore[arg-type]
    assert [score.reward for score in scores] == [0.0, 0.0]
    [note] = data_checks.check_labels(Inspection(config))
    assert isinstance(note, Note)
    assert note.text == f"data.prompt_data: 2 of 2 prompts have no label: {name} gives 0 to every response, only the teacher teaches"


def test_a_prompt_of_which_nothing_would_score_the_samples_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    given = {"rm_type": "given"}
    named = prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "math"}}, reward=given)
    assert named[0].environment == "math"
    with pytest.raises(ConfigError, match=r"metadata.rm_type = .*expected what scores the prompt's samples.* rm_type or a custom_rm_path"):
        prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2"}, reward=given)[0]
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1="}])
    config = run_config(tmp_path, data={"prompt_data": str(path), "label_key": None}, reward=given, rollout=GENERATED[0])
    assert TrainingPrompts(config, tokenizer)[0].environment == "given"


def test_other_keys_and_numbers_as_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"question": "a", "answer": 42, "extra": {"x": 1}}
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key="answer", metadata_key="extra")[0].label == "42"
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key="answer", metadata_key="extra")[0].metadata == {"x": 1}
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key="answer")[0].label_json
    reward = {"rm_type": "environment", "environment_url": "http://grader:8080"}
    assert prompts(tmp_path, tokenizer, row, reward=reward, input_key="question", label_key=None)[0].label is None


@table(
    ("row", "where", "words"),
    [
        ({"label": "2"}, "prompt", "has no key 'prompt'"),
        ({"prompt": "a"}, "label", "has no key 'label'"),
        ({"prompt": "", "label": "2"}, "prompt", "not empty"),
        ({"prompt": 5, "label": "2"}, "prompt", "text, or a list of chat messages"),
        ({"prompt": [], "label": "2"}, "prompt", "text, or a list of chat messages"),
        ({"prompt": [{"content": "a"}], "label": "2"}, "prompt", "with role and content"),
        ({"prompt": "a", "label": ["2"]}, "label", "text or a number"),
        ({"prompt": "a", "label": True}, "label", "text or a number"),
        ({"prompt": "a", "label": None}, "label", "the answer that math_verify compares with"),
        ({"prompt": [{"role": "user", "content": "a"}], "label": "2", "tools": "{"}, "tools", "JSON text of one"),
        ({"prompt": [{"role": "user", "content": "a"}], "label": "2", "tools": {"a": 1}}, "tools", "each an object"),
        ({"prompt": [{"role": "user", "content": [1]}], "label": "2"}, "prompt", "the chat template refuses it"),
        ({"prompt": "a", "label": "2", "metadata": [1]}, "metadata", "an object"),
        ({"prompt": "a" * 11, "label": "2"}, "prompt", "at most rollout_max_prompt_len = 10 tokens, found '11 tokens'"),
        ({"prompt": "a", "label": "2", "metadata": {"big": 10**30}}, "prompt", "MessagePack carries"),
        ({"prompt": "half \ud800", "label": "2"}, "prompt", "MessagePack carries"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], where: str, words: str) -> None:
    file = prompts(tmp_path, tokenizer, {"prompt": "fine", "label": "1"}, row, longest=10)
    assert file[0].label == "1"
    with pytest.raises(ConfigError, match=words) as caught:
        file.check()
    assert caught.value.field == f"data.prompt_data:{where}"
    assert str(caught.value.value).endswith("prompts.jsonl:2")


def test_the_run_says_which_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a", "label": "1"}])
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "b", "label": "1"}, {"prompt": "c", "label": "1"}])
    assert len(TrainingPrompts(run_config(tmp_path), tokenizer)) == 1
    [view] = eval_views(run_config(tmp_path, eval={"eval_prompt_data": str(tmp_path / "eval.jsonl")}))
    heldout = eval_prompts(view, tokenizer)
    assert [heldout[row].content for row in range(2)] == ["b", "c"]


def test_a_prompt_may_name_its_environment(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "label": "2", "metadata": metadata} for metadata in ({}, {"rm_type": "exact"}, {"rm_type": "grader"}, None)]
    file = prompts(tmp_path, tokenizer, *rows, reward={"environments": {"grader": "http://grader:8080"}})
    assert [file[row].environment for row in range(4)] == ["math_verify", "exact", "grader", "math_verify"]


@table("number", ["0.00001", "1e-5", "1.50", "-3.0", "12345678901234567", "1E2"])
def test_a_number_as_label_keeps_its_text(tmp_path: Path, tokenizer: Tokenizer, number: str) -> None:
    (tmp_path / "numbers.jsonl").write_text(f'{{"prompt": "a", "label": {number}}}\n')
    config = run_config(tmp_path, data={"prompt_data": str(tmp_path / "numbers.jsonl")})
    prompt = TrainingPrompts(config, tokenizer)[0]
    assert (prompt.label, prompt.label_json) == (number, True)
    assert Reference(prompt.label, prompt.label_json).value == json.loads(number)


def test_a_number_of_a_parquet_file_is_written_in_digits() -> None:
    assert label_text(1e-05) == ("0.00001", True)
    assert label_text(1.0) == ("1.0", True)


@pytest.mark.parametrize("label", [{"answer": [1, 2], "é": None}, ["a", "b"], True])
def test_an_object_is_a_label_for_a_function_alone(tmp_path: Path, tokenizer: Tokenizer, label: object) -> None:
    row = {"prompt": "a", "label": label}
    prompt = prompts(tmp_path, tokenizer, row, reward={"custom_rm_path": "my.rewards:score"})[0]
    assert Reference(prompt.label, prompt.label_json).value == label
    with pytest.raises(ConfigError, match="expected text or a number for f1 to compare with, found .*; custom_rm_path takes other values"):
        prompts(tmp_path, tokenizer, row, reward={"rm_type": "f1"}).check()


def test_a_function_of_the_users_own_scores_every_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "label": None, "metadata": metadata} for metadata in ({}, {"rm_type": "exact"}, {"rm_type": "deepscaler"})]
    file = prompts(tmp_path, tokenizer, *rows, reward={"custom_rm_path": "my.rewards:score"})
    assert [file[row].environment for row in range(3)] == ["custom_rm"] * 3
    assert file[2].metadata == {"rm_type": "deepscaler"}, "for the function to see"


@table(("name", "words"), [("graderr", "did you mean grader?"), (3, "valid are"), (["grader"], "grader")])
@table("of", ["data.prompt_data", "eval.eval_prompt_data"])
def test_an_environment_that_the_run_does_not_have_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, of: str, name: object, words: str
) -> None:
    path = write_jsonl(tmp_path / "named.jsonl", [{"prompt": "a", "label": "2", "metadata": {"rm_type": name}}])
    section, field = of.split(".")
    config = run_config(tmp_path, **{"reward": {"environments": {"grader": "nats:grader"}}, section: {field: str(path)}})
    file = TrainingPrompts(config, tokenizer) if section == "data" else eval_prompts(eval_views(config)[0], tokenizer)
    assert file is not None
    with pytest.raises(ConfigError) as caught:
        file.check()
    assert caught.value.field == f"{of}:metadata.rm_type"
    assert f"{path}:1" in str(caught.value)
    assert words in str(caught.value)


def test_tools_reach_the_chat_template(tmp_path: Path, tokenizer: Tokenizer, tiny_model: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    template = "{% if tools is not none %}{{ tools | map(attribute='name') | join }}: {% endif %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": chat, "label": "2", "functions": tools} for tools in ([{"name": "add"}], '[{"name": "add"}]', None, [])]
    file = prompts(tmp_path, Tokenizer(model), *rows, tool_key="functions")
    assert [tokenizer.decode(file[row].tokens) for row in range(4)] == ["add: 1+1=", "add: 1+1=", "1+1=", "1+1="]
    assert [file[row].metadata for row in range(4)] == [{"tools": [{"name": "add"}]}] * 2 + [{}] * 2, "where functions look for them"
    plain = prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2", "tools": ["a", "b"]})
    assert plain[0].metadata == {}, "of a text, what are no tools is nobody's"


NULLABLE = {"type": ["string", "null"], "default": None}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"properties": {"city": {"type": "string", "enum": ["a", None]}, "unit": NULLABLE, "any": {}}},
    },
}
SAID: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": {"city": "a"}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "7"},
]


def joined(value: Any) -> Any:
    """The same as a table holds it: each object has keys of others, as null."""
    if isinstance(value, list):
        return [joined(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {**{key: joined(item) for key, item in value.items()}, "of_another": None, "title": None}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_a_table_pads_with_null_reaches_neither_template_nor_tools(tmp_path: Path, tiny_model: Path, suffix: str) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages | tojson }}")
    rows = [{"prompt": SAID, "label": "2", "tools": [TOOL]}, {"prompt": joined(SAID), "label": None, "tools": [joined(TOOL), None]}]
    rows += [{"prompt": SAID, "label": "2", "tools": json.dumps([{"name": None}])}] if suffix == "jsonl" else []
    path = write_jsonl(tmp_path / "table.jsonl", rows)
    if suffix == "parquet":
        path = tmp_path / "table.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = run_config(tmp_path, data={"prompt_data": str(path)}, reward={"custom_rm_path": "my.rewards:score"})
    file = TrainingPrompts(config, Tokenizer(model))
    for row in range(2):
        assert file[row].content == SAID
        assert file[row].metadata == {"tools": [TOOL]}
        np.testing.assert_array_equal(file[row].tokens, file[0].tokens)
    assert suffix == "parquet" or file[2].metadata == {"tools": [{"name": None}]}, "what is text has been kept from tables"


ROWS: list[Any] = [
    {"prompt": "a" * 4, "label": "0"},
    {"prompt": "b" * 12, "label": "1"},
    {"prompt": "c" * 4},
    {"prompt": "d" * 4, "label": "3"},
    [1],
    {"prompt": "e" * 11, "label": "5"},
    {"prompt": "f" * 4, "label": "6"},
]


@table(
    ("rows", "options", "labels", "overlong", "bad"),
    [
        (ROWS, {"overlong_prompts": "filter", "bad_prompts": "skip"}, ["0", "3", "6"], 2, 2),
        ([ROWS[0], ROWS[1], ROWS[3]], {"overlong_prompts": "filter"}, ["0", "3"], 1, 0),
        ([ROWS[2], ROWS[0], ROWS[4], ROWS[3]], {"bad_prompts": "skip"}, ["0", "3"], 0, 2),
        ([ROWS[0], ROWS[3]], {"bad_prompts": "skip"}, ["0", "3"], 0, 0),
    ],
)
def test_prompts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], options: dict[str, str], labels: list[str], overlong: int, bad: int
) -> None:
    file = prompts(tmp_path, tokenizer, *rows, longest=10, **options)
    file.check()
    assert [file[number].label for number in range(len(file))] == labels
    assert file.left_out == {"overlong": overlong, "bad": bad}
    assert (file.first_left_out is None) == (not overlong and not bad)


@pytest.mark.parametrize(
    ("options", "line", "words"),
    [({"overlong_prompts": "filter"}, 3, "has no key 'label'"), ({"bad_prompts": "skip"}, 2, "at most rollout_max_prompt_len = 10 tokens")],
)
def test_what_is_not_to_be_left_out_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, options: dict[str, str], line: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        prompts(tmp_path, tokenizer, *ROWS, longest=10, **options)
    assert str(caught.value.value).endswith(f"prompts.jsonl:{line}")


def test_files_of_which_nothing_is_left_and_unknown_environments_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = {"overlong_prompts": "filter", "bad_prompts": "skip"}
    with pytest.raises(ConfigError, match=r"2 prompts.*all are left out; the first: data\.prompt_data:label"):
        prompts(tmp_path, tokenizer, ROWS[2], ROWS[1], longest=10, **options)
    with pytest.raises(ConfigError, match="did you mean math"):
        prompts(tmp_path, tokenizer, {"prompt": "a", "label": "1", "metadata": {"rm_type": "maths"}}, **options)


KINDS = st.lists(st.sampled_from([0, 1, 3, 4]), max_size=20)


@settings(max_examples=40)
@given(KINDS.filter(lambda kinds: 0 in kinds or 3 in kinds), KINDS, st.integers(0, 99))
def test_the_prompts_left_keep_their_numbers_over_restarts(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, first: list[int], second: list[int], resumed_at: int
) -> None:
    directory = tmp_path_factory.mktemp("restart")
    for name, kinds in (("a", first), ("b", [*second, 0])):
        rows = [{**ROWS[kind], "metadata": {"id": f"{name}{row}"}} if kind != 4 else ROWS[4] for row, kind in enumerate(kinds)]
        write_jsonl(directory / f"{name}.jsonl", rows)
    data = {
        "prompt_data": [str(directory / "a.jsonl"), {"path": str(directory / "b.jsonl"), "weight": 1.5}],
        "overlong_prompts": "filter",
        "bad_prompts": "skip",
        "rollout_shuffle": True,
    }
    config = run_config(directory, data=data, rollout={"rollout_max_prompt_len": 10})
    whole = TrainingPrompts(config, tokenizer)
    ids = [whole.at(number).metadata["id"] for number in range(resumed_at + 30)]
    assert [TrainingPrompts(config, tokenizer).at(resumed_at).metadata["id"], *ids[resumed_at + 1 :]] == ids[resumed_at:]
    kept = {f"{name}{row}" for name, kinds in (("a", first), ("b", [*second, 0])) for row, kind in enumerate(kinds) if kind in (0, 3)}
    assert set(ids) <= kept
    epoch = sum(kind in (0, 3) for kind in first) + round(1.5 * (1 + sum(kind in (0, 3) for kind in second)))
    assert {whole.at(number).metadata["id"] for number in range(epoch)} == kept, "an epoch uses each that is left"


def test_parquet_prompts_are_as_good(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{row}+1="}], "label": row + 1, "metadata": {"level": row}} for row in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    config = run_config(tmp_path, data={"prompt_data": f"{tmp_path}/prompts.parquet@[1:]"})
    taken = [TrainingPrompts(config, tokenizer).at(number) for number in range(5)]
    assert [prompt.label for prompt in taken] == ["2", "3", "4", "5", "2"]
    assert (taken[0].content, taken[0].metadata) == (rows[1]["prompt"], {"level": 1})
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [b"\xff", b"a"], "label": ["1", "2"]}), tmp_path / "prompts.parquet")
    with pytest.raises(ConfigError) as caught:
        TrainingPrompts(config, tokenizer).at(0)
    assert (caught.value.field, caught.value.value) == ("data.prompt_data:prompt", f"{tmp_path}/prompts.parquet:2")


def test_what_is_left_out_is_kept_for_the_next_start_and_only_for_the_same_input(
    tmp_path: Path, tokenizer: Tokenizer, tiny_model: Path
) -> None:
    def opened(**rollout: Any) -> TrainingPrompts:
        data = {"overlong_prompts": "filter", "bad_prompts": "skip"}
        model = {"hf_checkpoint": str(tiny_model)}
        return TrainingPrompts(run_config(tmp_path, model=model, data=data, rollout={"rollout_max_prompt_len": 10, **rollout}), tokenizer)

    def facts(prompts: TrainingPrompts) -> tuple[Any, ...]:
        return [prompts.at(number).label for number in range(6)], prompts.left_out, str(prompts.first_left_out)

    path, kept = write_jsonl(tmp_path / "prompts.jsonl", ROWS), tmp_path / "runs" / "test" / "prompts" / "data.prompt_data.kept"
    first = facts(opened())
    assert not (tmp_path / "runs").exists(), "looking at a config makes nothing"
    (tmp_path / "runs" / "test").mkdir(parents=True)
    assert facts(opened()) == first
    head, _, bits = kept.read_bytes().partition(b"\n")
    kept.write_bytes(head + b"\n" + bytes([bits[0] ^ 0x80]))
    assert facts(opened()) != first, "it is read"
    assert facts(opened(rollout_max_prompt_len=11))[1] == {"overlong": 1, "bad": 2}
    assert facts(opened()) == first
    kept.write_bytes(b"cut off")
    assert facts(opened()) == first
    write_jsonl(path, [ROWS[0], *ROWS])
    assert facts(opened())[0] == ["0", "0", "3", "6", "0", "0"]


@pytest.fixture
def base_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer begins a text with a token, as Llama 3's does."""
    model = shutil.copytree(tiny_model, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>", "add_bos_token": True}))
    return model


def test_text_prompts_begin_with_bos_and_chats_only_with_what_the_template_writes(tmp_path: Path, base_model: Path) -> None:
    tokenizer, chat = Tokenizer(base_model), [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": content, "label": "2"} for content in ("1+1=", "<|im_start|>1+1=", chat)]
    file = prompts(tmp_path, tokenizer, *rows)
    bos = tokenizer.text_prefix
    assert [file[row].tokens.tolist() for row in range(2)] == [[*bos, *tokenizer.encode("1+1=")]] * 2
    assert file[2].tokens.tolist() == tokenizer.encode(tokenizer.render(chat, {})).tolist()
    assert prompts(tmp_path, tokenizer, *rows, add_special_tokens=False)[0].tokens.tolist() == tokenizer.encode("1+1=").tolist()
    rendered = prompts(tmp_path, tokenizer, *rows, apply_chat_template=True)
    assert rendered[0].tokens.tolist() == rendered[2].tokens.tolist() == file[2].tokens.tolist()
    with pytest.raises(ConfigError, match="not empty"):
        prompts(tmp_path, tokenizer, {"prompt": "", "label": "2"})[0]


def test_bos_counts_for_the_longest_prompt(tmp_path: Path, base_model: Path) -> None:
    row = {"prompt": "1+1=", "label": "2"}
    tokenizer = Tokenizer(base_model)
    with pytest.raises(ConfigError, match="5 tokens"):
        prompts(tmp_path, tokenizer, row, longest=4).check()
    assert prompts(tmp_path, tokenizer, row, longest=4, add_special_tokens=False, overlong_prompts="filter").longest == 4


def test_a_broken_template_is_not_the_rows_fault_and_skips_none(tmp_path: Path, base_model: Path) -> None:
    (base_model / "chat_template.jinja").write_text("{{ messages | unheard }}")
    with pytest.raises(BrokenTemplate) as caught:
        prompts(tmp_path, Tokenizer(base_model), {"prompt": "1+1=", "label": "2"}, apply_chat_template=True, bad_prompts="skip")
    assert "chat_template.jinja" in str(caught.value) and "prompts.jsonl" not in str(caught.value)


def test_every_side_file_is_in_the_fingerprint(base_model: Path) -> None:
    found = {fingerprint(base_model, [], None)}
    for number, name in enumerate((*SIDE_FILES, *PROCESSOR_FILES, f"{TEMPLATE_FOLDER}/tool_use.jinja"), start=2):
        (base_model / name).parent.mkdir(exist_ok=True)
        with (base_model / name).open("a") as file:
            file.write(" ")
        assert len(found := found | {fingerprint(base_model, [], None)}) == number, name


@pytest.mark.parametrize("added", [True, False])
def test_a_dry_run_says_what_text_prompts_begin_with(tmp_path: Path, base_model: Path, added: bool) -> None:
    config = run_config(tmp_path, model={"hf_checkpoint": str(base_model)}, data={"add_special_tokens": added})
    [note] = check_tokenizer(Inspection(config))
    begin = "begin with" if added else "do not begin with"
    assert isinstance(note, Note) and f"{begin} <|im_start|> (id 2)" in note.text and "data.add_special_tokens" in note.text


def test_a_dry_run_says_which_variables_no_template_reads(tmp_path: Path, base_model: Path) -> None:
    (base_model / "chat_template.jinja").write_text("{{ 'a' if enable_thinking }}{{ messages[0].content }}")
    given = {"enable_thinking": False, "enable_thinkng": False, "continue_final_message": True, "messages": []}
    data = {"apply_chat_template": True, "apply_chat_template_kwargs": given}
    found = check_tokenizer(Inspection(run_config(tmp_path, model={"hf_checkpoint": str(base_model)}, data=data)))
    silent = ["enable_thinkng", "continue_final_message", "messages"]
    fields = [f"data.apply_chat_template_kwargs.{name}" for name in silent]
    assert [note.text.partition(" changes nothing")[0] for note in found if isinstance(note, Note)] == fields


@pytest.mark.parametrize("asked", [{"a": 1}, [1], 3])
def test_a_template_that_is_asked_for_is_text(base_model: Path, asked: object) -> None:
    with pytest.raises(BrokenTemplate, match="chat_template_kwargs.chat_template"):
        Tokenizer(base_model).render([{"role": "user", "content": "?"}], {"chat_template": asked})


def test_a_default_of_null_stays_where_openapi_allows_it() -> None:
    schema = {"a": {"type": "string", "nullable": True, "default": None}, "b": {"type": "string", "nullable": False, "default": None}}
    assert present(schema) == {"a": schema["a"], "b": {"type": "string", "nullable": False}}
