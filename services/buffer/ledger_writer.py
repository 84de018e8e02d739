"""The ledger's only writer: records go to the stream in order, each confirmed, and never beside another writer's.

Each record is first encoded, made to fit the bus, decoded and folded into a copy of the state, so that whatever is in the ledger replays,
to the very state that the buffer has. A long list is divided over several records. A group whose own part is too large ends as dead:
whoever scored it may have filled its message to the limit, and numbers grow when they are written out.
"""

import copy
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

from services.buffer.state import BufferState
from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime.errors import TASK, MessageTooLarge, MyxoError
from shared.schema.ledger import EvalScored, GroupDead, GroupRequeued, GroupsDropped, GroupsScored, LedgerRecord, LedgerRepaired
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


class BadRecord(MyxoError):
    """A decision comes to nothing that could be recorded; nothing has changed. The text says why."""


LedgerEntry = tuple[LedgerRecord, bytes]  # A record to append, as it is read back from its bytes, and these


class Trial:
    """A copy of the ``state`` that is ahead of it by the record that is about to be appended."""

    def __init__(self, state: BufferState) -> None:
        self._state, self._ahead = state, copy.deepcopy(state)

    def entries(self, records: Iterable[LedgerRecord], limit: int) -> Iterator[LedgerEntry]:
        """Yields the records, in pieces of at most ``limit`` bytes. Raises BadRecord for one that would not replay.

        Each is to be appended, and folded into the state, before the next one is asked for.
        """
        return iter(partial(self._next, fitted(records, limit)), None)

    def _next(self, pieces: Iterator[tuple[LedgerRecord, bytes]]) -> LedgerEntry | None:
        name = "a record"
        try:
            for record, data in pieces:
                name = type(record).__name__
                tried = LedgerRecord.decode(data)
                self._ahead.apply(tried)
                return tried, data
            return None
        except Exception as error:  # whatever is wrong with it, it costs this decision and nothing else
            self._ahead = copy.deepcopy(self._state)
            raise BadRecord(f"{name} is not recorded: {type(error).__name__}: {error}") from error

    def follow(self, record: LedgerRecord) -> None:
        """Folds a record of the ledger into both states."""
        self._state.apply(record)
        self._ahead.apply(record)


# The number of the payload keys that were let go last and are freed again after a restart: more than a killed buffer can have left undone
RELEASED_AGAIN = 1 << 18


class LedgerWriter:
    """Replays the run's ledger, and appends to it.

    Every append names the sequence it expects to follow: when another buffer has written in between, this one gets `WrongSequence`
    and must stop, so two active buffers can never both be believed.

    Args:
        allowed: awaited before each try to append; it raises where this buffer may not write any more. read: takes each record that is
            read from the ledger, and the state before it.
    """

    def __init__(
        self, bus: Bus, run: str, allowed: Callable[[], Awaitable[None]], read: Callable[[BufferState, LedgerRecord], None]
    ) -> None:
        self._bus, self._subjects, self._allowed, self._read = bus, Subjects(run), allowed, read
        self._stream = self._subjects.ledger_stream
        self.state = BufferState()
        self._trial = Trial(self.state)
        self.released: deque[str] = deque(maxlen=RELEASED_AGAIN)  # The payload keys that the records read so far let go last
        self.last = 0  # The sequence of the last record that was read or appended
        self.behind = 0  # How many records are still to be read, the present one among them, while the ledger is read

    async def follow(self) -> None:
        """Reads the ledger's new records to its end and folds them into ``state``. Raises MyxoError for a gap that is not a repair's."""
        newest = await streams.last_sequence(self._bus, self._stream)
        async for sequence, record in streams.read(self._bus, self._stream, LedgerRecord, after=self.last):
            if not (isinstance(record, LedgerRepaired) and (record.cut_after, record.cut_last) == (self.last, sequence - 1)):
                self._refuse_gap(sequence)
            self.behind = newest - sequence + 1
            self._read(self.state, record)
            self._trial.follow(record)
            self.last = sequence
            self.released.extend(self.state.released)
        self._refuse_gap(newest + 1)  # where the last ones are gone, the stream has their sequence all the same

    def _refuse_gap(self, following: int) -> None:
        if self.last + 1 < following:
            gone = f"records {self.last + 1} to {following - 1} of the ledger are gone"
            raise MyxoError(f"{gone}: `myxo repair {self._subjects.run}` says what the run needs to continue")

    def tried(self, records: Iterable[LedgerRecord]) -> Iterator[LedgerEntry]:
        """Yields what is to be appended for these records and then folded into the state, one after the other. Raises BadRecord."""
        return self._trial.entries(records, self._bus.message_limit)

    async def append(self, record: LedgerRecord, data: bytes) -> None:
        """Appends a record. Raises WrongSequence beside another writer, DeadlineExceeded where the bus stays away, and as ``allowed``."""
        msg_id, after = f"{self._stream}.{self.last + 1}.{record.at}", (self._stream, self.last)
        subject = self._subjects.ledger(record.event())
        self.last = await self._bus.publish(subject, data, msg_id=msg_id, after=after, before=self._allowed, deadline=120)
