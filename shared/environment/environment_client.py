"""One environment, over whichever transport: `open_environment` makes it, the rest of Myxo knows no other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shared.bus.connection import Bus
from shared.environment.environment_url import parse
from shared.environment.protocol import DESCRIBE, SCORE, Description, ScoreRequest, read_description, read_scores
from shared.runtime.errors import ConfigError
from shared.schema.messages import Score


class Environment(ABC):
    """An environment outside of Myxo. Must be made, used and closed in one event loop.

    Args:
        name: its name in the run. shown: its address without credentials.
    """

    def __init__(self, name: str, shown: str) -> None:
        self.name, self.shown = name, shown
        self.whom = f"environment {name} at {shown}"

    @abstractmethod
    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        """Sends one request and returns the decoded answer, unchecked.

        Args:
            question: plain values; None for a verb without any. deadline: seconds for everything, connecting included.

        Raises:
            EnvironmentAway: no connection, or it broke. The request may be sent again.
            EnvironmentFailed: an error status, a redirect, an answer that is too large or cannot be decoded.
            DeadlineExceeded: connected, but no complete answer in time.
        """

    async def describe(self, deadline: float) -> Description:
        """What the environment says of itself, checked. Raises as `ask` does."""
        return read_description(await self.ask(DESCRIBE, None, deadline), self.whom)

    async def score(self, request: ScoreRequest, deadline: float) -> list[Score]:
        """One checked score a sample, in order. Raises as `ask` does."""
        return read_scores(await self.ask(SCORE, request.model_dump(), deadline), len(request.samples), self.whom)

    @abstractmethod
    async def close(self) -> None:
        """Closes its connections; the bus stays open."""


def open_environment(name: str, url: str, bus: Bus | None = None, run: str = "") -> Environment:
    """The client for an address of `shared.environment.environment_url`.

    Args:
        name: of the environment in the run. bus, run: for ``nats:NAME``.

    Raises ConfigError for an address that is none. Nothing is connected yet.
    """
    try:
        address = parse(url)
    except ValueError as error:
        raise ConfigError(f"the URL of environment {name}", url.rpartition("@")[2], str(error)) from None
    if address.responder:
        from shared.environment.bus_environment import BusEnvironment

        if bus is None or not run:
            raise ConfigError(f"the URL of environment {name}", url, "an environment on the bus needs the run that it belongs to")
        return BusEnvironment(name, address, bus, run)
    from shared.environment.http_environment import HttpEnvironment  # aiohttp comes with the extra `reward`

    return HttpEnvironment(name, address)
