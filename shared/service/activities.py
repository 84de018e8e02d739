"""What a service does now, or waits for: each part of it reports it, and its status in the registry carries it to whoever asks.

Any thread may report; the heartbeat reads. What a display says of a wait comes from here, so that the words are the service's own.
"""

import time
from collections.abc import Callable, Sequence

from shared.schema.service_messages import Doing

# The parts of services that report: a trainer's loop, its push, the work of a rollout or reward service, a buffer's next batch
LOOP, PUSH, WORK, BATCH = "loop", "push", "work", "batch"

# Returns what a part does at the moment; None: nothing worth telling. It is called from the heartbeat, and must not wait.
Look = Callable[[], Doing | None]


class Activities:
    """What the parts of one service do."""

    def __init__(self) -> None:
        self._told: dict[str, Doing] = {}
        self._looks: list[Look] = []

    def watch(self, look: Look) -> None:
        """Asks ``look`` at every heartbeat from now on."""
        self._looks.append(look)

    def begin(self, part: str, what: str, awaited_from: Sequence[str] = (), next_action: str = "") -> None:
        """Reports that ``part`` begins to do something, or continues with it: the same words keep their beginning."""
        known = self._told.get(part)
        since = known.since if known is not None and known.what == what else time.time()
        self._told[part] = Doing(part=part, what=what, since=since, awaited_from=list(awaited_from), next_action=next_action)

    def end(self, part: str) -> None:
        """Reports that ``part`` does nothing of note any more."""
        self._told.pop(part, None)

    def now(self) -> list[Doing]:
        """Returns what all parts do now."""
        return [*list(self._told.values()), *(found for look in list(self._looks) if (found := look()) is not None)]
