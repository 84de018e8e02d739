"""The named errors of calls to an engine."""

from shared.runtime.errors import INFRASTRUCTURE, MyxoError


class EngineError(MyxoError):
    """The engine refused a call, or its answer is unusable.

    Args:
        where: the engine's address and the endpoint, for example ``http://127.0.0.1:30000/generate``.
        reason: the engine's own message, or what was wrong with its answer.
        status: the HTTP status, None where there was no answer.
    """

    fault = INFRASTRUCTURE

    def __init__(self, where: str, reason: str, status: int | None = None) -> None:
        self.where, self.reason, self.status = where, reason, status
        answered = "" if status is None else f" (HTTP {status})"
        super().__init__(f"engine at {where}{answered}: {reason}")


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer: the engine is dead, or was never there."""


class InvalidRequest(MyxoError):
    """A request was not sent, because the engine would have refused it or crashed."""
