"""Demonstrations: which tokens of text and of chats are trained, against templates in use."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.data.demonstrations import DemonstrationFile
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, write_jsonl

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


def test_a_template_without_ends_gets_one(tmp_path: Path, tiny_model: Path) -> None:
    found = opened(tmp_path, tiny_model, BARE, {"messages": CHAT})
    assert trained(*found)[1] == ["2", "5$"]


def test_template_variables_and_tools_reach_the_template(tmp_path: Path, tiny_model: Path) -> None:
    sections = {"data": {"apply_chat_template_kwargs": {"style": "7"}}}
    template = "{{ style }}" + CHATML
    found = opened(tmp_path, tiny_model, template, {"messages": CHAT[:3], "tools": [{"name": "9"}]}, **sections)
    assert "7" in trained(*found)[0].split("1+1=")[0]
    assert "9" in trained(*found)[0].split("1+1=")[0]


@pytest.mark.parametrize(
    ("template", "row", "key", "words"),
    [
        (THINKING, {"messages": CHAT}, "messages", "the chat template rewrites the turns before message 4"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}", {"messages": CHAT}, "messages",
         "rewrites the generation prompt of message 2"),
        (CHATML, {"messages": CHAT[:2]}, "messages", "no message has the role assistant"),
        (CHATML, {"messages": [CHAT[1], {**CHAT[2], "step_loss_mask": 0}]}, "messages", "a step_loss_mask of 1, the default"),
        (CHATML, {"messages": CHAT[2:]}, "messages", "the first message has the role assistant"),
        (CHATML, {"messages": []}, "messages", "expected a list of chat messages"),
        (CHATML, {"messages": ["2"]}, "messages", "expected a list of chat messages"),
        (CHATML, {"messages": CHAT, "tools": "search"}, "tools", "expected a list of tools"),
        ("{{ raise_exception('no system') }}", {"messages": CHAT}, "messages", "no system"),
        (None, {"messages": CHAT}, "messages", "has no chat template"),
        (None, {"prompt": "1+1="}, "response", "the line has no key 'response'"),
        (None, {"prompt": "1+1=", "response": 2}, "response", "expected text"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_line_and_key(
    tmp_path: Path, tiny_model: Path, template: str | None, row: dict[str, Any], key: str, words: str
) -> None:
    demonstrations, _ = opened(tmp_path, tiny_model, template, {"prompt": "1+1=", "response": "2"}, row)
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
