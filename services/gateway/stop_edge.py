"""Ends a turn that is drawn in parts at a stop string which lies across two of them. Pure but for what it has heard."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.gateway.draw_client import Hear
from shared.data.stop_strings import end_across
from shared.sessions.session import Drawn


class StopEdge:
    """The edge between what a turn has, int32 [T], and what is drawn next. ``stops``: strings that end it; ``text``: of tokens."""

    def __init__(self, before: NDArray[np.int32], stops: Sequence[str], text: Callable[[Sequence[int]], str]) -> None:
        self._before, self._stops, self._text = before, stops, text

    def whole(self, drawn: Drawn) -> Drawn:
        """Returns what was drawn, up to the turn's end if that is in it."""
        count = end_across(self._before, drawn.completion, self._stops, self._text)
        return drawn if count is None else drawn.stopped_at(count)

    def hearing(self, hear: Hear) -> Hear:
        """Returns what hears the pieces of one draw, and tells ``hear`` of them up to the turn's end."""
        heard: list[int] = []
        over = False

        def listen(piece: Drawn) -> None:
            nonlocal over
            if over:
                return
            known = len(heard)
            heard.extend(piece.completion.tolist())
            count = end_across(self._before, heard, self._stops, self._text, since=known)
            over = count is not None
            hear(piece if count is None else piece.stopped_at(count - known))

        return listen
