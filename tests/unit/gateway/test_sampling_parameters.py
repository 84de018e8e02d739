"""In a session that is trained no sampling parameter of the engine's changes what tokens are likely: each is refused, or ignored by name.

The parameters are SGLang's own, read from what is installed: a new one fails these tests until it stands in a table here.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.gateway.turn_decisions import fixed_by_task, turn_sampling, unconstrained
from services.rollout.agent_groups import CallSession
from services.rollout.engine.public_requests import GenerateRequest
from shared.data.tokenizer import Tokenizer
from shared.formats import anthropic_messages, openai_chat, openai_responses, token_generate
from shared.formats.request import TurnRefused, split
from shared.schema.messages import Sampling
from shared.sessions.session import Session
from tests.support.qwen3_tokenizer import ALPHABET, write_qwen3_tokenizer
from tests.support.tables import table

POLICY: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "frequency_penalty": 1.0,
    "presence_penalty": -1.0,
    "repetition_penalty": 1.5,
    "min_new_tokens": 5,
    "n": 2,
    "beam_width": 4,
    "json_schema": '{"type": "object"}',
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "ignore_eos": True,
    "logit_bias": {"5": 1.0},
    "sampling_seed": 7,
    "custom_params": {"a": 1},
}
"""Those that change which tokens are drawn, with values that do."""

ENDS: dict[str, Any] = {"max_new_tokens": 4, "stop": ["x"], "stop_token_ids": [9], "stop_regex": ["x+"]}
"""Those that end a turn earlier, and change nothing before."""

TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"}

FURTHER: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "custom_logit_processor": "x",
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "guided_regex": "a+",
    "lora_path": "x",
}
"""What servers take beside them."""

SAID = [{"role": "user", "content": "x"}]
FORMATS: dict[str, tuple[Callable[[bytes, str], Any], dict[str, Any]]] = {
    "chat": (openai_chat.parse, {"model": "m", "messages": SAID}),
    "responses": (openai_responses.parse, {"model": "m", "input": "x"}),
    "messages": (anthropic_messages.parse, {"model": "m", "messages": SAID, "max_tokens": 50}),
    "tokens": (token_generate.parse, {"token_ids": [1, 2]}),
}
SGLANG = Path(str(importlib.util.find_spec("sglang").origin)).parent / "srt"  # type: ignore[union-attr]
OTHER_NAMES = dict(re.findall(r'"(\w+)": (?:self|request)\.(\w+),', (SGLANG / "entrypoints/openai/protocol.py").read_text()))
"""What clients of SGLang's OpenAI endpoints call its parameters."""


def session(**changes: Any) -> Session:
    task = Sampling(temperature=1.0, max_new_tokens=100, stop_token_ids=[7])
    fields = {"id": "s1", "group": "g", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 9.0, "sampling": task}
    return Session(**{**fields, **changes})


def asked(form: str, **fields: Any) -> Any:
    parse, body = FORMATS[form]
    turn = parse(json.dumps({**body, **({"sampling_params": fields} if form == "tokens" else fields)}).encode(), "r1")
    return turn if form == "tokens" else unconstrained(turn, "ignore", evaluation=False, notes=False)


def drawn(log: Session, turn: Any) -> dict[str, Any]:
    return turn_sampling(log, turn.sampling, 20, 512, [1]).model_dump(exclude={"max_new_tokens", "stop", "stop_token_ids"})


def test_every_sampling_parameter_of_sglang_is_known_here() -> None:
    path = SGLANG / "sampling/sampling_params.py"
    spec = importlib.util.spec_from_file_location("sglang_sampling_params", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.SamplingParams.__struct_fields__) == {*POLICY, *ENDS, *TEXT, *INTERNAL}
    assert {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}.items() <= OTHER_NAMES.items()


@table("form", FORMATS)
@table("name", [*POLICY, *(OTHER_NAMES[name] for name in POLICY if OTHER_NAMES.get(name, name) != name), *FURTHER])
def test_a_trained_session_refuses_or_ignores_by_name_what_changes_the_policy(form: str, name: str) -> None:
    values = {**POLICY, **FURTHER, **{OTHER_NAMES[name]: value for name, value in POLICY.items() if name in OTHER_NAMES}}
    try:
        turn = asked(form, **{name: values[name]})
    except TurnRefused as refused:
        assert refused.status == 400 and name in str(refused.field)
        return
    if name == "n" and form == "chat":
        assert [one.sampling for one in split(turn)] == [turn.sampling] * 2, "each is a turn of its own"
        return
    assert name in (*fixed_by_task(session(), turn.sampling), *turn.ignored)
    assert drawn(session(), turn) == drawn(session(), asked(form))


@table("form", FORMATS)
def test_ids_that_end_a_turn_are_never_forbidden_with_it(form: str) -> None:
    """SGLang forbids all of them until ``min_new_tokens``: with ids of a client's that would be another policy than the task's."""
    both = asked(form, min_tokens=5, stop_token_ids=[9])
    taken = turn_sampling(session(), both.sampling, 20, 512, [1])
    assert (taken.min_new_tokens, taken.stop_token_ids) == (0, [7, 1, 9]) and fixed_by_task(session(), both.sampling) == ("min_tokens",)
    longer = session(sampling=Sampling(temperature=1.0, max_new_tokens=100, stop_token_ids=[7], min_new_tokens=30))
    taken = turn_sampling(longer, both.sampling, 20, 512, [1])
    assert (taken.min_new_tokens, taken.stop_token_ids) == (30, [7, 1])
    assert fixed_by_task(longer, both.sampling) == ("min_tokens", "stop_token_ids")


@table(
    ("given", "text", "end"),
    [
        ({}, "4.#", ""),
        ({"stop": "#"}, "4.", ""),
        ({"stop": [".", "#"]}, "4", ""),
        ({"stop": ["?"]}, "4.#", ""),
        ({"stop": "#", "no_stop_trim": True}, "4.#", ""),
        ({"skip_special_tokens": False}, "4.#", "<|im_end|>"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "4.#<|im_end|>", "<|im_end|>"),
        ({"stop_token_ids": [ALPHABET.index("#")]}, "4.", ""),
    ],
)
def test_a_turn_in_a_samples_name_is_trimmed_as_the_engines_own_answer(given: dict[str, Any], text: str, end: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_qwen3_tokenizer(tmp_path))
    ids = tokenizer.encode(f"4.#{end}").tolist()
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}] * len(ids)}}
    answer = {"choices": [choice], "usage": {"prompt_tokens": 1}, "request_id": "r", "weight_versions": {"oldest": 0}}
    asked = GenerateRequest.model_validate({"input_ids": [1], "sampling_params": given}, context=100)
    call: Any = SimpleNamespace(_groups=SimpleNamespace(tokenizer=tokenizer))
    assert json.loads(CallSession._converted(call, asked, answer))["text"] == text
    cut = {**answer, "choices": [{**choice, "finish_reason": "length"}]}
    assert json.loads(CallSession._converted(call, asked, cut))["text"].removesuffix("<|im_end|>") == "4.#"


def test_in_an_evaluation_the_clients_values_stand() -> None:
    evaluated = session(evaluation=True)
    for name, field in {"min_tokens": "min_new_tokens", **{name: name for name in ("temperature", "top_p", "top_k")}}.items():
        turn = asked("chat", **{name: POLICY[field]})
        assert drawn(evaluated, turn)[field] == POLICY[field] and fixed_by_task(evaluated, turn.sampling) == ()
    both = turn_sampling(evaluated, asked("chat", min_tokens=50, stop_token_ids=[9]).sampling, 500, 512, [])
    assert (both.min_new_tokens, both.max_new_tokens, both.stop_token_ids) == (12, 12, [7, 9]), "no more than there is room for"
