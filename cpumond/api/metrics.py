"""Metrics over HTTP in the requested format: OpenMetrics, or Prometheus' older text format, without exemplars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Metrics = Callable[[bool], bytes]
"""Returns the metrics as text; as OpenMetrics if called with True."""

PLAIN_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
VERSIONS: Final = ("", "0.0.1", "1.0.0")
"""Versions of OpenMetrics that a client may request; the output is the same for each."""


def make_metrics_route(metrics: Metrics) -> Route:

    async def read_metrics(request: Request) -> Response:
        is_open = wants_openmetrics(request.headers.get("accept", ""))
        headers = {"content-type": OPEN_TYPE if is_open else PLAIN_TYPE, "vary": "accept"}
        return Response(metrics(is_open), headers=headers)

    return Route("/metrics", read_metrics)


def wants_openmetrics(accept: str) -> bool:
    """Whether ``Accept`` names OpenMetrics with no lower weight than plain text (RFC 9110, 12.5.1)."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.lower().split(","):
        name, *options = (each.strip() for each in part.split(";"))
        values = dict(option.split("=", 1) for option in options if "=" in option)
        if name in weights and (name == "text/plain" or values.get("version", "") in VERSIONS):
            try:
                weight = float(values.get("q", "1"))
            except ValueError:
                weight = 0.0
            weights[name] = max(weights[name], weight)
    return weights["application/openmetrics-text"] > 0.0 and max(weights, key=weights.__getitem__) != "text/plain"
