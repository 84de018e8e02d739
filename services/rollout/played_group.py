"""Plays the rollouts of a group that something of the user's makes, and says what became of them."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from services.rollout.in_flight import Stopped
from services.rollout.rollout_fate import GroupProgress
from shared.runtime.tasks import cancelled
from shared.schema.sample import Sample


class PlayedGroup(NamedTuple):
    """What became of a group's rollouts: samples, in the rollouts' order; why they were ``stopped``, if they were; ``aborted``: how many
    surplus ones were, since the others had ended."""

    samples: list[Sample]
    stopped: Stopped | None
    aborted: int = 0


class PlayedRollout(Protocol):
    """One rollout: its index, and why it was stopped, if it was."""

    index: int
    stopped: Stopped | None


Made = TypeVar("Made", bound=PlayedRollout)


def kept(rollouts: Sequence[Made], progress: GroupProgress) -> tuple[list[Made], Stopped | None]:
    """Returns the rollouts that make up a complete group; of another all of them, and why it was stopped, if it was."""
    if progress.complete:
        return [rollout for rollout in rollouts if rollout.index in progress.kept], None
    return list(rollouts), next((rollout.stopped for rollout in rollouts if rollout.stopped is not None), None)


async def until_complete(playing: Sequence[Coroutine[Any, Any, None]], progress: GroupProgress) -> None:
    """Runs a group's rollouts until it is complete, or all have come to an end; the others are cancelled. Raises what one of them does."""
    running = [asyncio.create_task(one) for one in playing]
    left = set(running)
    try:
        while left and not progress.complete:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                one.result()
    finally:
        await cancelled(running)
