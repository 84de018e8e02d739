"""What is heard of a turn while it is drawn, for the answer that streams it."""

import asyncio
from contextlib import suppress

from shared.sessions.session import Drawn, PendingTurn


class LiveTurn:
    """One turn. ``prompt``: its token ids, once it has begun. ``cached``: of them, those that the first draw found in the prefix cache."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.cached = 0
        self._heard: list[int] = []
        self._news = asyncio.Event()

    def begin(self, pending: PendingTurn) -> None:
        """Notes the turn's prompt, and what another gateway has drawn of it already."""
        self.prompt = pending.prompt.tolist()
        self._note(pending.completion.tolist())

    def hear(self, drawn: Drawn) -> None:
        """Notes further tokens."""
        self.cached = self.cached or drawn.cached
        self._note(drawn.completion.tolist())

    def _note(self, tokens: list[int]) -> None:
        if tokens:
            self._heard += tokens
            self._news.set()

    def end(self) -> None:
        """Wakes whoever waits: nothing more is heard."""
        self._news.set()

    async def news(self, seconds: float) -> None:
        """Waits until there are tokens that were not taken, the turn has ended, or so many seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def taken(self) -> list[int]:
        """Returns the tokens that were heard since the last call."""
        self._news.clear()
        heard, self._heard = self._heard, []
        return heard
