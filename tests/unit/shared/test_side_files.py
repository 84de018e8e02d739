"""Each entry of a checkpoint's side files is read as AutoTokenizer reads it, or refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from shared.data.chat_template import BrokenTemplate
from shared.data.tokenizer import Tokenizer as Ours
from shared.runtime.errors import ConfigError
from tests.support.tables import table

TEXTS = (
    *("What is 1 + 1 ?", "12345", " a  b\n\nc ", "it's DON'T", "é e\u0301 Å", "x<tool>y", "<s> <s>a", "a<|end|> b</s>", "< tool >", ""),
    *("▁a b▁", "<MASK>x", "old-token", "<|img|> . , n't ?", "日本 \U0001f600", "<|endoftext|>", "[PAD]a<pad>", "wörd<x>word"),
)
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "é <tool> hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [1, "é<"]}}}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}{{ image_token }}{% if tools %}T{% endif %}"
)
NAMED = [{"name": "default", "template": "D{{ messages[0].content }}"}, {"name": "tool_use", "template": "U{{ tools | length }}"}]

Change = Callable[[Path], None]


def write(path: Path, kind: str = "bytes") -> Path:
    """Writes the side files of a small checkpoint: byte-level BPE as Llama 3 and Qwen have it, or pieces of words as Llama 2 has."""
    if kind == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("i", "t"), ("1", "2"), ("3", "4"), ("Ġ", "a"), ("'", "s"), ("w", "o"), ("Ġ", "1"), ("Ċ", "Ċ"), ("D", "O")]
        tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate([*letters, *map("".join, merges)])}, merges))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Whatis1234+?bcxy'", "▁a"]
        merges = [("▁", "a")]
        model = models.BPE({token: at for at, token in enumerate(vocabulary)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
        )
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<MASK>", lstrip=True, normalized=False)])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return path


def stated(name: str = "tokenizer_config.json", **entries: Any) -> Change:
    def change(path: Path) -> None:
        file = path / name
        found = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({key: value for key, value in {**found, **entries}.items() if value != "absent"}))

    return change


def filed(change: Callable[[Tokenizer], Any]) -> Change:
    def changed(path: Path) -> None:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(path / "tokenizer.json"))

    return changed


def both(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes] and None


def text(name: str, content: str) -> Change:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)

    return change


def part(name: str, value: Any) -> Change:
    return filed(lambda tokenizer: setattr(tokenizer, name, value))


def added(content: str, at: int = 400, **flags: bool) -> Change:
    token = {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False, **flags}
    return stated(added_tokens_decoder={str(at): token})


def template(content: Any) -> Change:
    return stated(chat_template=content)


TYPED = {"__type": "AddedToken", "content": "<x>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": True}
BOS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 265)])
AROUND = processors.TemplateProcessing(
    single="<s> <|end|> $A </s>", pair="$A $B", special_tokens=[("<s>", 265), ("</s>", 266), ("<|end|>", 267)]
)
QWEN, LLAMA, GPT2, GEMMA = (stated(tokenizer_class=f"{name}Tokenizer") for name in ("Qwen2", "Llama", "GPT2", "Gemma"))
FLAGS = [{}, *({flag: True} for flag in ("lstrip", "rstrip", "single_word", "normalized", "special"))]

CHANGES: dict[str, Change] = {
    "nothing": lambda path: None,
    "truncation": filed(lambda tokenizer: tokenizer.enable_truncation(3)),
    "truncation on the left": filed(lambda tokenizer: tokenizer.enable_truncation(3, direction="left")),
    "padding to a length": filed(lambda tokenizer: tokenizer.enable_padding(length=8, pad_token="<pad>", pad_id=7)),
    "padding to a multiple": filed(lambda tokenizer: tokenizer.enable_padding(pad_to_multiple_of=8)),
    "truncation and padding of a class": both(QWEN, filed(lambda t: (t.enable_truncation(3), t.enable_padding(length=5)))),
    "padding of Llama": both(LLAMA, filed(lambda tokenizer: tokenizer.enable_padding(length=5, pad_token="<p>"))),
    "padding of GPT2": both(GPT2, filed(lambda tokenizer: tokenizer.enable_padding(length=5, pad_token="<p>"))),
    **{f"an added token {flags}": added("<tool>", **flags) for flags in FLAGS},
    **{f"an added token {flags} of a class": both(QWEN, added("<tool>", **flags)) for flags in FLAGS},
    "an added token that is special elsewhere": both(added("<x>"), stated(eos_token="<x>")),
    "an added token that the vocabulary has": added("it", at=300),
    "added tokens out of order": both(added("<tool>", at=900), filed(lambda tokenizer: tokenizer.add_tokens(["word", "old-token"]))),
    "an added token with an entry of no token": stated(added_tokens_decoder={"400": {"content": "<tool>", "color": 1}}),
    "an added token that is text": stated(added_tokens_decoder={"400": "<tool>"}),
    "none added": stated(added_tokens_decoder={}),
    "none added of a class": both(QWEN, stated(added_tokens_decoder={})),
    "added_tokens.json": text("added_tokens.json", json.dumps({"<tool>": 400, "<x>": 401})),
    "added_tokens.json with a special one": both(
        stated(pad_token="<x>"), text("added_tokens.json", json.dumps({"<tool>": 400, "<x>": 401}))
    ),
    "added_tokens.json beside added_tokens_decoder": both(added("<tool>"), text("added_tokens.json", json.dumps({"word": 400}))),
    "special_tokens_map.json": stated("special_tokens_map.json", eos_token={"content": "<x>", "lstrip": True}, pad_token="<pad>"),
    "special_tokens_map.json with others": stated("special_tokens_map.json", additional_special_tokens=["<tool>", "<x>"]),
    "special_tokens_map.json with extra ones": both(
        stated(extra_special_tokens=["<x>"]),
        stated("special_tokens_map.json", extra_special_tokens=[{"content": "<tool>", "rstrip": True}, "<x>"]),
    ),
    "special_tokens_map.json with named ones": stated("special_tokens_map.json", extra_special_tokens={"tool_token": "<tool>"}),
    "special_tokens_map.json with a setting": stated("special_tokens_map.json", split_special_tokens=True),
    "a token of the model's own as it is saved": stated(model_specific_special_tokens={"image_token": "<|img|>"}),
    "special_tokens_map.json that is passed over": both(added("<tool>"), stated("special_tokens_map.json", eos_token="<x>")),
    "extra_special_tokens": stated(extra_special_tokens=["<tool>", "<x>", "word"]),
    "extra_special_tokens that is text": stated(extra_special_tokens="<tool>"),
    "extra_special_tokens by name": stated(extra_special_tokens={"image_token": "<|img|>", "tool_token": TYPED}),
    "additional_special_tokens": stated(additional_special_tokens=["<tool>", TYPED]),
    "additional_special_tokens that are objects": stated(additional_special_tokens=[{"content": "<tool>", "lstrip": True}]),
    "extra goes before additional": stated(additional_special_tokens=["<tool>"], extra_special_tokens=["<x>"]),
    "a token of the model's own": stated(image_token="<|img|>", video_token=TYPED, use_token=True),
    "a special token as an object": stated(pad_token=TYPED, unk_token="<unk>", mask_token="<MASK>", cls_token="<s>", sep_token=None),
    "a special token as an object of a class": both(QWEN, stated(pad_token=TYPED)),
    "a special token without its type": stated(eos_token={"content": "</s>", "lstrip": False}),
    "a special token that is a number": stated(eos_token=3),
    "no special tokens": stated(bos_token=None, eos_token=None),
    "no special tokens of Llama": both(LLAMA, stated(bos_token="absent", eos_token="absent")),
    "no special tokens of Qwen": both(QWEN, stated(bos_token="absent", eos_token="absent")),
    "no special tokens of GPT2": both(GPT2, stated(bos_token="absent", eos_token="absent", unk_token=None)),
    "split_special_tokens": stated(split_special_tokens=True),
    "add_prefix_space": stated(add_prefix_space=True),
    "add_prefix_space of Qwen": both(QWEN, stated(add_prefix_space=True)),
    "add_prefix_space of GPT2": both(GPT2, stated(add_prefix_space=True)),
    "add_prefix_space off of Llama": both(LLAMA, stated(add_prefix_space=False)),
    "legacy of Llama": both(LLAMA, stated(legacy=True)),
    "do_lower_case": stated(do_lower_case=True, strip_accents=True),
    "model_max_length": stated(model_max_length=4, padding_side="left", truncation_side="left"),
    "clean_up_tokenization_spaces": stated(clean_up_tokenization_spaces=True),
    "clean_up_tokenization_spaces all the same": stated(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    ),
    "Qwen2Tokenizer": QWEN,
    "Qwen3_5Tokenizer": stated(tokenizer_class="Qwen3_5Tokenizer"),
    "Qwen2TokenizerFast": stated(tokenizer_class="Qwen2TokenizerFast"),
    "LlamaTokenizerFast": stated(tokenizer_class="LlamaTokenizerFast"),
    "LlamaTokenizer": LLAMA,
    "GPT2Tokenizer": GPT2,
    "GPT2Tokenizer and digits in tokenizer.json": both(
        GPT2, part("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]))
    ),
    "GemmaTokenizer": GEMMA,
    "TokenizersBackend": stated(tokenizer_class="TokenizersBackend"),
    "PreTrainedTokenizer": stated(tokenizer_class="PreTrainedTokenizer"),
    "BertTokenizer": stated(tokenizer_class="BertTokenizer"),
    "a class of nobody's": stated(tokenizer_class="FooTokenizer"),
    "code of its own beside a class": both(LLAMA, stated(auto_map={"AutoTokenizer": ["tokenization_foo.FooTokenizer", None]})),
    "no class": stated(tokenizer_class="absent"),
    "a class in config.json": both(stated(tokenizer_class="absent"), stated("config.json", tokenizer_class="Qwen2Tokenizer")),
    **{
        f"{name or 'no class'} of {family}": both(stated(tokenizer_class=name or "absent"), stated("config.json", model_type=family))
        for family in (
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen3_5",
            "glm4",
            "glm4_moe",
            "deepseek_v3",
            "mistral",
            "phi3",
            "gemma",
            "olmo3",
            "granite",
            "gpt2",
        )
        for name in ("", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer")
    },
    "code of its own of DeepSeek": both(
        stated(tokenizer_class="TikTokenTokenizer", auto_map={"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}),
        stated("config.json", model_type="deepseek_v3"),
    ),
    "a file of another version": stated(fast_tokenizer_files=["tokenizer.json", "tokenizer.4.0.0.json"]),
    "a tokenizer file of its own": stated(tokenizer_file="/nowhere/tokenizer.json"),
    "a normalizer": part("normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "a normalizer of Qwen": both(QWEN, part("normalizer", normalizers.Lowercase())),
    "a decoder": part("decoder", decoders.Fuse()),
    "a decoder of Qwen": both(QWEN, part("decoder", decoders.Fuse())),
    "a BOS by the post-processor": part("post_processor", BOS),
    "a BOS by Llama 3's": part("post_processor", processors.Sequence([processors.ByteLevel(trim_offsets=False), BOS])),
    "a BOS by the post-processor of a class": both(QWEN, part("post_processor", BOS)),
    "a prefix of two": part("post_processor", AROUND),
    "BERT's post-processor": part("post_processor", processors.BertProcessing(("</s>", 266), ("<s>", 265))),
    "RoBERTa's post-processor": part("post_processor", processors.RobertaProcessing(("</s>", 266), ("<s>", 265))),
    "byte-level post-processor": part("post_processor", processors.ByteLevel(trim_offsets=True)),
    "add_bos_token and the post-processor": both(part("post_processor", BOS), stated(add_bos_token=True, add_eos_token=True)),
    "WordLevel": lambda path: Tokenizer(models.WordLevel({"a": 0, "What": 1, "<unk>": 2}, "<unk>")).save(str(path / "tokenizer.json")),
    "WordLevel cleaned": both(
        lambda path: Tokenizer(models.WordLevel({"a": 0, ".": 1, "n't": 2}, ".")).save(str(path / "tokenizer.json")),
        stated(clean_up_tokenization_spaces=True),
    ),
    "WordLevel of Qwen": both(QWEN, lambda path: Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path / "tokenizer.json"))),
    "a subword prefix of Qwen": both(
        QWEN, lambda path: Tokenizer(models.BPE({"a": 0}, [], continuing_subword_prefix="##")).save(str(path / "tokenizer.json"))
    ),
    "unk, fuse, ignore": lambda path: Tokenizer(
        models.BPE({"a": 0, "b": 1, "ab": 2}, [], unk_token="b", fuse_unk=True, ignore_merges=True)
    ).save(str(path / "tokenizer.json")),
    "unk, fuse, ignore of GPT2": both(
        GPT2,
        lambda path: Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [], unk_token="b", fuse_unk=True, ignore_merges=True)).save(
            str(path / "tokenizer.json")
        ),
    ),
    "a template in a file": text("chat_template.jinja", "F{{ messages[0].content }}\n"),
    "a template in chat_template.json": text("chat_template.json", json.dumps({"chat_template": "J"})),
    "named templates": template(NAMED),
    "named templates as an object": template({"default": "D", "tool_use": "U"}),
    "named templates without a default": template({"tool_use": "U", "rag": "R"}),
    "templates in a folder": both(
        text("chat_template.jinja", "F"), text("additional_chat_templates/tool_use.jinja", "A{{ tools | tojson }}")
    ),
    "templates in a folder only": text("additional_chat_templates/tool_use.jinja", "A"),
    "a template that is a number": template(3),
    "no template": stated(chat_template="absent"),
    "a template in a broken list": template([{"name": "default"}]),
    **{
        f"template: {content}": template(content)
        for content in (
            "{{ messages | tojson(separators=(',', ':')) }}",
            "{{ tools | tojson(indent=2, sort_keys=true) }}",
            "{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson(true, 1, (', ', '=')) }}",
            "{% for m in messages %}\n  {% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}\n{% endfor %}",
            "{{ strftime_now(format='%Y') }}{{ range(3) | list }}{{ dict(a=1) | items | list }}{{ lipsum is defined }}",
            "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token is defined }}|{{ documents }}|{{ tools }}",
            "{{ messages | map(attribute='content') | join('|') | upper }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
            "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index0 }}{% continue %}{% endfor %}{{ joiner(',')() }}",
            "{{ messages[0].content | unheard }}",
            "{{ raise_exception(message='no') }}",
            "{{ messages[0].content.x.y }}",
            "{% trans %}a{% endtrans %}",
            "{% do messages %}",
            "{{ messages.append(1) }}",
        )
    },
}
PIECES = {
    name: CHANGES[name]
    for name in CHANGES
    if any(word in name for word in ("nothing", "Llama", "Gemma", "added token {", "normalizer", "mistral", "gemma"))
}


def answers(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        return error


def rendered(tokenizer: Any, tools: Any) -> Any:
    if isinstance(tokenizer, Ours):
        return tokenizer.render(CHAT, {} if tools is None else {"tools": tools})
    return tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=True)


def differences(path: Path) -> list[str]:
    """Returns in what our tokenizer differs from AutoTokenizer where neither refuses the checkpoint."""
    ours, theirs = Ours(path), AutoTokenizer.from_pretrained(path)
    found = []
    for given in TEXTS:
        ids = theirs.encode(given, add_special_tokens=False)
        pairs = [("encode", ours.encode(given).tolist(), ids), ("lengths", ours.lengths([given]), [len(ids)])]
        around = [*ours.text_prefix, *ids, *ours.text_suffix]
        pairs += [("around", around, theirs.encode(given))]
        pairs += [(f"decode {skip}", ours.decode(ids, skip), theirs.decode(ids, skip_special_tokens=skip)) for skip in (True, False)]
        found += [f"{name} of {given!r}: {mine} is not {other}" for name, mine, other in pairs if mine != other]
    if (mine := ours.special_tokens) != (other := theirs.all_special_tokens):
        found.append(f"special tokens: {mine} is not {other}")
    if (mine := [ours.token_id(token) for token in ours.special_tokens]) != (other := theirs.all_special_ids):
        found.append(f"special ids: {mine} is not {other}")
    if ours.vocabulary_size != len(theirs) or ours.eos_id != theirs.eos_token_id:
        found.append("size or eos")
    for tools in (None, TOOLS):
        mine, other = answers(lambda tools=tools: rendered(ours, tools)), answers(lambda tools=tools: rendered(theirs, tools))
        if isinstance(mine, ConfigError) != isinstance(other, Exception) or (isinstance(other, str) and mine != other):
            found.append(f"render with {tools}: {mine!r} is not {other!r}")
    return found


@table(("kind", "name"), [*(("bytes", name) for name in CHANGES), *(("pieces", name) for name in PIECES)])
def test_each_entry_is_read_as_transformers_reads_it_or_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    path = write(tmp_path / "model", kind)
    CHANGES[name](path)
    try:
        Ours(path)
    except ConfigError as error:
        assert error.field == "model.hf_checkpoint"
        assert any(file in str(error.value) for file in ("tokenizer_config.json: ", "tokenizer.json: ", "special_tokens_map.json: ")), error
        return
    assert not differences(path)


def test_code_of_its_own_is_passed_over_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    stated(tokenizer_class="TikTokenTokenizer", auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})(path)
    stated("config.json", model_type="kimi_k2")(path)
    assert Ours(path).encode("12").tolist() == [257]
    assert "auto_map" in Ours(path).notes[0]


@pytest.mark.parametrize(
    ("name", "splits", "noted"),
    [
        ("GPT2Tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), True),  # SmolLM2
        ("GPT2Tokenizer", pre_tokenizers.ByteLevel(False), False),
        ("PreTrainedTokenizerFast", pre_tokenizers.ByteLevel(False), False),
    ],
)
def test_a_class_that_splits_text_otherwise_than_tokenizer_json_is_said(tmp_path: Path, name: str, splits: Any, noted: bool) -> None:
    path = write(tmp_path / "model")
    both(part("pre_tokenizer", splits), stated(tokenizer_class=name))(path)
    assert [f"{name.removesuffix('Fast')} splits" in note and type(splits).__name__ in note for note in Ours(path).notes] == [True] * noted


def test_a_class_that_loses_white_space_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """DeepSeek's distillation of Llama 3: transformers 5.12 reads its byte-level vocabulary as if it were SentencePiece's."""
    path = write(tmp_path / "model")
    both(part("pre_tokenizer", pre_tokenizers.ByteLevel(False)), stated(tokenizer_class="LlamaTokenizerFast"))(path)
    with pytest.raises(ConfigError, match=r"tokenizer_class'.*loses white space.*PreTrainedTokenizerFast has it read"):
        Ours(path)
    stated(tokenizer_class="PreTrainedTokenizerFast")(path)
    assert Ours(path).decode(Ours(path).encode("a b\n\tc")) == "a b\n\tc"


@table(
    ("change", "prefix"),
    [
        (part("post_processor", processors.Sequence([processors.ByteLevel(), BOS])), [265]),
        (stated(add_bos_token=True), [265]),
        (both(part("post_processor", BOS), stated(add_bos_token=True)), [265]),
        (
            both(
                part("post_processor", AROUND),
                part("pre_tokenizer", pre_tokenizers.Metaspace("▁", "never")),
                stated(tokenizer_class="LlamaTokenizer", add_bos_token=False),
            ),
            [267],
        ),
        (both(part("post_processor", AROUND), stated(add_bos_token=False)), [265, 267]),
        (stated(add_bos_token=True, bos_token=None), []),
        (stated(add_bos_token=False, add_eos_token=True), []),
        (both(stated("config.json", model_type="deepseek_v3"), stated(tokenizer_class="LlamaTokenizerFast", add_bos_token=True)), [265]),
    ],
)
def test_text_begins_with_what_the_checkpoint_asks_for_and_never_twice(tmp_path: Path, change: Change, prefix: list[int]) -> None:
    path = write(tmp_path / "model")
    change(path)
    ours, texts = Ours(path), ["12", "<s>12", ""]
    ids = [ours.encode(text, begin=True).tolist() for text in texts]
    assert ids[0] == [*prefix, 257] and ids[2] == prefix
    assert ids[1] == ([265, 257] if prefix == [265] else [*prefix, 265, 257])
    assert ours.lengths(texts, [True] * 3) == list(map(len, ids))
    assert ours.encode("12").tolist() == [257]


@table(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [9, 3, 9]}}, [9, 3]),
        ({"generation_config.json": {"eos_token_id": 4}}, [4]),
        ({"generation_config.json": {"temperature": 1}, "config.json": {"eos_token_id": [7, 1]}}, [7, 1]),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": 5}}}, [5]),
        ({"generation_config.json": {"eos_token_id": []}, "config.json": {"eos_token_id": None}}, [266]),
        ({"generation_config.json": {"eos_token_id": "2"}}, "generation_config.json: eos_token_id"),
        ({"config.json": {"eos_token_id": [1, True]}}, "config.json: eos_token_id"),
    ],
)
def test_stop_tokens_are_those_of_the_first_file_that_has_some(tmp_path: Path, files: dict[str, Any], expected: Any) -> None:
    path = write(tmp_path / "model")
    for name, entries in files.items():
        stated(name, **entries)(path)
    if isinstance(expected, list):
        assert Ours(path).stop_ids == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            Ours(path)


@table(
    ("content", "place"),
    [
        ("\n{{ messages | unheard }}", "line 2"),
        ("{% for", "line 1"),
        ("\n\n{{ tools | tojson(color=1) }}", "line 3"),
        ([{"name": "tool_use", "template": "{{ 1 + 'a' }}"}], "line 1"),
        ([{"name": "rag", "template": "R"}], "called rag"),
        ("\n{% if messages[1].content == 'é <tool> hi' %}\n{{ messages[1].content | unheard }}{% endif %}", "line 3"),
        ("{% if messages[1].content == 'é <tool> hi' %}{{ 1 if messages is unheard }}{% endif %}", "line 1"),
        ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "line"),
        ("{{ 'a' * 100000000000000 }}", "line 1"),
    ],
)
def test_an_error_of_the_template_is_the_templates_own(tmp_path: Path, content: Any, place: str) -> None:
    path = write(tmp_path / "model")
    template(content)(path)
    with pytest.raises(BrokenTemplate, match="template") as caught:
        Ours(path).render(CHAT, {"tools": TOOLS})
    assert place in str(caught.value)


@pytest.mark.parametrize("content", ["{{ raise_exception('no') }}", "{{ messages[0].content + 1 if messages[0].content == 's' else '' }}"])
def test_what_a_template_refuses_of_a_chat_is_the_chats(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "model")
    template(content)(path)
    with pytest.raises(ConfigError, match="refuses it") as caught:
        Ours(path).render(CHAT, {})
    assert not isinstance(caught.value, BrokenTemplate)


def test_a_template_may_be_asked_for_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    template([*NAMED, {"name": "rag", "template": "R{{ documents }}"}])(path)
    theirs = AutoTokenizer.from_pretrained(path)
    for asked in ("rag", "tool_use", "own {{ messages | length }}"):
        expected = theirs.apply_chat_template(CHAT, tools=TOOLS, chat_template=asked, tokenize=False)
        assert Ours(path).render(CHAT, {"tools": TOOLS, "chat_template": asked}) == expected
