"""Three real agents, one real scheduler, real jobs: whether pools really get the CPU that the fair share promises."""

from __future__ import annotations

import random
import statistics
import sys
import threading
from collections.abc import Iterator

import httpx2
import pytest
from fairness import (
    SAMPLE_S,
    TOTAL,
    WEIGHTS,
    Measured,
    Recorder,
    Shape,
    check_ends,
    check_whole_run,
    make_shape,
    run_all,
    run_cluster,
)

from cpumond.cgroup.mounts import Hierarchies
from cpumond.fairshare.resources import CPU
from cpumond.testing import Cluster

pytestmark = pytest.mark.alone

SEED = 20
RUN_S = 12.0
TOLERANCE = 0.3
"""A job is a fifth of what the smallest pool is due, and the time is short; that of the long run is a tenth."""
COUNTS = {"double": 14, "single": 8, "sure": 10}
"""Operations by pool: more than it can do in that time."""
RECLAIM_S = 7.0
QUICK_MONITOR = {
    "check_period": 100,
    "smoothing_factor": 0.5,
    "relative_lower_bound": 0.75,
    "relative_upper_bound": 0.95,
    "vote_window_size": 3,
    "vote_decision_threshold": 1,
    "decrease_coefficient": 0.75,
    "min_cpu_limit": 0.02,
}
"""Limits follow usage within a second or two."""

NAP_AND_BURN = """
import sys, time
end, cores = map(float, sys.argv[1:])
used = time.process_time()
while used < end:
    until = used + 0.02 * cores
    while used < until:
        sum(range(200))
        used = time.process_time()
    time.sleep(0.02 * (1.0 - cores))
"""
"""Uses so many CPU seconds, nearly so many cores all the time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster"), hierarchies) as running:
        yield running


def test_pools_use_what_they_deserve(cluster: Cluster, hierarchies: Hierarchies) -> None:
    """Core-seconds of each pool, as the kernel counts them, against the integral of its fair share."""
    rng = random.Random(SEED)
    shapes = [make_shape(rng, pool) for pool in WEIGHTS for _ in range(COUNTS[pool])]
    with httpx2.Client(base_url=cluster.url, trust_env=False, verify=False, timeout=60.0) as client:
        recorder = Recorder(cluster, hierarchies, client)
        run_all(recorder, shapes, RUN_S)
    measured = Measured(recorder)
    check_ends(recorder, measured)
    check_whole_run(recorder, measured, TOLERANCE)


def measure_reclaim(recorder: Recorder, reclaim: bool, run_s: float) -> float:
    """Core-seconds that jobs use within ``run_s`` that order more than they use, with or without reclaim."""
    rng = random.Random(SEED)
    monitor = {"enable_cpu_reclaim": reclaim, **QUICK_MONITOR}
    for number in range(14):
        use = rng.uniform(0.025, 0.04)
        shape = Shape(("double", "single")[number % 2], 0.0, rng.randint(8, 12), 0.1, use * rng.uniform(5.0, 8.0))
        command = [sys.executable, "-I", "-S", "-c", NAP_AND_BURN, f"{shape.cpu_seconds:.4f}", f"{use:.4f}"]
        recorder.start(shape, command, monitor=monitor)
    begin_s, begin_cpu_s = recorder.now_s(), recorder.read_total()
    pause = threading.Event()
    while recorder.now_s() < begin_s + run_s:
        recorder.take_sample()
        pause.wait(SAMPLE_S)
    used, passed_s = recorder.read_total() - begin_cpu_s, recorder.now_s() - begin_s
    recorder.abort_all()
    recorder.cluster.wait(lambda: not recorder.read_jobs(), "all jobs are over")
    return used * run_s / passed_s


def test_reclaim_gives_unused_cpu_to_others(cluster: Cluster, hierarchies: Hierarchies) -> None:
    """The same jobs twice, which use less than they order: with reclaim more of them run at a time."""
    with httpx2.Client(base_url=cluster.url, trust_env=False, verify=False, timeout=60.0) as client:
        recorder = Recorder(cluster, hierarchies, client)
        without = measure_reclaim(recorder, False, RECLAIM_S)
        most_without = max(len(sample.cpu_seconds) for sample in recorder.samples)
        recorder.samples.clear()
        reclaimed = measure_reclaim(recorder, True, RECLAIM_S)
        most = max(len(sample.cpu_seconds) for sample in recorder.samples)
        # A limit that goes back up may be above it for a moment.
        held = statistics.median(sum(sample.told_usage.values()) for sample in recorder.samples)
    print(
        f"\nwithin {RECLAIM_S:g} s: {without:.2f} core-s without reclaim, at most {most_without} jobs at a time; "
        f"{reclaimed:.2f} with it, {most} jobs; ratio {reclaimed / without:.2f}"
    )
    changes = [event["reason"] for node in cluster.nodes for event in node.log_events("limit_changed")]
    assert "shrink" in changes
    assert most_without <= round(TOTAL[CPU] / 0.1)
    assert held <= TOTAL[CPU] * 1.1
    assert reclaimed > 1.15 * without
