"""What tests of single decisions share: groups that come back, and records folded into the state."""

from collections.abc import Sequence
from typing import Any, TypeVar

from services.buffer.state import BufferState
from shared.schema.ledger import LedgerRecord
from shared.schema.messages import GeneratedGroup, Payload, SampleMeta
from tests.support.valid_messages import example

Group = TypeVar("Group", bound=GeneratedGroup)


def meta(oldest: int, newest: int, tokens: int = 1, finish: str = "stop") -> SampleMeta:
    return SampleMeta(tokens=tokens, trained=tokens, oldest=oldest, newest=newest, finish=finish)  # type: ignore[arg-type]


def of_samples(kind: type[Group], group: str, samples: Sequence[SampleMeta], key: str, **changes: Any) -> Group:
    """A group with a payload at ``key`` and, unless others are given, rewards of 1."""
    known = {"attempt": 0, "rewards": [1.0] * len(samples), "payload": Payload(keys=[key], bytes=1), "replica": "r"}
    return example(kind, group=group, samples=list(samples), **{**known, **changes})


def fold(state: BufferState, records: Sequence[LedgerRecord]) -> list[LedgerRecord]:
    for record in records:
        state.apply(record)
    return list(records)
