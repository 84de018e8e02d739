"""How far a session has got: the fold of its log without its tokens, for whoever looks at many. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.schema.message import Message
from shared.sessions.session import Session, SessionEnded, SessionProlonged, TurnBegun, TurnDrawn, TurnEnded


@dataclass
class SessionProgress:
    """``length``: records that were read. ``turns``: that have ended. ``tokens``: drawn in them, and recorded of the pending ones.

    ``asked``: when the newest turn began, seconds since the epoch; ``context``: tokens of its prompt and completion. ``gateway``: who
    draws or drew it; ``engine``: the replica of the newest tokens. ``oldest``, ``newest``: weight versions of the tokens.
    """

    session: Session
    length: int = 1
    turns: int = 0
    tokens: int = 0
    asked: float | None = None
    context: int = 0
    gateway: str = ""
    engine: str = ""
    oldest: int | None = None
    newest: int | None = None
    ended: bool = False
    _pending: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    @property
    def pending(self) -> int:
        """Returns how many turns have begun and not ended."""
        return len(self._pending)

    def apply(self, records: Iterable[Message]) -> None:
        """Takes further records, in the order of the log."""
        for record in records:
            self.length += 1
            if self.ended:
                continue
            match record:
                case SessionEnded():
                    self.ended = True
                case SessionProlonged(deadline=deadline):
                    self.session = self.session.model_copy(update={"deadline": max(deadline, self.session.deadline)})
                case TurnBegun(request=request) if request not in self._done:
                    self._begin(record)
                case TurnDrawn(request=request, start=start) if self._pending.get(request) == start:
                    self._pending[request] += len(record.completion)
                    self._drawn(len(record.completion), record)
                case TurnEnded(request=request) if request in self._pending:
                    self._drawn(len(record.completion) - self._pending.pop(request), record)
                    self._done.add(request)
                    self.turns += 1

    def _begin(self, record: TurnBegun) -> None:
        self.gateway = record.holder
        if record.request in self._pending:
            return  # a gateway has renewed its lease, or another has taken the turn over
        self._pending[record.request] = 0
        self.asked = record.at
        self.context = record.shared + len(record.rest)

    def _drawn(self, tokens: int, record: TurnDrawn | TurnEnded) -> None:
        self.tokens += tokens
        self.context += tokens
        self.engine, self.gateway = record.replica or self.engine, record.holder
        versions = [version for _, _, version in record.spans]
        self.oldest = min((version for version in (self.oldest, *versions) if version is not None), default=None)
        self.newest = max((version for version in (self.newest, *versions) if version is not None), default=None)
