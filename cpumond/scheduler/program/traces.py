"""Sending of operations' traces over OTLP/HTTP, by OpenTelemetry's exporter, in its own thread (`[traces]`)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from cpumond.core.errors import ConfigError
from cpumond.scheduler.answers.spans import Span, Watched

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


TIMEOUT_S: Final = 5.0
"""Longest time of one batch with all retries; the end of the process can take this long."""


class TraceSender:
    """Sends spans of ended operations. Spans that the endpoint does not accept are dropped; nothing waits for them."""

    def __init__(self, endpoint: str, cluster_name: str) -> None:
        """Prepare to send to ``endpoint``, for example http://localhost:4318/v1/traces. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError("traces.endpoint: needs OpenTelemetry: pip install 'cpumond[traces]'") from None
        self._resource = Resource.create({"service.name": "cpumond", "cpumond.cluster": cluster_name})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=TIMEOUT_S))

    def send(self, watched: Watched, now: float) -> None:
        """Send the traces of operations that have ended since the last call; the cost is a walk over the live jobs."""
        for spans in watched.look(now):
            for each in make_readable(spans, self._resource):
                self._processor.on_end(each)

    def close(self) -> None:
        """Send all remaining spans, which may take some seconds."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def make_readable(spans: list[Span], resource: Any) -> list[ReadableSpan]:
    """Return an operation's spans in the form of the library; the trace's id is derived from the operation's id."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    first, made = spans[0], []
    digest = hashlib.sha256(first.attributes["cpumond.operation.id"].encode()).digest()
    trace_id = int.from_bytes(digest[:16], "big")
    root = None
    for number, span in enumerate(spans):
        span_id = int.from_bytes(digest[16:24], "big") ^ number
        context = SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED))
        state = span.attributes.get("cpumond.operation.state")
        status = Status(StatusCode.ERROR if state in ("failed", "aborted") else StatusCode.UNSET)
        events = [Event(name, timestamp=round(at * 1e9)) for name, at in span.events]
        made.append(ReadableSpan(
            span.name, context, root, resource, span.attributes, events, kind=SpanKind.INTERNAL, status=status,
            start_time=round(span.start * 1e9), end_time=round(span.end * 1e9),
        ))  # fmt: skip
        root = root or context
    return made
