"""Whether and how traces are exported, as the environment says under OpenTelemetry's own names. Pure.

The exporter itself reads the others: ``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE``, ``_TIMEOUT``, ``_COMPRESSION`` and so on, each
also with ``TRACES_`` in its name.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.runtime.errors import ConfigError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


@dataclass(frozen=True)
class TraceSettings:
    """``ratio``: the share of traces that are exported, chosen by their ids, so that all services choose the same ones."""

    endpoint: str
    ratio: float = 1.0


def trace_settings(environment: Mapping[str, str]) -> TraceSettings | None:
    """Returns the settings; None where nothing is to be exported. Raises ConfigError, naming the variable."""
    variable, endpoint = _first(environment, ENDPOINTS)
    off = (
        environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environment.get("OTEL_TRACES_EXPORTER", "").strip() == "none"
    )
    if not endpoint or off:
        return None
    if "@" in endpoint:  # the address is logged
        raise ConfigError(variable, "(a URL with credentials)", "an address without them; they belong into OTEL_EXPORTER_OTLP_HEADERS")
    if not _is_http(endpoint):
        raise ConfigError(variable, endpoint, "http://host:port or https://host:port of an OTLP receiver")
    protocol_variable, protocol = _first(environment, PROTOCOLS)
    if protocol not in ("", "http/protobuf"):
        raise ConfigError(protocol_variable, protocol, "http/protobuf: receivers listen for it on port 4318")
    timeout_variable, timeout = _first(environment, TIMEOUTS)
    if timeout and not _number(timeout) > 0:
        raise ConfigError(timeout_variable, timeout, "seconds, more than 0")
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.exporter") is None:
        raise ConfigError(variable, endpoint, "the exporter, which is not installed: pip install 'myxo[traces]', or unset the variable")
    return TraceSettings(endpoint, _ratio(environment))


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the first of these variables that is set, with its value; the last one, empty, where none is."""
    values = ((name, environment.get(name, "").strip()) for name in names)
    return next(((name, value) for name, value in values if value), (names[-1], ""))


def _is_http(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:  # a port that is no number
        return False


def _ratio(environment: Mapping[str, str]) -> float:
    """Returns the share of traces. A parent's decision is that of its trace's id, so samplers that ask the parent decide the same."""
    sampler = environment.get(SAMPLER, "").strip() or "always_on"
    kind = sampler.removeprefix("parentbased_")
    if kind in ("always_on", "always_off"):
        return float(kind == "always_on")
    if kind != "traceidratio":
        raise ConfigError(SAMPLER, sampler, "always_on, always_off or traceidratio, each also with parentbased_ before it")
    text = environment.get(RATIO, "").strip() or "1"
    ratio = _number(text)
    if not 0 <= ratio <= 1:
        raise ConfigError(RATIO, text, "a number from 0 to 1")
    return ratio


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
