"""The spans of a training step: its own trace, and its part in the traces of the groups that it trained. Pure."""

from collections.abc import Iterator

from shared.schema.messages import Batch
from shared.tracing.span import Attributes, Span, step_trace


def step_spans(batch: Batch, started: float, ended: float) -> Iterator[Span]:
    """Yields the spans of a trained batch. Times are seconds since the epoch."""
    step, names = step_trace(batch.step), tuple(group.group for group in batch.groups)
    known: Attributes = {"step": batch.step, "version": batch.version}
    tokens = sum(sum(group.payload.tokens) for group in batch.groups)
    attributes: Attributes = {**known, "groups": len(names), "tokens": tokens}
    yield Span(trace=step, name="training step", started=started, ended=ended, root=True, links=names, attributes=attributes)
    for name in names:
        yield Span(trace=name, name="train", started=started, ended=ended, links=(step,), attributes={"group": name, **known})


def checkpoint_span(steps: int, started: float, ended: float) -> Span:
    """Returns the span of a checkpoint, in the trace of the last step that it holds: until the buffer has recorded that it is durable."""
    return Span(trace=step_trace(steps - 1), name="checkpoint", started=started, ended=ended, attributes={"steps": steps})
