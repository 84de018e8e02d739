"""Logs and metrics of a service; a metric is declared with its meaning before it is written."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO, cast

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.runtime import failure_summary
from shared.runtime.errors import no_room
from shared.runtime.safe_text import without_credentials
from shared.runtime.tasks import SAME_LINES, SAME_SECONDS, count_same

STRICT = "MYXO_STRICT_METRICS"  # The variable of the environment; any value but an empty one


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
_EACH = re.compile(r"\(([^()]*;[^()]*)\)")


def table_rows(table: str) -> list[list[str]]:
    """Returns the cells of a table of text: a row a line, of cells between bars; lines that are indented further continue one.

    A line with ``(a; b)``, at one place or at several, stands for two rows: one with each a, then one with each b.
    """
    lines = filter(str.strip, re.sub(r"\n {5,}", " ", table).splitlines())
    return [[cell.strip() for cell in row.split("|")] for line in lines for row in _spelt_out(line)]


def _spelt_out(line: str) -> Iterable[str]:
    def one(row: int) -> str:
        return _EACH.sub(lambda each: each[1].split(";")[row].strip(), line)

    return map(one, range(1 + max((each.count(";") for each in _EACH.findall(line)), default=0)))


def metric_specs(table: str) -> list[MetricSpec]:
    """Returns the metrics of a table: ``name | unit | definition``, and maybe ``| when``.

    A name ends with ``_total`` if it is a counter's, and then with its labels: ``groups_scored_total{environment}``.
    """
    found = []
    for cells in table_rows(table):
        head, unit, definition, when = [*cells, ""][:4]
        name, _, labels = head.removesuffix("}").partition("{")
        labelled = tuple(labels.split(",")) if labels else ()
        found.append(MetricSpec(name.removesuffix("_total"), unit, definition, when, labelled, name.endswith("_total")))
    return found


def declare_metrics(table: str) -> None:
    """Declares metrics of the calling module, as `metric_specs` reads them; a literal: docs.metrics_page reads it from the source."""
    for spec in metric_specs(table):
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


CONSOLE_SERVES = "console_serves"  # The event with the address of a console, and the token of it that is known from nowhere else


@dataclass
class LastError:
    """The newest line at level error of this process: its text, and when it was logged (seconds since the epoch)."""

    text: str = ""
    at: float = 0.0


last_error = LastError()


def _note_error(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if event.get("level") in failure_summary.ERROR_LEVELS:
        last_error.text, last_error.at = failure_summary.of_event(event), time.time()
    return event


class _Log:
    """A stream that ignores a full disk: a line that cannot be logged must not end the service that logs it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._unless_full(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._unless_full(self._stream.flush)

    def _unless_full(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if not no_room(error):
                raise


def _without_credentials(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Takes credentials out of a line, whoever put them into it; but for the console's address, by which a person learns its token."""
    return event if event.get("event") == CONSOLE_SERVES else without_credentials(dict(event))


def _folded(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leaves out warnings and errors beyond `SAME_LINES` of one kind; the last one that is logged says so."""
    if event.get("level") not in ("warning", *failure_summary.ERROR_LEVELS):
        return event
    if (count := count_same(failure_summary.of_event(event))) > SAME_LINES:
        raise structlog.DropEvent
    return {**event, "further": f"left out for up to {SAME_SECONDS:g} s"} if count == SAME_LINES else event


def configure_logs(run: str, service: str, instance: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Sets up JSON lines from structlog and from the libraries' own loggers, each with the ids of the service.

    Args:
        stream: where they go; standard error if not given.
    """
    stream = cast(TextIO, _Log(sys.stderr if stream is None else stream))

    def ids(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"run": run, "service": service, "instance": instance, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        ids,
        _note_error,
    ]
    formatted = structlog.processors.format_exc_info
    rendering: list[structlog.typing.Processor] = [formatted, _without_credentials, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, _folded, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),  # a line in one write: several processes share a log
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")


def silence_logs() -> None:
    """Silences all logs, for commands whose output is for a person: they report errors by raising them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger().handlers[:] = [logging.NullHandler()]


class Metrics:
    """A service's Prometheus metrics, made on first use: ``metrics.set("ready", 3)``. Each is declared (`shared.runtime.telemetry`).

    Names get the prefix ``myxo_``; every sample carries the run and the instance, and what ``labels`` a metric has besides: always
    the same ones. In `values` it stands as ``name.label``.
    """

    def __init__(self, run: str, instance: str) -> None:
        self.registry = CollectorRegistry()
        self.values: dict[str, float] = {}
        self._labels = {"run": run, "instance": instance}
        self._made: dict[str, Any] = {}

    def set(self, name: str, value: float, *, in_status: bool = True, **labels: str) -> None:
        """Sets a gauge. ``in_status``: it stands in `values`, too, which the service's status in the registry carries."""
        self._metric(Gauge, name, labels).set(value)
        if in_status:
            self.values[".".join([name, *labels.values()])] = float(value)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter."""
        self._metric(Counter, name, labels).inc(amount)
        key = ".".join([name, *labels.values()])
        self.values[key] = self.values.get(key, 0.0) + amount

    def _metric(self, kind: type[Gauge | Counter], name: str, labels: dict[str, str]) -> Any:
        # letters beyond ASCII stand as their code points: names that differ only in what is neither letter nor digit are one metric
        known = (letter if letter.isascii() and letter.isalnum() else f"u{ord(letter):x}" if letter.isalnum() else "_" for letter in name)
        legal = "".join(known)
        if legal not in self._made:
            check_declared(name, labels, counter=kind is Counter)
            self._made[legal] = kind(f"myxo_{legal}", name, [*self._labels, *labels], registry=self.registry)
        return self._made[legal].labels(**self._labels, **labels)
