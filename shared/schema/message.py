"""The base of everything that crosses the control plane: strict fields, MessagePack both ways, and the types and limits that fields share.

Each message is a pydantic model with strict fields, in MessagePack as ``{"schema": 1, "kind": <class name>, ...fields}``. A receiver
refuses an unknown schema version, an unknown kind and a field that does not fit, with a `BadMessage` that names it: what fits can be
stored, sent on, replayed and shown by everybody. Two kinds of fields are made to fit instead, for no service may fail over its own report:
texts for people (`Reason`) are cut, and figures that are not finite leave a status (`Gauges`).
"""

import math
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from shared.runtime.errors import BadMessage
from shared.schema import codec

LARGEST = (1 << 31) - 1  # The largest version, step, attempt, index and token id
MAX_SAMPLES = 4096  # The most samples of a group: each takes about 120 bytes of a record, and some servers take messages of 1 MiB
MAX_KEYS = 1024  # The most blobs of a group
MAX_SPANS = 1024  # The most weight versions that the trained tokens of one sample are of
MAX_PARTS, MAX_NAME = 64, 64  # The most named rewards of a sample, and the most characters of such a name
LARGEST_REWARD = 1e9  # Of a reward's absolute value: its square is still a float32
MAX_PROMPT_BYTES = 7 << 17  # Of a prompt with its token ids: an eighth of the 1 MiB that some servers take is left for the rest of the task
REASON_LENGTH = 1000  # The characters after which a reason is cut
MAX_GAUGES = 512  # The most gauges of a status
_VISIBLE = r"^\P{C}+$"  # no control or format characters, no surrogates

# A group's id. It is part of the store's keys, which ``:`` divides.
GroupId = Annotated[str, StringConstraints(max_length=160, pattern=r"^[A-Za-z0-9._-]+$")]
Name = Annotated[str, StringConstraints(max_length=128, pattern=_VISIBLE)]  # The name of a service's instance, an environment or a data set
ROLE = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # The name of one of those that play a rollout together; it is the name of a reward, too
PartName = Annotated[str, StringConstraints(max_length=MAX_NAME, pattern=_VISIBLE)]  # The name of one of several rewards of a sample

# A digest of 16 bytes, in hexadecimal digits; empty where there is none
Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")]
StoreKey = Annotated[str, StringConstraints(max_length=320, pattern=_VISIBLE)]  # A key in the store
Count = Annotated[int, Field(ge=0, le=LARGEST)]  # A version, step, attempt, index or number of tokens
Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)]  # A reward, or a named part of one
Parts = Annotated[dict[PartName, Reward], Field(max_length=MAX_PARTS)]  # The named rewards of a sample
Timestamp = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # Seconds since the epoch


def cut(text: object) -> object:
    """Returns a text of at most `REASON_LENGTH` characters without surrogates; what is no text unchanged."""
    if not isinstance(text, str):
        return text
    text = text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 2] + " …"
    return text if text.isascii() else text.encode(errors="replace").decode()


Reason = Annotated[str, BeforeValidator(cut)]  # Why something happened, in words for people


def _finite(gauges: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in list(gauges.items())[:MAX_GAUGES] if math.isfinite(value)}


Gauges = Annotated[dict[str, float], AfterValidator(_finite)]  # Live figures of a service, by name; what is not finite is left out
_PART_NAME = TypeAdapter(PartName)


def is_part_name(name: object) -> bool:
    """Returns whether a reward may have this name."""
    try:
        _PART_NAME.validate_python(name, strict=True)
    except ValidationError:
        return False
    return True


def is_reward(number: float) -> bool:
    """Returns whether a number may be a reward."""
    return abs(number) <= LARGEST_REWARD  # false for nan


SCHEMA = 1  # Version of the wire schema. It grows when a field changes its meaning.


def _token_array(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, list) and all(isinstance(token, int) and abs(token) <= LARGEST for token in value):
        value = np.asarray(value, dtype=np.int64)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if len(value) and (value.min() < 0 or value.max() > LARGEST):
            raise ValueError(f"token ids lie between 0 and {LARGEST}")
        return value.astype(np.int32, copy=False)
    raise ValueError("expected a one-dimensional array of token ids")


Tokens = Annotated[Any, BeforeValidator(_token_array)]  # Token ids: int32 [T]


class Part(BaseModel):
    """Base of the records inside messages."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Message(Part):
    """Base of all messages: strict fields, MessagePack both ways."""

    kinds: "ClassVar[dict[str, type[Message]]]" = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Message.kinds[cls.__name__] = cls

    def encode(self) -> bytes:
        """Returns the MessagePack bytes of the envelope."""
        return codec.pack({"schema": SCHEMA, "kind": type(self).__name__, **self.model_dump(mode="python")})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads a message of this class (or, on a base class, any of its subclasses).

        Raises BadMessage, naming the field, for anything else.
        """
        fields = codec.unpack(data)
        if not isinstance(fields, dict):
            raise BadMessage(f"expected a {cls.__name__} message, got a {type(fields).__name__}")
        schema, kind = fields.pop("schema", None), fields.pop("kind", None)
        if not codec.is_schema(schema, SCHEMA):
            named = kind if isinstance(kind, str) else cls.__name__
            raise BadMessage(f"{named}: schema version {schema!r} is unknown here; this side speaks {SCHEMA}")
        model = Message.kinds.get(kind) if isinstance(kind, str) else None
        if model is None or not issubclass(model, cls) or model.__subclasses__():  # a base is no kind of its own
            raise BadMessage(f"message kind {kind!r} where {cls.__name__} was expected")
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadMessage(f"{kind}.{where}: {first['msg']}") from error
