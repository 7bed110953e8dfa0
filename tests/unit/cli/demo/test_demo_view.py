"""What ``cpumond demo`` shows and adds up: the live table, the lines of events, the summary and what was not seen."""

import io
import time

import msgspec
import pytest
from rich.console import Console

from cpumond.cli.demo import run as demo_run
from cpumond.cli.demo import view as demo_view
from cpumond.cli.demo.jobs import make_plan
from cpumond.cli.demo.story import JobFacts, Story, Wakeup
from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.testing import make_tree, v2_cgroup


@pytest.fixture
def told():
    return []


@pytest.fixture
def story(tmp_path, told):
    """Of a cluster that was never started, on a node of two cores, with a fake tree of cgroups."""
    root = make_tree(tmp_path / "cgroup", {"cgroup.controllers": "cpu\n"})
    hierarchies = Hierarchies(2, root, root, None, root)
    story = Story(Cluster(tmp_path / "files"), hierarchies, make_plan(4.0), lambda *said: told.append(said))
    story.operations = {"op-1": "simulation", "op-2": "render"}
    return story


def add_job(story, name, load="simulation", pool="research", ordered=2.0, limit=2.0, **facts):
    facts = {"started_at": time.time() - 10.0, "since_heartbeat_s": 0.02, **facts}
    story.jobs[name] = JobFacts(name, name, load, pool, name, ordered, limit=limit, **facts)
    return story.jobs[name]


def write_quota(story, name, cores):
    make_tree(story._hierarchies.cpu_root, {name: v2_cgroup(1_500_000, f"{round(cores * 100_000)} 100000")})


def draw(story, events=()):
    console = Console(file=io.StringIO(), width=110)
    console.print(demo_view.draw_state(story, 12.0, 60.0, list(events)))
    return console.file.getvalue()


def test_the_table_shows_living_jobs_the_ledger_and_the_last_events(story):
    add_job(story, "simulation", limit=0.5, usage=0.2)
    add_job(story, "render-1", "render", "batch", 1.0, 1.0)
    add_job(story, "render-0", "render", "batch", 1.0, 0.0, ended_at=1.0)
    text = draw(story, [(3.25, "something happened")])
    assert "12 of 60 s" in text
    assert [line.split()[:6] for line in text.splitlines() if "running" in line] == [
        ["research", "simulation", "2.00", "0.50", "0.20", "running"],
        ["batch", "render-1", "1.00", "1.00", "running", "░░░░░░░░░░░░"],
    ]
    assert "node: limits of 1.5 cores together, it has 2 cores\n" in text.replace(" " * 20, "").replace("  \n", "\n")
    assert "   3.2 s  something happened" in text


def test_events_are_lines_where_there_is_no_terminal(story, capsys):
    with demo_view.Display(is_quiet=False) as display:
        display.report(3.25, "it begins")
        display.draw(story, 3.3, 60.0)
    with demo_view.Display(is_quiet=True) as quiet:
        quiet.report(1.0, "not this")
    assert capsys.readouterr().out == "   3.2 s  it begins\n"


def test_a_start_is_on_freed_cpu_when_the_simulated_limit_is_lowered(story, told):
    record = {
        "job_id": "j", "operation_id": "op-2", "pool": "batch", "cgroup": "gone", "cpu_limit_cores": 1.0,
        "since_heartbeat_s": 0.0431, "timestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    add_job(story, "simulation")
    write_quota(story, "simulation", 0.9)
    story._take_start(record, 7.0)
    assert told == [(7.0, "render-1 started on the freed CPU, 43 ms after the heartbeat")]
    write_quota(story, "simulation", 2.0)
    story._take_start({**record, "job_id": "k"}, 8.0)
    assert told[1] == (8.0, "render-2 started, 43 ms after the heartbeat")
    story._take_start({**record, "job_id": "k"}, 9.0)
    story._take_start({**record, "job_id": "l", "operation_id": "of somebody else"}, 9.0)
    assert len(story.jobs) == 3


def test_the_summary_adds_up(story):
    add_job(story, "simulation", used_cpu_s=3.0, reclaimed_cpu_s=8.0)
    add_job(story, "render-1", "render", "batch", 1.0, 0.0, used_cpu_s=4.0, on_freed_cpu=True, kind="overcommit",
            state="aborted", reason="too much", started_at=100.0, ended_at=106.0)  # fmt: skip
    add_job(story, "render-2", "render", "batch", 1.0, 1.0, used_cpu_s=0.5)
    story.wakeups = [Wakeup(5.0, 5.75), Wakeup(20.0)]
    story.pools["batch"].fair_share_cpu_s = 12.5
    summary = demo_run.summarise("simulated", story, 30.0, restored=True, removed=False)
    assert (summary.not_reached, summary.ordered_cpu_s) == ([], pytest.approx(20.0 + 6.0 + 10.0, abs=0.5))
    assert (summary.used_cpu_s, summary.reclaimed_cpu_s, summary.given_cpu_s) == (7.5, 8.0, 4.0)
    assert (summary.wake_ups, summary.give_back_s) == (2, [0.75])
    assert summary.jobs_started == {"simulation": 1, "render": 2}
    assert summary.started_on_freed_cpu == {"render": 1}
    assert summary.stopped == [demo_view.StoppedJob("render-1", "overcommit", "too much")]
    assert summary.pools["batch"] == demo_view.PoolSummary(1.0, 4.5, 12.5)
    text = "\n".join(demo_view.list_sentences(msgspec.structs.replace(summary, machine_load=2.0)))
    assert "After 30 s on a node of 2 cores (simulated kernel)" in text
    assert "simulation had all its CPU back 1 time, 0.75 s after it woke up" in text
    assert "2.0 processes wanted each CPU" in text
    assert "Every limit is back at the request.\nNOT everything that the demo made is removed" in text
