"""Traces: what the environment says of their export, and how spans reach a real OTLP receiver."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from shared.process.embedded_servers import free_port
from shared.runtime import span_export
from shared.runtime.errors import ConfigError
from shared.runtime.span_export import SpanExport
from shared.runtime.telemetry import Metrics
from shared.runtime.traces import TraceSettings, TraceSpan, step_trace, trace_ids, trace_settings
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.tables import table
from tests.support.waiting import wait_until

IDENTITY = {"service.name": "buffer", "service.instance.id": "buffer-0"}
DEADLINE = 60.0

Exporting = Callable[..., SpanExport]


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporting]:
    """Makes an export to an address, with further variables; closes it at the end."""
    made: list[SpanExport] = []
    monkeypatch.setattr(span_export, "EXPORT_INTERVAL", 0.05)

    def make(url: str, metrics: Metrics | None = None, **variables: str) -> SpanExport:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = trace_settings(environment)
        assert settings is not None
        made.append(SpanExport(settings, IDENTITY, "run 2026", metrics or Metrics("r", "b-1")))
        return made[-1]

    yield make
    for export in made:
        export.close()


def group(number: int = 0, **fields: object) -> TraceSpan:
    return TraceSpan(**{"trace": f"g{number:08d}", "name": "group", "started": 10.0, "ended": 12.5, "root": True, **fields})


def test_a_span_arrives_as_it_was_noted(exporting: Exporting) -> None:
    with OtlpReceiver() as receiver:
        export = exporting(receiver.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20secret", OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
        known = {"group": "g00000000", "rewards": [0.5, float("nan")], "attempts": 2, "nothing": None}
        events, links = (("requeued: stale", 11.0),), (step_trace(3),)
        export.add(group(events=events, links=links, attributes=known))
        export.add(group(name="score", root=False, error="no verifier\ud800", started=11.0, ended=10.0))
        wait_until(lambda: len(receiver.spans) == 2, "both spans")
    root, child = receiver.spans
    trace, span = trace_ids("run 2026", "g00000000")
    assert (root.trace, root.id, root.parent) == (f"{trace:032x}", f"{span:016x}", "")
    assert (root.service, root.instance, root.name, root.started, root.ended, root.failed) == (
        "buffer",
        "buffer-0",
        "group",
        10.0,
        12.5,
        False,
    )
    assert str(root.attributes) == "{'group': 'g00000000', 'rewards': [0.5, nan], 'attempts': 2}"
    assert root.links == [f"{trace_ids('run 2026', 'step 3')[0]:032x}"] and root.events == ["requeued: stale"]
    assert (child.trace, child.parent) == (root.trace, root.id) and child.id != root.id
    assert child.failed and child.error == "no verifier\\ud800"
    assert child.started == child.ended == 11.0, "a span does not end before it begins, whatever the clocks say"
    assert not receiver.malformed
    assert receiver.headers[0]["authorization"] == "Bearer secret"


def test_the_same_traces_are_chosen_in_every_service(exporting: Exporting) -> None:
    with OtlpReceiver() as receiver:
        variables = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
        for export in (exporting(receiver.url, **variables), exporting(receiver.url, **variables)):
            for number in range(400):
                export.add(group(number, name=str(id(export)), root=False))
            export.close()
    first, second = ({span.trace for span in receiver.spans if span.name == name} for name in {span.name for span in receiver.spans})
    assert first == second and 120 < len(first) < 280


def test_an_endpoint_that_comes_late_gets_what_comes_after_it(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    port, metrics = free_port(), Metrics("r", "b-1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    with structlog.testing.capture_logs() as logged:
        export = exporting(f"http://127.0.0.1:{port}", metrics)
        for number in range(5):
            export.add(group(number))
            wait_until(lambda lost=number + 1: metrics.values.get("spans_lost", 0) == lost, "the loss of a span")
        warnings = [line for line in logged if line["event"] == "traces_not_exported"]
        assert len(warnings) == 1, "one warning a minute"
        assert (warnings[0]["log_level"], warnings[0]["lost"]) == ("warning", 1) and str(port) in warnings[0]["endpoint"]
        assert warnings[0]["reason"]
        with OtlpReceiver(port=port) as receiver:
            export.add(group(9))
            wait_until(lambda: receiver.spans, "the span")
            wait_until(lambda: metrics.values.get("spans_exported") == 1, "its count")
        assert [line["event"] for line in logged][-1] == "traces_exported_again"


@pytest.mark.parametrize("answer", [400, 401, 500, 503])
def test_a_receiver_that_refuses_costs_its_spans_only(exporting: Exporting, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    metrics = Metrics("r", "b-1")
    with OtlpReceiver(answer=answer) as receiver:
        export = exporting(receiver.url, metrics)
        export.add(group())
        wait_until(lambda: metrics.values.get("spans_lost") == 1, "the loss")
        receiver.answer = 200
        export.add(group(1))
        wait_until(lambda: receiver.spans, "the next span")


def test_a_receiver_that_hangs_holds_up_nobody(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued stays bound, and the end comes in time."""
    monkeypatch.setattr(span_export, "MOST_WAITING", 1000)
    monkeypatch.setattr(span_export, "FLUSH_SECONDS", 0.2)
    metrics = Metrics("r", "b-1")
    with OtlpReceiver(delay_s=DEADLINE) as receiver:
        export = exporting(receiver.url, metrics)
        export.add(group())
        wait_until(lambda: receiver.headers, "the first request")
        for number in range(5000):
            export.add(group(number))
        assert len(export._waiting) == 1000
        closing = threading.Thread(target=export.close)
        closing.start()
        closing.join(DEADLINE / 2)
        assert not closing.is_alive(), "the service would not end"


def test_what_is_queued_at_the_end_is_exported(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "FLUSH_SECONDS", DEADLINE)
    monkeypatch.setattr(span_export, "EXPORT_INTERVAL", DEADLINE)
    with OtlpReceiver() as receiver:
        export = exporting(receiver.url)
        for number in range(1200):
            export.add(group(number))
        export.close()
        assert len(receiver.spans) == 1200 and len(receiver.headers) == 3


def test_ids_differ_between_lives_of_a_run_and_agree_within_one() -> None:
    ids = {trace_ids(life, trace) for life in ("r 1", "r 2") for trace in ("g00000001", "g00000002", "step 1", "step 2", "odd \ud800")}
    assert len(ids) == 10 and all(trace and span for trace, span in ids)
    assert trace_ids("r 1", "g00000001") == trace_ids("r 1", "g00000001")


def test_services_do_not_import_the_exporter() -> None:
    """Where nothing is exported, nobody pays for it."""
    modules = "shared.service.service_base, services.buffer.group_spans, services.trainer.control_client, services.rollout.weight_receiver"
    code = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('opentelemetry.exporter')])"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=120).stdout == "[]\n"


# --- whether traces are exported is what the environment says; what it says wrong is refused by the variable's name

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@table(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_SAMPLER": "nonsense"},
    ],
)
def test_nothing_is_exported(environment: dict[str, str]) -> None:
    assert trace_settings(environment) is None


def test_the_traces_own_endpoint_wins() -> None:
    both = {**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://other/path"}
    assert trace_settings(both) == TraceSettings("https://other/path")


@table(
    ("sampler", "argument", "ratio"),
    [("", "0.5", 1.0), ("always_off", "", 0.0), ("traceidratio", "0.25", 0.25), ("parentbased_traceidratio", "", 1.0)],
)
def test_the_sampler_is_a_share_of_the_traces(sampler: str, argument: str, ratio: float) -> None:
    settings = trace_settings({**ENDPOINT, "OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert settings is not None and settings.ratio == ratio


@table(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[half"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://host/"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/no/such.pem"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/no/such.key"),
    ],
)
def test_what_is_wrong_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as refused:
        trace_settings({**ENDPOINT, variable: value})
    assert value in str(refused.value)


@table("ratio", ["1.5", "-0.1", "nan", "half"])
def test_a_share_lies_between_0_and_1(ratio: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
        trace_settings({**ENDPOINT, "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": ratio})


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        trace_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:hunter2@collector"})
    assert "hunter2" not in str(refused.value)
