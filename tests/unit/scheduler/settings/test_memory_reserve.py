"""The memory that a job reserves: YTsaurus' digest to its digits, and what of it the end of a job changes (8.1)."""

import pytest

from cpumond.scheduler.settings.memory_reserve import count_buckets, find_bucket, find_quantile


def digest(samples: list[float], lower: float = 0.05, default: float = 0.5) -> float:
    counts: dict[int, int] = {}
    for sample in samples:
        bucket = find_bucket(sample, lower)
        counts[bucket] = counts.get(bucket, 0) + 1
    return find_quantile(counts, lower, default)


@pytest.mark.parametrize(
    ("name", "samples", "bounds", "reserve"),
    [
        ("MEM-1", [], {}, 0.5),
        ("MEM-2", [0.3], {}, 0.302788),
        ("MEM-3", [0.3] * 19 + [0.9], {}, 0.302788),
        ("MEM-3", [0.3] * 18 + [0.9] * 2, {}, 0.904669),
        ("MEM-4", [0.01] * 5, {}, 0.0505),
        ("MEM-5", [0.3], {"lower": 0.5}, 0.505),
        ("MEM-6", [0.3], {"lower": 1.0, "default": 1.0}, 1.0),
        ("MEM-6", [], {"lower": 1.0, "default": 1.0}, 1.0),
        ("MEM-7", [0.3], {"lower": 0.6, "default": 0.6}, 0.606),
        ("above the limit", [1.7], {}, 1.0),
    ],
)
def test_the_digest_to_its_digits(name, samples, bounds, reserve):
    assert digest(samples, **bounds) == pytest.approx(reserve, abs=5e-7), name


def test_a_lower_bound_of_a_twentieth_has_302_buckets():
    assert [count_buckets(lower) for lower in (0.05, 1.0)] == [302, 1]
