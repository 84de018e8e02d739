"""Makes trajectories of a session's turns. It is pure.

A turn whose prompt begins with the very tokens of its parent (prompt and completion) continues the parent's trajectory. Any other begins
one of its own; and where several turns continue the same one, the first carries the trajectory on and each other one forks: it holds the
same beginning, of which nothing is trained again. So every sampled token is trained exactly once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.schema.sample import segments_of
from shared.sessions.session import Finish, Turn, extends


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A conversation's tokens as a model read and wrote them, in the arrays of a `shared.schema.sample.Sample`.

    prompt: int32 [P], that of its first turn; response: int32 [R], all that follows; mask: uint8 [R], 1 where the token was sampled and no
    earlier trajectory trains it; sampled: bool [R]; log_probs: float32 [R], 0 where a token was not sampled; segments tile [0, R):
    what was not sampled has the version of what was sampled before it. finish: of the last turn. turns: the request ids of its turns.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    mask: NDArray[np.uint8]
    sampled: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    segments: list[tuple[int, int, int]]
    finish: Finish
    turns: tuple[str, ...]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Returns prompt and response: int32 [P + R]."""
        return np.concatenate([self.prompt, self.response])


@dataclass
class _Path:
    """The turns from a conversation's beginning to its end; ``forked``: how many of the first are trained elsewhere."""

    turns: list[Turn] = field(default_factory=list)
    forked: int = 0


def trajectories(turns: Iterable[Turn]) -> list[Trajectory]:
    """Returns the trajectories of a session's turns, in the order of their first own turn. Turns without a token are left out."""
    return [_trajectory(path) for path in _paths([turn for turn in turns if len(turn.completion)])]


def _paths(turns: Sequence[Turn]) -> list[_Path]:
    ends: dict[str, _Path] = {}  # the path on which a turn lies, by its request id: the one that trains it
    paths: list[_Path] = []
    for turn in turns:
        before = ends.get(turn.parent) if turn.parent is not None else None
        position = -1 if before is None else [one.request for one in before.turns].index(str(turn.parent))
        if before is None or not extends(turn.prompt, before.turns[position]):
            path = _Path([turn])
            paths.append(path)
        elif position == len(before.turns) - 1:
            path = before
            path.turns.append(turn)
        else:
            path = _Path([*before.turns[: position + 1], turn], forked=position + 1)
            paths.append(path)
        ends[turn.request] = path
    return paths


def _trajectory(path: _Path) -> Trajectory:
    first, last = path.turns[0], path.turns[-1]
    tokens, start = last.tokens, len(first.prompt)
    length = len(tokens) - start
    mask, log_probs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    versions, sampled = np.full(length, -1, np.int32), np.zeros(length, np.bool_)
    for index, turn in enumerate(path.turns):
        begin = len(turn.prompt) - start
        end = begin + len(turn.completion)
        mask[begin:end] = index >= path.forked
        sampled[begin:end] = True
        log_probs[begin:end] = turn.log_probs
        for span_start, span_end, version in turn.spans:
            versions[begin + span_start : begin + span_end] = version
    return Trajectory(
        prompt=first.prompt,
        response=tokens[start:],
        mask=mask,
        sampled=sampled,
        log_probs=log_probs,
        segments=segments_of(_filled(versions)),
        finish=last.finish,
        turns=tuple(turn.request for turn in path.turns),
    )


def _filled(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns versions in which each entry of -1 has that of the entry before it. The first is never -1: a completion begins there."""
    known = np.maximum.accumulate(np.where(versions >= 0, np.arange(len(versions)), 0))
    return versions[known]
