"""Three real nodes, 100 operations in three pools: each pool gets the CPU that the fair share promises, also where one
of them wants little for a time; and with reclaim more of it is used."""

from __future__ import annotations

import random
import statistics
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from fairness import (
    GUARANTEED_CORES,
    SAMPLE_S,
    TOTAL,
    Measured,
    Recorder,
    Shape,
    check_ends,
    check_whole_run,
    make_shape,
    run_all,
    run_cluster,
    show,
)

from cpumond.fairshare.resources import CPU
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.alone

SEED = 20
RUN_S = 36.0
LULL_S = (14.0, 23.0)
"""In between, little is started in the pool with the guarantee."""
TOLERANCE = 0.10
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


def make_shapes(seed: int) -> list[Shape]:
    """100 operations: 42 and 21 in the pools without a guarantee, 37 in that with one."""
    rng = random.Random(seed)
    shapes = [make_shape(rng, pool, rng.uniform(-36.0, 25.0)) for pool in ["double"] * 42 + ["single"] * 21]
    shapes += [make_shape(rng, "sure", rng.uniform(-6.0, 3.0)) for _ in range(17)]
    shapes += [make_shape(rng, "sure", rng.uniform(LULL_S[0] + 1.0, LULL_S[1]), jobs=(1, 1)) for _ in range(4)]
    shapes += [make_shape(rng, "sure", LULL_S[1] + rng.uniform(-1.0, 1.0)) for _ in range(16)]
    rng.shuffle(shapes)
    return sorted(shapes, key=lambda shape: shape.at_s)


def test_pools_use_what_they_deserve(tmp_path: Path, hierarchies: Hierarchies) -> None:
    """Core-seconds of each pool, as the kernel counts them, against the integral of its fair share."""
    shapes = make_shapes(SEED)
    assert len(shapes) == 100
    with (
        run_cluster(tmp_path, hierarchies) as cluster,
        httpx2.Client(base_url=cluster.url, trust_env=False, verify=False, timeout=60.0) as client,
    ):
        recorder = Recorder(cluster, hierarchies, client)
        run_all(recorder, shapes, RUN_S, LULL_S[0])
        measured = Measured(recorder)
        check_ends(recorder, measured)
    samples = recorder.samples
    last = len(samples) - 1

    lull = [
        number
        for number, sample in enumerate(samples)
        if LULL_S[0] < sample.at_s < LULL_S[1] and sample.fair_share["sure"] < 0.8 * GUARANTEED_CORES["sure"]
    ]
    assert lull, "there was no time with little demand in the pool with the guarantee"
    first, end = lull[0], lull[-1]
    show("before the lull", samples[: first + 1], measured.between(0, first))
    lull_deviations, _ = show("in it", samples[first : end + 1], measured.between(first, end))
    show("after it", samples[end:], measured.between(end, last))
    tolerance = check_whole_run(recorder, measured, TOLERANCE)
    # What the pool with the guarantee leaves goes to the others.
    assert all(abs(lull_deviations[name]) < 1.5 * tolerance for name in ("double", "single"))


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


def test_reclaim_gives_unused_cpu_to_others(tmp_path: Path, hierarchies: Hierarchies) -> None:
    """The same jobs twice, which use less than they order: with reclaim more of them run at a time."""
    with (
        run_cluster(tmp_path, hierarchies) as cluster,
        httpx2.Client(base_url=cluster.url, trust_env=False, verify=False, timeout=60.0) as client,
    ):
        recorder = Recorder(cluster, hierarchies, client)
        without = measure_reclaim(recorder, False, RECLAIM_S)
        most_without = max(len(sample.cpu_seconds) for sample in recorder.samples)
        recorder.samples.clear()
        reclaimed = measure_reclaim(recorder, True, RECLAIM_S)
        most = max(len(sample.cpu_seconds) for sample in recorder.samples)
        # A limit that goes back up may be above it for a moment.
        held = statistics.median(sum(sample.told_usage.values()) for sample in recorder.samples)
        changes = [event["reason"] for node in cluster.nodes for event in node.log_events("limit_changed")]
    print(
        f"\nwithin {RECLAIM_S:g} s: {without:.2f} core-s without reclaim, at most {most_without} jobs at a time; "
        f"{reclaimed:.2f} with it, {most} jobs; ratio {reclaimed / without:.2f}"
    )
    assert "shrink" in changes
    assert most_without <= round(TOTAL[CPU] / 0.1)
    assert held <= TOTAL[CPU] * 1.1
    assert reclaimed > 1.15 * without
