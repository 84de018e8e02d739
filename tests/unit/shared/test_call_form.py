"""Tool calls are shown to a model as its own chat template shows them, in whatever form their arguments come."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.data.call_form import in_call_form
from shared.data.tokenizer import Tokenizer
from tests.support import call_templates as templates
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.tables import table

TEXT = '{"city":"Z\\u00fcrich","days":[1,2]}'
WRITTEN = '{"city": "Zürich", "days": [1, 2]}'
BROKEN = '{"city": "Lon'
DEEP: str = '{"a":' * 5000 + "1" + "}" * 5000


def rendered(path: Path, template: str, *arguments: Any, keep_text: bool = False, **message: Any) -> str:
    tokenizer = Tokenizer(write_qwen3_tokenizer(path, template, settings={"eos_token": "</s>", "bos_token": "<s>"}))
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "go", "arguments": one}} for i, one in enumerate(arguments)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls, **message}, *results]
    before = json.dumps(chat)
    formed = in_call_form(tokenizer, chat, {}, keep_text=keep_text)
    assert json.dumps(chat) == before and in_call_form(tokenizer, formed, {}, keep_text=keep_text) == formed
    return tokenizer.render(formed, {})


TAKES = {
    # what each shows of an object that comes as text; of an object; of text that is no JSON
    "DEEPSEEK_V3": (f"```json\n{TEXT}\n```", f"```json\n{WRITTEN}\n```", f"```json\n{BROKEN}\n```"),
    "FIRST_DEEPSEEK": (f"```json\n{TEXT}\n```", f"```json\n{WRITTEN}\n```", f"```json\n{BROKEN}\n```"),
    "STRINGIFIED": (f"call {TEXT}", f"call {WRITTEN}", f"call {BROKEN}"),
    "QWEN_2_5": (f'"arguments": {WRITTEN}}}', f'"arguments": {WRITTEN}}}', f'"arguments": {json.dumps(BROKEN)}}}'),
    "QWEN_3": (f"\n{WRITTEN}<", f"\n{WRITTEN}<", f"\n{BROKEN}<"),
    "HERMES_3": (WRITTEN, WRITTEN, json.dumps(BROKEN)),
    "LLAMA_3_1": (f'"parameters": {WRITTEN}}}', f'"parameters": {WRITTEN}}}', f'"parameters": {json.dumps(BROKEN)}}}'),
    "KIMI_K2": (f"call_0<|argument|>{WRITTEN}", f"call_0<|argument|>{WRITTEN}", f"call_0<|argument|>{BROKEN}"),
    "MISTRAL": (f'"arguments": {WRITTEN}, "id"', f'"arguments": {WRITTEN}, "id"', f'"arguments": {json.dumps(BROKEN)}, "id"'),
    "GLM_4_5": (
        "<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>[1, 2]</arg_value>",
        "<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>[1, 2]</arg_value>",
        f"<arg_key>arguments</arg_key><arg_value>{BROKEN}</arg_value>",
    ),
}


@table("name", TAKES)
def test_each_template_is_given_the_arguments_that_it_takes(name: str, tmp_path: Path) -> None:
    template = getattr(templates, name)
    for number, (given, expected) in enumerate(zip((TEXT, json.loads(TEXT), BROKEN), TAKES[name], strict=True)):
        assert expected in rendered(tmp_path / str(number), template, given)


@table("name", TAKES)
@table("arguments", ["", "  ", "null", None, "[1, 2]", [1, 2], '"text"', "7", '{"a": NaN}', '{"a": "\\ud800"}', "{}", DEEP])
def test_no_arguments_end_a_conversation(name: str, arguments: Any, tmp_path: Path) -> None:
    """Whatever a model once wrote comes back with every later turn: nothing of it may be refused, or lost."""
    text = rendered(tmp_path, getattr(templates, name), arguments)
    text.encode()
    none = rendered(tmp_path / "none", getattr(templates, name), {})
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if not shown.strip() or shown in ("null", "{}"):
        assert text == none, "a call without arguments"
    else:
        assert shown in text or json.dumps(shown) in text


@table("name", ["DEEPSEEK_V3", "QWEN_2_5", "GLM_4_5", "MISTRAL"])
def test_calls_of_one_message_have_each_its_own_form(name: str, tmp_path: Path) -> None:
    text = rendered(tmp_path, getattr(templates, name), '{"city": "Paris"}', BROKEN, {"city": "Rome"}, content=None)
    places = [text.index(word) for word in ("Paris", "Lon", "Rome")]
    assert places == sorted(places) and "None" not in text


def test_rows_keep_text_where_the_template_shows_it_as_it_stands(tmp_path: Path) -> None:
    """As transformers renders them; only where it would be escaped it becomes an object."""
    assert f"\n{TEXT}<" in rendered(tmp_path / "qwen3", templates.QWEN_3, TEXT, keep_text=True)
    assert f"\n{WRITTEN}<" in rendered(tmp_path / "object", templates.QWEN_3, json.loads(TEXT), keep_text=True)
    assert WRITTEN in rendered(tmp_path / "qwen2.5", templates.QWEN_2_5, TEXT, keep_text=True)


def test_ids_are_short_where_the_template_wants_them_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_qwen3_tokenizer(tmp_path, templates.MISTRAL))
    chat = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_of_many_characters", "function": {"name": "go", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_of_many_characters", "content": "fine"},
    ]
    _, said, result = in_call_form(tokenizer, chat, {})
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] and len(result["tool_call_id"]) == 9
    assert in_call_form(Tokenizer(write_qwen3_tokenizer(tmp_path / "other", templates.QWEN_3)), chat, {})[2] == chat[2]


def test_calls_without_a_function_of_their_own_and_empty_lists_are_taken(tmp_path: Path) -> None:
    bare = [{"name": "go", "arguments": {"city": "Paris"}}]
    assert '\n{"city": "Paris"}<' in rendered(tmp_path / "bare", templates.QWEN_3, tool_calls=bare)
    for nothing in (None, []):
        text = rendered(tmp_path / str(nothing), templates.DEEPSEEK_V3, content="Hi", tool_calls=nothing)
        assert "<｜Assistant｜>Hi<｜end▁of▁sentence｜>" in text


@pytest.mark.parametrize("refused", ["messages[0].role != 'system'", "messages[-1].tool_calls", "messages[-1].role != 'tool'"])
def test_a_template_is_tried_with_a_chat_that_it_takes(refused: str, tmp_path: Path) -> None:
    template = f"{{% if {refused} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% for m in messages %}}"
    template += "{{ 'args ' ~ m.tool_calls[0].function.arguments if m.tool_calls else m.content }}{% endfor %}"
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, template))
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": True}}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, called, {"role": "tool", "content": "t"}]
    assert 'args {"a": true}' in tokenizer.render(in_call_form(tokenizer, said, {}), {})
