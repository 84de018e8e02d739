"""The trainer's spans: of a step, which has its own trace and a part in those of its groups, of checkpoints and of pushes. Pure."""

from collections.abc import Iterator

from shared.runtime.traces import Attributes, TraceSpan, push_trace, step_trace
from shared.schema.messages import Batch
from shared.schema.weight_messages import WeightsPushed


def step_spans(batch: Batch, started: float, ended: float) -> Iterator[TraceSpan]:
    """Yields the spans of a trained batch. Times are seconds since the epoch."""
    step, names = step_trace(batch.step), tuple(group.group for group in batch.groups)
    known: Attributes = {"step": batch.step, "version": batch.version}
    tokens = sum(sum(group.payload.tokens) for group in batch.groups)
    attributes: Attributes = {**known, "groups": len(names), "tokens": tokens}
    yield TraceSpan(trace=step, name="training step", started=started, ended=ended, root=True, links=names, attributes=attributes)
    for name in names:
        yield TraceSpan(trace=name, name="train", started=started, ended=ended, links=(step,), attributes={"group": name, **known})


def checkpoint_span(steps: int, started: float, ended: float) -> TraceSpan:
    """Returns the span of a checkpoint, in the trace of the last step that it holds: until the buffer has recorded that it is durable."""
    return TraceSpan(trace=step_trace(steps - 1), name="checkpoint", started=started, ended=ended, attributes={"steps": steps})


def push_spans(push: WeightsPushed, channel: str) -> Iterator[TraceSpan]:
    """Yields the spans of a push that has ended. ``channel``: the name of its first one."""
    trace, started, version = push_trace(push.version, channel), push.at - push.seconds, Attributes(version=push.version)
    served = ", ".join(replica.replica for replica in push.replicas if not replica.failure)
    attributes: Attributes = {**version, "bytes": push.bytes, "replicas": served, "stall_seconds": push.stall}
    yield TraceSpan(trace=trace, name="push", started=started, ended=push.at, root=True, error=push.failure, attributes=attributes)
    joined = started + push.joining
    steps = {"push: join": (started, push.joining), "push: transfer": (joined, push.transfer)}
    steps["push: activate"] = (push.at - push.activation, push.activation)
    for name, (at, seconds) in steps.items():
        if seconds:
            yield TraceSpan(trace=trace, name=name, started=at, ended=at + seconds, attributes=version)
