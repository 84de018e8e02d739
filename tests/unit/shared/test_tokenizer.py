"""The torch-free tokenizer agrees with transformers on ids, text and chat templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from tests.support.byte_tokenizer import write_byte_tokenizer

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
