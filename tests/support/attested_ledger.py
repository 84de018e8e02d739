"""A trainer that says of each step what was scored of its groups."""

from collections.abc import Iterable

from shared.schema.digests import attest_scored
from shared.schema.ledger import BatchAmended, BatchFormed, BatchTrained, GroupsScored, LedgerRecord, group_number
from shared.schema.messages import ScoredGroup


def attested(records: Iterable[LedgerRecord]) -> list[LedgerRecord]:
    """Returns the records, with such an attestation in each `BatchTrained`."""
    scored, batches, found = dict[str, ScoredGroup](), dict[int, BatchFormed](), list[LedgerRecord]()
    for record in records:
        match record:
            case GroupsScored(groups=groups):
                scored |= {group.group: group for group in groups}
            case BatchFormed(step=step):
                batches[step] = record
            case BatchAmended(step=step, removed=removed, added=added) if step in batches:
                left = [name for name in batches[step].groups if name not in removed]
                batches[step] = batches[step].model_copy(update={"groups": sorted([*left, *added], key=group_number)})
            case BatchTrained(step=step) if step in batches:
                groups = [scored[name] for name in batches[step].groups if name in scored]
                said = attest_scored([(one.group, one.samples, one.removed) for one in groups], batches[step].mask_below)
                record = record.model_copy(update={"attestation": said})
        found.append(record)
    return found
