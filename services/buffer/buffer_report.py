"""Reports of the buffer: why the next batch is not complete, groups by state, and the depths of the queues."""

import asyncio
from collections import Counter

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.bus.streams import Consumer, generated_consumer, scored_consumer, task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import WorkQueue
from shared.runtime import failure_summary
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema.ledger import BatchFormed, GroupDead, GroupsDropped, LedgerRecord
from shared.schema.messages import Task
from shared.service.service_base import Service


class EndsSinceBatch:
    """Counts the groups that ended without being trained since a batch was last formed."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._dead, self._reason = 0, ""

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        match record:
            case BatchFormed():
                self._dropped.clear()
                self._dead, self._reason = 0, ""
            case GroupsDropped(groups=groups, reason=reason):
                self._dropped[reason] += len(groups)
            case GroupDead(reason=reason):
                self._dead, self._reason = self._dead + 1, reason

    def words(self) -> str:
        """Returns what became of them; empty where there are none."""
        parts = [f"{count} dropped ({reason})" for reason, count in self._dropped.most_common(2)]
        parts += [f"{self._dead} died, the last for: {failure_summary.short(self._reason)}"] if self._dead else []
        return f"of the groups since the last batch {' and '.join(parts)}" if parts else ""


def awaited(state: BufferState, limits: BufferConfig, held_back: str, ends: str, source: str = "") -> str:
    """Returns, in words, the reason why the next batch waits.

    Args:
        held_back: why the buffer holds back. ends: as `EndsSinceBatch.words` returns it. source: what gives prompts too slowly.
    """
    if held_back:
        return held_back
    if state.live_version < 0:
        return "a rollout replica that serves weights (none does yet)"
    if source:
        return source
    if state.evaluations:
        evaluation = next(iter(state.evaluations.values()))
        where = f"{evaluation.dataset} under version {evaluation.version}"
        return f"the evaluation of {where} ({len(evaluation.pending)} of {evaluation.prompts} prompts outstanding)"
    if not state.outstanding:
        return "; ".join(filter(None, [_held_by_bound(state, limits), ends]))
    away = f"{len(state.outstanding)} groups with the rollout and reward services"
    return "; ".join(filter(None, [f"{away}; live version {state.live_version}", f"{state.dead} dead so far", ends]))


def _held_by_bound(state: BufferState, limits: BufferConfig) -> str:
    """Returns why no group is under way."""
    if state.formed_steps >= limits.rollout.num_rollout:
        return "no group any more: every batch is formed"
    bound = limits.rollout.max_staleness
    return (
        f"newer weights than version {state.live_version}: the staleness bound (rollout.max_staleness = {bound}) admits no further group "
        "before they are live"
    )


declare_metrics("""
    admitted | groups | admitted since the run began
    trained | groups | of them, trained
    dropped | groups | of them, dropped
    dead | groups | of them, given up
    groups_dead_total{fault} | groups | and held-out prompts, that were given up since the service started, by [what was at
        fault](rewards.md#what-a-group-dies-of)
    in_flight | groups | admitted and not ended
    ready | groups | of those in flight, scored and ready for a batch
    outstanding | groups | of those in flight, sent out and not back yet
    trained_steps | steps | that are trained
    durable_steps | steps | that a checkpoint holds
    live_version | version | of the weights that are served; -1 before the first
    followed | | the number of the newest ledger record that a standby has read | in a standby
    evaluations | | evaluations that have ended
    eval_pending | prompts | held-out prompts of evaluations under way that are not back yet
    queue_task | messages | groups to generate that wait for a worker
    queue_eval | messages | held-out prompts that wait for a worker
    queue_generated | messages | groups to score that wait for a worker
    queue_scored | messages | outcomes for the buffer that wait for a worker
    queue_task_held | messages | of the same queue, what workers have and did not ack yet
    queue_eval_held | messages | of the same queue, what workers have and did not ack yet
    queue_generated_held | messages | of the same queue, what workers have and did not ack yet
    queue_scored_held | messages | of the same queue, what workers have and did not ack yet
    queue_lag{queue,consumer} | messages | both together: what says [how many workers](monitoring.md#scaling-by-the-queues) would have
        something to do
""")

# Gauges that are fields of the state
_OF_STATE = ("admitted", "trained", "dropped", "dead", "in_flight", "trained_steps", "durable_steps", "live_version")


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
