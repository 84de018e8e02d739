"""What the curves of a run are marked with: failures and restarts of its services, by what these and the launcher have told. Pure."""

from collections import deque
from dataclasses import dataclass, field

from shared.live.service_failures import FAILED, RESTARTED
from shared.schema.service_messages import ServiceEvent

JOINED, LEFT, TOOK_OVER = "joined", "left", "took_over"
"""Events of a service that begins, that ends in order, and of a buffer that takes another's place."""

MOST_MARKS = 2000
"""The newest marks that are kept: a service that dies again and again makes many."""


@dataclass(slots=True)
class RunMark:
    """Something that happened to ``instance``. ``at``: seconds since the epoch; ``what``: failed, restarted, took_over; ``text``: why."""

    at: float
    what: str
    instance: str
    text: str


@dataclass
class RunMarks:
    """The fold of the services' events, in the order of the stream."""

    marks: deque[RunMark] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _last: dict[str, RunMark | None] = field(default_factory=dict)
    """Instance → its mark since it last joined, of those that have joined."""

    def take(self, event: ServiceEvent) -> bool:
        """Takes an event; returns whether marks have changed.

        The launcher's word that it started a service again says more than the service's own that it failed, and takes its place.
        """
        instance, known = event.instance, self._last.get(event.instance)
        if event.what in (FAILED, TOOK_OVER):
            self._mark(event, event.what, event.detail)
        elif event.what == RESTARTED and known is not None and known.what == FAILED:
            known.at, known.what, known.text = event.at, RESTARTED, event.detail or known.text
        elif event.what == RESTARTED:
            self._mark(event, RESTARTED, event.detail)
        elif event.what == JOINED:
            again = instance in self._last and known is None
            if again:
                self._mark(event, RESTARTED, "started again")
            self._last[instance] = None
            return again
        else:
            return False
        return True

    def _mark(self, event: ServiceEvent, what: str, text: str) -> None:
        mark = RunMark(event.at, what, event.instance, text)
        self.marks.append(mark)
        self._last[event.instance] = mark
