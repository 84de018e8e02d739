"""Makes ledger records fit the bus, measured as they are encoded. Pure.

A long list is divided over several records. A group whose own part is too large ends as dead: whoever scored it may have filled its
message to the limit, and numbers grow when they are written out.
"""

from collections.abc import Iterable, Iterator

from shared.runtime.errors import TASK, MessageTooLarge
from shared.schema.ledger import EvalScored, GroupDead, GroupRequeued, GroupsDropped, GroupsScored, LedgerRecord
from shared.schema.messages import Payload


def fitted(records: Iterable[LedgerRecord], limit: int) -> Iterator[tuple[LedgerRecord, bytes]]:
    """Yields the records, each with its bytes, which are ``limit`` at most. Raises MessageTooLarge for one that cannot be made to fit."""
    dead: set[str] = set()  # groups that ended here: what the same decision says of them later is void
    left = [*records][::-1]
    while left:
        record = left.pop()
        if isinstance(record, GroupsDropped) and not dead.isdisjoint(record.groups):
            record = record.model_copy(update={"groups": [name for name in record.groups if name not in dead]})
            if not record.groups:
                continue
        data = record.encode()
        if len(data) <= limit:
            yield record, data
            continue
        smaller = _smaller(record, f"its record of {len(data)} bytes is over the bus's limit of {limit}")
        dead |= {part.group for part in smaller if isinstance(part, GroupDead)}
        left += smaller[::-1]


def _smaller(record: LedgerRecord, reason: str) -> list[LedgerRecord]:
    """Returns what stands for a record that is too large: its two halves, or the end of its group."""
    match record:
        case GroupsScored(groups=[_, _, *_] as groups) | GroupsDropped(groups=[_, _, *_] as groups):
            middle = len(groups) // 2
            return [record.model_copy(update={"groups": half}) for half in (groups[:middle], groups[middle:])]
        case GroupsScored(groups=[group], at=at):
            return [GroupDead(group=group.group, reason=reason, fault=TASK, payload=group.payload, at=at)]
        case EvalScored(rewards=[_, *_]):
            return [record.model_copy(update={"rewards": [], "parts": (), "reason": reason})]
        case GroupDead(payload=Payload()) | EvalScored(payload=Payload()):  # its blobs stay in the store, which is the lesser evil
            return [record.model_copy(update={"payload": None})]
        case GroupRequeued(partial=Payload()):
            return [record.model_copy(update={"partial": None, "renew_below": 0})]
        case _:
            raise MessageTooLarge(f"{type(record).__name__}: {reason}")
