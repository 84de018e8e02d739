"""Tells of evaluations that have ended: in the log, as gauges, and to the trainer that asks for those it has not heard of."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from shared.runtime.service_base import Service
from shared.schema.ledger import EvalEnded
from shared.schema.messages import EvalFigures, EvaluationsEnded, EvaluationsRequest

MOST_EVALUATIONS = 256
"""Of an answer: each takes about 1 KB."""


def log_evaluation(service: Service, record: EvalEnded) -> None:
    """Logs and shows an evaluation that has just ended; one that was late as a warning."""
    log = service.log.warning if record.late else service.log.info
    counted = {"samples": record.samples, "failed": record.failed, "late": record.late, "prompts": record.prompts}
    versions = {"version": record.version, "newest": record.newest, "lag": record.lag}
    figures = {"mean_reward": record.mean_reward, **record.rates, "truncated": record.truncated, "response_len": record.lengths}
    log("evaluated", dataset=record.dataset, **figures, **versions, **counted)
    show_evaluations(service, [record])


def show_evaluations(service: Service, records: Iterable[EvalEnded]) -> None:
    """Sets the gauges of evaluations, in their order; one without samples leaves those of the set's last one."""
    for record in records:
        shown = {"reward": record.mean_reward, "version": record.version, "newest": record.newest, "lag": record.lag}
        shown |= {"missing": record.failed + record.late, "prompts": record.prompts}
        for name, value in shown.items() if record.samples else ():
            service.metrics.set(f"eval_{name}", value, dataset=record.dataset)


def evaluations_after(request: EvaluationsRequest, ended: Mapping[Any, EvalEnded]) -> EvaluationsEnded:
    """Returns the next ones of the evaluations that have ended, in their order."""
    found = islice(ended.values(), request.known, request.known + MOST_EVALUATIONS)
    names = EvalFigures.model_fields
    return EvaluationsEnded(evaluations=[EvalFigures(**{name: getattr(record, name) for name in names}) for record in found])
