"""Starts that a pool's limit refused of late: counted for an hour, and in bounded memory."""

from cpumond.scheduler.state.refused import RefusedStarts


def test_refusals_of_the_last_hour_are_counted_by_pool_with_their_requests():
    refused = RefusedStarts()
    for at in (0.0, 10.0, 100.0):
        refused.note("default", "a", 5, 2.0, at)
    refused.note("default", "b", 5, 7.0, 100.0)
    assert refused.count("default", "a", 5, 200.0) == (3, 6.0)
    assert refused.count("other", "a", 5, 200.0) == (0, 0.0)
    assert refused.count("default", "a", 5, 3605.0) == (1, 2.0)  # those of the first minute are gone
    assert refused.count("default", "a", 5, 3700.0) == (0, 0.0)


def test_what_a_limit_refused_that_was_raised_since_is_not_told_of():
    refused = RefusedStarts()
    refused.note("default", "a", 5, 2.0, 0.0)
    refused.note("default", "a", 8, 3.0, 1.0)
    assert [refused.count("default", "a", limit, 2.0) for limit in (5, 8, 9)] == [(2, 5.0), (1, 3.0), (0, 0.0)]


def test_memory_is_bounded_whatever_pools_are_named_and_however_often():
    refused = RefusedStarts()
    for number in range(5000):
        refused.note("default", f"p{number}", 0, 1.0, float(number))
        refused.note("default", "busy", number, 1.0, 60.0 * number)
    assert len(refused._by_pool) == 1000
    assert max(len(entries) for entries in refused._by_pool.values()) == 61
    assert refused.count("default", "busy", 0, 60.0 * 4999) == (60, 60.0)
