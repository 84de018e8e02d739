"""``/api/clients``: the clients of the training endpoint: what each has trained and sampled, by the log of commands."""

from collections.abc import Collection
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel

from services.console.run_source import CLIENTS, RunSource
from shared.schema.messages import Command, CommandOutcome, LogEntry

MOST_LOSSES = 500  # a client's newest losses that are kept


class ClientRow(BaseModel):
    """One model or sampling session. ``steps``: optimizer steps. ``commands``: accepted, of them ``waiting`` without an outcome, and
    ``failed``, of which ``error`` is the newest. ``tokens``: trained or sampled; ``sequences``: sampled. ``at``: of its newest entry.
    ``losses``: of its newest passes, by token; None: not finite."""

    client: str
    at: float = 0.0
    steps: int = 0
    commands: int = 0
    waiting: int = 0
    failed: int = 0
    error: str = ""
    tokens: int = 0
    sequences: int = 0
    losses: list[float | None] = []


class ClientHistory:
    """The fold of the log. Requests share it: ``source.shared(ClientHistory)``."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._begin()
        source.followers.append(self.follow)

    def _begin(self) -> None:
        self.rows, self._seen, self._life = dict[str, ClientRow](), 0, self._source.life

    async def follow(self) -> Collection[str]:
        """Takes what is new; returns the pages whose data has changed."""
        source, seen = self._source, self._seen
        if source.config is None or not source.config.tinker.tinker_endpoint or not source.live:
            return ()
        if self._life != source.life:
            self._begin()
        async for sequence, entry in source.read(source.names.commands_stream, LogEntry, after=self._seen):
            self._seen = sequence
            self.take(entry)
        return (CLIENTS,) if self._seen != seen else ()

    def take(self, entry: LogEntry) -> None:
        """Takes the next entry of the log."""
        row = self.rows.setdefault(entry.client, ClientRow(client=entry.client))
        row.at = entry.at
        if isinstance(entry, Command):
            row.commands, row.waiting = row.commands + 1, row.waiting + 1
        elif isinstance(entry, CommandOutcome):
            figures, row.waiting = entry.figures, row.waiting - 1
            row.failed, row.error = row.failed + bool(entry.error), entry.error or row.error
            row.steps = int(figures.get("updates", row.steps))
            row.tokens, row.sequences = row.tokens + int(figures.get("tokens", 0)), row.sequences + int(figures.get("sequences", 0))
            if "tokens" in figures and "sequences" not in figures:  # a pass; what is not finite is not among the figures
                loss = figures.get("loss:sum")
                row.losses = [*row.losses[1 - MOST_LOSSES :], None if loss is None else loss / max(1.0, figures["tokens"])]

    async def newest(self, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[ClientRow]:
        """Returns the clients of `myxo serve`, those with the newest entries first: steps, losses, samples, failures."""
        return sorted(self.rows.values(), key=lambda row: row.at, reverse=True)[:limit]
