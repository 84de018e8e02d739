"""Sessions in Redis or Valkey: one list each, to which records are appended and from which none is ever taken.

RPUSHX appends where there is a session, in one step; nothing is read, compared and written back, so that no lock is needed. Writing a
record twice, after a connection that broke, changes nothing (`shared.sessions.session`).
"""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage
from shared.schema.message import Message
from shared.sessions.session import (
    SECRET_BYTES,
    PendingTurn,
    Session,
    SessionEnded,
    SessionLog,
    SessionOver,
    SessionProlonged,
    SessionUnknown,
    ThreadExtended,
    Turn,
    TurnBegun,
    TurnEnded,
    TurnExtended,
    TurnHeld,
    TurnRecord,
    TurnRewarded,
    parts_of_key,
)
from shared.store.payload_store import Store

KEPT_SECONDS = 3600.0  # The time after its deadline for which a session can still be read
GATEWAY_KEY = ".gateway-key"  # In the place of a session's id, of which none begins with a dot

# In the same place the ids of the sessions that were opened within so many seconds, and the number of that stretch of time
OPENED_KEY, OPENED_SECONDS = ".opened-{}", 600
LATE_SECONDS = 30  # The time for which a session that nobody needs any more is still there, so that late turns are told that it has ended
_DIGEST = 32  # Bytes of a picture's name, before the picture
STORE_SECONDS = 30.0  # The default deadline of one command, with its repetitions while the store is away


class SessionStore:
    """The sessions of a run. Every call raises as `Store`'s do: DeadlineExceeded, StoreRefused, StoreFull. ``seconds``: its deadline."""

    def __init__(self, store: Store, run: str, seconds: float = STORE_SECONDS) -> None:
        self._store, self._names, self._seconds = store, Subjects(run), seconds

    async def open(self, session: Session, shows: bool = False) -> None:
        """Opens a session. Its record goes by itself `KEPT_SECONDS` after its deadline. ``shows``: its turns may show pictures."""
        now = time.time()
        key, opened = self._names.session_key(session.id), self._opened_key(int(now // OPENED_SECONDS))
        left = int(max(session.deadline - now, 0) + KEPT_SECONDS)
        commands = ("RPUSH", key, session.encode()), ("EXPIRE", key, left)
        noted = ("RPUSH", opened, session.id), ("EXPIRE", opened, left + OPENED_SECONDS)
        shown = self._pictures_key(session.id)  # gateways may append to what is there alone
        begun = (("RPUSH", shown, b""), ("EXPIRE", shown, left)) if shows else ()
        await self._command(f"opening of session {session.id}", *commands, *noted, *begun)

    async def read(self, session: str) -> SessionLog:
        """Returns a session's state. Raises SessionUnknown."""
        [found] = await self._command(f"session {session}", ("LRANGE", self._names.session_key(session), 0, -1))
        if not found:
            raise SessionUnknown(f"there is no session {session}, or it has expired")
        try:
            log = SessionLog(Session.decode(found[0]))
        except BadMessage as error:
            raise SessionUnknown(f"session {session} cannot be read: {error}") from error
        log.apply(map(Message.decode, found[1:]))
        return log

    async def pictures(self, session: str) -> dict[str, bytes]:
        """Returns the pictures that a session's turns show, PNGs, by name."""
        [found] = await self._command(f"the pictures of session {session}", ("LRANGE", self._pictures_key(session), 0, -1))
        return {bytes(one[:_DIGEST]).hex(): bytes(one[_DIGEST:]) for one in found if one}

    async def add_pictures(self, session: str, pictures: Mapping[str, bytes]) -> None:
        """Adds pictures to a session's, PNGs by name. Raises SessionUnknown where it has expired."""
        for name, picture in pictures.items():
            command = ("RPUSHX", self._pictures_key(session), bytes.fromhex(name) + picture)
            [length] = await self._command(f"a picture of session {session}", command)
            if not length:
                raise SessionUnknown(f"there is no session {session} any more")

    def _pictures_key(self, session: str) -> str:
        return self._names.session_key(session) + ".pictures"

    async def opened(self, stretch: int, after: int, deadline: float) -> list[str]:
        """Returns the ids of sessions that were opened in one stretch of `OPENED_SECONDS`, in order, beyond the first ``after``."""
        command = ("LRANGE", self._opened_key(stretch), after, -1)
        [found] = await self._store.commands("the sessions that were opened", [command], deadline)
        return [bytes(name).decode() for name in found]

    async def lengths(self, sessions: Sequence[str], deadline: float) -> list[int]:
        """Returns how many records each session has; 0 where its record is gone."""
        commands = [("LLEN", self._names.session_key(session)) for session in sessions]
        return await self._store.commands("the lengths of sessions", commands, deadline) if commands else []

    async def records(self, sessions: Sequence[tuple[str, int]], deadline: float) -> list[list[bytes]]:
        """Returns the records of each (session, n) beyond the first n."""
        commands = [("LRANGE", self._names.session_key(session), after, -1) for session, after in sessions]
        return await self._store.commands("the records of sessions", commands, deadline) if commands else []

    async def ended(self, sessions: Sequence[str]) -> set[str]:
        """Returns those of several sessions that have ended, by their newest record, or expired, in one round trip."""
        if not sessions:
            return set()
        newest = await self._command("the ends of sessions", *(("LRANGE", self._names.session_key(one), -1, -1) for one in sessions))
        return {one for one, found in zip(sessions, newest, strict=True) if not found or isinstance(Message.decode(found[0]), SessionEnded)}

    async def find(self, key: str) -> SessionLog:
        """Returns the state of the session that a key opens. Raises SessionUnknown, in the same words whatever is wrong with the key."""
        session, secret = parts_of_key(key)
        try:
            log = await self.read(session)
        except SessionUnknown:
            log = None
        if log is None or not log.session.opened_by(secret):
            raise SessionUnknown("this key opens no session")
        return log

    async def refresh(self, log: SessionLog) -> None:
        """Reads what has been appended to a session's log since. Raises SessionUnknown where it has expired."""
        await self._catch_up(log, f"session {log.session.id}", "LLEN")

    async def refresh_all(self, logs: Collection[SessionLog]) -> None:
        """Reads what has been appended to several logs since, in one round trip. One that has expired stays as it is."""
        asked = [(log, log.length) for log in logs]
        if asked:
            commands = [("LRANGE", self._names.session_key(log.session.id), start, -1) for log, start in asked]
            for (log, start), found in zip(asked, await self._command("the sessions of turns", *commands), strict=True):
                log.apply(map(Message.decode, found[log.length - start :]))  # another task may have folded some of them meanwhile

    async def begin(self, log: SessionLog, turn: TurnBegun) -> Turn | PendingTurn:
        """Begins a turn, or takes it over where the lease of who generated it has run out.

        Returns it with the tokens that it has already, or as a whole where it has ended. Raises SessionOver, SessionUnknown, and TurnHeld
        where another request generates it.
        """
        return await self._append(log, turn)

    async def extend(self, log: SessionLog, extended: TurnExtended) -> PendingTurn:
        """Records more tokens of a turn, and renews its lease. Raises SessionOver, SessionUnknown, and TurnHeld where it was lost."""
        found = await self._append(log, extended)
        if isinstance(found, Turn):
            raise TurnHeld(extended.request, 0.0)
        return found

    async def append(self, log: SessionLog, turn: TurnEnded) -> Turn:
        """Records a turn's end, and returns the turn that counts: another gateway may have ended it first.

        Raises SessionOver, SessionUnknown, and TurnHeld where another request generates it now.
        """
        found = await self._append(log, turn)
        if isinstance(found, PendingTurn):
            raise TurnHeld(turn.request, found.until)
        return found

    async def reward(self, log: SessionLog, rewarded: TurnRewarded) -> float:
        """Rewards a turn of the log, and returns the reward that counts: its first. Raises SessionOver, SessionUnknown."""
        if log.ended is None and rewarded.request not in log.rewards:
            what = f"the reward of turn {rewarded.request} of session {log.session.id}"
            await self._catch_up(log, what, "RPUSHX", rewarded.encode())
        if rewarded.request not in log.rewards:
            raise SessionOver(f"session {log.session.id} has ended: its turns take no more rewards")
        return log.rewards[rewarded.request]

    async def extend_thread(self, log: SessionLog, record: ThreadExtended) -> None:
        """Records messages of a stored conversation. Raises SessionOver, SessionUnknown."""
        if log.ended is None:
            await self._catch_up(log, f"conversation {record.name} of session {log.session.id}", "RPUSHX", record.encode())
        if log.ended is not None:
            raise SessionOver(f"session {log.session.id} has ended: it stores no more messages")

    async def prolong(self, session: str, deadline: float) -> None:
        """Gives a session that has not ended a later deadline, in seconds since the epoch, after which its record goes as before."""
        key, left = self._names.session_key(session), max(deadline - time.time(), 0) + KEPT_SECONDS
        record = SessionProlonged(deadline=deadline).encode()
        expiries = [("EXPIRE", one, int(left)) for one in (key, self._pictures_key(session))]
        await self._command(f"a later deadline of session {session}", ("RPUSHX", key, record), *expiries)

    async def end(self, session: str, ended: SessionEnded) -> SessionLog:
        """Ends a session, and returns its state, with the end that counts: the first one. Raises SessionUnknown."""
        key = self._names.session_key(session)
        [length] = await self._command(f"the end of session {session}", ("RPUSHX", key, ended.encode()))
        if not length:
            raise SessionUnknown(f"there is no session {session}, or it has expired")
        return await self.read(session)

    async def let_go(self, session: str) -> None:
        """Has the record of a session that has ended go in `LATE_SECONDS`."""
        keys = self._names.session_key(session), self._pictures_key(session)
        await self._command(f"expiry of session {session}", *(("EXPIRE", key, LATE_SECONDS) for key in keys))

    async def make_gateway_key(self, held: str = "") -> str:
        """Returns the key by which gateways ask replicas for tokens. Where there is none, it is ``held``, or made."""
        key = self._names.session_key(GATEWAY_KEY)
        _, found = await self._command("the gateways' key", ("SETNX", key, held or secrets.token_hex(SECRET_BYTES)), ("GET", key))
        return bytes(found).decode()

    async def gateway_key(self) -> str | None:
        """Returns that key; None where no replica has made it yet."""
        [found] = await self._command("the gateways' key", ("GET", self._names.session_key(GATEWAY_KEY)))
        return None if found is None else bytes(found).decode()

    def _opened_key(self, stretch: int) -> str:
        return self._names.session_key(OPENED_KEY.format(stretch))

    async def _append(self, log: SessionLog, record: TurnRecord) -> Turn | PendingTurn:
        """Appends a record, folds what has been appended since the log was read, and returns the turn: whole, or pending with the holder.

        Raises SessionOver, SessionUnknown, and TurnHeld where another request holds it.
        """
        if log.ended is None:
            await self._catch_up(log, f"turn {record.request} of session {log.session.id}", "RPUSHX", record.encode())
        if log.ended is not None and record.request not in log.turns:
            raise SessionOver(f"session {log.session.id} has ended" + (f": {log.ended.reason}" if log.ended.reason else ""))
        if (turn := log.turns.get(record.request)) is not None:
            return turn
        if (pending := log.pending.get(record.request)) is None:
            raise SessionUnknown(f"session {log.session.id} knows nothing of turn {record.request}")
        if pending.holder != record.holder:
            raise TurnHeld(record.request, pending.until)
        return pending

    async def _catch_up(self, log: SessionLog, what: str, command: str, *arguments: bytes) -> None:
        """Runs a command on a session's list that answers its length, and folds what was appended since the log was read."""
        key, start = self._names.session_key(log.session.id), log.length
        length, found = await self._command(what, (command, key, *arguments), ("LRANGE", key, start, -1))
        if not length:
            raise SessionUnknown(f"there is no session {log.session.id} any more")
        log.apply(map(Message.decode, found[log.length - start :]))  # another task may have folded some of them meanwhile

    async def _command(self, what: str, *commands: tuple[Any, ...]) -> list[Any]:
        return await self._store.commands(what, commands, self._seconds)
