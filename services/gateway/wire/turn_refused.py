"""The one refusal of the gateway, and how each house's clients are told of it: the status is the same, the body is the house's."""

from collections.abc import Mapping
from math import ceil
from typing import Any, Literal

from shared.runtime.errors import MyxoError

House = Literal["openai", "anthropic"]
"""Whose error shape an endpoint answers with. ``/inference/v1/generate`` and ``/groups`` have OpenAI's."""

Status = Literal[400, 401, 403, 404, 405, 408, 409, 410, 413, 422, 429, 500, 503]

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class TurnRefused(MyxoError):
    """A request is not served. Its text is for the client's author.

    Args:
        status: of HTTP. 400: the request; 401: the key; 404: the model, or what the path names; 409: the replicas are behind the version
            that was asked for; 410: the session has ended; 413: too long; 429: too much at once; 503: no replica serves.
        field: the dotted place in the body that it is about; OpenAI's ``param``.
        code: a word that programs may compare; OpenAI's ``code``.
        retry_after_s: after how many seconds the same request may be served; None where it never will.
    """

    def __init__(
        self, status: Status, message: str, *, field: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.status, self.message, self.field, self.code, self.retry_after_s = status, message, field, code, retry_after_s
        super().__init__(f"{field}: {message}" if field else message)

    @property
    def headers(self) -> Mapping[str, str]:
        """Returns the answer's headers. Clients would try 409 and 503 again by themselves, also where that is in vain."""
        if self.retry_after_s is None:
            return {"X-Should-Retry": "false"}
        exact = str(ceil(1000 * self.retry_after_s))
        return {"Retry-After": str(ceil(self.retry_after_s)), "Retry-After-Ms": exact, "X-Should-Retry": "true"}

    def body(self, house: House) -> dict[str, Any]:
        """Returns the answer's body."""
        if house == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": None}
        kind = "server_error" if self.status >= 500 else _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def unknown_model(model: str, served: str) -> TurnRefused:
    """Returns the refusal of a request for a model that is not served."""
    return TurnRefused(404, f"the model {model[:200]!r} does not exist here; served is {served!r}", code="model_not_found")


def overlong_prompt(length: int, most: int, place: str = "messages", unit: str = "tokens") -> TurnRefused:
    """Returns the refusal of a prompt of a ``length`` where ``most`` tokens fit. ``place``: its field in the body."""
    message = f"the prompt has {length} {unit}, more than the model's maximum context length of {most} leaves for it"
    return TurnRefused(400, message, field=place, code="context_length_exceeded")
