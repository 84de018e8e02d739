"""Ledgers that benchmarks write hold groups as a run's do: something of each is trained."""

import itertools

from benchmarks import console, standby
from shared.schema.ledger import GroupsScored


def test_something_of_every_scored_sample_is_trained() -> None:
    records = itertools.chain(standby.ledger(200), console.history(4 * console.BATCH))
    samples = [sample for record in records if isinstance(record, GroupsScored) for group in record.groups for sample in group.samples]
    assert samples and all(0 < sample.trained <= sample.tokens for sample in samples)
