"""Declarations of metrics: each is declared once, in the module that computes it, and docs/metrics.md is made of the declarations.

A name is declared as it is or as a pattern: ``<part>`` in it stands for any text. A metric that is written without a declaration is an
error where `STRICT` is set in the environment, as tests have it; elsewhere it is written all the same, with one warning in the log.
Names that users' own functions give their metrics are no part of the code: `allow_users` lets them pass.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

STRICT = "MYXO_STRICT_METRICS"
"""The variable of the environment; any value but an empty one."""


class UndeclaredMetric(AssertionError):
    """A metric was written that no `declare_metrics` knows, or with other labels: a fault of the code, which only tests raise."""


@dataclass(frozen=True)
class MetricSpec:
    """A metric, or all metrics of one pattern.

    Args:
        name: as it is written, ``train/loss``; with ``<k>`` and the like in the place of what differs. unit: in docs/metrics.md; empty
            where there is none. definition: Markdown. when: the condition under which it is there; empty: always. labels: in their
            order, besides run and instance. counter: it only grows, and is ``_total`` for Prometheus; else a gauge.
    """

    name: str
    unit: str
    definition: str
    when: str = ""
    labels: tuple[str, ...] = ()
    counter: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that this declares."""
        parts = re.split(r"<[^>]*>", self.name)
        return re.compile(".+".join(re.escape(part) for part in parts), re.DOTALL)


class _Declared:
    def __init__(self) -> None:
        self.exact: dict[str, MetricSpec] = {}
        self.patterns: list[tuple[re.Pattern[str], MetricSpec]] = []
        self.users: set[str] = set()
        self.warned: set[str] = set()


_declared = _Declared()


def declare_metrics(*specs: MetricSpec) -> None:
    """Declares metrics of the calling module. Arguments are literals: docs.metrics_page reads them from the source."""
    for spec in specs:
        if "<" in spec.name:
            _declared.patterns.append((spec.pattern, spec))
        else:
            _declared.exact[spec.name] = spec


def allow_users(names: Iterable[str]) -> None:
    """Lets names pass that a function of the user's gave its metrics."""
    _declared.users.update(names)


def spec_of(name: str) -> MetricSpec | None:
    """Returns the declaration of a metric, or None."""
    if name in _declared.exact:
        return _declared.exact[name]
    return next((spec for pattern, spec in _declared.patterns if pattern.fullmatch(name)), None)


def check_declared(name: str, labels: Iterable[str], *, counter: bool) -> None:
    """Checks a metric against its declaration before it is written for the first time.

    Raises UndeclaredMetric where `STRICT` is set.
    """
    if name in _declared.users:
        return
    spec, given = spec_of(name), tuple(labels)
    if spec is not None and spec.counter == counter and spec.labels == given:
        return
    kind = "counter" if counter else "gauge"
    fault = f"the {kind} {name} with labels {given} is " + ("not declared" if spec is None else f"declared as {spec}")
    if os.environ.get(STRICT):
        raise UndeclaredMetric(fault)
    if name not in _declared.warned:
        _declared.warned.add(name)
        structlog.get_logger().warning("metric_not_declared", metric=name, fault=fault)
