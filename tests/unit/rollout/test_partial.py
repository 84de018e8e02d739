"""What a sample keeps over interruptions."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from services.rollout import engine_proxy
from services.rollout.custom_generate import GENERATE, _gone_on, _Rollout
from services.rollout.engine.generation import Finish, Generation, Routed, Span
from services.rollout.engine.public_requests import ChatRequest, GenerateRequest, parse_request
from services.rollout.engine_proxy import EngineAnswers, SampleCheck
from services.rollout.in_flight import UNROUTED, Partial, Requests, restored, samples_of
from services.rollout.played_group import _EngineRollout
from services.rollout.producer import Producer
from services.rollout.producer_process import DrawnGroups
from shared.data.tokenizer import Tokenizer
from shared.hooks.hook_sample import HookSample, Status
from shared.schema.messages import Sampling, Task
from shared.schema.sample import ExpertChoices, Sample
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example

LONGEST = 1000


def generation(tokens: list[int], spans: list[tuple[int, int, int]], finish: Finish) -> Generation:
    return Generation(
        tokens=np.asarray(tokens, np.int32),
        log_probs=-np.asarray(tokens, np.float32) / 10,
        finish=finish,
        spans=tuple(Span(*span) for span in spans),
        cached_tokens=0,
    )


def test_an_aborted_generation_is_gone_on_with() -> None:
    partial = Partial()
    partial.extend(generation([5, 6], [(0, 2, 3)], "abort"), LONGEST)
    assert partial.finish is None
    partial.extend(generation([7, 8, 9], [(0, 1, 3), (1, 3, 4)], "stop"), LONGEST)
    assert partial.finish == "stop"
    assert partial.tokens.tolist() == [5, 6, 7, 8, 9]
    assert partial.segments == [(0, 3, 3), (3, 5, 4)]
    assert np.allclose(partial.log_probs, [-0.5, -0.6, -0.7, -0.8, -0.9])


async def test_what_is_penalised_is_one_request_s_from_its_beginning() -> None:
    """An engine counts what that request has generated: what follows an aborted one's tokens would not be penalised for them."""
    answers = [generation([5, 6], [(0, 2, 3)], "abort"), generation([7, 8], [(0, 2, 4)], "stop")]
    for penalty, expected in ((1.0, [5, 6, 7, 8]), (1.05, [7, 8])):
        sampling, partials = Sampling(temperature=1.0, max_new_tokens=LONGEST, repetition_penalty=penalty), [Partial()]
        groups = Mock(deadline=60.0, kept=0, replica=Mock(incarnation=0))
        task = TASK.model_copy(update={"sampling": sampling})
        rollout = _EngineRollout(groups, task, 0, partials, Requests(), Mock(), Mock())
        client = Mock(generate_group=AsyncMock(side_effect=[[one] for one in answers]))
        for _ in answers:
            await rollout.attempt(client, 3, 0)
        assert (partials[0].tokens.tolist(), partials[0].finish) == (expected, "stop")
        functions, earlier = Mock(goes_on=True, field=GENERATE, seconds=60.0), [replace(ended(0, 3), finish="abort")]
        assert (_Rollout(functions, task, 0, earlier, Mock(), Mock())._sample is None) == (penalty != 1)


def test_an_abort_before_the_first_token_changes_nothing() -> None:
    partial = Partial()
    partial.extend(generation([], [], "abort"), LONGEST)
    assert partial.finish is None
    assert partial.segments == []


def test_an_abort_at_full_length_ends_the_sample() -> None:
    partial = Partial()
    partial.extend(generation([1, 2, 3], [(0, 3, 0)], "abort"), 3)
    assert partial.finish == "length"


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=4), max_size=6))
def test_segments_tile_the_tokens_however_often_it_was_interrupted(pieces: list[list[tuple[int, int]]]) -> None:
    """Each piece is one answer of the engine: (length, growth of the version) span by span."""
    partial, version, expected = Partial(), 0, []
    for piece in pieces:
        spans, at = [], 0
        for length, growth in piece:
            version += growth
            spans.append((at, at + length, version))
            expected += [version] * length
            at += length
        partial.extend(generation(list(range(at)), spans, "abort"), LONGEST)
    tiled = [version for start, end, version in partial.segments for _ in range(start, end)]
    assert tiled == expected
    assert len(partial.tokens) == len(partial.log_probs) == len(expected)
    versions = [version for _, _, version in partial.segments]
    assert versions == sorted(set(versions))


CHOICES = ExpertChoices(layers=(1, 2), total=3, per_token=2, count=4)
TASK = Task(
    group="g00000001",
    n=1,
    prompt="123",
    prompt_tokens=np.array([1, 2, 3], np.int32),
    environment="math",
    sampling=Sampling(temperature=1.0, max_new_tokens=LONGEST),
    min_version=0,
)


def experts(rows: int, first: int = 0) -> tuple[str, np.ndarray]:
    """What an engine tells of rows from ``first`` on, and what is kept of it: the layers with experts."""
    told = (np.arange(first * 6, (first + rows) * 6) % 4).astype("<i4").reshape(rows, 3, 2)
    return base64.b64encode(told.tobytes()).decode(), told[:, 1:]


def routed(tokens: list[int], finish: Finish, start: int, rows: int) -> Generation:
    told = Routed(start, rows, experts(rows, start)[0])
    return replace(generation(tokens, [(0, len(tokens), 0)] if tokens else [], finish), routed=told)


def test_experts_stay_in_step_over_interruptions(tiny_model: Path) -> None:
    """A prompt of three tokens; the second attempt never ran, the third tells some tokens once more."""
    partial = Partial(choices=CHOICES)
    assert partial.routed_from == 0
    partial.extend(routed([5, 6], "abort", 0, 4), LONGEST)
    assert partial.routed_from == 4
    partial.extend(generation([], [], "abort"), LONGEST)
    partial.extend(routed([7, 8], "stop", 2, 4), LONGEST)
    assert partial.routed is not None and partial.routed.dtype == np.int16
    assert np.array_equal(partial.routed, experts(6)[1])
    (sample,) = samples_of(TASK, [partial], Tokenizer(tiny_model))
    assert sample.mask.all() and np.array_equal(sample.routed_experts, experts(6)[1])
    again = restored([sample], TASK, CHOICES)
    assert again[0].routed_from == 6


@table(
    ("spoiled", "reason"),
    [
        (lambda told: replace(told, routed=Routed(0, 5, told.routed.encoded)), "24 experts for 5 tokens"),
        (lambda told: replace(told, routed=Routed(0, 4, "//8=")), "experts that cannot be read"),
        (lambda told: replace(told, routed=None), "routed_experts are missing"),
        (
            lambda told: replace(told, routed=told.routed._replace(encoded=experts(3)[0], rows=3)),
            r"shape \[3, 2, 2\]; expected \[4, 2, 2\]",
        ),
    ],
)
def test_a_sample_without_all_its_experts_is_not_trained(
    spoiled: Callable[[Generation], Generation], reason: str, tiny_model: Path
) -> None:
    broken, whole = Partial(choices=CHOICES), Partial(choices=CHOICES)
    broken.extend(spoiled(routed([5, 6], "stop", 0, 4)), LONGEST)
    whole.extend(routed([5, 6], "stop", 0, 4), LONGEST)
    first, second = samples_of(TASK.model_copy(update={"n": 2}), [broken, whole], Tokenizer(tiny_model))
    assert not first.mask.any() and re.search(reason, first.attributes[UNROUTED])
    assert second.mask.all() and not second.attributes


def test_a_stop_string_with_a_special_token_in_it_ends_no_text(tiny_model: Path) -> None:
    """The engine looks for stop strings in the text with its special tokens; a sample's text has none."""
    tokenizer, shown = Tokenizer(tiny_model), TASK.sampling.model_copy(update={"stop": ["ab"], "no_stop_trim": False})
    texts = []
    for written in ("a<|unk|>bcab", "a<|unk|>bc<|im_end|>"):
        partial, tokens = Partial(), tokenizer.encode(written).tolist()
        partial.extend(generation(tokens, [(0, len(tokens), 0)], "stop"), LONGEST)
        texts += [sample.text for sample in samples_of(TASK.model_copy(update={"sampling": shown}), [partial], tokenizer)]
    assert texts == ["abc", "abc"]


def ended(rollout: int, version: int, index: int = 0) -> Sample:
    known = {"prompt": TASK.prompt_tokens, "response": [5, 6], "segments": [(0, 2, version)], "text": ""}
    return example(Sample, group=TASK.group, index=index, rollout=rollout, **known)


async def drawn(earlier: list[Sample], task: Task, directory: Path) -> list[HookSample]:
    """The samples of a task as a rollout function gets them, version 3 being served."""
    config = run_config(directory, rollout={"n_samples_per_prompt": task.n, "staleness_policy": "continue"})

    async def read(_: Task) -> list[Sample]:
        return earlier

    parts = {"_outcomes": SimpleNamespace(earlier=read), "_replica": SimpleNamespace(version=3), "_rendered": lambda task: task.prompt}
    producer: Any = SimpleNamespace(_config=config, **parts)
    entry = await Producer._entry(producer, SimpleNamespace(task=task))  # type: ignore[arg-type]
    return DrawnGroups(SimpleNamespace(), config, 8)._taken(entry, 3)  # type: ignore[arg-type]


async def test_a_rollout_function_gets_no_sample_of_which_nothing_is_trained_any_more(tmp_path: Path) -> None:
    """Handed in as they are, they would be given out again for ever."""
    earlier = [ended(0, 0), ended(1, 2, 1)]
    old, new = await drawn(earlier, TASK.model_copy(update={"n": 2, "renew_below": 2}), tmp_path)
    assert (old.status, old.response_length, old.tokens) == (Status.PENDING, 0, [1, 2, 3])
    assert (new.status, new.response_length, new.weight_versions) == (Status.COMPLETED, 2, [2, 2])


async def test_a_rollout_that_gave_several_samples_begins_anew_and_takes_no_other_s_place(tmp_path: Path) -> None:
    earlier = [ended(0, 2), ended(0, 2, 1), ended(1, 2, 2)]
    task = TASK.model_copy(update={"n": 3})
    found = await drawn(earlier, task, tmp_path)
    assert [one.response_length for one in found] == [0, 2, 0]
    assert [len(one.tokens) for one in restored(earlier, task)] == [0, 2, 0]


# --- what is remembered of the engine's answers


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
