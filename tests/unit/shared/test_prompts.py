"""Prompts: read, rendered and tokenised, or refused with file, line, key and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.jsonl import JsonLines
from shared.prompts import PromptFile, eval_prompts, training_prompts
from shared.sections import DataSection, RewardSection
from shared.tokenizer import Tokenizer
from tests.support.run_config import run_config, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def prompts(tmp_path: Path, tokenizer: Tokenizer, *rows: object, longest: int | None = None, **data: Any) -> PromptFile:
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    return PromptFile(JsonLines(path, "data.prompt_data"), DataSection(prompt_data=path, **data), tokenizer, longest)


def test_text_is_taken_as_it_stands(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = prompts(tmp_path, tokenizer, {"prompt": "1+1=", "label": "2", "metadata": {"level": 1}})[0]
    assert (prompt.content, prompt.label, prompt.metadata) == ("1+1=", "2", {"level": 1})
    np.testing.assert_array_equal(prompt.tokens, tokenizer.encode("1+1="))
    assert prompt.tokens.dtype == np.int32


def test_chat_messages_and_text_go_through_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    file = prompts(tmp_path, tokenizer, {"prompt": chat, "label": "2"}, {"prompt": "1+1=", "label": "2"}, apply_chat_template=True)
    for row in range(2):
        np.testing.assert_array_equal(file[row].tokens, tokenizer.encode(tokenizer.render(chat, {})))
    assert file[0].content == chat
    assert file[1].content == "1+1="


def test_other_keys_and_numbers_as_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"question": "a", "answer": 42, "extra": {"x": 1}}
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key="answer", metadata_key="extra")[0].label == "42"
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key="answer", metadata_key="extra")[0].metadata == {"x": 1}
    assert prompts(tmp_path, tokenizer, row, input_key="question", label_key=None)[0].label is None


@pytest.mark.parametrize(
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
    assert len(training_prompts(run_config(tmp_path), tokenizer)) == 1
    assert eval_prompts(run_config(tmp_path), tokenizer) is None
    heldout = eval_prompts(run_config(tmp_path, eval={"eval_prompt_data": str(tmp_path / "eval.jsonl")}), tokenizer)
    assert heldout is not None
    assert [heldout[row].content for row in range(2)] == ["b", "c"]


def test_a_prompt_may_name_its_environment(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "label": "2", "metadata": metadata} for metadata in ({}, {"rm_type": "exact"}, {"rm_type": "judge"}, None)]
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    reward = RewardSection(environments={"judge": "http://judge:8080"})
    file = PromptFile(JsonLines(path, "data.prompt_data"), DataSection(prompt_data=path), tokenizer, None, reward)
    assert [file[row].environment for row in range(4)] == ["math", "exact", "judge", "math"]


@pytest.mark.parametrize(("name", "words"), [("jugde", "did you mean judge?"), (3, "valid are"), (["judge"], "judge")])
@pytest.mark.parametrize("of", ["data.prompt_data", "eval.eval_prompt_data"])
def test_an_environment_that_the_run_does_not_have_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, of: str, name: object, words: str
) -> None:
    path = write_jsonl(tmp_path / "named.jsonl", [{"prompt": "a", "label": "2", "metadata": {"rm_type": name}}])
    section, field = of.split(".")
    config = run_config(tmp_path, **{"reward": {"environments": {"judge": "nats:judge"}}, section: {field: str(path)}})
    file = training_prompts(config, tokenizer) if section == "data" else eval_prompts(config, tokenizer)
    assert file is not None
    with pytest.raises(ConfigError) as caught:
        file.check()
    assert caught.value.field == f"{of}:metadata.rm_type"
    assert f"{path}:1" in str(caught.value)
    assert words in str(caught.value)
