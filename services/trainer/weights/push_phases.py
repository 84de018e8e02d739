"""The phases of a push of weights, and their spans. Pure but for the clock."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.tracing.span import Attributes, Span, push_trace


@dataclass
class PushPhases:
    """The phases that a push has come through, each with when it began, seconds since the epoch; the last one is under way."""

    version: int
    begun: list[tuple[str, float]] = field(default_factory=list)

    @property
    def present(self) -> str:
        """Returns the name of the phase under way."""
        return self.begun[-1][0]

    def begin(self, name: str) -> None:
        """Ends the phase under way and begins the next."""
        self.begun.append((name, time.time()))

    def spans(self, channel: str, error: str, replicas: Sequence[str], sent: int = 0) -> Iterator[Span]:
        """Yields the spans of a push that ends now. ``error``: why it failed. ``replicas``: serve the version. ``sent``: bytes."""
        trace, ended = push_trace(self.version, channel), time.time()
        attributes: Attributes = {"version": self.version, "bytes": sent, "replicas": ", ".join(replicas)}
        started = self.begun[0][1]
        yield Span(trace=trace, name="push", started=started, ended=ended, root=True, error=error, attributes=attributes)
        ends = [at for _, at in self.begun[1:]] + [ended]
        for (name, at), end in zip(self.begun, ends, strict=True):
            yield Span(trace=trace, name=f"push: {name}", started=at, ended=end, attributes={"version": self.version})
