"""Three real nodes: each of three pools gets the CPU of its fair share, also where one wants little for a time."""

import random
from pathlib import Path

import fairness
import httpx2
import pytest

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.alone

SEED = 20
RUN_S = 36.0
LULL_S = (14.0, 23.0)
"""In between, little is started in the pool with the guarantee."""
TOLERANCE = 0.10


def make_shapes(seed: int) -> list[fairness.Shape]:
    """100 operations: 42 and 21 in the pools without a guarantee, 37 in that with one."""
    rng = random.Random(seed)
    shapes = [fairness.make_shape(rng, pool, rng.uniform(-36.0, 25.0)) for pool in ["double"] * 42 + ["single"] * 21]
    shapes += [fairness.make_shape(rng, "sure", rng.uniform(-6.0, 3.0)) for _ in range(17)]
    shapes += [fairness.make_shape(rng, "sure", rng.uniform(LULL_S[0] + 1.0, LULL_S[1]), jobs=(1, 1)) for _ in range(4)]
    shapes += [fairness.make_shape(rng, "sure", LULL_S[1] + rng.uniform(-1.0, 1.0)) for _ in range(16)]
    rng.shuffle(shapes)
    return sorted(shapes, key=lambda shape: shape.at_s)


def test_pools_use_what_they_deserve(tmp_path: Path, hierarchies: Hierarchies) -> None:
    """Core-seconds of each pool, as the kernel counts them, against the integral of its fair share."""
    shapes = make_shapes(SEED)
    assert len(shapes) == 100
    with (
        fairness.run_cluster(tmp_path, hierarchies) as cluster,
        httpx2.Client(base_url=cluster.url, trust_env=False, verify=False, timeout=60.0) as client,
    ):
        recorder = fairness.Recorder(cluster, hierarchies, client)
        fairness.run_all(recorder, shapes, RUN_S, LULL_S[0])
        measured = fairness.Measured(recorder)
        fairness.check_ends(recorder, measured)
    samples = recorder.samples
    last = len(samples) - 1

    lull = [
        number
        for number, sample in enumerate(samples)
        if LULL_S[0] < sample.at_s < LULL_S[1] and sample.fair_share["sure"] < 0.8 * fairness.GUARANTEED_CORES["sure"]
    ]
    assert lull, "there was no time with little demand in the pool with the guarantee"
    first, end = lull[0], lull[-1]
    fairness.show("before the lull", samples[: first + 1], measured.between(0, first))
    lull_deviations, _ = fairness.show("in it", samples[first : end + 1], measured.between(first, end))
    fairness.show("after it", samples[end:], measured.between(end, last))
    tolerance = fairness.check_whole_run(recorder, measured, TOLERANCE)
    # What the pool with the guarantee leaves goes to the others.
    assert all(abs(lull_deviations[name]) < 1.5 * tolerance for name in ("double", "single"))
