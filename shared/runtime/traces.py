"""OpenTelemetry traces: one for each group from its admission to its training, for each training step and for each push of weights.

Every service exports its own part. No message carries a context: ids are derived from the run and from the trace's name, which all services
know. Nothing is exported, imported or started unless the environment names an OTLP endpoint, under OpenTelemetry's own names. The exporter
itself reads the others: ``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE``, ``_TIMEOUT``, ``_COMPRESSION`` and so on, each also with
``TRACES_`` in its name.
"""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shared.runtime.errors import ConfigError

Attributes = dict[str, str | bool | int | float | list[float] | None]  # What a span says of itself; None is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that began and ended: in the trace of a group, a training step or a push.

    ``trace``: the trace's name: a group's id, or as `step_trace` and `push_trace` say. ``started``, ``ended``: seconds since the epoch.
    ``root``: it stands for the whole trace, which has one; all other spans are its children. ``error``: why it failed; empty: it did not.
    ``links``: names of other traces. ``events``: (name, seconds since the epoch).
    """

    trace: str
    name: str
    started: float
    ended: float
    root: bool = False
    error: str = ""
    links: tuple[str, ...] = ()
    events: tuple[tuple[str, float], ...] = ()
    attributes: Attributes = field(default_factory=dict)


def step_trace(step: int) -> str:
    """Returns the name of the trace of a training step."""
    return f"step {step}"


def push_trace(version: int, channel: str) -> str:
    """Returns the name of the trace of a push. ``channel``: the name of one of its channels, which are made anew after every failure."""
    return f"push {version} {channel}"


def trace_ids(life: str, trace: str) -> tuple[int, int]:
    """Returns a trace's id (128 bits) and that of its root span (64 bits), the same in all services.

    ``life``: what one life of a run has for itself: a run that begins anew under its name has new traces.
    """
    digest = hashlib.blake2b(f"{life}\n{trace}".encode(errors="backslashreplace"), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


class Traces:
    """Takes spans. This one drops them, since nothing is exported; `shared.runtime.span_export` has the other.

    ``on``: whether spans are worth making.
    """

    on = False

    def add(self, span: TraceSpan) -> None:
        """Takes a span, from any thread; never waits."""

    def close(self) -> None:
        """Takes no more spans."""


PREFIX = "OTEL_EXPORTER_OTLP"  # of the names of the exporter's variables
SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


@dataclass(frozen=True)
class TraceSettings:
    """``ratio``: the share of traces that are exported, chosen by their ids, so that all services choose the same ones."""

    endpoint: str
    ratio: float = 1.0


def trace_settings(environment: Mapping[str, str]) -> TraceSettings | None:
    """Returns the settings; None where nothing is to be exported. Raises ConfigError, naming the variable."""
    variable, endpoint = _first(environment, "ENDPOINT")
    off = (
        environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environment.get("OTEL_TRACES_EXPORTER", "").strip() == "none"
    )
    if not endpoint or off:
        return None
    if "@" in endpoint:  # the address is logged
        raise ConfigError(variable, "(a URL with credentials)", "an address without them; they belong into OTEL_EXPORTER_OTLP_HEADERS")
    if not _is_http(endpoint):
        raise ConfigError(variable, endpoint, "http://host:port or https://host:port of an OTLP receiver")
    for name, (fits, expected) in EXPECTED.items():
        wrong, value = _first(environment, name)
        if value and not fits(value):
            raise ConfigError(wrong, value, expected)
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.exporter") is None:
        raise ConfigError(variable, endpoint, "the exporter, which is not installed: pip install 'myxo[traces]', or unset the variable")
    return TraceSettings(endpoint, _ratio(environment))


def _first(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """Returns the exporter's variable for traces, else that for all, which is set, with its value; empty where neither is."""
    values = ((variable, environment.get(variable, "").strip()) for variable in (f"{PREFIX}_TRACES_{name}", f"{PREFIX}_{name}"))
    return next(((variable, value) for variable, value in values if value), ("", ""))


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


# What the exporter's other variables hold, and that in words.
EXPECTED: dict[str, tuple[Callable[[str], bool], str]] = {
    "PROTOCOL": ("http/protobuf".__eq__, "http/protobuf: receivers listen for it on port 4318"),
    "TIMEOUT": (lambda text: _number(text) > 0, "seconds, more than 0"),
    "COMPRESSION": (lambda name: name.lower() in ("none", "gzip", "deflate"), "none, gzip or deflate"),
    **dict.fromkeys(("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"), (lambda path: os.access(path, os.R_OK), "a file to be read here")),
}
