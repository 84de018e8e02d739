"""Whether traces are exported is what the environment says; what it says wrong is refused by the variable's name."""

import pytest

from shared.runtime.errors import ConfigError
from shared.runtime.traces import TraceSettings, trace_settings
from tests.support.tables import table

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
