"""Where engines keep prefixes, and what a generation that began with those of older weights is worth."""

from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.engine.generation import Generation, Span, without_older_prefix
from services.rollout.replica_command import keeps_prefixes
from tests.support.run_config import run_config
from tests.support.tables import table

AGENT: dict[str, Any] = {"agent": "package.module:run"}


@table(
    ("rollout", "device", "read", "kept"),
    [
        ({}, "cuda", True, True),
        ({}, "cpu", True, False),
        (AGENT, "cpu", True, True),
        ({**AGENT, "in_flight_on_push": "abort"}, "cpu", True, True),
        ({"in_flight_on_push": "retract"}, "cuda", True, False),
        ({}, "cuda", False, False),
        ({"sglang": {"enable-deterministic-inference": True}}, "cuda", True, False),
    ],
)
def test_prefixes_are_kept_where_versions_can_be_told_apart(
    tmp_path: Path, rollout: dict[str, Any], device: str, read: bool, kept: bool
) -> None:
    assert keeps_prefixes(run_config(tmp_path, rollout=rollout), device, answers_are_read=read) is kept


def generation(cached: int, *spans: Span) -> Generation:
    count = spans[-1].end if spans else 0
    return Generation(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), "stop", spans, cached)


def test_what_began_with_a_prefix_of_older_weights_is_as_if_aborted() -> None:
    for sound in (generation(0, Span(0, 4, 2)), generation(9, Span(0, 4, 1)), generation(9, Span(0, 2, 1), Span(2, 4, 2)), generation(9)):
        assert without_older_prefix(sound, 1) is sound
    dropped = without_older_prefix(generation(9, Span(0, 4, 2)), 1)
    assert (dropped.finish, len(dropped.tokens), len(dropped.log_probs), dropped.spans) == ("abort", 0, 0, ())
