"""The class of all environments outside of Myxo: the verbs are the same over every transport, and their answers are checked here."""

from abc import ABC, abstractmethod
from typing import Any

from shared.environment.protocol import DESCRIBE, SCORE, Description, ScoreRequest, read_description, read_map, read_scores
from shared.environment.stepping import (
    CLOSE,
    RESET,
    STEP,
    CloseRequest,
    OpenedSession,
    ResetRequest,
    StepRequest,
    TurnOutcome,
    read_reset,
    read_step,
)
from shared.schema.sample import Score


class Environment(ABC):
    """An environment outside of Myxo. It must be made, used and closed in one event loop.

    Args:
        name: its name in the run. shown: its address without credentials.
    """

    def __init__(self, name: str, shown: str) -> None:
        self.name, self.shown = name, shown
        self.label = f"environment {name} at {shown}"
        self.content_type: str | None = None
        """The type that the newest answer said it is of, where its transport tells."""

    @abstractmethod
    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        """Sends one request and returns the decoded answer, unchecked.

        Args:
            question: plain values; None for a verb without any. deadline: seconds for everything, connecting included.

        Raises:
            EnvironmentAway: there is no connection, or it broke. The request may be sent again.
            EnvironmentFailed: the answer is an error status or a redirect, is too large, or cannot be decoded.
            DeadlineExceeded: the connection was made, but no complete answer came in time.
        """

    async def describe(self, deadline: float) -> Description:
        """Returns the environment's description, checked. Raises as `ask` does."""
        return read_description(await self.ask(DESCRIBE, None, deadline), self.label)

    async def score(self, request: ScoreRequest, deadline: float) -> list[Score]:
        """Returns one checked score a sample, in order. Raises as `ask` does."""
        return read_scores(await self.ask(SCORE, request.model_dump(), deadline), len(request.samples), self.label)

    async def reset(self, request: ResetRequest, deadline: float) -> OpenedSession:
        """Returns the session that was opened, checked. Raises as `ask` does."""
        return read_reset(await self.ask(RESET, request.model_dump(), deadline), self.label)

    async def step(self, request: StepRequest, deadline: float) -> TurnOutcome:
        """Returns what came of a turn, checked. Raises as `ask` does."""
        return read_step(await self.ask(STEP, request.model_dump(), deadline), self.label)

    async def end(self, request: CloseRequest, deadline: float) -> None:
        """Ends a session; its answer may be any map. Raises as `ask` does."""
        read_map(await self.ask(CLOSE, request.model_dump(), deadline), self.label)

    async def close(self) -> None:
        """Closes its own connections; the bus stays open."""
        return
