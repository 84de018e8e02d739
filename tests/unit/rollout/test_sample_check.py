"""What is remembered of the engine's answers."""

import json

import numpy as np
import pytest

from services.rollout import sample_check
from services.rollout.engine.public_requests import ChatRequest, GenerateRequest, parse_request
from services.rollout.sample_check import EngineAnswers


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


@pytest.mark.parametrize("unknown", ["stream", "text", "chat", "several prompts", "no answer"])
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
    monkeypatch.setattr(sample_check, "MOST_TOKENS", 3 * (sample_check.ANSWER_TOKENS + 1))
    answers = EngineAnswers()
    for prompt in (1, 2, 3, 4):
        answers.add(request([prompt]), body(5))
    assert [found(answers, prompt, 5) for prompt in (1, 2, 4)] == [[], [(1, [5])], [(1, [5])]]
    assert answers.whole
