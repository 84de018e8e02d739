"""``slime.backends.megatron_utils.cp_utils``: what functions of the objective do with their samples' log-probs under context parallelism.

Here such a function always gets whole responses, whatever the layout, and gives whole ones back: there is nothing to gather or to cut.
"""

from collections.abc import Sized
from typing import TypeVar

_Values = TypeVar("_Values", bound=Sized)


def all_gather_with_cp(tensor: _Values, total_length: int, response_length: int) -> _Values:
    """Returns the values of a whole response, [response_length]: those given. Raises ValueError for another length."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: _Values, total_length: int, response_length: int) -> _Values:
    """Returns what a function hands back of a whole response, [response_length]: all of it. Raises ValueError for another length."""
    return _whole(log_prob, response_length)


def _whole(values: _Values, response_length: int) -> _Values:
    if len(values) != response_length:
        raise ValueError(f"{len(values)} values for a response of {response_length} tokens")
    return values
