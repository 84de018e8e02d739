"""What the traces of a whole run have in common, when no service was killed: they are whole, across all services."""

from collections import Counter

from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan

CLOCK_S = 0.05
"""Within one machine times are of one clock, rounded."""

PARTS = {
    ("buffer", "wait for a replica"),
    ("rollout", "generate"),
    ("reward", "score"),
    ("buffer", "wait for a batch"),
    ("buffer", "wait for the trainer"),
    ("trainer", "train"),
}
"""What a group has in its trace that was generated once and trained."""


def assert_traced(receiver: OtlpReceiver, steps: int, groups: int) -> None:
    """``groups``: how many were trained in ``steps`` steps. The run has held-out prompts, and saved a checkpoint."""
    assert not receiver.malformed, receiver.malformed[:3]
    traces = {id: assert_whole(id, spans) for id, spans in receiver.traces().items()}
    roots = Counter(root.name for root in traces.values())
    assert roots["training step"] == steps and roots["evaluation"] >= 1 and roots["held-out prompt"] >= 8, roots
    trained = [root for root in traces.values() if root.attributes.get("end") == "trained"]
    assert len(trained) == groups
    for root in trained:
        assert_trained(receiver, root, traces)
    saved = receiver.named("checkpoint")
    assert saved and all(traces[span.trace].name == "training step" for span in saved)
    assert max(span.attributes["steps"] for span in saved) == steps
    assert_pushed(receiver, [root for root in traces.values() if root.name == "push"])


def assert_whole(trace: str, spans: list[ReceivedSpan]) -> ReceivedSpan:
    """A trace has one root, which all its other spans are children of. Returns it."""
    told = Counter((span.service, span.name) for span in spans)
    roots = [span for span in spans if not span.parent]
    assert len(roots) == 1, f"{trace}: {told}"
    assert {span.parent for span in spans if span.parent} <= {roots[0].id}, f"{trace}: {told}"
    assert len({span.id for span in spans}) == len(spans)
    assert all(span.started <= span.ended for span in spans)
    return roots[0]


def assert_trained(receiver: OtlpReceiver, root: ReceivedSpan, traces: dict[str, ReceivedSpan]) -> None:
    """A trained group's trace tells of all its services, in their order, and leads to the step."""
    spans = receiver.traces()[root.trace]
    parts = {(span.service, span.name): span for span in spans if span is not root}
    assert parts.keys() >= PARTS, f"{root.attributes['group']}: {parts.keys()}"
    generated, scored, batched, trained = (
        parts[name] for name in [("rollout", "generate"), ("reward", "score"), ("buffer", "wait for a batch"), ("trainer", "train")]
    )
    assert root.started <= generated.started + CLOCK_S and generated.ended <= scored.ended + CLOCK_S
    assert scored.started <= batched.started + CLOCK_S and batched.ended <= trained.started + CLOCK_S
    assert trained.ended <= root.ended + CLOCK_S
    assert generated.attributes["group"] == root.attributes["group"] and generated.attributes["tokens"] > 0
    assert len(scored.attributes["rewards"]) == generated.attributes["samples"]
    (step,) = root.links
    assert traces[step].name == "training step" and traces[step].attributes["step"] == root.attributes["step"]
    assert root.trace in traces[step].links


def assert_pushed(receiver: OtlpReceiver, pushes: list[ReceivedSpan]) -> None:
    """Each push is told of by both ends."""
    assert pushes
    for push in pushes:
        parts = {(span.service, span.name) for span in receiver.traces()[push.trace] if span is not push}
        assert parts >= {("trainer", "push: transfer"), ("trainer", "push: activate"), ("rollout", "receive"), ("rollout", "commit")}, parts
        assert push.attributes["bytes"] > 0 and push.attributes["replicas"] == "rollout-0" and not push.failed
