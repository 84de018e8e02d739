"""Finds which stop strings may have ended a text, and its end where one begins in one request and is completed in the next. Pure.

An engine looks for stop strings in what the request at hand has generated. Where it aborts one, or a turn is generated in parts, the tokens
before are input to the next request, and a stop string that lies across the edge would be passed over.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

CHARACTER_TOKENS = 4  # The most tokens that make one character, in a vocabulary of bytes
CONTEXT = 8  # Tokens before those of a stop string that are decoded with them: the text of a token may depend on its neighbours

Tokens = NDArray[np.int32] | Sequence[int]
Decode = Callable[[list[int]], str]


def end_across(
    before: Tokens, generated: Tokens, stops: Sequence[str], decode: Decode, since: int = 0, ends: Sequence[int] = ()
) -> int | None:
    """Returns how many tokens of ``generated`` the text ends with: the last one completes a stop string that begins in ``before``.

    Args:
        before, generated: int32 [B], [T]; of earlier requests, and of the last one. decode: tokens to text, special tokens included.
        since: tokens of ``generated`` that are known not to end it. ends: ids that end it where they are the last one, whatever the engine
            said: it may count or abort first, and look then.

    Returns None where no stop string lies across the edge.
    """
    whole = len(generated) if len(generated) and int(generated[-1]) in ends else None
    reach = max((len(stop) for stop in stops), default=0) * CHARACTER_TOKENS
    if not reach or not len(before):
        return whole
    context = [int(token) for token in before[-(reach + CONTEXT) :]]
    known = len(decode(context).rstrip("\ufffd"))  # the edge may lie in a character
    for count in range(since + 1, min(len(generated), reach) + 1):
        text = decode([*context, *(int(token) for token in generated[:count])])
        if any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in stops if stop):
            return count
    return whole


def written(tokens: Tokens, stops: Sequence[str], decode: Decode) -> list[str]:
    """Returns the stop strings that may have ended a text. One with a special token in it has not, though the shown text has it.

    Args:
        tokens: int32 [T]; all that is generated. decode: tokens to text, special tokens included, as engines search it.
    """
    text = decode([int(token) for token in tokens]) if stops else ""
    return [stop for stop in stops if stop in text]
