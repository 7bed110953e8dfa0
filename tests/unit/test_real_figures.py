"""How ``tests/bench/real_services.py`` makes its load and its table."""

import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # last: modules of tests have names that are there, too

import real_figures as figures
from real_figures import AGAIN, BASE, PLAIN, SETTLE, Bound, Run, ServerRun
from real_servers import Groups

from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.testing import make_v2_host, v2_cgroup


def make_run(arm: str, number: int, p99_ms: float, **fields: object) -> Run:
    """Of one server that orders a core and uses a fifth of it, whose every latency is ``p99_ms``."""
    freed, held_back = fields.pop("freed", 0.0), fields.pop("held_back", 0)
    server = ServerRun(1.0, 0.2, freed, held_back, 900, held_back, 0.0, {"": figures.summarise([p99_ms / 1e3])})
    return msgspec.convert({"arm": arm, "round": number, "seconds": 100.0, "servers": {"web": server}, **fields}, Run)


def test_arrivals_are_the_same_in_each_arm_of_a_round_only():
    first, again, other = (figures.make_arrivals(seed, 100.0, 66.0, 5.0) for seed in ("1 web", "1 web", "2 web"))
    assert first == again
    assert first.due_s[:20] != other.due_s[:20]
    assert all(before <= after for before, after in pairwise(first.due_s))
    assert first.due_s[-1] < SETTLE.seconds + 66.0


def test_a_failed_request_counts_with_its_time_and_settling_does_not():
    found = figures.split_phases([9.0, 0.001, 0.002, -0.5], ["settle", "low", "burst", "burst"])
    assert (found[""].requests, found[""].failed, found[""].p99, found[""].most) == (3, 1, 500.0, 500.0)
    assert (found["burst"].requests, found["low"].failed, found["low"].p50) == (2, 0, 1.0)
    assert "settle" not in found


def test_ratios_are_to_nothing_in_the_same_round_where_both_count():
    runs = [make_run(BASE, 1, 10.0), make_run("peak", 1, 20.0), make_run("peak", 2, 99.0), make_run(BASE, 3, 4.0),
            make_run("peak", 3, 2.0)]  # fmt: skip
    assert figures.list_ratios(runs, "peak", "web") == [2.0, 0.5]
    assert figures.find_noise(runs, "web") == 1.0


def test_runs_beside_other_load_are_dropped_and_named():
    runs = [make_run(BASE, 1, 10.0, others_cores=0.2), make_run("peak", 1, 20.0, others_cores=0.21)]
    assert figures.drop_runs(runs, 0.2) == (runs[:1], runs[1:])
    shown = figures.show(runs, 0.2)
    assert "Dropped, others used more than 0.2 cores: peak, round 1: 0.21" in shown
    assert [line for line in shown.splitlines() if line.startswith("| peak")][1].endswith("| 0, 1 dropped |")
    assert "Dropped" not in figures.show(runs, 0.5)


def test_each_bound_is_judged_by_the_median_over_rounds():
    bounds = [
        Bound("a", "p99", 1.25, or_noise=True),
        Bound("a", "batch", 0.95, is_least=True),
        Bound("a", "held back", 0.001),
        Bound("a", "freed", 0.6, is_least=True),
        Bound("b", "p99", 1.0),
    ]
    runs = []
    for number, (p99, files) in enumerate([(10.8, 90), (10.0, 99), (50.0, 99)], 1):
        runs += [make_run(BASE, number, 10.0), make_run("a", number, p99, batch_files=files, held_back=2, freed=0.4),
                 make_run(PLAIN, number, 10.0, batch_files=100)]  # fmt: skip
    assert figures.judge(runs, bounds) == [
        "a: p99 of web to nothing, at most 1.25: 1.08 ok",
        "a: files to overcommit-low, at least 0.95: 0.99 ok",
        "a: held back, at most 0.0010: 0.0020 MISSED",
        "a: freed, at least 0.60: 0.50 MISSED",
    ]
    noisy = [*runs, make_run(AGAIN, 2, 20.0)]
    assert figures.judge(noisy, bounds)[0] == "a: p99 of web to nothing, at most 2.00: 1.08 ok"


def test_what_a_batch_and_a_percentile_get():
    assert figures.compute_free(2.0, 0.2, [0.5, 0.3]) == pytest.approx(1.0)
    assert figures.compute_free(2.0, 0.2, [1.0, 1.0]) == figures.compute_suppressed(2.0, 0.65, 1.9) == 0.01
    assert figures.compute_suppressed(2.0, 0.65, 0.4) == pytest.approx(0.9)
    assert figures.compute_percentile_limit(0.5, 0.1, []) == 0.5
    assert figures.compute_percentile_limit(0.5, 0.1, [0.2] * 9 + [9.0]) == pytest.approx(0.23)
    assert [figures.compute_percentile_limit(0.5, 0.1, [use]) for use in (0.01, 0.49)] == [0.1, 0.5]


def test_use_throttling_and_quotas_of_v2(tmp_path):
    stat = "usage_usec 1500000\nuser_usec 1\nnr_periods 40\nnr_throttled 3\nthrottled_usec 250000\n"
    server = v2_cgroup(quota="20000 50000") | {"cpu.stat": stat, "cpu.max.burst": "7"}
    host = open_hierarchies(make_v2_host(tmp_path, {"top": {"server": server}}))
    groups = Groups(host, "top")
    assert (groups.read_used_s("server"), groups.read_used_s("gone")) == (1.5, 0.0)
    assert groups.read_throttling("server") == (40, 3, 0.25)
    assert groups.quota_cores("server") == 0.4
    groups.set_quota("server", 0.5)
    found = [(tmp_path / "cgroup/top/server" / name).read_text() for name in ("cpu.max", "cpu.max.burst")]
    assert found == ["25000", "0"]  # the kernel keeps the period
