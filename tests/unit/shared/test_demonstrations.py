"""Demonstrations: which tokens of text and of chats are trained, against templates in use."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence

from shared.data.demonstrations import DemonstrationFile
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import table

QWEN3 = (Path(__file__).parents[2] / "support" / "qwen3_chat_template.jinja").read_text()

GLM = (
    "[g]{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}{{ '\\n(' + m.content + ')' }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As of GLM-4.5: a turn ends where the next one's header begins, and the headers of user and tool are stop tokens."""

GLM_MARKERS = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"]

HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As of gpt-oss: the channel is the model's to write, and only the last turn ends in a stop token."""

GEMMA = (
    "{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (system if loop.first else '') + m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As of Gemma 3: the system's words are a part of the user's first turn, and a line break is behind each turn's end."""

CHATML = (
    "{% if tools %}[{{ tools[0].name }}]{% endif %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""As of Qwen2.5: a line break behind each turn's end."""

BARE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
"""Turns end where the next begins."""

THINKING = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if loop.last and m.role == 'assistant' %}{}{% endif %}{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""As of Qwen3: only the last turn has its thoughts."""

CHAT = [
    {"role": "system", "content": "sum"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+3="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "bye"},
]


def opened(
    directory: Path, tiny_model: Path, template: str | None, *rows: object, **sections: dict[str, Any]
) -> tuple[DemonstrationFile, Tokenizer]:
    model = directory / "model"
    if not model.exists():
        shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    path = write_jsonl(directory / "sft.jsonl", rows)
    sections.setdefault("sft", {})["sft_data"] = str(path)
    tokenizer = Tokenizer(model)
    return DemonstrationFile(run_config(directory, **sections), tokenizer), tokenizer


def with_markers(
    directory: Path, template: str, markers: list[str], stops: list[str], *rows: object
) -> tuple[DemonstrationFile, Tokenizer]:
    """A model whose generation_config.json lists these tokens as ends, in this order."""
    model = write_byte_tokenizer(directory / "model", template, markers)
    known = Tokenizer(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [known.token_id(stop) for stop in stops]}))
    path = write_jsonl(directory / "sft.jsonl", rows)
    tokenizer = Tokenizer(model)
    return DemonstrationFile(run_config(directory, sft={"sft_data": str(path)}), tokenizer), tokenizer


def shown(demonstrations: DemonstrationFile, tokenizer: Tokenizer, row: int = 0) -> list[str]:
    """Each line of a row as text, trained stretches in ``[[ ]]``."""
    found = []
    for sample in demonstrations.samples(row):
        text, before = tokenizer.decode(sample.prompt, skip_special_tokens=False), 0
        for token, mask in zip(sample.response.tolist(), [*sample.mask.tolist()], strict=True):
            text += ("[[" if mask > before else "]]" if mask < before else "") + tokenizer.decode([token], skip_special_tokens=False)
            before = mask
        found.append(text + "]]")
    return found


def trained(demonstrations: DemonstrationFile, tokenizer: Tokenizer, row: int = 0) -> tuple[str, list[str]]:
    """The prompt, and the stretches of the response that are trained, ``$`` for a stop token."""
    one = demonstrations[row]
    assert len(one.response) == len(one.mask)
    assert one.mask[0] == one.mask[-1] == 1

    def text(ids: list[int]) -> str:
        return "".join("$" if i in tokenizer.stop_ids else tokenizer.decode([i]) for i in ids)

    stretches: list[list[int]] = [[]]
    for token, m in zip(one.response.tolist(), one.mask.tolist(), strict=True):
        if m:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return text(one.prompt.tolist()), [text(stretch) for stretch in stretches]


def test_text_is_trained_from_the_response_to_a_stop_token(tmp_path: Path, tiny_model: Path) -> None:
    found = opened(tmp_path, tiny_model, None, {"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": ""})
    assert trained(*found) == ("1+1=", ["2$"])
    assert trained(*found, row=1) == ("1+1=", ["$"])


def test_of_a_chat_the_assistants_turns_are_trained_with_their_ends(tmp_path: Path, tiny_model: Path) -> None:
    found = opened(tmp_path, tiny_model, CHATML, {"messages": CHAT}, {"messages": CHAT[:3]}, {"prompt": "1+1=", "response": "2"})
    assert trained(*found)[1] == ["2$", "5$"]  # and neither the line breaks behind them nor what comes after
    prompt, stretches = trained(*found, row=1)
    assert stretches == ["2$"]
    assert prompt.endswith("1+1=$\n<a>")
    assert trained(*found, row=2) == ("1+1=", ["2$"])  # lines of both kinds in one file


def test_calls_are_trained_as_the_template_takes_their_arguments(tmp_path: Path, tiny_model: Path) -> None:
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.tool_calls[0].arguments + '' if m.tool_calls else m.content }}{{ eos_token }}"
    template += "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    rows = [{"messages": [CHAT[1], {"role": "assistant", "tool_calls": [{"arguments": one}]}]} for one in ({"a": 1}, '{"a":1}')]
    found = opened(tmp_path, tiny_model, template, *rows)
    assert [trained(*found, row=row)[1] for row in range(2)] == [['{"a": 1}$'], ['{"a":1}$']]


def test_a_turn_whose_step_loss_mask_is_0_is_not_trained(tmp_path: Path, tiny_model: Path) -> None:
    first, last = ([{**m, "step_loss_mask": 0} if i == turn else m for i, m in enumerate(CHAT)] for turn in (2, 4))
    found = opened(tmp_path, tiny_model, CHATML, {"messages": first}, {"messages": last})
    assert [trained(*found, row=row)[1] for row in range(2)] == [["5$"], ["2$"]]
    bare = opened(tmp_path, tiny_model, BARE, {"messages": last})
    assert trained(*bare)[1] == ["2"]


def test_the_tokens_are_those_of_a_rollout(tmp_path: Path, tiny_model: Path) -> None:
    demonstrations, tokenizer = opened(tmp_path, tiny_model, CHATML, {"messages": CHAT})
    one = demonstrations[0]
    prompt = tokenizer.encode(tokenizer.render(CHAT[:2], {}))
    assert one.prompt.tolist() == prompt.tolist()
    rendered = tokenizer.render(CHAT[:5], {"add_generation_prompt": False})
    whole = [*one.prompt.tolist(), *one.response.tolist()]
    assert whole == tokenizer.encode(rendered).tolist()[: len(whole)]


@pytest.mark.parametrize("settings", [{"tokenizer_class": "PreTrainedTokenizerFast"}, {"legacy": True}, {"legacy": False}])
def test_the_tokens_are_those_of_a_rollout_where_a_text_begins_with_a_space_of_the_tokenizers(
    tmp_path: Path, tiny_model: Path, settings: dict[str, Any]
) -> None:
    answered = [{**message, "content": "x 1"} for message in CHAT]
    chat, bare = CHATML.replace("<", "").replace(">", "|"), {"prompt": "1+1=", "response": "2 1"}
    demonstrations, tokenizer = opened(tmp_path, tiny_model, chat, {"messages": answered}, bare)
    bytewise = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary = {text: 256 + at for at, text in enumerate(["<unk>", "<s>", "</s>", "▁", *"x12+=sua", "▁x"])}
    pieces = tokenizers.Tokenizer(BPE({**bytewise, **vocabulary}, [("▁", "x")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pieces.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])  # as of Llama 2
    pieces.add_special_tokens(["<s>", "</s>"])
    pieces.save(str(tmp_path / "model" / "tokenizer.json"))
    stated = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(stated))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary["</s>"]}))
    demonstrations, tokenizer = opened(tmp_path, tiny_model, chat, {"messages": answered}, bare)
    one, text = demonstrations.samples(0)[0], demonstrations.samples(1)[0]
    whole = tokenizer.encode(tokenizer.render(answered[:5], {"add_generation_prompt": False})).tolist()
    ids = [*one.prompt.tolist(), *one.response.tolist()]
    assert one.prompt.tolist() == tokenizer.encode(tokenizer.render(answered[:2], {})).tolist()
    assert ids == whole[: len(ids)] and len(whole) - len(ids) < 3
    assert [*text.prompt.tolist(), *text.response.tolist()][:-1] == tokenizer.encode("1+1=2 1").tolist()


def test_a_template_without_ends_gets_one(tmp_path: Path, tiny_model: Path) -> None:
    found = opened(tmp_path, tiny_model, BARE, {"messages": CHAT})
    assert trained(*found)[1] == ["2", "5$"]


def test_template_variables_and_tools_reach_the_template(tmp_path: Path, tiny_model: Path) -> None:
    sections = {"data": {"apply_chat_template_kwargs": {"style": "7"}}}
    template = "{{ style }}" + CHATML
    found = opened(tmp_path, tiny_model, template, {"messages": CHAT[:3], "tools": [{"name": "9"}]}, **sections)
    assert "7" in trained(*found)[0].split("1+1=")[0]
    assert "9" in trained(*found)[0].split("1+1=")[0]


@table(("template", "row", "key", "words"), [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}", {"messages": CHAT}, "messages",
         "rewrites the generation prompt of message 2"),
        (CHATML, {"messages": CHAT[:2]}, "messages", "no message has the role assistant"),
        (CHATML, {"messages": [CHAT[1], {**CHAT[2], "step_loss_mask": 0}]}, "messages", "a step_loss_mask of 1, the default"),
        (CHATML, {"messages": [CHAT[1], {**CHAT[2], "step_loss_mask": "0"}]}, "messages", "the step_loss_mask '0'; expected 0 or 1"),
        (CHATML, {"messages": CHAT, "images": ["a.png"]}, "images", "demonstrations are trained as text"),
        (CHATML, {"messages": CHAT[2:]}, "messages", "the first message has the role assistant"),
        (CHATML, {"messages": []}, "messages", "expected a list of chat messages"),
        (CHATML, {"messages": ["2"]}, "messages", "expected a list of chat messages"),
        (CHATML, {"messages": CHAT, "tools": "search"}, "tools", "expected a list of tools"),
        ("{{ raise_exception('no system') }}", {"messages": CHAT}, "messages", "no system"),
        (None, {"messages": CHAT}, "messages", "has no chat template"),
        (None, {"prompt": "1+1="}, "response", "the line has no key 'response'"),
        (None, {"prompt": "1+1=", "response": 2}, "response", "expected text"),
    ])  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_line_and_key(
    tmp_path: Path, tiny_model: Path, template: str | None, row: dict[str, Any], key: str, words: str
) -> None:
    shows: dict[str, Any] = {"apply_chat_template": True, "multimodal_keys": {"image": "images"}} if "images" in row else {}
    backend = {"trainer_backend": "torch"} if shows else {}
    demonstrations, _ = opened(tmp_path, tiny_model, template, {"prompt": "1+1=", "response": "2"}, row, data=shows, trainer=backend)
    demonstrations.check(0)
    for read in (demonstrations.check, demonstrations.__getitem__):
        with pytest.raises(ConfigError) as error:
            read(1)
        assert error.value.field == f"sft.sft_data:{key}"
        assert str(error.value.value).endswith("sft.jsonl:2")
        assert words in error.value.expected


def test_a_prompt_without_tokens_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    demonstrations, _ = opened(tmp_path, tiny_model, None, {"prompt": "", "response": "2"})
    with pytest.raises(ConfigError, match="has no tokens"):
        demonstrations[0]


@pytest.mark.parametrize("added", [True, False])
def test_a_text_demonstration_begins_with_the_bos_that_the_checkpoint_adds(tmp_path: Path, tiny_model: Path, added: bool) -> None:
    row = {"prompt": "1+1=", "response": "2"}
    opened(tmp_path, tiny_model, None, row)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>", "add_bos_token": True}))
    demonstrations, tokenizer = opened(tmp_path, tiny_model, None, row, data={"add_special_tokens": added})
    bos = tokenizer.text_prefix if added else []
    assert demonstrations[0].prompt.tolist() == [*bos, *tokenizer.encode("1+1=")]
    assert demonstrations[0].response.tolist() == [*tokenizer.encode("2"), *tokenizer.stop_ids[:1]]


def test_a_model_learns_to_stop_by_the_header_of_the_next_message(tmp_path: Path) -> None:
    """GLM-4.5 ends a turn by the first token of what comes next: the user's header, or that of a tool's answer."""
    user, answer, tool = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    chats = [[user, answer, tool, tool, answer, user, answer], [user, answer, user], [user, answer, answer], [user, answer, tool]]
    found = with_markers(tmp_path, GLM, GLM_MARKERS, stops, *({"messages": chat} for chat in chats))
    begin = "[g]<|user|>\nu<|assistant|>[[\na"
    assert shown(*found, row=0) == [f"{begin}<|observation|>]]\n(t)\n(t)<|assistant|>[[\na<|user|>]]\nu<|assistant|>[[\na<|endoftext|>]]"]
    assert shown(*found, row=1) == [f"{begin}<|user|>]]"], "behind the last turn, too"
    assert shown(*found, row=2) == [f"{begin}]]<|assistant|>[[\na<|endoftext|>]]"], "a header that is no stop token"
    assert shown(*found, row=3) == [f"{begin}<|observation|>]]"]


def test_a_header_is_trained_too_where_the_turn_before_it_is_written_anew(tmp_path: Path) -> None:
    """GLM-4.5 leaves out the reasoning of earlier turns, and writes no end of its own."""
    template = GLM.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('|')[-1] }}\n")
    chat = [
        {"role": role, "content": content} for role, content in [("user", "u"), ("assistant", "r|a"), ("user", "v"), ("assistant", "b")]
    ]
    found = with_markers(tmp_path, template, GLM_MARKERS, ["<|endoftext|>", "<|user|>"], {"messages": chat})
    assert shown(*found) == [
        "[g]<|user|>\nu\n<|assistant|>[[\nr|a\n<|user|>]]",
        "[g]<|user|>\nu\n<|assistant|>\na\n<|user|>\nv\n<|assistant|>[[\nb\n<|endoftext|>]]",
    ]


def test_a_template_with_an_end_of_its_own_trains_no_header(tmp_path: Path) -> None:
    """Phi-3's: the assistant's header is among the stop tokens."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    markers = ["<|end|>", "<|user|>", "<|assistant|>"]
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "assistant", "user")]
    found = with_markers(tmp_path, template, markers, ["<|user|>", "<|assistant|>", "<|end|>"], {"messages": chat})
    assert shown(*found) == ["<|user|>x<|end|>\n<|assistant|>[[x<|end|>]]\n<|assistant|>[[x<|end|>]]"]


def test_text_ends_in_the_first_stop_token_of_the_list(tmp_path: Path) -> None:
    """Qwen2.5's generation_config.json names <|im_end|> before <|endoftext|>, which has the smaller id."""
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    found = with_markers(tmp_path, CHATML, markers, ["<|im_end|>", "<|endoftext|>"], {"prompt": "q", "response": "r"})
    assert found[1].stop_ids == [found[1].token_id("<|im_end|>"), found[1].token_id("<|endoftext|>")]
    assert shown(*found) == ["q[[r<|im_end|>]]"]


def test_a_chat_that_qwen3_writes_anew_becomes_lines_that_agree(tmp_path: Path) -> None:
    """Reasoning of earlier turns is left out; calls of tools and what follows them are one turn to the template, and stay in one line."""
    thought = "<think>\n{}\n</think>\n\n{}"
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": thought.format("r1", "a1")},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": thought.format("r2", "a2")},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "a3"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": thought.format("r4", "a4")},
    ]
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    found = with_markers(tmp_path, QWEN3, markers, ["<|im_end|>", "<|endoftext|>"], {"messages": chat})
    first, second = shown(*found)
    assert first.count("[[") == 2
    assert "assistant\n[[<think>\nr1\n</think>\n\na1<|im_end|>]]" in first
    assert first.endswith("assistant\n[[<think>\nr2\n</think>\n\na2<|im_end|>]]")
    assert "<think>" not in second.partition("[[")[0], "as a rollout sees earlier turns"
    assert second.count("[[") == 2, "nothing of the third turn is written anew"
    assert "[[a3<|im_end|>]]" in second and second.endswith("[[<think>\nr4\n</think>\n\na4<|im_end|>]]")
    samples = found[0].samples(0)
    assert [(sample.group, sample.index) for sample in samples] == [("sft-0", 0), ("sft-0", 1)]
    for sample, turn in zip(samples, (1, 5), strict=True):
        assert sample.prompt.tolist() == found[1].encode(found[1].render(chat[:turn], {})).tolist(), "the prompt of a rollout"
    assert found[0].check(0) == 2


def test_of_harmony_a_turn_is_trained_from_its_channel_to_its_return(tmp_path: Path) -> None:
    markers = ["<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    opened = with_markers(tmp_path, HARMONY, markers, ["<|return|>"], {"messages": CHAT[1:5]})
    before, own = "<|start|>user<|message|>1+1=<|end|><|start|>assistant", "<|channel|>final<|message|>"
    again = f"{before}{own}2<|end|><|start|>user<|message|>+3=<|end|><|start|>assistant"
    assert shown(*opened) == [f"{before}[[{own}2<|return|>]]", f"{again}[[{own}5<|return|>]]"]


def test_of_gemma_a_turn_is_trained_to_its_end_and_the_system_belongs_to_the_user(tmp_path: Path) -> None:
    opened = with_markers(tmp_path, GEMMA, ["<eos>", "<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"], {"messages": CHAT})
    first = "<start_of_turn>user\nsum\n\n1+1=<end_of_turn>\n<start_of_turn>model\n[[2<end_of_turn>]]\n"
    assert shown(*opened) == [f"{first}<start_of_turn>user\n+3=<end_of_turn>\n<start_of_turn>model\n[[5<end_of_turn>]]"]


def test_each_line_has_to_fit_into_a_micro_batch(tmp_path: Path) -> None:
    rows = [{"messages": [*CHAT[:3], {"role": "user", "content": "1" * length}, CHAT[4]]} for length in (20, 60)]
    path, model = write_jsonl(tmp_path / "sft.jsonl", rows), write_byte_tokenizer(tmp_path / "model", THINKING)
    config = run_config(tmp_path, sft={"sft_data": str(path)}, trainer={"max_tokens_per_gpu": 70}, rollout={"rollout_max_response_len": 8})
    demonstrations = DemonstrationFile(config, Tokenizer(model))
    assert demonstrations.check(0) == 2
    lengths = [sample.length for sample in demonstrations.samples(0)]
    assert max(lengths) <= 70 < sum(lengths)
    with pytest.raises(ConfigError, match="the demonstration has .* tokens, a micro-batch holds 70"):
        demonstrations.check(1)
    (model / "config.json").write_text(json.dumps({"index_topk": 60, "eos_token_id": 0}))
    wide = config.with_fields(trainer={"trainer_backend": "torch", "max_tokens_per_gpu": 4096})
    with pytest.raises(ConfigError, match="a micro-batch holds 60 .*index_topk"):
        DemonstrationFile(wide.with_fields(model={"hf_checkpoint": model}), Tokenizer(model)).check(1)


def test_rows_of_a_joined_table_are_read_as_what_they_are(tmp_path: Path, tiny_model: Path) -> None:
    """A table of both kinds has each key in every row, and each object in it the keys of all."""
    chat = [{**message, "tool_calls": None, "name": None} for message in CHAT[:3]]
    rows = [
        {"messages": None, "prompt": "1+1=", "response": "2", "tools": None},
        {"messages": chat, "prompt": None, "response": None, "tools": [{"name": "9", "description": None}]},
        {"messages": None, "prompt": None, "response": None},
    ]
    template = "{% for m in messages %}{{ 'x' if m.name is none }}{% endfor %}" + CHATML
    for suffix in ("jsonl", "parquet"):
        demonstrations, tokenizer = opened(tmp_path, tiny_model, template, *rows)
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "sft.parquet")
            demonstrations = DemonstrationFile(run_config(tmp_path, sft={"sft_data": str(tmp_path / "sft.parquet")}), tokenizer)
        assert trained(demonstrations, tokenizer) == ("1+1=", ["2$"])
        assert trained(demonstrations, tokenizer, row=1) == ("[9]<s>sum$\n<u>1+1=$\n<a>", ["2$"])
        with pytest.raises(ConfigError, match="expected a list of chat messages with role and content, found None"):
            demonstrations.check(2)
