"""The base of everything that crosses the control plane: strict fields, MessagePack both ways, and the types that fields share.

Each message is a pydantic model with strict fields, in MessagePack as ``{"schema": 1, "kind": <class name>, ...fields}``. A receiver
refuses an unknown schema version, an unknown kind and a field that does not fit, with a `BadMessage` that names it.
"""

from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema.limits import LARGEST

SCHEMA = 1
"""Version of the wire schema. It grows when a field changes its meaning."""


def _token_array(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, list) and all(isinstance(token, int) and abs(token) <= LARGEST for token in value):
        value = np.asarray(value, dtype=np.int64)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if len(value) and (value.min() < 0 or value.max() > LARGEST):
            raise ValueError(f"token ids lie between 0 and {LARGEST}")
        return value.astype(np.int32, copy=False)
    raise ValueError("expected a one-dimensional array of token ids")


Tokens = Annotated[Any, BeforeValidator(_token_array)]
"""Token ids: int32 [T]."""


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
