"""Exports spans over OTLP/HTTP, on a thread of its own: whoever notes one only appends it to a queue.

The queue is bound. While the endpoint is away or slow, what does not fit is lost and counted; the service works on, and leaves in time. The
SDK's own batch processor has no deadline for its end, and starts a thread in every forked process, between the fork and the program.
"""

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared.runtime.failure_summary import short
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.runtime.traces import Traces, TraceSettings, TraceSpan, trace_ids

declare_metrics("""
    spans_exported_total | spans | [traces](traces.md): what the receiver took | with an endpoint for traces
    spans_lost_total | spans | what it did not take | from the first on
""")

MOST_WAITING = 8192  # The spans that wait for their export at most: some megabytes
BATCH = 512  # The spans of one request
EXPORT_INTERVAL = 1.0  # The seconds between two looks at the queue
FLUSH_SECONDS = 1.0  # The time that a service which ends gives its last spans
WARN_INTERVAL = 60.0  # The seconds between two warnings that the endpoint takes nothing
SAMPLED_BITS = 64  # Sampling by ratio looks at the lower bits of a trace's id, as other SDKs do


class SpanExport(Traces):
    """The export of one service's spans.

    Args:
        identity: what its resource says of the service, under OpenTelemetry's names. life: as `trace_ids` takes it. metrics: get the
            counts ``spans_exported`` and ``spans_lost``.
    """

    on = True

    def __init__(self, settings: TraceSettings, identity: Mapping[str, str], life: str, metrics: Metrics) -> None:
        self._life, self._metrics = life, metrics
        self._below = int(settings.ratio * (1 << SAMPLED_BITS))
        self._resource = Resource.create(dict(identity))
        self._scope = InstrumentationScope("myxo")
        self._problems = _Problems()
        self._log: Any = structlog.get_logger()
        self._endpoint, self._warned = settings.endpoint, 0.0
        self._waiting: deque[TraceSpan] = deque()
        self._overflowed = 0
        self._ending, self._closed = threading.Event(), False
        self._exporter = OTLPSpanExporter()
        self._thread = threading.Thread(target=self._work, name="span-export", daemon=True)
        self._thread.start()

    def add(self, span: TraceSpan) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(span)
        else:
            self._overflowed += 1

    def close(self) -> None:
        """Exports what is queued, for `FLUSH_SECONDS` at most."""
        self._ending.set()
        self._thread.join(FLUSH_SECONDS)
        self._closed = True
        self._exporter.shutdown()

    # --- on the thread

    def _work(self) -> None:
        while not self._ending.wait(EXPORT_INTERVAL):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._waiting and not self._closed:
            spans = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            overflowed, self._overflowed = self._overflowed, 0
            if overflowed:
                self._metrics.add("spans_lost", overflowed)
            if encoded := [made for span in spans if (made := self._readable(span)) is not None]:
                self._export(encoded)

    def _export(self, spans: list[ReadableSpan]) -> None:
        try:
            exported = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever it is, it must not end this thread
            exported, self._problems.last = False, f"{type(error).__name__}: {error}"
        self._metrics.add("spans_exported" if exported else "spans_lost", len(spans))
        if exported and self._warned:
            self._log.info("traces_exported_again", endpoint=self._endpoint)
            self._warned = 0.0
        elif not exported and not self._closed and (not self._warned or time.monotonic() - self._warned > WARN_INTERVAL):
            lost = self._metrics.values.get("spans_lost", 0.0)
            self._log.warning("traces_not_exported", endpoint=self._endpoint, reason=short(self._problems.last), lost=int(lost))
            self._warned = time.monotonic()

    def _readable(self, span: TraceSpan) -> ReadableSpan | None:
        """Returns a span as the SDK exports it; None where its trace is not among those that are exported."""
        context = self._root(span.trace)
        if context.trace_id & ((1 << SAMPLED_BITS) - 1) >= self._below:
            return None
        parent = None if span.root else context
        status = Status(StatusCode.ERROR, _text(span.error)) if span.error else Status(StatusCode.UNSET)
        return ReadableSpan(
            span.name,
            context if parent is None else _context(context.trace_id, random.getrandbits(64) or 1),
            parent,
            self._resource,
            {
                f"myxo.{name}": _text(value) if isinstance(value, str) else value
                for name, value in span.attributes.items()
                if value is not None
            },
            [Event(_text(name), timestamp=_nanoseconds(at)) for name, at in span.events],
            [Link(self._root(trace)) for trace in span.links],
            SpanKind.INTERNAL,
            status=status,
            start_time=_nanoseconds(span.started),
            end_time=_nanoseconds(max(span.started, span.ended)),
            instrumentation_scope=self._scope,
        )

    def _root(self, trace: str) -> SpanContext:
        return _context(*trace_ids(self._life, trace))


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _text(text: str) -> str:
    """Returns a text as protobuf takes it: half of a surrogate pair would cost the whole batch."""
    return text.encode(errors="backslashreplace").decode()


class _Problems(logging.Handler):
    """Keeps what the library logs in place of the service's log: an endpoint that is away is no error of the service's."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer in time"
        logger = logging.getLogger("opentelemetry")
        logger.handlers[:], logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self.last = record.getMessage()
