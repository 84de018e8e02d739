"""Valid messages, parts and samples of any kind, made from their fields' types."""

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar, Union

import annotated_types
import numpy as np
from pydantic import BaseModel

from shared.schema import ledger, messages, weight_messages  # noqa: F401  # they register their kinds
from shared.schema.messages import Message
from shared.schema.sample import Sample
from shared.sessions import session  # noqa: F401

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

ARRAYS = {"prompt": np.int32, "response": np.int32, "log_probs": np.float32, "mask": np.uint8}

SPECIAL: dict[str, Any] = {"group": "000007", "digest": "0" * 32, "secret": "0" * 32, "key_digest": "0" * 64}
SPECIAL |= {name: np.array([1, 2], dtype=np.int32) for name in ("prompt_tokens", "rest", "completion", "input_ids")}
SPECIAL |= {name: np.array([-1, -2], dtype=np.float32) for name in ("log_probs", "top_log_probs", "prompt_log_probs")}
SPECIAL |= {"client": "default-0123456789abcdef:train:0"}
SPECIAL |= {"point": "localhost:1", "points": ["localhost:1"], "silent": ["localhost:1"]}
"""Fields of which not every value of their type is valid."""


def valid(model: type[Model]) -> Model:
    """An instance of a model, all of its fields given. Raises ValidationError: this module cannot make one."""
    return model.model_validate(_fields(model, (), all_of_them=True))


def example(kind: type[T], **changes: Any) -> T:
    """A message, a part of one or a dataclass with these values; of its other fields, those without a default have any that is valid.

    Of a `Sample`, lists become arrays, and a number stands for one of each token of its response. By default it is number 0 of its group,
    and all of its response is trained, of log-prob 0 and version 0.
    """
    if kind is Sample:
        changes = {"index": 0, "prompt": [1], "response": [2, 3], "log_probs": 0.0, "mask": 1, **changes}
        length = len(changes["response"])
        changes = {"segments": [(0, length, 0)], **changes}
        for name, dtype in ARRAYS.items():
            if isinstance(value := changes[name], int | float):
                changes[name] = np.full(length, value, dtype)
            elif isinstance(value, list):
                changes[name] = np.array(value, dtype)
    return kind(**(_fields(kind, set(changes)) | changes))


def _fields(kind: Any, given: Collection[str], all_of_them: bool = False) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        infos = {name: info for name, info in kind.model_fields.items() if all_of_them or info.is_required()}
        fields = {name: (info.annotation, list(info.metadata)) for name, info in infos.items()}
    else:
        hints, missing = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING
        wanted = [field.name for field in dataclasses.fields(kind) if all_of_them or field.default is field.default_factory is missing]
        fields = {name: (hints[name], []) for name in wanted}
    return {name: _value(name, *what, all_of_them) for name, what in fields.items() if name not in given}


def _value(name: str, kind: Any, limits: list[Any], all_of_them: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if name in SPECIAL:
        return SPECIAL[name]
    if origin is Annotated:
        return _value(name, arguments[0], [*limits, *arguments[1:]], all_of_them)
    if name == "kept" and kind is Any:
        return np.array([3, 5], dtype=np.int32)  # two places' kept tokens, of one id each
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return _value(name, next(argument for argument in arguments if argument is not type(None)), limits, all_of_them)
    if origin is tuple and arguments[-1:] != (...,):
        return tuple(_value(name, argument, [], all_of_them) for argument in arguments)
    if origin in (list, tuple, set, frozenset) or getattr(origin, "__name__", "") in ("Sequence", "Collection"):
        return [_value(name, arguments[0], [], all_of_them)]
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {_value("key", arguments[0], [], all_of_them): _value(name, arguments[1], [], all_of_them)}
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)):
        return _fields(kind, (), all_of_them)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [_value(field, argument, [], all_of_them) for field, argument in typing.get_type_hints(kind).items()]
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
    return {name: valid(kind) for name, kind in kinds.items() if kind.model_fields and not kind.__subclasses__()}
