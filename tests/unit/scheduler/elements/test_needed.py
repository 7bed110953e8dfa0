"""Which operations share the map of the jobs that they still need."""

from cpumond.scheduler.elements import NONE_NEEDED, share_needed


def test_operations_share_what_they_need_of_one_task():
    assert share_needed({"t": 4}) is share_needed({"t": 4})
    assert [share_needed({"t": 3}), share_needed({"u": 4})] == [{"t": 3}, {"u": 4}]
    assert share_needed({}) is NONE_NEEDED
    assert share_needed({"t": 4, "u": 1}) == {"t": 4, "u": 1}
