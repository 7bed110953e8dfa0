"""YTsaurus' digest of the memory of a task's jobs beside a literal reading of its description (semantics.md 8.1)."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cpumond.scheduler.settings.memory_reserve import find_bucket, find_quantile


def read_literally(samples: list[float], lower: float, default: float) -> float:
    """The description of the histogram, step by step."""
    p, q = 0.01, 0.95
    n = max(1, math.ceil(math.log(1 / lower) / math.log(1 + p)))
    bucket = [0] * n
    for x in samples:
        bucket[max(0, min(n - 1, int(math.log(x / lower) / math.log(1 + p))))] += 1
    if not samples:
        return default
    v, s = lower, 0
    for i in range(n):
        if s >= q * len(samples):
            return v
        s += bucket[i]
        v *= 1 + p
    return 1.0


@given(
    samples=st.lists(st.floats(1e-6, 2.0) | st.sampled_from([0.05, 0.3, 1.0]), max_size=40),
    lower=st.floats(0.001, 1.0),
    default=st.floats(0.001, 1.0),
)
def test_the_digest_is_what_a_literal_reading_gives(samples, lower, default):
    counts: dict[int, int] = {}
    for sample in samples:
        bucket = find_bucket(sample, lower)
        counts[bucket] = counts.get(bucket, 0) + 1
    expected = read_literally(samples, lower, default)
    assert math.isclose(find_quantile(counts, lower, default), expected, rel_tol=1e-9)
