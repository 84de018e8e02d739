"""Finds which stop strings may have ended a text, and its end where the engine has passed it over. Pure.

An engine looks for stop strings in what the request at hand has generated, once it has counted the tokens or aborted. Where a turn is
generated in parts, one that lies across the edge between two requests, or that the last tokens of a part complete, would be passed over.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

CHARACTER_TOKENS = 4  # The most tokens that make one character, in a vocabulary of bytes
CONTEXT = 8  # Tokens before those of a stop string that are decoded with them: the text of a token may depend on its neighbours

Tokens = NDArray[np.int32] | Sequence[int]
Decode = Callable[[list[int]], str]


def end_across(
    before: Tokens, generated: Tokens, stops: Sequence[str], decode: Decode, since: int = 0, ends: Sequence[int] | None = None
) -> int | None:
    """Returns how many tokens of ``generated`` the text ends with: the last one completes a stop string, or is an end.

    Args:
        before, generated: int32 [B], [T]; of earlier requests, and of the last one. decode: tokens to text, special tokens included.
        since: tokens of ``generated`` that are known not to end it. ends: ids that end it where they are the last one, whatever the engine
            said; None: it has looked itself, and only what begins in ``before`` is found.

    Returns None where nothing ends it.
    """
    whole = len(generated) if len(generated) and int(generated[-1]) in (ends or ()) else None
    reach = max((len(stop) for stop in stops), default=0) * CHARACTER_TOKENS
    most = len(generated) if ends is not None else min(len(generated), reach if len(before) else 0)
    if not reach or most <= since:
        return whole
    context = [int(token) for token in before[-(reach + CONTEXT) :]]
    known = len(decode(context).rstrip("\ufffd"))  # the edge may lie in a character

    def ended(count: int) -> bool:
        text = decode([*context, *(int(token) for token in generated[:count])])
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in stops if stop)

    return bisect_left(range(most), True, since + 1, key=ended) if ended(most) else whole


def written(tokens: Tokens, stops: Sequence[str], decode: Decode) -> list[str]:
    """Returns the stop strings that may have ended a text. One with a special token in it has not, though the shown text has it.

    Args:
        tokens: int32 [T]; all that is generated. decode: tokens to text, special tokens included, as engines search it.
    """
    text = decode([int(token) for token in tokens]) if stops else ""
    return [stop for stop in stops if stop in text]
