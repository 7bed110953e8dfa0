"""Traces of operations: a real scheduler, agent and job, OpenTelemetry's own exporter, and a collector that decodes."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from answering import Asked, listen
from waiting import wait_until

from cpumond.cluster.processes import Cluster

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs opentelemetry-exporter-otlp-proto-http"
)

pytestmark = pytest.mark.cgroup

BURN = ["python3", "-c", "import time\nwhile time.process_time() < 0.2: pass"]


def test_a_collector_gets_the_phases_of_operations_also_at_the_end(tmp_path: Path) -> None:
    spans: list[Any] = []

    def collect(asked: Asked) -> None:
        body = gzip.decompress(asked.body) if asked.headers.get("content-encoding") == "gzip" else asked.body
        request = trace_service.ExportTraceServiceRequest.FromString(body)
        spans.extend(
            span for resource in request.resource_spans for each in resource.scope_spans for span in each.spans
        )
        asked.reply(200)

    with listen(collect) as url:
        config = f'[traces]\nendpoint = "{url}/v1/traces"\n'
        with Cluster(tmp_path, cpu=2.0, scheduler_config=config) as cluster:
            started = [
                cluster.start_operation("p", BURN, title="burn", cpu_limit=0.05),
                cluster.start_operation("p", ["false"], title="bad", max_failed_job_count=1),
            ]
            wait_until(
                lambda: all(cluster.get(f"/api/v1/operations/{each}")["finish_time"] for each in started), timeout_s=60
            )
            cluster.scheduler.stop()
            assert {each.name for each in spans} >= {"burn", "bad"}, "all are sent before the process has ended"
    roots = {each.name: each for each in spans if not each.parent_span_id}
    assert set(roots) == {"burn", "bad"}
    assert roots["burn"].status.code != roots["bad"].status.code
    phases = [each for each in spans if each.parent_span_id == roots["burn"].span_id]
    assert [each.name for each in phases] == ["pending", "waiting", "starting", "running"]
    assert all(each.trace_id == roots["burn"].trace_id for each in phases)
    times = [roots["burn"].start_time_unix_nano, *(each.end_time_unix_nano for each in phases)]
    assert times == sorted(times)
    assert times[-1] == roots["burn"].end_time_unix_nano
    events = [each.name for each in roots["burn"].events]
    assert (events[:4], events[-1]) == (["submitted", "admitted", "placed", "first CPU"], "ended")
    assert "throttled" in events
