"""Tells of evaluations that have ended: in the log, as gauges, and to the trainer that asks for those it has not heard of."""

from collections.abc import Iterable, Mapping
from itertools import islice, takewhile
from typing import Any

from services.buffer.evaluation_logger import EvaluationLogger
from shared.runtime.telemetry import MetricSpec, declare_metrics
from shared.schema.ledger import EvalEnded
from shared.schema.messages import EvalFigures, EvaluationsEnded, EvaluationsRequest
from shared.service.service_base import Service

declare_metrics(
    MetricSpec(
        "eval_reward", "reward", "mean reward of the set's newest evaluation", when="once one of the set has ended", labels=("dataset",)
    ),
    MetricSpec("eval_version", "version", "that it is of", when="once one of the set has ended", labels=("dataset",)),
    MetricSpec(
        "eval_newest", "version", "the newest that drew some of its tokens", when="once one of the set has ended", labels=("dataset",)
    ),
    MetricSpec(
        "eval_lag",
        "versions",
        "by how many it was behind the live version when it was known",
        when="once one of the set has ended",
        labels=("dataset",),
    ),
    MetricSpec("eval_missing", "prompts", "that failed or were late", when="once one of the set has ended", labels=("dataset",)),
    MetricSpec("eval_prompts", "prompts", "of the whole set", when="once one of the set has ended", labels=("dataset",)),
)

MOST_EVALUATIONS = 256
"""Of an answer: each takes about 1 KB."""


def log_evaluation(service: Service, record: EvalEnded) -> None:
    """Logs and shows an evaluation that has just ended; one that was late as a warning."""
    log = service.log.warning if record.late or record.reason else service.log.info
    counted = {"samples": record.samples, "failed": record.failed, "late": record.late, "prompts": record.prompts}
    versions = {"version": record.version, "newest": record.newest, "lag": record.lag}
    figures = {"mean_reward": record.mean_reward, **record.rates, "truncated": record.truncated, "response_len": record.lengths}
    more = ({"metrics": record.metrics} if record.metrics else {}) | ({"error": record.reason} if record.reason else {})
    log("evaluated", dataset=record.dataset, **figures, **versions, **counted, **more)
    show_evaluations(service, [record])


def show_evaluations(service: Service, records: Iterable[EvalEnded]) -> None:
    """Sets the gauges of evaluations, in their order; one without samples leaves those of the set's last one."""
    for record in records:
        shown = {"reward": record.mean_reward, "version": record.version, "newest": record.newest, "lag": record.lag}
        shown |= {"missing": record.failed + record.late, "prompts": record.prompts}
        for name, value in shown.items() if record.samples else ():
            service.metrics.set(f"eval_{name}", value, dataset=record.dataset)


def evaluations_after(request: EvaluationsRequest, ended: Mapping[Any, EvalEnded], log: EvaluationLogger) -> EvaluationsEnded:
    """Returns the next ones of the evaluations that have ended, in order, up to those that the user's log function is still to see."""
    found = islice(ended.values(), request.known, request.known + MOST_EVALUATIONS)
    names = EvalFigures.model_fields
    told = []
    for record in takewhile(lambda record: record.version not in log.open, found):
        figures = EvalFigures(**{name: getattr(record, name) for name in names})
        told.append(figures.model_copy(update={"logged": figures.logged or log.logged.get(record.version, False)}))
    return EvaluationsEnded(evaluations=told)
