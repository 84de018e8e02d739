"""What is remembered of the engine's answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from services.rollout import engine_proxy
from services.rollout.custom_generate import _gone_on
from services.rollout.engine.public_requests import ChatRequest, GenerateRequest, parse_request
from services.rollout.engine_proxy import EngineAnswers, SampleCheck
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Sampling
from shared.schema.sample import Sample
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.tables import table


def request(ids: list[int], **fields: object) -> GenerateRequest:
    found = parse_request(GenerateRequest, json.dumps({"input_ids": ids, **fields}).encode(), 100)
    assert isinstance(found, GenerateRequest)
    return found


def body(*ids: int) -> bytes:
    return json.dumps({"output_ids": ids, "meta_info": {"output_token_logprobs": [[-0.5, one, None] for one in ids]}}).encode()


def found(answers: EngineAnswers, *tokens: int) -> list[tuple[int, list[int]]]:
    return [(start, ids.tolist()) for start, ids, _ in answers.of(np.array(tokens, np.int32))]


def test_the_answers_to_the_beginnings_of_a_sample_are_found() -> None:
    answers = EngineAnswers()
    answers.add(request([1, 2]), body(3, 4))
    answers.add(request([1, 2, 3, 4, 9]), body(5))
    answers.add(request([1, 7]), body(8))
    answers.add(request([1, 2]), b"[" + body(6) + b"," + body(7) + b"]")
    assert found(answers, 1, 2, 3, 4, 9, 5) == [(2, [3, 4]), (2, [6]), (2, [7]), (5, [5])]
    assert found(answers, 1, 2) == [] and answers.whole
    answers.add(request([4]), json.dumps({"output_ids": [5], "meta_info": {}}).encode())
    assert found(answers, 4, 5) == [(1, [5])] and answers.whole, "without log-probs"


@table("unknown", ["stream", "text", "chat", "several prompts", "no answer"])
def test_other_requests_are_known_to_be_missing(unknown: str) -> None:
    answers = EngineAnswers()
    match unknown:
        case "stream":
            answers.add(request([1], stream=True), b"")
        case "text":
            answers.add(parse_request(GenerateRequest, b'{"text": "a"}', 100), body(1))
        case "chat":
            answers.add(parse_request(ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}', 100), body(1))
        case "several prompts":
            answers.add(parse_request(GenerateRequest, b'{"input_ids": [[1], [2]]}', 100), b"[]")
        case _:
            answers.add(request([1]), b'{"error": "no"}')
    assert not answers.whole


def test_the_oldest_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_proxy, "MOST_TOKENS", 3 * (engine_proxy.ANSWER_TOKENS + 1))
    answers = EngineAnswers()
    for prompt in (1, 2, 3, 4):
        answers.add(request([prompt]), body(5))
    assert [found(answers, prompt, 5) for prompt in (1, 2, 4)] == [[], [(1, [5])], [(1, [5])]]
    assert answers.whole


@table(
    ("tokens", "more", "finish", "told"),
    [
        ((3, 7), {}, "abort", "stop"),
        ((3, 9), {"stop_token_ids": [9]}, "abort", "stop"),
        ((3, 4), {}, "abort", "abort"),
        ((3, 4), {"stop": "</x>"}, "abort", "stop"),
        ((3, 4), {"stop": ["</y>"]}, "abort", "abort"),
        ((), {}, "abort", "abort"),
        ((3, 7), {"ignore_eos": True}, "abort", "abort"),
        ((3, 7), {}, "length", "length"),
    ],
)
def test_what_a_stock_engine_aborts_at_its_end_has_ended(tokens: tuple[int, ...], more: dict[str, Any], finish: str, told: str) -> None:
    answer = json.loads(body(*tokens)) | {"text": "hello</x>\n"}
    answer["meta_info"]["finish_reason"] = {"type": finish}
    asked = parse_request(GenerateRequest, json.dumps({"input_ids": [1], "sampling_params": more}).encode(), 100)
    for whole in (answer, [answer]):
        [found] = np.ravel(json.loads(engine_proxy._ended(asked, json.dumps(whole).encode(), [7])))
        assert found == answer | {"meta_info": answer["meta_info"] | {"finish_reason": {"type": told}}}


def two_turns(tokenizer: Tokenizer, text: str, log_prob_of_tool: float | None = None, answered: bool = False) -> list[str]:
    """Returns the turns of a sample with a tool's answer between two turns; ``answered``: the engine's answers are known."""
    parts = [tokenizer.encode(part).tolist() for part in ("look<|im_end|>", "\n7\n", "42<|im_end|>")]
    mask, prompt = [int(turn != 1) for turn, part in enumerate(parts) for _ in part], tokenizer.encode("Q")
    log_probs = None if log_prob_of_tool is None else np.where(mask, -0.5, log_prob_of_tool).astype(np.float32)
    response = np.array([token for part in parts for token in part], np.int32)
    sample = Sample("g1", 0, prompt, response, log_probs, np.array(mask, np.uint8), [(0, len(mask), 0)], "stop", text)
    task = SimpleNamespace(sampling=Sampling(temperature=1, max_new_tokens=9), partial=None, group="g1", prompt_tokens=prompt)
    check = SampleCheck(SimpleNamespace(log=structlog.get_logger()), tokenizer)  # type: ignore[arg-type]
    if answered:
        check.answers.add(request(prompt.tolist()), body(*parts[0]))
        check.answers.add(request([*prompt.tolist(), *parts[0], *parts[1]]), body(*parts[2]))
    return check.checked(sample, task, "", "f").turns  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "end"), [("look\n7\n42", ""), ("look<|im_end|>\n7\n42<|im_end|>", "<|im_end|>")])
def test_turns_have_special_tokens_only_where_the_functions_text_has_them(text: str, end: str, tmp_path: Path) -> None:
    assert two_turns(Tokenizer(write_qwen3_tokenizer(tmp_path)), text) == [f"look{end}", f"42{end}"]


@table(("log_prob", "answered"), [(float("nan"), False), (float("-inf"), False), (-1.0, True), (-100.0, True)])
def test_a_tools_text_is_not_scored_for_log_probs_of_its_masked_tokens(log_prob: float, answered: bool, tmp_path: Path) -> None:
    assert two_turns(Tokenizer(write_qwen3_tokenizer(tmp_path)), "look\n7\n42", log_prob, answered) == ["look", "42"]


def test_a_sample_that_a_function_gets_again_keeps_no_turns_of_its_beginning() -> None:
    one = np.array([1], np.int32)
    partial = Sample("g1", 0, one, one, None, np.ones(1, np.uint8), [(0, 1, 0)], "abort", "the beginning", turns=["the beginning"])
    assert not hasattr(_gone_on(partial), "turns")
