"""What clients of the training endpoint may send: the wire format, fields by name, tenants, and what the log comes to."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tinker import protobuf, requests
from services.gateway.tinker.command_book import CommandBook
from services.gateway.tinker.protobuf import field
from services.gateway.tinker.requests import ServedModel, WrongRequest, forward_backward, read_json
from services.gateway.tinker.tenants import owner, read_tenants
from shared.bus.command_log import CommandAudit
from shared.runtime.errors import BadMessage, ConfigError
from shared.schema.client_commands import Command, CommandOutcome, LogEntry, Verb
from tests.support.tables import table

SERVED = ServedModel(("base", "/base"), 8, 100, 50, True)
CLIENT = "alice-0123456789abcdef:train:0"


def pair(name: str, value: bytes) -> bytes:
    return field(1, name) + field(2, value)


def tensor(values: Any, dtype: int = 1) -> bytes:
    data = np.asarray(values, {1: "<f4", 2: "<i8"}[dtype]).tobytes()
    return field(1, data) + field(3, dtype) + field(4, len(values))


def message(tokens: list[int], loss: str = "cross_entropy", config: dict[str, float] | None = None, **inputs: bytes) -> dict[str, Any]:
    given = inputs or {"target_tokens": tensor(tokens, 2)}
    datum = field(1, field(1, field(1, np.array(tokens, "<i4").tobytes())))
    datum += b"".join(field(2, pair(name, value)) for name, value in given.items())
    settings = b"".join(field(7, field(1, name) + field(2, field(1, value))) for name, value in (config or {}).items())
    return protobuf.read(field(1, CLIENT) + field(2, 7) + field(3, datum) + field(4, loss) + settings, protobuf.FORWARD_BACKWARD)


def test_a_request_is_read() -> None:
    found = message([1, 2, 3], "ppo", {"clip_low_threshold": 0.5}, target_tokens=tensor([2, 3, 4], 2), logprobs=tensor([0, -1, -2]),
                    advantages=tensor([1, 1, 1]))  # fmt: skip
    assert (found["model_id"], found["seq_id"]) == (CLIENT, 7)
    asked = forward_backward(found, SERVED)
    assert asked.arguments == {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}}
    assert {name: values.tolist() for name, values in asked.content[0].items()} == {
        "tokens": [1, 2, 3], "target_tokens": [2, 3, 4], "logprobs": [0, -1, -2], "advantages": [1, 1, 1],
    }  # fmt: skip
    assert asked.tokens == 3


@table(
    ("words", "given"),
    [
        ("loss_fn: gspo", message([1], "gspo")),
        ("model_input: no tokens", message([])),
        ("data.0.model_input: 100", message([100])),
        ("model_input: 51 tokens", message([1] * 51)),
        ("advantages: absent", message([1], "dro", target_tokens=tensor([1], 2), logprobs=tensor([0]))),
        ("loss_fn_inputs.mask", message([1], target_tokens=tensor([1], 2), mask=tensor([1]))),
        ("weights: shape [2]", message([1], target_tokens=tensor([1], 2), weights=tensor([1, 2]))),
        ("weights: nan", message([1], target_tokens=tensor([1], 2), weights=tensor([np.nan]))),
        ("target_tokens: float32", message([1], target_tokens=tensor([1]))),
        ("loss_fn_config.beta", message([1], config={"beta": 1.0})),
        ("data: no datums", protobuf.read(field(4, "cross_entropy"), protobuf.FORWARD_BACKWARD)),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(words: str, given: dict[str, Any]) -> None:
    with pytest.raises(WrongRequest) as refused:
        forward_backward(given, SERVED)
    assert words in str(refused.value)


SAMPLE = {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 4}}


@table(
    ("words", "change"),
    [
        ("num_samples", {"num_samples": 0}),
        ("prompt: no tokens", {"prompt": {"chunks": []}}),
        ("topk_prompt_logprobs", {"topk_prompt_logprobs": 3}),
        ("sampling_params.stop: []", {"sampling_params": {"stop": []}}),
        ("sampling_params.temperature", {"sampling_params": {"temperature": -1}}),
        ("sampling_params.top_k: 0", {"sampling_params": {"top_k": 0}}),
        ("prompt_logprobs_last_n", {"prompt_logprobs_last_n": 1}),
        ("prompt: 49 tokens", {"prompt": {"chunks": [{"tokens": [1] * 49}]}}),
        ("record_stability_info", {"record_stability_info": True}),
        ("unheard_of", {"unheard_of": 1}),
    ],
)
def test_a_wrong_sample_is_refused_by_its_field(words: str, change: dict[str, Any]) -> None:
    with pytest.raises(WrongRequest) as refused:
        read_json(requests.SampleBody, {**SAMPLE, **change}).asked(SERVED, CLIENT)
    assert words in str(refused.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadMessage, WrongRequest):
        forward_backward(protobuf.read(data, protobuf.FORWARD_BACKWARD), SERVED)


def test_tenants(tmp_path: Path) -> None:
    path, key = tmp_path / "tenants.json", "tml-" + "a" * 16
    path.write_text(json.dumps({"alice": {"key": key, "tokens": 5}}))
    found = read_tenants(path, {})
    assert (owner(found, key), owner(found, key + "a"), owner(found, "")) == ("alice", None, None)
    for bad in (
        {},
        {"Alice": {"key": key}},
        {"a": {"key": "short"}},
        {"a": {"key": key}, "b": {"key": key}},
        [],
        {"a": {"key": key, "x": 1}},
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match="tinker_tenants"):
            read_tenants(path, {})
    with pytest.raises(ConfigError, match="MYXO_TINKER_KEY"):
        read_tenants(None, {})


def test_paths_of_others_are_not_there() -> None:
    own = "tinker://alice-0123456789abcdef:train:3/weights/x"
    assert requests.checked_path(own, CLIENT, "weights") == own
    for path in (own.replace("alice", "bob"), own.replace("x", ".."), own.replace("weights", "sampler_weights"), own + "/y", "x"):
        with pytest.raises(WrongRequest, match="path"):
            requests.checked_path(path, CLIENT, "weights")


def command(number: int, verb: Verb, refused: str = "", **arguments: Any) -> Command:
    return Command(client=CLIENT, number=number, at=0.0, verb=verb, arguments=json.dumps(arguments), refused=refused, tokens=10)


def outcome(number: int, error: str = "", updates: float = -1, size: int = 0) -> CommandOutcome:
    return CommandOutcome(client=CLIENT, number=number, at=0.0, error=error, figures={"updates": updates}, bytes=size)


PATH = f"tinker://{CLIENT}/weights/x"
WHOLE: list[LogEntry] = [
    command(0, "create_model", seed=1, rank=8, parts=["mlp"]), outcome(0, updates=0),
    command(1, "forward_backward"), command(2, "optim_step"), outcome(1), outcome(2, updates=1),
    command(3, "save_weights", refused="no"), outcome(3, error="no"),
    command(4, "save_weights", path=PATH), outcome(4, error="disk"),
    command(5, "save_weights", path=PATH), outcome(5, size=7),
]  # fmt: skip


def test_the_book_of_a_log() -> None:
    book = CommandBook()
    for entry in [*WHOLE, *WHOLE]:  # an entry that comes twice counts once
        book.see(entry)
    assert (book.used["alice"], book.stored("alice"), book.held("alice"), book.stored("bob")) == (50, 7, [CLIENT], 0)
    assert book.is_taken(PATH)
    book.see(command(6, "unload_model"))
    assert book.held("alice") == []


def test_the_audit_of_a_log() -> None:
    def violations(entries: list[LogEntry]) -> list[str]:
        audit = CommandAudit()
        for entry in entries:
            audit.see(entry)
        return audit.violations

    assert violations(WHOLE) == []
    assert "was update 2 where 1" in violations([*WHOLE[:5], outcome(2, updates=2)])[0]
    assert "was carried out where 1" in violations([*WHOLE[:4], outcome(2, updates=1)])[0]
    assert "no command" in violations([outcome(9)])[0]
    assert "accepted twice" in violations([WHOLE[0], WHOLE[0]])[0]
    assert "refused and carried out" in violations([command(0, "create_model", refused="x"), outcome(0)])[0]
