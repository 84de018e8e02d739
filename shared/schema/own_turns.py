"""The text of a response that is the model's own: what tools and environments wrote between its turns left out. Pure."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ScoredText = Literal["own", "last_turn", "full"]

SURE_TOKENS = 3
"""The most tokens in a row that are taken for sampled ones whose log-prob was rounded to 0.0, between others that are not trained."""


def sampled(mask: NDArray[Any], log_probs: NDArray[Any] | None) -> NDArray[np.bool_]:
    """Returns which tokens of a response the model itself sampled: bool [R].

    These are the trained ones, and those that have a log-prob though they are not trained, such as stale or removed ones: tokens of tools
    and environments have none.

    Args:
        mask: [R], not 0 where a token is trained. log_probs: [R], 0 or not finite where a token has none; None: no token has one.
    """
    trained = np.asarray(mask) != 0
    if log_probs is None:
        return trained
    own = trained | (np.nan_to_num(log_probs, posinf=0, neginf=0) != 0)
    for before, after in pairwise(np.flatnonzero(own)):
        if 1 < after - before <= SURE_TOKENS + 1 and not (trained[before] and trained[after]):
            own[before:after] = True
    return own


def turns_of(own: NDArray[Any], response: NDArray[Any], decode: Callable[[NDArray[Any]], str]) -> list[str]:
    """Returns the texts of the runs of a response's tokens that are the model's own; none where all are, or no token is known to be.

    Args:
        own, response: [R]. decode: tokens to text.
    """
    if own.all() or not own.any():
        return []
    return [decode(response[start:end]) for start, end in runs(own)]


def runs(where: NDArray[Any]) -> list[tuple[int, int]]:
    """Returns the (start, end) of each run of true entries in a bool array."""
    edges = np.flatnonzero(np.diff(where.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def scored_text(text: str, turns: Sequence[str], which: ScoredText) -> str:
    """Returns what is scored of a response. Its turns stand on lines of their own, so that no word begins in one and ends in another.

    Args:
        text: the whole response. turns: the model's own, none where the whole response is.
    """
    if not turns or which == "full":
        return text
    return turns[-1] if which == "last_turn" else "\n".join(turns)
