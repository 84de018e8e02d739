"""Where services put their spans."""

from shared.tracing.span import TraceSpan


class Traces:
    """Takes spans. This one drops them, since nothing is exported; `shared.tracing.span_export` has the other.

    ``on``: whether spans are worth making.
    """

    on = False

    def add(self, span: TraceSpan) -> None:
        """Takes a span, from any thread; never waits."""

    def close(self) -> None:
        """Takes no more spans."""
