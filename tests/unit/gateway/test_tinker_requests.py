"""What clients of the training endpoint may send: the wire format, fields by name, tenants, and what the log comes to."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tinker import requests
from services.gateway.tinker.command_book import CommandBook, Tenant, WrongRequest, owner, read_tenants
from services.gateway.tinker.requests import MOST_AHEAD, ServedModel, forward_backward, key_of, read_json
from shared.bus.command_log import CommandAudit
from shared.formats.request import TurnRefused
from shared.runtime.errors import ConfigError
from shared.schema.messages import Command, CommandOutcome, LogEntry, Verb
from tests.support.tables import table

SERVED = ServedModel(("base", "/base"), 8, 100, 50, True)
CLIENT = "alice-0123456789abcdef:train:0"
SAMPLER = CLIENT.replace("train", "sample")
PATH = f"tinker://{CLIENT}/weights/x"


REQUEST = requests.MESSAGES["ForwardBackwardRequest"]


def tensor(values: Any, dtype: int = 1) -> dict[str, Any]:
    return {"dense": np.asarray(values, {1: "<f4", 2: "<i8"}[dtype]).tobytes(), "dtype": dtype, "shape": [len(values)]}


def message(tokens: list[int], loss: str = "cross_entropy", config: dict[str, float] | None = None, **inputs: Any) -> Any:
    given = inputs or {"target_tokens": tensor(tokens, 2)}
    datum = {
        "model_input": [{"encoded_text": {"tokens": np.array(tokens, "<i4").tobytes()}}],
        "loss_fn_inputs": [{"key": name, "value": value} for name, value in given.items()],
    }
    settings = [{"key": name, "value": {"number": value}} for name, value in (config or {}).items()]
    sent = REQUEST(model_id=CLIENT, seq_id=7, data=[datum], loss_fn=loss, loss_fn_config_v2=settings)
    return REQUEST.FromString(sent.SerializeToString())


def test_a_request_is_read() -> None:
    found = message([1, 2, 3], "ppo", {"clip_low_threshold": 0.5}, target_tokens=tensor([2, 3, 4], 2), logprobs=tensor([0, -1, -2]),
                    advantages=tensor([1, 1, 1]))  # fmt: skip
    assert (found.model_id, found.seq_id) == (CLIENT, 7)
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
        ("data: no datums", REQUEST(loss_fn="cross_entropy")),
        ("data: 1025 datums", REQUEST(loss_fn="cross_entropy", data=[{}] * 1025)),
        ("<= 1 <=", message([1], "ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.28})),
        ("<= 1 <=", message([1], "cispo", {"clip_low_threshold": 2.0, "clip_high_threshold": 4.0})),
        ("loss_fn_config.beta: -1", message([1], "dro", {"beta": -1.0})),
        ("weights: shape [1, 1]", message([1], target_tokens=tensor([1], 2), weights={**tensor([1]), "shape": [1, 1]})),
        ("weights: shape [5]", message([1], target_tokens=tensor([1], 2), weights={**tensor([1]), "shape": [5]})),
        (
            "logprobs: 0.5; expected at most 0",
            message([1], "ppo", target_tokens=tensor([1], 2), logprobs=tensor([0.5]), advantages=tensor([1])),
        ),
        ("weights: dtype 9", message([1], target_tokens=tensor([1], 2), weights={**tensor([1]), "dtype": 9})),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(words: str, given: Any) -> None:
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
        ("sampling_params.stop: '\\ud800'", {"sampling_params": {"stop": ["a", "\ud800"]}}),
        ("sampling_params.stop: ''", {"sampling_params": {"stop": ""}}),
        ("sampling_params.stop: 100", {"sampling_params": {"stop": [100]}}),
        ("sampling_params.seed", {"sampling_params": {"seed": 1.5}}),
        ("num_samples: 1025", {"num_samples": 1025}),
        ("sampling_params.seq_id", {"sampling_params": {"seq_id": 1}}),
        ("base_model: another", {"base_model": "another"}),
    ],
)
def test_a_wrong_sample_is_refused_by_its_field(words: str, change: dict[str, Any]) -> None:
    with pytest.raises(WrongRequest) as refused:
        read_json("sample", {**SAMPLE, **change}, SERVED, CommandBook(), CLIENT)
    assert words in str(refused.value)


@table(
    ("words", "verb", "body"),
    [
        *(
            (f"adam_params.{name}", "optim_step", {"adam_params": {name: value}})
            for name, value in (
                ("learning_rate", float("nan")),
                ("learning_rate", float("inf")),
                ("learning_rate", -1.0),
                ("learning_rate", 1e300),
                ("eps", 0.0),
                ("eps", 1e-50),
                ("eps", 1e300),
                ("beta2", 1.0),
                ("weight_decay", 1e300),
                ("grad_clip_norm", 1e-300),
                ("momentum", 0.9),
            )
        ),
        ("path: '\\ud800'", "save_weights", {"path": "\ud800"}),
        ("path: ", "save_weights", {"path": PATH}),
        ("sampling_session_seq_id", "save_weights", {"path": "y", "sampling_session_seq_id": 0}),
        ("overwrite", "save_weights_for_sampler", {"path": "y", "overwrite": True}),
        ("a name that is not taken, or overwrite", "save_weights", {"path": "x"}),
        ("a name that is not taken, or overwrite", "save_weights", {"path": "on its way"}),
        ("sampling_session_seq_id: 0", "save_weights_for_sampler", {"path": "y", "sampling_session_seq_id": 0}),
        ("sampling_session_seq_id: 1", "save_weights_for_sampler", {"path": "y", "sampling_session_seq_id": 1}),
        ("sampling_session_seq_id: 2", "save_weights_for_sampler", {"path": "y", "sampling_session_seq_id": 2}),
        ("base_model: another", "load_weights", {"path": PATH, "optimizer": True, "base_model": "another"}),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused_by_its_field(words: str, verb: Verb, body: dict[str, Any]) -> None:
    book = CommandBook()
    for entry in WHOLE:
        book.see(entry)
    book.samplers[SAMPLER] = None
    book.see(command(6, "save_weights_for_sampler", path=PATH.replace("weights/x", "sampler_weights/z"), sampler=SAMPLER[:-1] + "1"))
    book.coming[CLIENT, 7] = command(7, "save_weights", path=PATH[:-1] + "on its way")
    begun = command(0, "create_sampling_session", path=None).model_copy(update={"client": SAMPLER[:-1] + "2"})
    book.coming[begun.key] = begun
    own = {"model_id": CLIENT, "seq_id": 8}
    with pytest.raises(WrongRequest) as refused:
        read_json(verb, {**own, **body}, SERVED, book, CLIENT)
    assert words in str(refused.value) and str(refused.value).encode()
    assert read_json("save_weights", {**own, "path": "x", "overwrite": True}, SERVED, book, CLIENT).arguments["path"] == PATH
    assert book.missing_number(CLIENT) == 8


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(DecodeError, WrongRequest):
        forward_backward(REQUEST.FromString(data), SERVED)


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


def command(number: int, verb: Verb, refused: str = "", **arguments: Any) -> Command:
    return Command(client=CLIENT, number=number, at=0.0, verb=verb, arguments=json.dumps(arguments), refused=refused, tokens=10)


def outcome(number: int, error: str = "", size: int = 0, **figures: float) -> CommandOutcome:
    return CommandOutcome(client=CLIENT, number=number, at=0.0, error=error, figures=figures, bytes=size)


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
    quotas = Tenant(key="tml-" + "a" * 16, tokens=50, models=1)

    def check(tenant: str, verb: Verb, client: str = f"{CLIENT}1", tokens: int = 0) -> None:
        book.check_quotas(tenant, quotas, Command(client=client, number=0, at=0.0, verb=verb, tokens=tokens))

    check("bob", "save_weights", CLIENT.replace("alice", "bob"), 50)
    tried: list[tuple[str, Verb, int]] = [("tokens: 1 more", "forward", 1), ("models: 1", "create_model", 0)]
    for words, verb, tokens in tried:
        with pytest.raises(WrongRequest, match=words):
            check("alice", verb, tokens=tokens)
    bobs = command(9, "forward").model_copy(update={"client": CLIENT.replace("alice", "bob"), "tokens": 30})
    book.coming[bobs.key] = bobs
    with pytest.raises(WrongRequest, match="tokens: 21 more than the 30"):  # at once
        check("bob", "forward", tokens=21)
    check("bob", "forward", tokens=20)
    book.see(bobs)  # is there before its confirmation: counts once
    check("bob", "forward", tokens=20)
    assert book.is_taken(PATH)

    def status(tenant: str, *, whole: bool) -> int:
        with pytest.raises(WrongRequest, match="models: 1") as refused:
            book.check_quotas(tenant, quotas, Command(client=f"{CLIENT}1", number=0, at=0.0, verb="create_model"), whole=whole)
        return refused.value.status

    assert (status("alice", whole=False), status("bob", whole=True)) == (400, 400)
    book.see(command(6, "unload_model"))
    assert (status("alice", whole=False), status("bob", whole=True)) == (429, 429)  # the trainer holds it until then; the SDK asks again
    book.see(outcome(6))
    check("alice", "create_model")


def test_paths_of_others_and_expired_ones_are_not_there() -> None:
    book = CommandBook()
    for entry in WHOLE:
        book.see(entry)
    assert book.saved(PATH, CLIENT, "weights") == PATH
    others = CLIENT.replace("alice", "bob")
    for path, client in (
        (PATH, others), (PATH.replace("/x", "/.."), CLIENT), (PATH.replace("/weights", "/sampler_weights"), CLIENT), (PATH + "/y", CLIENT),
        ("x", CLIENT), (PATH.replace("/x", "/other"), CLIENT),
    ):  # fmt: skip
        with pytest.raises(WrongRequest, match="path"):
            book.saved(path, client, "weights")
    sampled = PATH.replace("/weights", "/sampler_weights")
    for number, path in ((6, PATH), (7, sampled)):
        book.see(command(number, "save_weights", path=path))
        book.see(outcome(number, size=7, expires=1.0))
    assert (book.is_taken(PATH), book.is_taken(sampled)) == (False, True)  # an engine may have the latter's still
    with pytest.raises(WrongRequest, match="no such weights"):
        book.saved(PATH, CLIENT, "weights")


@table(
    ("words", "verb", "body"),
    [
        ("model_id: bob-", "optim_step", {"model_id": CLIENT.replace("alice", "bob"), "seq_id": 7}),
        ("model_id: alice-0123456789abcdef: ", "optim_step", {"model_id": CLIENT.partition(":")[0], "seq_id": 7}),
        ("model_id: .*sample:0: ", "optim_step", {"model_id": CLIENT.replace("train", "sample"), "seq_id": 7}),
        ("model_id: .*train:9: ", "optim_step", {"model_id": CLIENT.replace(":0", ":9"), "seq_id": 1}),
        ("model_id: None", "optim_step", {}),
        ("seq_id: 0;", "optim_step", {"model_id": CLIENT, "seq_id": 0}),
        ("seq_id: True;", "optim_step", {"model_id": CLIENT, "seq_id": True}),
        ("seq_id: 100000;", "optim_step", {"model_id": CLIENT, "seq_id": 100_000}),
        ("sampling_session_id: ", "sample", {"sampling_session_id": CLIENT, "seq_id": 0}),
        ("model_seq_id: -1;", "create_model", {"session_id": CLIENT.partition(":")[0], "model_seq_id": -1}),
    ],
)
def test_a_command_that_would_wait_for_ever_is_refused(words: str, verb: Verb, body: dict[str, Any]) -> None:
    book = CommandBook()
    for entry in WHOLE:
        book.see(entry)
    assert key_of("alice", "optim_step", {"model_id": CLIENT, "seq_id": 6}, book) == (CLIENT, 6)
    with pytest.raises(WrongRequest, match=words):
        key_of("alice", verb, body, book)
    book.waiting[CLIENT] += MOST_AHEAD
    assert key_of("alice", "forward", {"model_id": CLIENT, "seq_id": 5}, book) == (CLIENT, 5)  # others wait for it
    with pytest.raises(TurnRefused, match="10000 of its requests wait") as refused:
        key_of("alice", "forward", {"model_id": CLIENT, "seq_id": 6}, book)
    assert refused.value.status == 429
    book.samplers[sampler := CLIENT.replace("train", "sample")] = None
    far = {"sampling_session_id": sampler, "seq_id": 999_999_999_000_000_007}  # as a pickled sampling client of the SDK counts
    assert key_of("alice", "sample", far, book) == (sampler, far["seq_id"] + 1)
    book.waiting[sampler] += MOST_AHEAD
    with pytest.raises(TurnRefused, match="10000 of its requests wait"):
        key_of("alice", "sample", far, book)
    book.see(command(6, "unload_model"))
    book.see(outcome(6))
    assert key_of("alice", "optim_step", {"model_id": CLIENT, "seq_id": 5}, book) == (CLIENT, 5)  # asked again
    with pytest.raises(WrongRequest, match="no more"):
        key_of("alice", "optim_step", {"model_id": CLIENT, "seq_id": 7}, book)


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
