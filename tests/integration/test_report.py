"""``cpumond report`` against a real scheduler with a history, and a node that tells what its jobs used."""

import csv
import io
from pathlib import Path

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from test_scheduler_commands import Shell
from waiting import wait_until

Counters = dict[str, float]
"""Core-seconds of a job by the names of a heartbeat."""


@pytest.fixture
def cpumond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Shell()


def make_counters(ordered: float) -> Counters:
    """Core-seconds of a job that uses half of what it ordered."""
    return {
        "ordered_cpu_seconds": ordered,
        "cpu_seconds": 0.5 * ordered,
        "reclaimed_cpu_seconds": 0.4 * ordered,
        "throttled_cpu_seconds": 0.05 * ordered,
        "late_cpu_seconds": 0.01 * ordered,
    }


@pytest.fixture
def world(scheduler: SchedulerProcess) -> dict[str, str]:
    """Pools a > b and c; operations of 1, 2 and 4 core-hours in b, b and c, one of which has ended."""
    scheduler.write_config('[history]\nperiod = "100ms"\n')
    scheduler.start()
    scheduler.create_pool("a")
    scheduler.create_pool("b", "a")
    scheduler.create_pool("c")
    operations = {
        "one": scheduler.start_operation("b"),
        "two": scheduler.start_operation("b"),
        "four": scheduler.start_operation("c"),
    }
    node = PlayedNode(scheduler, "n1")
    node.register()
    node.beat_until(lambda: len(node.jobs) == 3, "three jobs")
    jobs = {name: node.jobs_of(operation_id)[0] for name, operation_id in operations.items()}
    hours = {"one": 1.0, "two": 2.0, "four": 4.0}
    # The job that ends tells the last fifth at its end.
    last = make_counters(3600.0 * hours["two"])
    for name, each in hours.items():
        node.jobs[jobs[name]].update(make_counters(3600.0 * each * (0.8 if name == "two" else 1.0)))
    node.beat()
    node.end(jobs["two"], **last)
    node.beat_until(lambda: not node.finished, "the end of a job is acknowledged")

    def is_recorded() -> bool:
        (tree,) = scheduler.get("report?since_s=3600")["trees"]
        return bool(tree["total"]["ordered"] > 6.99)

    wait_until(is_recorded, "the history has all core-hours")
    return operations


def read_rows(text: str) -> dict[tuple[str, str], dict[str, str]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return {(row["kind"], row["name"]): row for row in rows}


def assert_hours(row: dict[str, str], ordered: float) -> None:
    shares = {"ordered": 1.0, "used": 0.5, "reclaimed": 0.4, "throttled": 0.05, "late": 0.01}
    found = {name: float(row[f"{name}_core_hours"]) for name in shares}
    assert found == pytest.approx({name: ordered * share for name, share in shares.items()}, rel=0.02)
    assert float(row["used_of_ordered_percent"]) == pytest.approx(50, rel=0.02)
    assert float(row["late_of_throttled_percent"]) == pytest.approx(20, rel=0.02)


def test_core_hours_are_what_nodes_told_before_and_after_a_restart(world, scheduler, cpumond):
    for is_after in (False, True):
        if is_after:
            scheduler.stop()
            scheduler.start()
        rows = read_rows(cpumond("report", "--scheduler", scheduler.url, "--since", "1h", "--format", "csv"))
        assert_hours(rows["total", "<Root>"], 7.0)
        for pool, hours in {"a": 3.0, "b": 3.0, "c": 4.0}.items():
            assert_hours(rows["pool", pool], hours)
        for name, hours in {"one": 1.0, "two": 2.0, "four": 4.0}.items():
            assert_hours(rows["operation", world[name]], hours)
        assert (rows["pool", "b"]["parent"], rows["operation", world["four"]]["pool"]) == ("a", "c")


def test_a_scheduler_that_knows_nothing_says_so(scheduler, cpumond):
    for history, sentence in (
        ('length = "0s"', "history is turned off: [history] length = 0"),
        ('period = "1h"', "nothing has been recorded yet for the last 1 d; the history gets a point every 1 h\n"),
    ):
        scheduler.write_config(f"[history]\n{history}\n")
        scheduler.start()
        cpumond("report", "--scheduler", scheduler.url, code=69)
        assert (sentence in cpumond.err, cpumond.err.count("\n")) == (True, 1)
        scheduler.stop()


def test_no_scheduler_and_wrong_options_are_one_sentence(cpumond, tmp_path):
    """A file that cannot be written is refused before the scheduler is asked."""
    cpumond("report", "--output", str(tmp_path / "missing" / "report.csv"), code=73)
    assert "give --output a file that can be written" in cpumond.err
    kept = tmp_path / "kept.csv"
    kept.write_text("before")
    cpumond("report", "--scheduler", "127.0.0.1:1", "--output", str(kept), code=69)
    assert (kept.read_text(), list(tmp_path.glob("*.tmp"))) == ("before", [])
    cpumond("report", "--scheduler", "127.0.0.1:1", code=69)
    assert "no scheduler answers on http://127.0.0.1:1" in cpumond.err
    wrong = (("--since", "0s"), ("--since", "2000d"), ("--top", "-1"), ("--savings", "--price", "nan"))
    for words in wrong:
        cpumond("report", *words, code=64)
        assert cpumond.err.count("\n") == 1
