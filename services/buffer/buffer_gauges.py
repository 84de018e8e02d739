"""The buffer's gauges: groups by state, and what waits in each queue."""

import asyncio

from services.buffer.state import BufferState
from shared.bus.streams import Consumer, generated_consumer, scored_consumer, task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import WorkQueue
from shared.runtime.telemetry import Metrics, MetricSpec, declare_metrics
from shared.schema.messages import Task
from shared.service.service_base import Service

declare_metrics(
    MetricSpec("admitted", "groups", "admitted since the run began"),
    MetricSpec("trained", "groups", "of them, trained"),
    MetricSpec("dropped", "groups", "of them, dropped"),
    MetricSpec("dead", "groups", "of them, given up"),
    MetricSpec(
        "groups_dead",
        "groups",
        "and held-out prompts, that were given up since the service started, by [what was at fault](rewards.md#what-a-group-dies-of)",
        labels=("fault",),
        counter=True,
    ),
    MetricSpec("in_flight", "groups", "admitted and not ended"),
    MetricSpec("ready", "groups", "of those in flight, scored and ready for a batch"),
    MetricSpec("outstanding", "groups", "of those in flight, sent out and not back yet"),
    MetricSpec("trained_steps", "steps", "that are trained"),
    MetricSpec("durable_steps", "steps", "that a checkpoint holds"),
    MetricSpec("live_version", "version", "of the weights that are served; -1 before the first"),
    MetricSpec("followed", "", "the number of the newest ledger record that a standby has read", when="in a standby"),
    MetricSpec("evaluations", "", "evaluations that have ended"),
    MetricSpec("eval_pending", "prompts", "held-out prompts of evaluations under way that are not back yet"),
    MetricSpec("queue_task", "messages", "groups to generate that wait for a worker"),
    MetricSpec("queue_eval", "messages", "held-out prompts that wait for a worker"),
    MetricSpec("queue_generated", "messages", "groups to score that wait for a worker"),
    MetricSpec("queue_scored", "messages", "outcomes for the buffer that wait for a worker"),
    MetricSpec("queue_task_held", "messages", "of the same queue, what workers have and did not ack yet"),
    MetricSpec("queue_eval_held", "messages", "of the same queue, what workers have and did not ack yet"),
    MetricSpec("queue_generated_held", "messages", "of the same queue, what workers have and did not ack yet"),
    MetricSpec("queue_scored_held", "messages", "of the same queue, what workers have and did not ack yet"),
    MetricSpec(
        "queue_lag",
        "messages",
        "both together: what says [how many workers](monitoring.md#scaling-by-the-queues) would have something to do",
        labels=("queue", "consumer"),
    ),
)

_OF_STATE = ("admitted", "trained", "dropped", "dead", "in_flight", "trained_steps", "durable_steps", "live_version")
"""Gauges that are fields of the state."""


def show_groups(metrics: Metrics, state: BufferState) -> None:
    """Sets the gauges of groups by state."""
    for name in _OF_STATE:
        metrics.set(name, getattr(state, name))
    metrics.set("ready", len(state.ready))
    metrics.set("outstanding", len(state.outstanding))
    metrics.set("evaluations", len(state.evaluated))
    metrics.set("eval_pending", sum(len(evaluation.pending) for evaluation in state.evaluations.values()))


class QueueGauges:
    """The depths of the run's queues: what waits for a worker, and what workers have and did not ack yet.

    ``queue_lag`` is both together by queue and consumer, which is what says how many workers would have something to do.
    """

    def __init__(self, service: Service) -> None:
        self._metrics, run, bus = service.metrics, service.run, service.config.bus
        queues: dict[str, list[Consumer]] = {
            "task": [task_consumer(run, bus, TRAIN)],
            "eval": [task_consumer(run, bus, EVAL)],
            "generated": [generated_consumer(run, bus, name) for name in service.config.queues()],
            "scored": [scored_consumer(run, bus)],
        }
        self._queues = {name: {of.name: WorkQueue(service.bus, of, Task) for of in consumers} for name, consumers in queues.items()}

    async def show(self, deadline: float) -> None:
        """Reads the depths and sets the gauges. Raises DeadlineExceeded."""
        for name, consumers in self._queues.items():
            depths = await asyncio.gather(*(queue.depth(deadline=deadline) for queue in consumers.values()))
            self._metrics.set(f"queue_{name}", sum(waiting for waiting, _ in depths))
            self._metrics.set(f"queue_{name}_held", sum(held for _, held in depths))
            for consumer, (waiting, held) in zip(consumers, depths, strict=True):
                self._metrics.set("queue_lag", waiting + held, in_status=False, queue=name, consumer=consumer)
