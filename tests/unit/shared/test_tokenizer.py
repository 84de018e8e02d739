"""The torch-free tokenizer agrees with transformers, and tool calls are shown as a model's own chat template shows them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared.data.tokenizer import Tokenizer, in_call_form
from shared.runtime.errors import ConfigError
from tests.support import call_templates as templates
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.tables import table

QWEN3 = Path(__file__).parents[2] / "support" / "qwen3_chat_template.jinja"

CHAT = [{"role": "system", "content": "a < b & 'c'"}, {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n  {% endif %}\n{% endfor %}\nend",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "special tokens": "{{ eos_token }}{% if add_generation_prompt %}go{% endif %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}quiet{% else %}loud{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}{{ ns.n }}",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint's tokenizer that a test may change."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_becomes_the_ids_that_transformers_gives(tokenizer: Tokenizer, tiny_model: Path, text: str) -> None:
    reference = transformers_tokenizer(tiny_model)
    ids = tokenizer.encode(text)
    assert ids.tolist() == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


_loaded: dict[Path, Any] = {}


def transformers_tokenizer(path: Path) -> Any:
    if path not in _loaded:
        _loaded[path] = AutoTokenizer.from_pretrained(path)
    return _loaded[path]


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_text_of_the_alphabet_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_known_where_the_text_spells_them_and_left_out_of_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.pieces(ids) == ["<|im_start|>", "a", "<|im_end|>"]


@pytest.mark.parametrize("name", ["its own", *TEMPLATES])
def test_chat_templates_render_as_in_transformers(model: Path, name: str) -> None:
    if name in TEMPLATES:
        (model / "chat_template.jinja").write_text(TEMPLATES[name])
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert Tokenizer(model).render(CHAT, {"enable_thinking": False}) == expected


def test_a_template_of_real_size_is_compiled_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "chat_template.jinja").write_text(QWEN3.read_text() + "{# which no other test has compiled #}")
    compiled = []
    from_string = jinja2.Environment.from_string
    monkeypatch.setattr(jinja2.Environment, "from_string", lambda *words: compiled.append(1) or from_string(*words))
    tokenizer = Tokenizer(model)
    rendered = [tokenizer.render(CHAT[: number % 3 + 1], {"enable_thinking": number % 2 == 0}) for number in range(6)]
    assert len(compiled) == 1
    assert rendered[2] != rendered[5], "variables are each call's own"
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert rendered[2] == expected


def test_lengths_are_those_of_the_ids(tokenizer: Tokenizer) -> None:
    texts = ["1+1=", "", "<|im_start|>a", "β"]
    assert tokenizer.lengths(texts) == [len(tokenizer.encode(text)) for text in texts]
    assert tokenizer.lengths([]) == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "refuses it"),
        ("{{ messages[0].content + 1 }}", "refuses it"),
        ("{{ messages[99].content.x }}", "refuses it"),
        ("{{ messages.__class__.__mro__ }}", "refuses it"),
    ],
    ids=["its own refusal", "broken", "type error", "undefined", "out of the sandbox"],
)
def test_what_a_template_refuses_is_bad_input(model: Path, template: str, words: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=words) as caught:
        Tokenizer(model).render(CHAT, {})
    assert caught.value.field == "data.apply_chat_template"


def test_a_model_without_a_template_says_so(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="the model has no chat template"):
        Tokenizer(model).render(CHAT, {})


def test_stop_ids_come_from_generation_config_then_config_then_the_tokenizer(model: Path) -> None:
    eos = Tokenizer(model).encode("<|im_end|>")[0]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert Tokenizer(model).stop_ids == [9, 3], "in their order: a demonstration ends with the first"
    (model / "generation_config.json").unlink()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer(model).stop_ids == [7]
    (model / "config.json").write_text("{}")
    assert Tokenizer(model).stop_ids == [eos]


def test_a_missing_or_broken_tokenizer_is_bad_input(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        Tokenizer(model)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not a readable tokenizer\.json"):
        Tokenizer(model)
    with pytest.raises(ConfigError, match=r"not a readable tokenizer\.json"):
        Tokenizer(model / "none")


def test_a_part_of_a_character_has_its_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, ""))
    text = "<think> é\u00ad中\n😀<|im_end|>"
    found = tokenizer.token_bytes(tokenizer.encode(text))
    assert b"".join(found) == text.encode() and found[0] == b"<think>" and len(found) > 12


# --- tool calls are shown to a model as its own chat template shows them, in whatever form their arguments come

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
    for number, (arguments, expected) in enumerate(zip((TEXT, json.loads(TEXT), BROKEN), TAKES[name], strict=True)):
        assert expected in rendered(tmp_path / str(number), template, arguments)


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
