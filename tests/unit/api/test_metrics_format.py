"""Which of the two formats of metrics a request gets."""

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from cpumond.api.metrics import OPEN_TYPE, PLAIN_TYPE, make_metrics_route, wants_openmetrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text ; version=0.0.1", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=high", False),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited", False),
    ],
)
def test_openmetrics_is_sent_where_it_is_wanted_no_less_than_plain_text(accept: str, is_open: bool) -> None:
    assert wants_openmetrics(accept) is is_open


@pytest.mark.parametrize(("accept", "sent"), [(PROMETHEUS, OPEN_TYPE), ("*/*", PLAIN_TYPE)])
def test_the_answer_names_its_format(accept: str, sent: str) -> None:
    app = Starlette(routes=[make_metrics_route(lambda is_open: b"open" if is_open else b"plain")])
    answer = TestClient(app).get("/metrics", headers={"accept": accept})
    assert (answer.headers["content-type"], answer.headers["vary"]) == (sent, "accept")
    assert answer.text == ("open" if sent == OPEN_TYPE else "plain")
