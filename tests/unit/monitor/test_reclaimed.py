"""Work of jobs on one owner's reclaimed CPU: what is kept and what is thrown away."""

import random

import pytest

from cpumond.monitor.reclaimed import ReclaimedJobs, ReclaimedWork


def start(length_s: float = 120.0, wait_s: float = 15.0) -> ReclaimedWork:
    """Beside an owner of 16 cores; each job orders one."""
    return ReclaimedWork(16.0, ReclaimedJobs(1 / 16, length_s, wait_s))


def play(work: ReclaimedWork, limit: float, used: float, seconds: int) -> None:
    for _ in range(seconds):
        work.add(limit, used, 1.0)


def test_as_many_jobs_run_as_fit_below_the_limit_and_what_they_do_is_kept():
    work = start(length_s=10.0)
    play(work, 7.5, 4.0, 1)
    assert work.kept_cpu_s == 0.0, "they have just been started"
    play(work, 7.5, 4.0, 25)
    assert (work.kept_cpu_s, work.lost_cpu_s, work.finished_cpu_s) == (8 * 25.0, 0.0, 8 * 2 * 10.0)


def test_they_share_the_owners_rest_and_get_at_most_their_request():
    work = start()
    play(work, 8.0, 0.0, 1)
    play(work, 8.0, 12.0, 4)
    assert work.kept_cpu_s == pytest.approx(8 * 4 * 0.5)
    play(work, 8.0, 20.0, 4)
    assert work.kept_cpu_s == pytest.approx(8 * 4 * 0.5)
    play(work, 8.0, 0.0, 1)
    assert work.kept_cpu_s == pytest.approx(8 * 4 * 0.5 + 8)


def test_they_wait_while_the_owner_has_its_cpu_and_the_youngest_end():
    work = start()
    play(work, 12.0, 1.0, 11)
    play(work, 8.0, 1.0, 11)
    assert work.kept_cpu_s == 4 * 20.0 + 4 * 10.0 + 4
    play(work, 12.0, 16.0, 15)
    assert work.lost_cpu_s == 0.0
    play(work, 12.0, 16.0, 1)
    assert (work.kept_cpu_s, work.lost_cpu_s) == (4 * 21.0, 4 * 10.0)


def test_a_moment_in_which_they_fit_begins_the_wait_anew():
    work = start(wait_s=5.0)
    play(work, 8.0, 8.0, 10)
    for _ in range(10):
        play(work, 16.0, 16.0, 5)
        play(work, 8.0, 8.0, 1)
    assert work.lost_cpu_s == 0.0
    play(work, 16.0, 16.0, 6)
    assert (work.kept_cpu_s, work.lost_cpu_s) == (0.0, 8 * 19.0)


def test_completed_work_is_kept_or_lost_and_never_above_the_owners_rest():
    chance = random.Random(1)
    for _ in range(50):
        work = start(length_s=chance.uniform(1.0, 60.0), wait_s=chance.uniform(0.0, 20.0))
        left_cpu_s = 0.0
        for _ in range(200):
            used = chance.uniform(0.0, 16.0)
            left_cpu_s += 16.0 - used
            before = work.kept_cpu_s + work.lost_cpu_s
            work.add(chance.choice([16.0, used, chance.uniform(used, 16.0)]), used, 1.0)
            assert work.kept_cpu_s + work.lost_cpu_s >= before - 1e-9
            assert work.kept_cpu_s + work.lost_cpu_s <= left_cpu_s + 1e-9
