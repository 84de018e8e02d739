"""The log of commands from outside: what clients of the training endpoint have asked for, and what became of each command."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.schema.message import Gauges, Message, Reason, Timestamp
from shared.schema.messages import Payload

Verb = Literal[
    "create_model",
    "load_weights",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "unload_model",
    "create_sampling_session",
    "sample",
]
MAKES = ("create_model", "load_weights")  # the verbs by which a client begins
TRAINED = ("create_model", "load_weights", "forward_backward", "optim_step")  # the verbs that change a client's state
MOST_ARGUMENTS = 1 << 16  # characters of a command's arguments
TENANT = r"[a-z0-9]{1,32}"
# TENANT-SESSION, then which of the session's models or samplers; part of a subject
ClientId = Annotated[str, StringConstraints(max_length=96, pattern=rf"^{TENANT}-[0-9a-f]{{16}}(:(train|sample):[0-9]{{1,9}})?$")]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Json = Annotated[str, StringConstraints(max_length=MOST_ARGUMENTS)]


class LogEntry(Message):
    """Base of what the log of commands holds. ``client``: a model or a sampling session. ``number``: of the command, among its client's.

    There is one command and one outcome at most for each client and number.
    """

    client: ClientId
    number: Number
    at: Timestamp

    @property
    def key(self) -> tuple[str, int]:
        return self.client, self.number


class Command(LogEntry):
    """A command, as the endpoint has accepted it. Those that train are carried out in the order of their numbers, without a gap.

    ``arguments``: a JSON object. ``payload``: the rest of the request, in the store. ``digest``: of the request; another request under the
    same key is refused. ``refused``: why it is not carried out; it only takes its number. ``tokens``: that it counts for quotas.
    """

    verb: Verb
    arguments: Json = "{}"
    payload: Payload | None = None
    digest: str = Field(default="", max_length=64)
    refused: Reason = ""
    tokens: Number = 0


class CommandOutcome(LogEntry):
    """What became of a command. ``error``: why it failed, and then it has changed nothing. ``category``: of the error, whose fault it is.

    ``result``: a JSON object. ``payload``: the rest of the answer, in the store. ``figures``: for displays; ``expires``: when what it saved
    is removed. ``state``: digest of the client's weights after an optimizer step. ``bytes``: that it has written and that stay.
    """

    error: Reason = ""
    category: Literal["", "user", "server"] = ""
    result: Json = "{}"
    payload: Payload | None = None
    figures: Gauges = {}
    state: str = Field(default="", max_length=64)
    bytes: Number = 0


def is_expired(saved: CommandOutcome, now: float) -> bool:
    """Returns whether what a command has saved is to be removed. ``now``: seconds since the epoch."""
    return saved.figures.get("expires", now) < now


def weights_directory(trained: Path, path: str) -> Path:
    """Returns where saved weights with a path ``tinker://CLIENT/KIND/NAME`` lie; the endpoint has checked it. ``trained``: the run's."""
    client, kind, name = path.removeprefix("tinker://").split("/")
    return trained / "clients" / kind / client / name
