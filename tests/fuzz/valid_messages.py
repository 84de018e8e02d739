"""One valid message of each kind, made from its fields' types."""

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal, Union

import annotated_types
import numpy as np
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.schema import client_commands, ledger, messages, weight_messages  # noqa: F401  # they register their kinds
from shared.schema.messages import Message
from shared.sessions import session  # noqa: F401

SPECIAL: dict[str, Any] = {"group": "000007", "digest": "0" * 32, "secret": "0" * 32, "key_digest": "0" * 64}
SPECIAL |= {name: np.array([1, 2], dtype=np.int32) for name in ("prompt_tokens", "rest", "completion", "input_ids")}
SPECIAL |= {name: np.array([-1, -2], dtype=np.float32) for name in ("log_probs", "top_log_probs", "prompt_log_probs")}
SPECIAL |= {"client": "default-0123456789abcdef:train:0"}
SPECIAL |= {"point": "localhost:1", "points": ["localhost:1"], "silent": ["localhost:1"]}
"""Fields of which not every value of their type is valid."""


def valid(model: type[BaseModel]) -> BaseModel:
    """An instance of a model. Raises ValidationError: this module cannot make one."""
    return model.model_validate({name: _of_field(name, info) for name, info in model.model_fields.items()})


def _of_field(name: str, info: FieldInfo) -> Any:
    return _value(name, info.annotation, list(info.metadata))


def _value(name: str, kind: Any, limits: list[Any]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if name in SPECIAL:
        return SPECIAL[name]
    if origin is Annotated:
        return _value(name, arguments[0], [*limits, *arguments[1:]])
    if name == "kept" and kind is Any:
        return np.array([3, 5], dtype=np.int32)  # two places' kept tokens, of one id each
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return _value(name, next(argument for argument in arguments if argument is not type(None)), limits)
    if origin is tuple and arguments[-1:] != (...,):
        return tuple(_value(name, argument, []) for argument in arguments)
    if origin in (list, tuple, set, frozenset) or getattr(origin, "__name__", "") in ("Sequence", "Collection"):
        return [_value(name, arguments[0], [])]
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {_value("key", arguments[0], []): _value(name, arguments[1], [])}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {field: _of_field(field, info) for field, info in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {field.name: _value(field.name, hints[field.name], []) for field in dataclasses.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [_value(field, argument, []) for field, argument in typing.get_type_hints(kind).items()]
    if kind is str:
        return "0" * 64 if "[0-9a-f]{64}" in repr(limits) else "a"
    if kind is bool:
        return True
    if kind in (int, float):
        return kind(max([1, *(limit.ge for limit in limits if isinstance(limit, annotated_types.Ge))]))
    if kind is bytes:
        return b"a"
    return {}


def every_message() -> dict[str, Message]:
    """Kind → a valid message, of all kinds that a service knows."""
    kinds = {
        name: kind for name, kind in Message.kinds.items() if kind.__module__.startswith("shared.") and not kind.__name__.startswith("_")
    }
    return {name: typing.cast(Message, valid(kind)) for name, kind in kinds.items() if kind.model_fields and not kind.__subclasses__()}
