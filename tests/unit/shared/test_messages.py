"""The wire schema: every kind comes back as it was sent, and what does not fit is refused with the name of the field."""

from typing import Any

import numpy as np
import pytest

from shared.runtime.errors import BadMessage
from shared.schema import codec, ledger, messages, service_messages, weight_messages
from shared.schema.message import MAX_KEYS, MAX_SAMPLES, REASON_LENGTH, SCHEMA
from shared.schema.messages import Message, Outcome, Scored, Task
from shared.schema.service_messages import ServiceStatus
from tests.support.tables import table
from tests.support.valid_messages import example, valid

SAMPLING = {"temperature": 1.0, "max_new_tokens": 8}
PAYLOAD = {"keys": ["run:group:g00000000:0:0"], "bytes": 100}
SAMPLE = {"tokens": 3, "oldest": 0, "newest": 1, "finish": "stop"}
CONCRETE = {
    name: kind
    for name, kind in Message.kinds.items()
    if not kind.__subclasses__()
    and kind.__module__ in [module.__name__ for module in (messages, service_messages, weight_messages, ledger)]
}
EXAMPLES: dict[str, dict[str, Any]] = {name: codec.unpack(valid(kind).encode()) for name, kind in CONCRETE.items()}
for fields in EXAMPLES.values():
    del fields["schema"], fields["kind"]
EXAMPLES["Task"] |= {
    "prompt": [{"role": "user", "content": "1+1"}],
    "metadata": {"level": 3},
    "prompt_tokens": np.array([5, 6, 7], np.int32),
}


def envelope(kind: str, **changes: Any) -> bytes:
    return codec.pack({"schema": SCHEMA, "kind": kind, **EXAMPLES[kind], **changes})


@table("name", sorted(CONCRETE))
def test_every_kind_comes_back_as_it_was_sent(name: str) -> None:
    for message in (CONCRETE[name](**EXAMPLES[name]), example(CONCRETE[name])):
        for reader in (CONCRETE[name], *CONCRETE[name].__mro__[1:2], Message):
            back = reader.decode(message.encode())
            assert type(back) is CONCRETE[name]
            assert repr(back) == repr(message)


def test_a_task_keeps_its_tokens_as_int32() -> None:
    task = Task.decode(envelope("Task"))
    assert task.prompt_tokens.dtype == np.int32
    np.testing.assert_array_equal(task.prompt_tokens, [5, 6, 7])


@pytest.mark.parametrize("tokens", [[5, 6, 7], np.array([5, 6, 7], np.int64)], ids=["list", "int64"])
def test_token_ids_become_int32(tokens: Any) -> None:
    assert Task.decode(envelope("Task", prompt_tokens=tokens)).prompt_tokens.dtype == np.int32


@table(
    "tokens",
    [
        [1.5],
        ["a"],
        [2**31],
        [-1],
        np.array([2**40], np.int64),
        np.array([-3], np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(2, np.float32),
        5,
    ],
)
def test_what_is_not_a_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(BadMessage, match=r"Task\.prompt_tokens"):
        Task.decode(envelope("Task", prompt_tokens=tokens))


@table("schema", [0, SCHEMA + 1, "1", None, True, np.empty((0, 4), np.int32), np.array([SCHEMA])])
def test_another_schema_version_is_refused_with_both_versions(schema: Any) -> None:
    with pytest.raises(BadMessage, match=rf"Failed: schema version .*; this side speaks {SCHEMA}"):
        Message.decode(codec.pack({"schema": schema, "kind": "Failed", **EXAMPLES["Failed"]}))


@table("kind", [7, ["Failed"], np.empty(0, np.int32), None])
def test_a_kind_that_is_no_name_is_refused(kind: Any) -> None:
    with pytest.raises(BadMessage, match="where Failed was expected"):
        messages.Failed.decode(codec.pack({"schema": SCHEMA, "kind": kind, **EXAMPLES["Failed"]}))


@pytest.mark.parametrize("kind", ["Nonsense", None, 7])
def test_an_unknown_kind_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(BadMessage, match=f"message kind {kind!r} where Message was expected"):
        Message.decode(codec.pack({"schema": SCHEMA, "kind": kind}))


def test_a_kind_that_was_not_expected_here_is_refused() -> None:
    with pytest.raises(BadMessage, match="message kind 'Durable' where Outcome was expected"):
        Outcome.decode(envelope("Durable"))
    assert isinstance(Outcome.decode(envelope("Failed")), messages.Failed)


def test_every_missing_field_is_named() -> None:
    for name, kind in CONCRETE.items():
        for field, info in kind.model_fields.items():
            if info.is_required():
                rest = {key: value for key, value in EXAMPLES[name].items() if key != field}
                with pytest.raises(BadMessage, match=rf"^{name}\.{field}: Field required"):
                    kind.decode(codec.pack({"schema": SCHEMA, "kind": name, **rest}))


@table(
    ("kind", "changes", "where"),
    [
        ("Durable", {"extra": 1}, r"^Durable\.extra: "),
        ("Durable", {"steps": -1}, r"^Durable\.steps: "),
        ("Durable", {"steps": "many"}, r"^Durable\.steps: "),
        ("Scored", {"rewards": [float("nan")]}, r"^Scored\.rewards\.0: "),
        ("Scored", {"rewards": [float("inf")]}, r"^Scored\.rewards\.0: "),
        ("Scored", {"samples": [SAMPLE, {**SAMPLE, "finish": "maybe"}]}, r"^Scored\.samples\.1\.finish: "),
        ("Scored", {"rewards": [1.1e9]}, r"^Scored\.rewards\.0: "),
        ("Scored", {"payload": {"keys": [], "bytes": 0}}, r"^Scored\.payload\.keys: "),
        ("Scored", {"payload": {**PAYLOAD, "keys": ["k"] * (MAX_KEYS + 1)}}, r"^Scored\.payload\.keys: "),
        ("Scored", {"payload": {**PAYLOAD, "keys": ["k" * 321]}}, r"^Scored\.payload\.keys\.0: "),
        ("Scored", {"payload": {**PAYLOAD, "keys": ["k\0"]}}, r"^Scored\.payload\.keys\.0: "),
        ("Scored", {"payload": {**PAYLOAD, "tokens": [-1, 5]}}, r"^Scored\.payload\.tokens\.0: "),
        ("Scored", {"payload": {**PAYLOAD, "tokens": [2**31]}}, r"^Scored\.payload\.tokens\.0: "),
        ("Generated", {"payload": {**PAYLOAD, "tokens": [-1, 5]}}, r"^Generated\.payload\.tokens\.0: "),
        ("Interrupted", {"payload": {**PAYLOAD, "tokens": [2**40]}}, r"^Interrupted\.payload\.tokens\.0: "),
        ("Scored", {"parts": [{"f": float("nan")}]}, r"^Scored\.parts\.0\.f: "),
        ("Scored", {"parts": [{"f\x1b[31m": 1.0}]}, r"^Scored\.parts\.0"),
        ("Scored", {"parts": [{"f" * 65: 1.0}]}, r"^Scored\.parts\.0"),
        ("Scored", {"parts": [{str(index): 1.0 for index in range(65)}]}, r"^Scored\.parts\.0: "),
        ("Scored", {"samples": [{**SAMPLE, "newest": 2**40}]}, r"^Scored\.samples\.0\.newest: "),
        ("Scored", {"samples": [SAMPLE] * (MAX_SAMPLES + 1)}, r"^Scored\.samples: "),
        ("Scored", {"removed": [-1]}, r"^Scored\.removed\.0: "),
        ("Scored", {"group": "g00000001:0"}, r"^Scored\.group: "),
        ("Scored", {"attempt": 2**31}, r"^Scored\.attempt: "),
        ("Scored", {"started": float("nan")}, r"^Scored\.started: "),
        ("Batch", {"groups": [{"group": "g", "payload": PAYLOAD, "rewards": [float("nan")]}]}, r"^Batch\.groups\.0\.rewards\.0: "),
        ("Trained", {"started": 1e300}, r"^Trained\.started: "),
        ("WeightsLive", {"version": 2**40}, r"^WeightsLive\.version: "),
        ("Task", {"sampling": {**SAMPLING, "top_p": 0.0}}, r"^Task\.sampling\.top_p: "),
        ("Task", {"n": 0}, r"^Task\.n: "),
    ],
)
def test_a_field_that_does_not_fit_is_named(kind: str, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(BadMessage, match=where):
        CONCRETE[kind].decode(envelope(kind, **changes))


def test_reasons_are_cut_and_lose_what_cannot_travel() -> None:
    for kind in ("Failed", "Refused", "GroupDead"):
        message = CONCRETE[kind](**{**EXAMPLES[kind], "reason": "\ud800 x" * 5000})
        back = CONCRETE[kind].decode(message.encode())
        assert back == message
        assert len(message.reason) == REASON_LENGTH and message.reason.endswith(" …") and message.reason.startswith("? x")  # type: ignore[attr-defined]


def test_figures_that_are_not_finite_leave_a_status() -> None:
    gauges = {"rate": 1.0, "broken": float("nan"), "worse": float("inf")}
    status = ServiceStatus.decode(envelope("ServiceStatus", gauges=gauges))
    assert status.gauges == ServiceStatus(**{**EXAMPLES["ServiceStatus"], "gauges": gauges}).gauges == {"rate": 1.0}


@table("data", [b"", b"\xc1", codec.pack([1]), codec.pack("text"), codec.pack(np.zeros(2, np.int32))])
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        Scored.decode(data)


def test_ledger_events_are_named_after_their_records() -> None:
    assert ledger.GroupsAdmitted.event() == "groups_admitted"
    names = [kind.event() for kind in CONCRETE.values() if issubclass(kind, ledger.LedgerRecord)]
    assert len(set(names)) == len(names) == 17


def test_group_ids_count_from_zero_and_sort_in_order_of_admission() -> None:
    ids = [ledger.group_id(number) for number in (0, 9, 10, 99_999_999)]
    assert ids == sorted(ids)
    assert [ledger.group_number(name) for name in ids] == [0, 9, 10, 99_999_999]
