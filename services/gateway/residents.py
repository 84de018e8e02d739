"""Decides which sessions' keys and values a replica is to keep in its prefix cache. Pure.

An engine that is asked for more prefixes than its memory holds drops those that were used longest ago: where all sessions take turns, just
those that come next, and each turn computes its whole conversation again. So sessions are admitted by the tokens that there is room for.
One that is admitted is resident until it has ended or was idle for `IDLE_SECONDS`. While others wait, those that were admitted first make
room after a while; where sessions grow beyond the room, those that were admitted last leave. So each session plays many turns for each time
that its conversation is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.sessions.session import Session, SessionLog

HELD_SHARE = 0.9  # The share of a replica's tokens that resident sessions may have: the rest is for what running requests add
IDLE_SECONDS = 120.0  # The time without a turn after which others have taken a session's place in the cache


@dataclass(eq=False)
class Resident:
    """A session, or one that asks to be resident. tokens: of its newest turn. shared: of them, the leading ones that the other sessions of
    its group have as well. since, used: when it was admitted, and when its newest turn ended, monotonic seconds. running: its turns now.
    asked: when the store was asked last whether it has ended."""

    session: Session
    tokens: int
    shared: int = 0
    since: float = 0.0
    used: float = 0.0
    running: int = 0
    asked: float = 0.0

    @classmethod
    def asking(cls, log: SessionLog, tokens: int) -> "Resident":
        """Returns a session whose next turn begins with so many tokens."""
        first = next(iter(log.turns.values()), None)
        return cls(log.session, tokens, min(tokens, len(first.prompt) if first is not None else tokens))


@dataclass
class Residents:
    """The sessions that are resident at one replica. ``capacity``: tokens whose keys and values it keeps; 0: it keeps none, or does not say
    how many, and every session is admitted."""

    capacity: int = 0
    sessions: dict[str, Resident] = field(default_factory=dict)
    _kept: tuple[int, dict[str, int]] | None = None  # what `_counted` returns until it changes: those that wait ask again and again

    def fits(self, asking: Resident) -> bool:
        """Returns whether a session may have a turn here: it is resident, or there is room for it, or nothing else is here."""
        if not self.capacity or not self.sessions or asking.session.id in self.sessions:
            return True
        kept, shared = self._counted()
        further = max(0, asking.shared - shared.get(asking.session.group, 0)) + max(0, asking.tokens - asking.shared)
        return kept + further <= HELD_SHARE * self.capacity

    def admit(self, asking: Resident, now: float) -> Resident:
        """Returns the session as a resident with one more turn. Where it does not fit, those that were admitted first and have no turn make
        room."""
        leaving = self._idle(key=lambda one: -one.since)
        while leaving and not self.fits(asking):
            self.leave(leaving.pop())
        found = self.sessions.setdefault(asking.session.id, asking)
        found.since = found.since or now
        found.tokens, found.running, self._kept = asking.tokens, found.running + 1, None
        return found

    def ended(self, resident: Resident, now: float) -> None:
        """Notes the end of a resident's turn. Where residents have grown beyond their room, those that were admitted last leave."""
        resident.running, resident.used, self._kept = resident.running - 1, now, None
        leaving = self._idle(key=lambda one: one.since) if self.capacity else []
        while leaving and len(self.sessions) > 1 and self._counted()[0] > HELD_SHARE * self.capacity:
            self.leave(leaving.pop())

    def leave(self, resident: Resident) -> None:
        """Gives a session's room to others."""
        if self.sessions.get(resident.session.id) is resident:
            del self.sessions[resident.session.id]
            self._kept = None

    def idle(self) -> list[Resident]:
        """Returns the sessions without a turn, the longest idle first."""
        return self._idle(key=lambda one: one.used)

    def _idle(self, key: Callable[[Resident], float]) -> list[Resident]:
        return sorted((one for one in self.sessions.values() if not one.running), key=key)

    def _counted(self) -> tuple[int, dict[str, int]]:
        """Returns the tokens that are kept for sessions, what a group shares counted once, and of them the shared ones of each group."""
        if self._kept is None:
            shared, held = dict[str, int](), self.sessions.values()
            for one in held:
                shared[one.session.group] = max(shared.get(one.session.group, 0), one.shared)
            # a turn may begin with less than the group shares
            self._kept = sum(max(0, one.tokens - one.shared) for one in held) + sum(shared.values()), shared
        return self._kept
