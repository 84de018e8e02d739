"""Has the user's own function choose a batch: ``rollout.buffer_filter_path``, slime's buffer filter.

``f(args, rollout_id, buffer, num)`` gets every ready group within the bound, oldest-finished first, as lists of samples without tokens, and
returns at most ``num`` of them; fewer: the batch waits. Its choice is in the ledger, so it is made once for each step.
"""

import asyncio

from services.buffer.state import GroupState
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookFailed, HookSample, load
from shared.hooks.hook_sample import FINISHED
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.tasks import error_text
from shared.schema.ledger import group_id

FIELD = "rollout.buffer_filter_path"

FILTER_SECONDS = 60.0
"""The deadline for the function; it runs beside the buffer's loop, and the trainer waits for it."""


class BufferFilter:
    """Calls the user's function for each batch. Raises ConfigError where there is none."""

    def __init__(self, config: RunConfig, path: str) -> None:
        self._path, self._function, self._arguments = path, load(FIELD, path), Arguments(config)

    async def choose(self, step: int, candidates: list[GroupState], size: int) -> list[str]:
        """Returns the ids of the groups that the function wants in the batch. Raises HookFailed, DeadlineExceeded."""
        buffer = [_samples(group) for group in candidates]
        call = asyncio.to_thread(self._function, self._arguments, step, buffer, size)
        try:
            chosen = await asyncio.wait_for(call, FILTER_SECONDS)
            return [group_id(group[0].group_index) for group in chosen]
        except TimeoutError:
            raise DeadlineExceeded(f"the choice of step {step}'s batch", self._path, FILTER_SECONDS, "the trainer is refused") from None
        except Exception as error:  # it is the user's code: it may raise anything and return anything
            raise HookFailed(FIELD, self._path, f"for step {step}: {error_text(error, self._function)}") from error


def _samples(group: GroupState) -> list[HookSample]:
    """Returns the ledger's data of a group as slime's samples."""
    scored = group.scored
    assert scored is not None  # only ready groups are candidates
    return [
        HookSample(
            group_index=group.number,
            index=index,
            response_length=meta.tokens,
            reward=reward,
            weight_versions=[meta.oldest, meta.newest],
            remove_sample=index in scored.removed,
            status=FINISHED[meta.finish],
        )
        for index, (meta, reward) in enumerate(zip(scored.samples, scored.rewards, strict=True))
    ]
