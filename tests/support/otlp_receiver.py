"""An OTLP/HTTP receiver on loopback, as collectors have one: it parses what is sent as protobuf, and keeps every span."""

import contextlib
import gzip
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came: ids in hexadecimal digits, times in seconds since the epoch. ``service``: who sent it."""

    service: str
    instance: str
    trace: str
    id: str
    parent: str
    name: str
    started: float
    ended: float
    failed: bool
    error: str
    attributes: dict[str, object]
    links: list[str]
    events: list[str]


@dataclass
class OtlpReceiver:
    """Use as a context manager. ``answer``: the status of its answers; ``delay_s``: the time that each takes."""

    answer: int = 200
    delay_s: float = 0.0
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    url: str = ""
    port: int = 0

    def __enter__(self) -> "OtlpReceiver":
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                time.sleep(receiver.delay_s)
                content = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.answer)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(content)))
                with contextlib.suppress(ConnectionError):  # whoever asked may have gone
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Parses a request. What is none is kept in ``malformed``."""
        self.headers.append(headers)
        if path != "/v1/traces" or headers.get("content-type") != "application/x-protobuf":
            self.malformed.append(f"{path}, {headers}")
            return
        request = ExportTraceServiceRequest()
        try:
            request.ParseFromString(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
        except DecodeError as error:
            self.malformed.append(str(error))
            return
        if self.answer == 200:
            self.spans += _spans(request)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """All spans by their trace's id."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans:
            found.setdefault(span.trace, []).append(span)
        return found


def _spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource in request.resource_spans:
        of = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            found.append(
                ReceivedSpan(
                    service=of["service.name"],
                    instance=of["service.instance.id"],
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    started=span.start_time_unix_nano / 1e9,
                    ended=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == Status.STATUS_CODE_ERROR,
                    error=span.status.message,
                    attributes={pair.key.removeprefix("myxo."): _value(pair.value) for pair in span.attributes},
                    links=[link.trace_id.hex() for link in span.links],
                    events=[event.name for event in span.events],
                )
            )
    return found


def _value(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]  # type: ignore[attr-defined]
    return getattr(value, kind)
